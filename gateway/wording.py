"""Puts what pydantic finds wrong with a body into this project's words: the field's path, the bound, and what was
given. Pure.

Texts are quoted only where a number, a truth value or one of a few words was wanted: others may be part of a prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gateway.asked import UNKNOWN

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_FORMS = ("json", "regex", "choice", "grammar")
_IS_HERE = {
    **{f"guided_{form}": f'structured_outputs: {{"{form}": ...}}' for form in _FORMS},
    **dict.fromkeys(("enable_thinking", "thinking"), 'chat_template_kwargs: {"enable_thinking": ...}'),
    "extra_body": "its fields at the top level of the body",
    "max_new_tokens": "max_tokens",
    "random_seed": "seed",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
    "structural_tag": 'structured_outputs: {"structural_tag": ...}',
}
"""Former fields of vLLM and fields of other servers, each with what to use here."""
_ROUTE_OF = {"prompt": "/v1/completions", "messages": "/v1/chat/completions", "input": "/v1/responses"}
"""By the field in which a route takes what the model is to answer."""
_WANTED = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number",
    "int_type": "a whole number",
    "list_type": "an array",
    "model_type": "an object",
    "string_type": "a text",
}
_WANTS_NO_TEXT = {
    "bool_parsing", "bool_type", "float_type", "int_parsing", "int_parsing_size", "int_type", "literal_error"
}  # fmt: skip
MAX_NAME_CHARS = 80
"""Names chosen by the client are cut to this length in errors."""
MAX_VALUE_CHARS = 40
"""So are values."""


def in_our_words(errors: Sequence[ErrorDetails]) -> tuple[str, str]:
    """Where in the body the first error is (empty: everywhere), and what is wrong there, without that place."""
    first = errors[0]
    param = _param_of(first)
    if first["type"] == UNKNOWN:
        return param, "is not a known parameter" + _instead_of(param, first["ctx"]["close"])
    if first["type"] == "missing":
        return param, "must be given" + _other_route(param, first["input"])
    if first["type"] == "json_invalid":
        return param, f"the body must be JSON: {first['ctx']['error']}"
    # If the field may have several types, say what each of them wants.
    wanted = list(dict.fromkeys(_wanted(each) for each in errors if _param_of(each) == param))
    said = " or ".join([wanted[0], *(text.removeprefix("must be ") for text in wanted[1:])])
    if first["type"] == "value_error":  # ours say everything
        return param, said
    if "empty" not in said:
        said += f", {_given(first)}"
    return param, said if param else f"the body {said}"


def _wanted(wrong: ErrorDetails) -> str:
    """What is wanted in place of what was given."""
    kind, bounds = wrong["type"], wrong.get("ctx", {})
    match kind:
        case "value_error":
            return wrong["msg"].removeprefix("Value error, ")
        case "greater_than_equal":
            return f"must be at least {bounds['ge']}"
        case "less_than_equal":
            return f"must be at most {bounds['le']}"
        case "less_than":
            return f"must be at most {bounds['lt'] - 1}"  # whole numbers only
        case "literal_error":
            return f"must be {bounds['expected']}"
        case "too_short" | "string_too_short" if bounds["min_length"] == 1:
            return "must not be empty"
        case "too_long":
            return f"must have at most {bounds['max_length']} entries"
        case "string_too_long":
            return f"must have at most {bounds['max_length']} characters"
    # Whatever else pydantic may find one day is told in its own words, which quote nothing.
    return f"must be {_WANTED[kind]}" if kind in _WANTED else f"cannot be read ({wrong['msg']})"


def _given(wrong: ErrorDetails) -> str:
    """What was given instead."""
    value = wrong["input"]
    if wrong["type"] in ("too_short", "too_long", "string_too_short", "string_too_long"):
        return f"has {len(value)}"
    if isinstance(value, str) and wrong["type"] in _WANTS_NO_TEXT:
        return f"is {json.dumps(value, ensure_ascii=False):.{MAX_VALUE_CHARS}}"
    return f"is {kind_of(value)}"


def kind_of(value: Any) -> str:
    """A description of a value. Never quotes a text, which may be part of a prompt."""
    for kind, name in ((str, "a text"), (list, "an array"), (dict, "an object")):
        if isinstance(value, kind):
            return name
    return json.dumps(value)[:MAX_VALUE_CHARS]


def _param_of(wrong: ErrorDetails) -> str:
    """Where in the body the wrong field is."""
    # An unknown name may read like a type, so it is not filtered below.
    unknown = wrong["loc"][-1:] if wrong["type"] == UNKNOWN else ()
    known = wrong["loc"][: len(wrong["loc"]) - len(unknown)]
    # For a field that may have several types, pydantic's location also names the type that was tried: leave it out.
    place = [part for part in known if not (isinstance(part, str) and (part == "str" or "[" in part))]
    place += unknown
    names = [part if isinstance(part, int) else part[:MAX_NAME_CHARS] for part in place]
    return "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in names).removeprefix(".")


def _instead_of(param: str, close: Sequence[str]) -> str:
    """A hint what to use instead of an unknown name."""
    if param in _IS_HERE:
        return f"; use {_IS_HERE[param]} instead"
    if param in _ROUTE_OF:
        return f" of this route; a body with {param} goes to POST {_ROUTE_OF[param]}"
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _other_route(param: str, body: Any) -> str:
    """A hint at another route, if the body lacks what this one answers and has what that one does."""
    if param not in _ROUTE_OF or not isinstance(body, Mapping):
        return ""
    for name, route in _ROUTE_OF.items():
        if name in body:
            return f"; a body with {name} goes to POST {route}"
    return ""
