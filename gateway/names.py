"""Translates names of a request's fields from the wire's, which a router's errors use, to those of the client's body.
Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from rpc.errors import InvalidRequest

_IN_BODY = {"tool_name": "tool_choice", "template_kwargs": "chat_template_kwargs"}
_QUOTED = r"""(?<!\w)(["'])(?:\\.|(?!\1)[^\\])*\1"""
"""A text as Python and JSON quote it. An apostrophe within a word does not begin one."""


def name_in_body(field: str) -> str:
    """The name of a field of the wire in chats and completions. Empty if `field` is."""
    name = field.removeprefix("sampling_params.")
    if name in ("text", "token_ids"):
        return "prompt"
    name = name.removeprefix("chat.")
    if name in _IN_BODY:
        return _IN_BODY[name]
    name = re.sub(r"^((?:messages\[\d+\]\.)?(?:tools|tool_calls)\[\d+\])\.", r"\1.function.", name)
    return name.replace("chat", "messages")


def named(error: InvalidRequest, name_of: Callable[[str], str]) -> InvalidRequest:
    """The same error, with the field names translated by `name_of`."""
    if not error.violations:
        return error
    return InvalidRequest([(name_of(wrong.field), wrong.description) for wrong in error.violations])


def renamed(error: InvalidRequest, theirs: Mapping[str, str]) -> InvalidRequest:
    """The same error with words replaced, in the descriptions, too, except in quoted texts, which are the client's."""
    if not error.violations or not theirs:
        return error
    words = "|".join(map(re.escape, theirs))
    field, said = re.compile(words), re.compile(rf"{_QUOTED}|(?<![\w.-])(?:{words})(?![\w-])")

    def other(found: re.Match[str]) -> str:
        return theirs.get(found[0], found[0])

    return InvalidRequest(
        [
            # The description of a wrong structured output quotes the client's schema or grammar: leave it.
            (field.sub(other, name), why if "structured_outputs" in name else said.sub(other, why))
            for name, why in error.violations
        ]
    )
