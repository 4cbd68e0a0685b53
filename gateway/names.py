"""Names of a request's fields: the wire's, by which a router complains, and those that the client's body has. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from rpc.errors import InvalidRequest

_IN_BODY = {"tool_name": "tool_choice", "template_kwargs": "chat_template_kwargs"}
_QUOTED = r"""(?<!\w)(["'])(?:\\.|(?!\1)[^\\])*\1"""
"""As Python and JSON write a text. An apostrophe does not begin one."""


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


def renamed(error: InvalidRequest, theirs: Mapping[str, str]) -> InvalidRequest:
    """Words by others, in what is said of the fields, too, but for what the client has written there itself."""
    if not error.violations or not theirs:
        return error
    words = "|".join(map(re.escape, theirs))
    field, said = re.compile(words), re.compile(rf"{_QUOTED}|(?<![\w.-])(?:{words})(?![\w-])")

    def other(found: re.Match[str]) -> str:
        return theirs.get(found[0], found[0])

    return InvalidRequest(
        [
            # Why a form cannot be had is said in the words of the form.
            (field.sub(other, name), why if "structured_outputs" in name else said.sub(other, why))
            for name, why in error.violations
        ]
    )
