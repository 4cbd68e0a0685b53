"""Calls as a list of JSON objects.

    granite          <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}, …]            Granite 3
    hunyuan_a13b     <tool_calls>[{"name": "get_weather", "arguments": {"city": "Oslo"}}, …]</tool_calls>  Hunyuan
    phi4_mini_json   functools[{"name": "get_weather", "arguments": {"city": "Oslo"}}, …]                Phi-4-mini

Granite's templates ask for the first ("respond with <|tool_call|> followed by a JSON list of tools used"); some of its
models write <tool_call> instead, as vLLM's parser says (vllm/tool_parsers/granite_tool_parser.py), and may end it as
llama.cpp expects (pull request 16537). The others are in vLLM's examples/tool_chat_template_hunyuan_a13b.jinja and
…_phi4_mini.jinja.
"""

from __future__ import annotations

import json
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
    add_json_calls,
)
from router.text.calls.heads import MAX_HEAD_CHARS
from router.text.calls.object_calls import ObjectReader
from router.text.calls.text_values import Schema


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedFormat(ToolFormat):
    end: str = ""
    """The word behind the list."""
    is_end_taught: bool = True
    """Templates show it. Otherwise only some models write it, of themselves."""

    @property
    def words(self) -> tuple[str, ...]:
        return (*self.begins, self.end) if self.end else self.begins

    def reader(self, begin: str, schemas: Mapping[str, Schema]) -> CallReader:
        return ListedReader(begin, self.end)

    def answer(self, lines: GrammarLines, tools: Sequence[Tool], *, is_one: bool) -> str:
        def around(name: str) -> tuple[str, str]:
            return lines.literal(f'{{"name": {json.dumps(name)}, "arguments": '), lines.literal("}")

        add_json_calls(lines, tools, around)
        begin = lines.literal(f"{self.begins[0].removesuffix('[')}[")
        more = "" if is_one else ' (", " call)*'
        end = lines.literal(f"]{self.end if self.is_end_taught else ''}")
        return f"{begin} call{more} {end}"


class ListedReader(Bracketed):
    """Reads one object of a list."""

    joint = ","

    def __init__(self, begin: str, end: str) -> None:
        self.ends = ("]", end) if end else ("]",)
        self._has_bracket = not begin.startswith(",") and not begin.endswith("[")
        """A list's bracket stands before the object."""
        self._reader = ObjectReader()

    def head(self, text: str) -> Head | None:
        if not self._has_bracket:
            return self._reader.head(text)
        if text[0] != "[":
            return Head(0)
        begin = text[: MAX_HEAD_CHARS + 1]
        num_before = len(begin) - len(begin[1:].lstrip())
        if num_before > MAX_HEAD_CHARS:  # of white space, which would be read again with each piece
            return Head(0)
        head = self._reader.head(text[num_before:]) if num_before < len(text) else None
        return None if head is None else head._replace(num_chars=head.num_chars + num_before)

    def body(self, text: str) -> Body:
        return self._reader.body(text)


GRANITE = ListedFormat(
    name="granite", begins=("<|tool_call|>", "<tool_call>"), end="</tool_call>", is_end_taught=False,
    known_by=("<|tool_call|>", "<|start_of_role|>"),
)  # fmt: skip
HUNYUAN_A13B = ListedFormat(
    name="hunyuan_a13b", begins=("<tool_calls>",), end="</tool_calls>", known_by=("<tool_calls>[",)
)  # fmt: skip
PHI4_MINI_JSON = ListedFormat(name="phi4_mini_json", begins=("functools[",), known_by=("functools[",))
