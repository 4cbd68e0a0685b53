"""Calls as Mistral's models write them, behind a word that is a single token.

    mistral   [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}}, …]     tokenizers before v11
              [TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]…                   from then on

Each model knows which variant it was taught, so the grammar allows either. Between v11 and v13 an id stood before the
arguments ([CALL_ID]). The templates accept only call ids of nine letters and digits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from router.text.calls.call_format import (
    Body,
    Bracketed,
    CallReader,
    GrammarLines,
    Head,
    Tool,
    ToolFormat,
    arguments_of,
    json_of,
)
from router.text.calls.heads import MAX_HEAD_CHARS, NAME, Cursor, head_of
from router.text.calls.object_calls import ObjectReader
from router.text.calls.objects import ArgumentsReader
from router.text.calls.text_values import Schema

BEGIN, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_LIST = re.compile(r"\[\s*")


@dataclass(frozen=True, kw_only=True, slots=True)
class MistralFormat(ToolFormat):
    @property
    def words(self) -> tuple[str, ...]:
        return (BEGIN, ARGUMENTS, CALL_ID)

    def reader(self, begin: str, schemas: Mapping[str, Schema]) -> CallReader:
        return MistralReader(begin)

    def answer(self, lines: GrammarLines, tools: Sequence[Tool], *, is_one: bool) -> str:
        for rule in ("item", "call"):
            lines.add(rule, " | ".join(f"{rule}_{number}" for number in range(len(tools))))
        for number, tool in enumerate(tools):
            item = lines.literal(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
            lines.add(f"item_{number}", f'{item} arguments_{number} "}}"', place=number)
            call = lines.literal(f"{BEGIN}{tool.name}{ARGUMENTS}")
            lines.add(f"call_{number}", f"{call} arguments_{number}", place=number)
            lines.add(f"arguments_{number}", json_of(arguments_of(tool)), place=number)
        items, calls = ("item", "call") if is_one else ('item (", " item)*', "call+")
        return f'{lines.literal(BEGIN)} " "? "[" {items} "]" | {calls}'


class MistralReader(Bracketed):
    """Finds out which variant a call has, and reads it."""

    def __init__(self, begin: str) -> None:
        self._is_listed = begin != BEGIN
        """An object of a list, but not its first."""
        self._reader: ObjectReader | ArgumentsReader | None = None
        self._num_before = 0
        """Characters before a list's first object."""

    @property
    def joint(self) -> str:
        return "," if isinstance(self._reader, ObjectReader) else ""

    @property
    def ends(self) -> tuple[str, ...]:
        return ("]",) if isinstance(self._reader, ObjectReader) else ()

    def head(self, text: str) -> Head | None:
        if self._reader is None:
            listed = None if self._is_listed else _LIST.match(text, 0, MAX_HEAD_CHARS + 1)
            self._num_before = 0 if listed is None else listed.end()
            if self._num_before > MAX_HEAD_CHARS:  # of white space, which would be read again with each piece
                return Head(0)
            if self._num_before == len(text):
                return None
            is_object = text[self._num_before] == "{"
            if (listed is not None or self._is_listed) and not is_object:
                return Head(0)
            self._reader = ObjectReader(BEGIN) if is_object else ArgumentsReader(BEGIN)
        if not isinstance(self._reader, ObjectReader):
            return head_of(text, _head_of_named)
        head = self._reader.head(text[self._num_before :])
        return None if head is None else head._replace(num_chars=head.num_chars + self._num_before)

    def body(self, text: str) -> Body:
        assert self._reader is not None
        return self._reader.body(text)


def _head_of_named(cursor: Cursor) -> Head:
    name = cursor.run(NAME)
    cursor.space()
    if cursor.take(CALL_ID):
        cursor.run(NAME)
        cursor.space()
    if cursor.take(ARGUMENTS):
        cursor.space()
    return Head(cursor.position, name) if cursor.is_at("{") else Head(0)


MISTRAL = MistralFormat(name="mistral", begins=(BEGIN,), known_by=(BEGIN,), has_short_ids=True)
