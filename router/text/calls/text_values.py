"""Turns argument values that are written as plain text into JSON, by the tool's schema.

A value that can only be text is taken as it is, whatever it looks like. Any other value is read as JSON if it is JSON
of a type that it may have, and as text otherwise. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

MAX_DEPTH = 16
"""Maximum depth of nested schemas that are examined. Beyond it, a value may be anything."""
MAX_COUNT = 1000
"""Larger bounds of a length are not enforced: the grammar would count the characters one by one."""
TYPES = frozenset({"string", "number", "boolean", "null", "object", "array"})
STRING = frozenset({"string"})
_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Some templates show values to models as Python writes them."""


class Schema:
    """The JSON schema of one tool's arguments."""

    def __init__(self, parameters: Mapping[str, Any] | None) -> None:
        self._root = parameters or {}
        properties = self._root.get("properties")
        self.properties: Mapping[str, Any] = properties if isinstance(properties, dict) else {}
        required = self._root.get("required")
        self.required = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
        self._types: dict[str, frozenset[str]] = {}
        self._referred_types: dict[str, frozenset[str]] = {}

    def types_of(self, name: str) -> frozenset[str]:
        """The JSON types that the argument may have. All, if the schema does not mention it."""
        if name not in self.properties:
            return TYPES
        if name not in self._types:
            self._types[name] = self.types(self.properties[name])
        return self._types[name]

    def types(self, schema: Any, depth: int = 0) -> frozenset[str]:
        """The types that fit `schema`, a part of this one. Empty: none fits."""
        if schema is False:
            return frozenset()
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            return TYPES
        return TYPES.intersection(*self._types_by_keyword(schema, depth))

    def _types_by_keyword(self, schema: Mapping[str, Any], depth: int) -> Iterator[frozenset[str]]:
        """For each keyword that restricts types: the types that it allows."""
        if "type" in schema:
            named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            known = frozenset("number" if each == "integer" else each for each in named if isinstance(each, str))
            yield known & TYPES or TYPES
        if "const" in schema:
            yield frozenset({type_of(schema["const"])})
        if isinstance(schema.get("enum"), list):
            yield frozenset(map(type_of, schema["enum"]))
        if isinstance(schema.get("$ref"), str):
            yield self._types_of_reference(schema["$ref"], depth)
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                yield frozenset().union(*(self.types(each, depth + 1) for each in schema[key]))
        if isinstance(schema.get("allOf"), list):
            yield from (self.types(each, depth + 1) for each in schema["allOf"])

    def _types_of_reference(self, reference: str, depth: int) -> frozenset[str]:
        """The types of a referenced schema. Each is examined once, since schemas may refer to themselves, and to each
        other in many ways."""
        if reference not in self._referred_types:
            self._referred_types[reference] = TYPES
            self._referred_types[reference] = self.types(self._referred(reference), depth + 1)
        return self._referred_types[reference]

    def resolved(self, schema: Any) -> Mapping[str, Any]:
        """`schema`, a part of this one, with references followed. Empty: it may be anything."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                break
            schema = self._referred(schema["$ref"])
        return schema if isinstance(schema, dict) else {}

    def values(self, schema: Any) -> list[Any] | None:
        """All values that fit `schema`, a part of this one, if it lists them."""
        known, types = self.resolved(schema), self.types(schema)
        if "const" not in known and not isinstance(known.get("enum"), list):
            return None
        values = [known["const"]] if "const" in known else known["enum"]
        return [each for each in values if type_of(each) in types]

    def whole(self, schema: Any) -> dict[str, Any]:
        """`schema`, a part of this one, with the definitions that it may refer to."""
        definitions = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        return {**definitions, **schema} if isinstance(schema, dict) else definitions

    def _referred(self, reference: str) -> Any:
        """The part that `reference` names. True (anything) if it is not in this schema."""
        found: Any = self._root
        if not reference.startswith("#/"):
            return True
        for key in reference[2:].split("/"):
            found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        return True if found is None else found


def type_of(value: Any) -> str:
    """The JSON type of a parsed value."""
    if value is None:
        return "null"
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "string")


def bounds_of(least: Any, most: Any) -> tuple[int, int | None]:
    """The least and most characters or items that are enforced, of those that a schema names. None: no bound."""
    return least if _is_count(least) else 0, most if _is_count(most) else None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT


def json_of_text(text: str, types: frozenset[str]) -> str:
    """A value, which may have one of `types`, as JSON."""
    said = text.strip()
    said = _PYTHON.get(said, said)
    for _ in range(1 if "string" in types else 2):  # some models quote values that are no texts
        try:
            value = json.loads(said, strict=False, parse_constant=no_number)
        except (ValueError, RecursionError):
            break
        if type_of(value) in types - STRING:
            return _on_one_line(said, value)
        if not isinstance(value, str):
            break
        said = value.strip()
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """A piece of text, escaped as within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _on_one_line(said: str, value: Any) -> str:
    """The JSON as it was written, but without line breaks, which may be within its strings."""
    if "\n" not in said and "\r" not in said and "\t" not in said and "\\u" not in said:
        return said
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode(errors="replace").decode()
    except (ValueError, RecursionError):
        return json.dumps(said, ensure_ascii=False)


def no_number(name: str) -> None:
    """A `parse_constant` for `json.loads`, which would otherwise accept NaN and Infinity."""
    raise ValueError(f"{name} is not a JSON number")
