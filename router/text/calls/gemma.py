"""Calls as Gemma 4 writes them: JSON with keys without quotes, and strings between words that are single tokens.

    gemma4   <|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:[1,2],more:{a:true}}<tool_call|>

Google describes this in ai.google.dev/gemma/docs/core/prompt-formatting-gemma4 and the models' chat templates (vLLM has
one as examples/tool_chat_template_gemma4.jinja). Behind a call the model writes <|tool_response>, which its
generation_config.json names among the tokens that end answers. Templates show tools and calls with their keys in
alphabetical order; answers that are held to calls have them in this order, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from router.text.calls.call_format import (
    NO_PARAMETERS,
    Body,
    Bracketed,
    CallReader,
    GrammarLines,
    Head,
    Tool,
    ToolFormat,
    add_calls,
    arguments_of,
    json_of,
)
from router.text.calls.gemma_values import MAX_KEY_CHARS, QUOTE, GemmaArguments
from router.text.calls.heads import NAME, Cursor, head_of
from router.text.calls.text_values import MAX_DEPTH, TYPES, Schema, bounds_of
from router.text.schemas import BOUNDS

CALL_BEGIN, CALL_END = "<|tool_call>", "<tool_call|>"
_NAME = "call:"
_PLAIN_KEY = re.compile(r"[\w$.-]+(?: [\w$.-]+)*")
MAX_SHOWN_CHARS = 80
MAX_RULES = 10_000
"""Maximum number of rules for one tool. Some are written anew if a part that they refer to turns out to fit nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmaFormat(ToolFormat):
    begins: tuple[str, ...] = (CALL_BEGIN,)

    @property
    def words(self) -> tuple[str, ...]:
        return (CALL_BEGIN, QUOTE, CALL_END)

    def reader(self, begin: str, schemas: Mapping[str, Schema]) -> CallReader:
        return GemmaReader(schemas)

    def answer(self, lines: GrammarLines, tools: Sequence[Tool], *, is_one: bool) -> str:
        def call_of(number: int, tool: Tool) -> str:
            held = arguments_of(tool) if tool.parameters else {**NO_PARAMETERS, "additionalProperties": False}
            arguments = _Rules(lines, number, held).value(held)
            return f"{lines.literal(f'{CALL_BEGIN}{_NAME}{tool.name}')} {arguments} {lines.literal(CALL_END)}"

        add_calls(lines, tools, call_of)
        return f"call{'' if is_one else '+'}"


class GemmaReader(Bracketed):
    """Reads one call."""

    joint = ""
    ends = (CALL_END,)

    def __init__(self, schemas: Mapping[str, Schema]) -> None:
        self._schemas = schemas
        self._arguments: GemmaArguments | None = None

    def head(self, text: str) -> Head | None:
        return head_of(text, self._head)

    def _head(self, cursor: Cursor) -> Head:
        if not cursor.take(_NAME):
            return Head(0)
        cursor.space()
        name = cursor.run(NAME)
        cursor.space()
        if not cursor.take("{"):
            return Head(0)
        self._arguments = GemmaArguments(self._schemas.get(name, Schema(None)), (CALL_BEGIN, CALL_END))
        return Head(cursor.position, name)

    def body(self, text: str) -> Body:
        assert self._arguments is not None
        return self._arguments.body(text)


class _NoneFits(ValueError):  # noqa: N818 (as `rpc.errors` names them)
    """No value fits a schema."""


class _Rules:
    """The rules of one tool's arguments. `number`: the tool's. Methods raise `_NoneFits`, or another `ValueError` if
    something cannot be said in Gemma's format."""

    def __init__(self, lines: GrammarLines, number: int, parameters: Mapping[str, Any]) -> None:
        self._lines = lines
        self._number = number
        self._schema = Schema(parameters)
        self._known: dict[tuple[int, frozenset[str]], str] = {}
        """Rules of values, by the identity of their schema, which may contain itself, and their types. Empty: no value
        fits."""
        self._any = ""
        """The rule of any value, once it is needed."""
        self._num_rules = 0

    def _add(self, said: str, rule: str = "") -> str:
        return self._lines.add(rule or self._new(), said, place=self._number)

    def _new(self) -> str:
        self._num_rules += 1
        if self._num_rules > MAX_RULES:
            raise ValueError("it has too many parts")
        return f"part_{self._number}_{self._num_rules}"

    def value(self, of: Any, depth: int = 0) -> str:
        """The rule of a value that fits `of`, a part of the schema."""
        types, known = self._schema.types(of), self._schema.resolved(of)
        if not types:
            raise _NoneFits("no value fits it")
        if not known or depth > MAX_DEPTH:
            return self._free(types)
        key = id(known), types
        if key not in self._known:
            num_before = len(self._known)
            self._known[key] = name = self._new()
            try:
                said = self._fitting(of, known, types, depth)
            except _NoneFits:
                self._known[key] = ""
                for part in [*self._known][num_before:]:  # they may refer to this rule, which there is not
                    if self._known[part]:
                        del self._known[part]
                raise
            self._add(said, name)
        if not self._known[key]:
            raise _NoneFits("no value fits it")
        return self._known[key]

    def _fitting(self, of: Any, known: Mapping[str, Any], types: frozenset[str], depth: int) -> str:
        values = self._schema.values(of)
        if values is not None:
            if not values:
                raise _NoneFits("no value fits it")
            return " | ".join(self._lines.literal(self._said(each)) for each in values)
        for key in ("anyOf", "oneOf", "allOf"):
            several = known.get(key)
            if not isinstance(several, list) or not several or (key == "allOf" and len(several) > 1):
                continue
            if all(self._schema.types(each) <= types for each in several):
                return self._one_of(several, depth)
        return " | ".join(self._of_type(each, known, depth) for each in sorted(types))

    def _one_of(self, several: Sequence[Any], depth: int) -> str:
        rules = []
        for each in several:
            with suppress(_NoneFits):
                rules.append(self.value(each, depth + 1))
        if not rules:
            raise _NoneFits("no value fits it")
        return " | ".join(rules)

    def _of_type(self, kind: str, known: Mapping[str, Any], depth: int) -> str:
        """A rule for a value of this type that fits `known`, as far as it says what values of the type contain."""
        match kind:
            case "string":
                bounds = bounds_of(known.get("minLength"), known.get("maxLength"))
                return f"{self._lines.literal(QUOTE)} {self._lines.text_until(QUOTE, bounds, without=[QUOTE])}"
            case "number":
                named = known.get("type")
                is_integer = named == "integer" or (isinstance(named, list) and "number" not in named)
                bounds_said = {key: known[key] for key in (*BOUNDS, "multipleOf") if key in known}
                return self._add(json_of({**bounds_said, "type": "integer" if is_integer else "number"}))
            case "boolean":
                return '"true" | "false"'
            case "null":
                return '"null"'
            case "array":
                return self._list(known, depth)
            case _:
                return self._object(known, depth)

    def _list(self, known: Mapping[str, Any], depth: int) -> str:
        least, most = bounds_of(known.get("minItems"), known.get("maxItems"))
        try:
            item = self.value(True if "prefixItems" in known else known.get("items", True), depth + 1)
        except _NoneFits:
            if least:
                raise
            most = 0
        if most == 0:
            return '"[" "]"'
        more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        return f'"[" ({item} ("," {item}){more}){"" if least else "?"} "]"'

    def _object(self, known: Mapping[str, Any], depth: int) -> str:
        schema = Schema(known)
        names = sorted({*schema.properties, *schema.required}, key=_in_order)
        if not names:
            other = known.get("additionalProperties", True)
            return '"{" "}"' if other is False else self._pairs(self.value(other, depth + 1))
        # The rules of the keys from one on: `first` if none was said before, `more` if one was.
        first, more = '""', '""'
        for name in reversed(names):
            is_required = name in schema.required
            try:
                value = self.value(schema.properties.get(name, True), depth + 1)
            except _NoneFits as error:
                if is_required:
                    raise _NoneFits(f"properties.{name[:MAX_SHOWN_CHARS]}: {error}, but it is required") from error
                continue
            pair = self._add(f"{self._lines.literal(f'{_key(name)}:')} {value}")
            begun, following = f"{pair} {more}", f'"," {pair} {more}'
            first = self._add(begun if is_required else f"{begun} | {first}")
            more = self._add(following if is_required else f"{following} | {more}")
        return f'"{{" {first} "}}"'

    def _free(self, types: frozenset[str]) -> str:
        """The rule of any value of these types."""
        if types == TYPES and self._any:
            return self._any
        name = self._new()
        if types == TYPES:
            self._any = name
        return self._add(" | ".join(self._of_type(each, {}, MAX_DEPTH) for each in sorted(types)), name)

    def _pairs(self, value: str) -> str:
        """A rule for an object with any keys, and values of this rule."""
        pair = f'/[\\w$.-]{{1,64}}/ ":" {value}'
        return f'"{{" ({pair} ("," {pair})*)? "}}"'

    def _said(self, value: Any) -> str:
        """A value as Gemma writes it. Raises `ValueError` if it cannot be said."""
        if isinstance(value, str):
            if QUOTE in value:
                raise ValueError(f"{value[:MAX_SHOWN_CHARS]!r} cannot be said in this model's format")
            return f"{QUOTE}{value}{QUOTE}"
        if isinstance(value, dict):
            return f"{{{','.join(f'{_key(key)}:{self._said(value[key])}' for key in sorted(value, key=_in_order))}}}"
        if isinstance(value, list):
            return f"[{','.join(map(self._said, value))}]"
        return json.dumps(value)


def _key(name: str) -> str:
    """A key as Gemma writes it; with quotes if it would be no key without. Raises `ValueError`."""
    if QUOTE in name or len(name) > MAX_KEY_CHARS - 2 * len(QUOTE) - 1:
        raise ValueError(f"properties: {name[:MAX_SHOWN_CHARS]!r} cannot be said in this model's format")
    return name if _PLAIN_KEY.fullmatch(name) else f"{QUOTE}{name}{QUOTE}"


def _in_order(name: str) -> tuple[str, str]:
    """By this, chat templates sort keys."""
    return name.lower(), name


GEMMA4 = GemmaFormat(name="gemma4", known_by=(f"{CALL_BEGIN}{_NAME}",))
