"""Values of arguments that are written as plain text, as JSON: a tool's schema says which of them are text.

A value that can only be text is one as it stands, whatever it looks like. Any other is JSON if it is, of a type that it
may have; and text if not. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

MAX_DEPTH = 16
"""Of schemas within schemas that are looked at. Beyond, a value may be anything."""
TYPES = frozenset({"string", "number", "boolean", "null", "object", "array"})
STRING = frozenset({"string"})
_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Some templates show models values as Python writes them."""


class Schema:
    """Of one tool's arguments."""

    def __init__(self, parameters: Mapping[str, Any] | None) -> None:
        self._root = parameters or {}
        properties = self._root.get("properties")
        self.properties: Mapping[str, Any] = properties if isinstance(properties, dict) else {}
        self._types: dict[str, frozenset[str]] = {}
        self._referred_types: dict[str, frozenset[str]] = {}

    def types_of(self, name: str) -> frozenset[str]:
        """What the argument may be, as JSON's types. All where nothing is said of it."""
        if name not in self.properties:
            return TYPES
        if name not in self._types:
            self._types[name] = self.types(self.properties[name])
        return self._types[name]

    def types(self, schema: Any, depth: int = 0) -> frozenset[str]:
        """What fits `schema`, a part of this one. Empty: nothing does."""
        if schema is False:
            return frozenset()
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            return TYPES
        return TYPES.intersection(*self._types_by_keyword(schema, depth))

    def _types_by_keyword(self, schema: Mapping[str, Any], depth: int) -> Iterator[frozenset[str]]:
        """What each of its keywords that says something of types leaves."""
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
        """Each is looked at once: they may refer to themselves, and to each other in many ways."""
        if reference not in self._referred_types:
            self._referred_types[reference] = TYPES
            self._referred_types[reference] = self.types(self._referred(reference), depth + 1)
        return self._referred_types[reference]

    def resolved(self, schema: Any) -> Mapping[str, Any]:
        """A part of this one, or what it refers to instead. Empty: it may be anything."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                break
            schema = self._referred(schema["$ref"])
        return schema if isinstance(schema, dict) else {}

    def whole(self, schema: Any) -> dict[str, Any]:
        """A part of this one, with the definitions that it may refer to."""
        definitions = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        return {**definitions, **schema} if isinstance(schema, dict) else definitions

    def _referred(self, reference: str) -> Any:
        """A part that another refers to. Anything, where it is not in here."""
        found: Any = self._root
        if not reference.startswith("#/"):
            return True
        for key in reference[2:].split("/"):
            found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        return True if found is None else found


def type_of(value: Any) -> str:
    """Of a value that was JSON."""
    if value is None:
        return "null"
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "string")


def json_of_text(text: str, types: frozenset[str]) -> str:
    """A value as JSON, which may be of `types`."""
    said = text.strip()
    said = _PYTHON.get(said, said)
    for _ in range(1 if "string" in types else 2):  # models that quote what is no text
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
    """A part of a text, as within a JSON text."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _on_one_line(said: str, value: Any) -> str:
    """As it was said, but for line breaks, which may have stood within its texts."""
    if "\n" not in said and "\r" not in said and "\t" not in said and "\\u" not in said:
        return said
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode(errors="replace").decode()
    except (ValueError, RecursionError):
        return json.dumps(said, ensure_ascii=False)


def no_number(name: str) -> None:
    """For `json.loads`, which would take NaN and Infinity."""
    raise ValueError(f"{name} is not a JSON number")
