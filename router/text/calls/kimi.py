"""Calls as Kimi K2 writes them: ids and JSON between words that are single tokens.

    kimi_k2   <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>
              {"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|>                        (on one line)

Moonshot describes this in the models' docs/tool_call_guidance.md (moonshotai/Kimi-K2-Instruct-0905) and chat templates.
The id names the tool, and numbers the calls of a whole chat. The client gets it as the call's id, since the template
shows it to the model again: a model that sees ids of another form soon writes such ids itself, which name no tool.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from router.text.calls.call_format import CallReader, GrammarLines, Head, Tool, ToolFormat, add_json_calls
from router.text.calls.heads import Cursor, head_of
from router.text.calls.objects import ArgumentsReader
from router.text.calls.text_values import Schema

CALLS_BEGIN, CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_BEGIN, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
_NAMESPACE = "functions."
_ID = re.compile(r"[^\s<{]*")
_NAME_OF_ID = re.compile(rf"(?:{re.escape(_NAMESPACE)})?(.+):[0-9]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class KimiFormat(ToolFormat):
    begins: tuple[str, ...] = (CALLS_BEGIN, CALL_BEGIN)

    @property
    def words(self) -> tuple[str, ...]:
        return (CALLS_BEGIN, CALL_BEGIN, ARGUMENTS, CALL_END, CALLS_END)

    def reader(self, begin: str, schemas: Mapping[str, Schema]) -> CallReader:
        return KimiReader(begin)

    def answer(self, lines: GrammarLines, tools: Sequence[Tool], *, is_one: bool) -> str:
        def around(name: str) -> tuple[str, str]:
            begin = lines.literal(f"{CALL_BEGIN}{_NAMESPACE}{name}:")
            return f"{begin} /[0-9]{{1,4}}/ {lines.literal(ARGUMENTS)}", lines.literal(CALL_END)

        add_json_calls(lines, tools, around)
        return f"{lines.literal(CALLS_BEGIN)} call{'' if is_one else '+'} {lines.literal(CALLS_END)}"


class KimiReader(ArgumentsReader):
    ends = (CALL_END, CALLS_END)

    def __init__(self, begin: str) -> None:
        super().__init__()
        self._is_of_many = begin == CALLS_BEGIN

    def head(self, text: str) -> Head | None:
        return head_of(text, self._head)

    def _head(self, cursor: Cursor) -> Head:
        if self._is_of_many and not cursor.take(CALL_BEGIN):
            return Head(0)
        cursor.space()
        call_id = cursor.run(_ID)
        cursor.space()
        named = _NAME_OF_ID.fullmatch(call_id)
        if not cursor.take(ARGUMENTS) or named is None:
            return Head(0)
        cursor.space()
        if cursor.is_at(CALL_END):
            return Head(cursor.position, named[1], "{}", call_id)
        return Head(cursor.position, named[1], id=call_id) if cursor.is_at("{") else Head(0)


KIMI_K2 = KimiFormat(name="kimi_k2", known_by=(ARGUMENTS,))
