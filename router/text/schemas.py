"""JSON schemas that constrain answers. Pure."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from router.text.calls.text_values import no_number

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

ON_ONE_LINE: JsonCompileOptions = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
"""JSON as Python's json module writes it. If white space is free, small models get lost in line breaks and indents,
sometimes forever. A schema may override this in its "x-guidance"."""
NO_FORCING = '%llguidance {"no_forcing": true}'
"""For grammars with regexes written by clients. llguidance follows text that is the only continuation; if a lexeme
forever takes the text that should follow it, as /(ab)*/ before "ab" does, llguidance would never return."""
OPTIONS = ("whitespace_flexible", "coerce_one_of", "lenient")
"""What a schema may set in its "x-guidance", to true or false. Separators and white space would be regexes there, which
could take text forever, as described at NO_FORCING."""
BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}


def schema_of(text: str) -> dict[str, Any]:
    """Parse a JSON schema. Raises `ValueError` saying what is wrong with it."""
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
    """The schema with our defaults in its "x-guidance". Raises `ValueError` if its own is wrong."""
    own = schema.get("x-guidance", {})
    if not isinstance(own, dict):
        raise ValueError(f"x-guidance must be an object, is a {type(own).__name__}")
    for name, value in own.items():
        if name not in OPTIONS:
            raise ValueError(f"x-guidance.{name[:40]} is not supported; supported are {', '.join(OPTIONS)}")
        if not isinstance(value, bool):
            raise ValueError(f"x-guidance.{name} must be true or false, is {json.dumps(value)[:40]}")
    return {**schema, "x-guidance": {**ON_ONE_LINE, **own}}


def check_bounds(schema: Any) -> None:
    """Raise `ValueError` if a bound is an integer beyond 64 bits: llguidance would take it for the nearest one
    within."""
    stack = [schema]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            for name in BOUNDS & item.keys():
                if isinstance(item[name], int) and abs(item[name]) >= 1 << 63:
                    raise ValueError(f"json: {name} must be within 64 bits, is {str(item[name])[:40]}")
        stack.extend(item.values() if isinstance(item, dict) else item if isinstance(item, list) else ())
