"""Calls as DeepSeek's models write them: names and JSON between words that are single tokens.

    deepseek_v31   <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Oslo"}
                   <｜tool▁call▁end｜><｜tool▁calls▁end｜>                                    (on one line)  V3.1
    deepseek_v3    … <｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\\n```json\\n{"city": "Oslo"}\\n```
                   <｜tool▁call▁end｜> …                                                      (on one line)  V3, R1

The reader accepts both variants for either format: what follows the separator tells them apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from router.text.calls.call_format import CallReader, GrammarLines, Head, Tool, ToolFormat, add_json_calls
from router.text.calls.heads import Cursor, head_of
from router.text.calls.objects import ArgumentsReader
from router.text.calls.text_values import Schema

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCE = "```"
_NAME = re.compile(r"[^\s<`{]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSeekFormat(ToolFormat):
    is_fenced: bool
    begins: tuple[str, ...] = (CALLS_BEGIN, CALL_BEGIN)

    @property
    def words(self) -> tuple[str, ...]:
        return (CALLS_BEGIN, CALL_BEGIN, SEPARATOR, CALL_END, CALLS_END)

    def reader(self, begin: str, schemas: Mapping[str, Schema]) -> CallReader:
        return DeepSeekReader(begin)

    def answer(self, lines: GrammarLines, tools: Sequence[Tool], *, is_one: bool) -> str:
        def around(name: str) -> tuple[str, str]:
            begin, end = f"{CALL_BEGIN}{name}{SEPARATOR}", CALL_END
            if self.is_fenced:
                begin = f"{CALL_BEGIN}function{SEPARATOR}{name}\n{FENCE}json\n"
                end = f"\n{FENCE}{CALL_END}"
            return lines.literal(begin), lines.literal(end)

        add_json_calls(lines, tools, around)
        between = lines.literal(self.between) if self.between else ""
        more = "" if is_one else f" ({between} call)*"
        return f"{lines.literal(CALLS_BEGIN)} call{more} {lines.literal(CALLS_END)}"


class DeepSeekReader(ArgumentsReader):
    ends = (FENCE, CALL_END, CALLS_END)

    def __init__(self, begin: str) -> None:
        super().__init__()
        self._is_of_many = begin == CALLS_BEGIN

    def head(self, text: str) -> Head | None:
        return head_of(text, self._head)

    def _head(self, cursor: Cursor) -> Head:
        if self._is_of_many and not cursor.take(CALL_BEGIN):
            return Head(0)
        cursor.space()
        name = cursor.run(_NAME)
        cursor.space()
        if not cursor.take(SEPARATOR):
            return Head(0)
        cursor.space()
        if cursor.is_at(CALL_END):  # V3.1's models write this if there are no arguments
            return Head(cursor.position, name, "{}")
        if not cursor.is_at("{"):
            name = cursor.run(_NAME)
            cursor.space()
            if cursor.take(FENCE):
                cursor.take("json")
                cursor.space()
        return Head(cursor.position, name) if cursor.is_at("{") else Head(0)


DEEPSEEK_V3 = DeepSeekFormat(
    name="deepseek_v3", is_fenced=True, between="\n", known_by=(CALL_BEGIN, f"{FENCE}json")
)  # fmt: skip
DEEPSEEK_V31 = DeepSeekFormat(
    name="deepseek_v31", is_fenced=False, known_by=(CALL_BEGIN,), not_by=(f"{FENCE}json",)
)  # fmt: skip
