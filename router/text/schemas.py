"""JSON schemas that answers are held to. Pure."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from router.text.calls.text_values import no_number

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

ON_ONE_LINE: JsonCompileOptions = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
"""As Python's json writes. Free to choose, small models wander about in line breaks and indents, sometimes for ever. A
schema may say otherwise in its "x-guidance"."""
NO_FORCING = '%llguidance {"no_forcing": true}'
"""Of grammars whose regexes strangers write: llguidance follows what alone may come, and where a lexeme takes for ever
what was to follow it, as /(ab)*/ before "ab" does, it would never come back."""
OPTIONS = ("whitespace_flexible", "coerce_one_of", "lenient")
"""That a schema may have in its "x-guidance", true or false. Separators and white space are regexes there, which could
take for ever what JSON has behind them, as those do that NO_FORCING is for."""
BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}


def schema_of(text: str) -> dict[str, Any]:
    """A JSON schema. Raises `ValueError`."""
    try:
        schema = json.loads(text, parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"json: is not JSON: {error}") from error
    if schema is False:
        raise ValueError("json: no text fits it")
    check_bounds(schema)
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise ValueError(f"json: must be a schema, an object, is a {type(schema).__name__}")
    return schema


def guided(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema that says what is ours to choose. Raises `ValueError`."""
    own = schema.get("x-guidance", {})
    if not isinstance(own, dict):
        raise ValueError(f"x-guidance must be an object, is a {type(own).__name__}")
    for name, value in own.items():
        if name not in OPTIONS:
            raise ValueError(f"x-guidance.{name[:40]} is not supported; there are {', '.join(OPTIONS)}")
        if not isinstance(value, bool):
            raise ValueError(f"x-guidance.{name} must be true or false, is {json.dumps(value)[:40]}")
    return {**schema, "x-guidance": {**ON_ONE_LINE, **own}}


def check_bounds(schema: Any) -> None:
    """Of integers beyond 64 bits, which would be taken for the nearest within. Raises `ValueError`."""
    stack = [schema]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            for name in BOUNDS & item.keys():
                if isinstance(item[name], int) and abs(item[name]) >= 1 << 63:
                    raise ValueError(f"json: {name} must be within 64 bits, is {str(item[name])[:40]}")
        stack.extend(item.values() if isinstance(item, dict) else item if isinstance(item, list) else ())
