"""Names of a request's fields: the wire's, by which a router complains, and those that the client's body has. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable

from rpc.errors import InvalidRequest

_IN_BODY = {"tool_name": "tool_choice", "template_kwargs": "chat_template_kwargs"}


def name_in_body(field: str) -> str:
    """Of chats and completions. Empty: of no field."""
    name = field.removeprefix("sampling_params.")
    if name in ("text", "token_ids"):
        return "prompt"
    name = name.removeprefix("chat.")
    if name in _IN_BODY:
        return _IN_BODY[name]
    name = re.sub(r"^((?:messages\[\d+\]\.)?(?:tools|tool_calls)\[\d+\])\.", r"\1.function.", name)
    return name.replace("chat", "messages")


def named(error: InvalidRequest, name_of: Callable[[str], str]) -> InvalidRequest:
    """The same complaint, of fields by other names."""
    if not error.violations:
        return error
    return InvalidRequest([(name_of(wrong.field), wrong.description) for wrong in error.violations])


def renamed(error: InvalidRequest, ours: str, theirs: str) -> InvalidRequest:
    """One word by another, in what is said of the fields, too."""
    if not error.violations:
        return error
    wrongs = [(wrong.field.replace(ours, theirs), wrong.description) for wrong in error.violations]
    return InvalidRequest([(name, description.replace(ours, theirs)) for name, description in wrongs])
