"""Calls that are JSON objects.

hermes        <tool_call>\\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\\n</tool_call>    Qwen, Hermes …
llama3_json   {"name": "get_weather", "parameters": {"city": "Oslo"}}                               Llama 3
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from router.text.calls.call_format import (
    Body,
    Bracketed,
    CallReader,
    GrammarLines,
    Head,
    Tool,
    ToolFormat,
    add_json_calls,
)
from router.text.calls.heads import MAX_HEAD_CHARS
from router.text.calls.objects import BROKEN_BY, ControlEscapes, ObjectScan, call_of, unquoted
from router.text.calls.text_values import Schema

PYTHON_TAG = "<|python_tag|>"
"""What Llama may write before a call."""
_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectFormat(ToolFormat):
    ends: tuple[str, ...] = ()
    arguments_key: str

    @property
    def words(self) -> tuple[str, ...]:
        return (*self.begins, *self.ends)

    def reader(self, begin: str, schemas: Mapping[str, Schema]) -> CallReader:
        return ObjectReader(ends=self.ends)

    def answer(self, lines: GrammarLines, tools: Sequence[Tool], *, is_one: bool) -> str:
        begin = f"{self.begins[0]}\n" if self.begins else ""
        end = f"\n{self.ends[0]}" if self.ends else ""

        def around(name: str) -> tuple[str, str]:
            head = f'{begin}{{"name": {json.dumps(name)}, "{self.arguments_key}": '
            return lines.literal(head), lines.literal(f"}}{end}")

        add_json_calls(lines, tools, around)
        return "call" if is_one else f"call ({lines.literal(self.between)} call)*"


class ObjectReader(Bracketed):
    """Reads one call. A head longer than MAX_HEAD_CHARS is recognised only when the call is complete.

    HEAD up to the arguments ── ARGUMENTS ── the rest of the object, which is ignored."""

    joint = ""

    def __init__(self, broken_by: str = BROKEN_BY, ends: tuple[str, ...] = ()) -> None:
        self._broken_by = broken_by
        self.ends = ends
        self._scan = ObjectScan(broken_by)
        self._escapes = ControlEscapes()
        self._is_behind = False
        """The arguments have been read: the rest of the object follows."""

    def head(self, text: str) -> Head | None:
        if text[0] != "{":
            return Head(0)
        match = _HEAD.match(text[: MAX_HEAD_CHARS + 1])
        if match is not None:
            self._scan = ObjectScan(self._broken_by)
            return Head(match.end(), unquoted(match[1]))
        end = self._scan.end_of_object(text)
        if end is None:
            return None
        call = call_of(text[:end])
        return Head(end) if call is None else Head(end, *call)

    def body(self, text: str) -> Body:
        end = self._scan.end_of_object(text)
        num_chars = min(self._scan.num_seen, len(text)) if end is None else end
        arguments = "" if self._is_behind else self._escapes.escaped(text[:num_chars])
        if end is None:
            self._scan.rebase(num_chars)
            return Body(num_chars, arguments)
        if self._is_behind:
            return Body(num_chars, is_over=True)
        self._is_behind, self._scan = True, ObjectScan(self._broken_by, depth=1)
        rest = self.body(text[num_chars:])
        return Body(num_chars + rest.num_chars, arguments, rest.is_over)


HERMES = ObjectFormat(
    name="hermes",
    begins=("<tool_call>",),
    ends=("</tool_call>",),
    between="\n",
    arguments_key="arguments",
    known_by=("<tool_call>",),
    not_by=("<function=", "<arg_key>"),
)
GRANITE4 = replace(HERMES, name="granite4")
"""Another name of vLLM's for the same format."""
LLAMA3_JSON = ObjectFormat(
    name="llama3_json",
    leads=PYTHON_TAG,
    between="; ",
    arguments_key="parameters",
    known_by=('"parameters": dictionary of argument name and its value',),
)
