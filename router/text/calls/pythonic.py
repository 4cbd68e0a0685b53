"""Calls as a list of calls in Python's syntax, with keyword arguments only.

    pythonic          [get_weather(city="Oslo"), now()]                                      Llama 3.2, ToolACE
    llama4_pythonic   the same, between <|python_start|> and <|python_end|> or not           Llama 4
    lfm2              <|tool_call_start|>[get_weather(city="Oslo"), now()]<|tool_call_end|>  LFM2, LFM2.5
    olmo3             <function_calls>\\nget_weather(city="Oslo")\\nnow()\\n</function_calls>    OLMo 3

The first two are described by vLLM's templates (examples/tool_chat_template_llama3.2_pythonic.jinja, …_llama4_pythonic,
…_toolace), the third by vLLM's parser (vllm/tool_parsers/lfm2_tool_parser.py) and the template of LFM2.5-8B-A1B.
llama.cpp's template for LFM2 (models/templates/llama-cpp-lfm2.jinja) shows the model lists of JSON objects between the
same words; so these are read, too. The last is described by vLLM's examples/tool_chat_template_olmo3.jinja.

A call is one only if a keyword follows its bracket, or the bracket's end: lists in Markdown look like such lists.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.text.calls.call_format import (
    Body,
    Bracketed,
    CallReader,
    GrammarLines,
    Head,
    Tool,
    ToolFormat,
    add_calls,
    json_of,
)
from router.text.calls.heads import NAME, Cursor, head_of
from router.text.calls.object_calls import PYTHON_TAG, ObjectReader
from router.text.calls.python_values import KEY, MAX_KEY_CHARS, PythonArguments
from router.text.calls.text_values import Schema

PYTHON_BEGIN, PYTHON_END = "<|python_start|>", "<|python_end|>"
LFM2_BEGIN, LFM2_END = "<|tool_call_start|>", "<|tool_call_end|>"
OLMO_BEGIN, OLMO_END = "<function_calls>", "</function_calls>"
MAX_SHOWN_CHARS = 80
_PYTHON = {"true": "True", "false": "False", "null": "None"}
_NAME_OF_ARGUMENT = re.compile(KEY)


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonicFormat(ToolFormat):
    end: str = ""
    """The word behind the list."""
    is_bracketed: bool = True
    """The list has brackets, and commas between its calls. Otherwise, each call is on a line of its own."""
    known_by_one_of: tuple[str, ...] = ()
    """Templates that teach this format contain one of these words, too."""

    @property
    def words(self) -> tuple[str, ...]:
        return (*self.begins, self.end) if self.begins else ()

    def is_taught_by(self, template: str) -> bool:
        one_of = self.known_by_one_of  # (A dataclass with slots has no `super()`.)
        return ToolFormat.is_taught_by(self, template) and (not one_of or any(word in template for word in one_of))

    def reader(self, begin: str, schemas: Mapping[str, Schema]) -> CallReader:
        return PythonicReader(self, begin, schemas)

    def answer(self, lines: GrammarLines, tools: Sequence[Tool], *, is_one: bool) -> str:
        def call_of(number: int, tool: Tool) -> str:
            return f"{lines.literal(f'{tool.name}(')} {_arguments(lines, number, tool)} {lines.literal(')')}"

        add_calls(lines, tools, call_of)
        begin, joint, end = ("[", ", ", "]") if self.is_bracketed else ("\n", "\n", "\n")
        if self.begins:
            begin, end = f"{self.begins[0]}{begin}", f"{end}{self.end}"
        if not self.is_bracketed:
            # The same words stand behind each call, since llguidance cannot yet tell a longer one from them there.
            each = f"(call {lines.literal(joint)}){'' if is_one else '+'}"
            return f"{lines.literal(begin)} {each} {lines.literal(self.end)}"
        more = "" if is_one else f" ({lines.literal(joint)} call)*"
        return f"{lines.literal(begin)} call{more} {lines.literal(end)}"


def _arguments(lines: GrammarLines, number: int, tool: Tool) -> str:
    """The rule of a call's arguments, in the schema's order. Raises `ValueError`."""
    schema = Schema(tool.parameters)
    names = dict.fromkeys([*schema.properties, *schema.required])
    if not names:
        if not tool.parameters or tool.parameters.get("additionalProperties", True) is False:
            return '""'
        value = _value(lines, f"value_{number}", number, schema, True)
        argument = lines.add(f"argument_{number}", f'/[\\w.-]{{1,64}}/ "=" {value}', place=number)
        return f'({argument} (", " {argument})*)?'
    said = []
    for place, name in enumerate(names):
        of = schema.properties.get(name, True)
        shown = name[:MAX_SHOWN_CHARS]
        if not schema.types(of) or schema.values(of) == []:
            if name in schema.required:
                raise ValueError(f"properties.{shown}: no value fits it, but it is required")
            continue
        if not _NAME_OF_ARGUMENT.fullmatch(name) or len(name) >= MAX_KEY_CHARS:
            raise ValueError(f"properties: {shown!r} cannot be the name of an argument in this model's format")
        value = _value(lines, f"value_{number}_{place}", number, schema, of)
        argument = lines.add(f"argument_{number}_{place}", f"{lines.literal(f'{name}=')} {value}", place=number)
        said.append((argument, name in schema.required))
    # The rules of the arguments from one on: `first` if none was said before, `more` if one was.
    first, more = '""', '""'
    for place, (argument, is_required) in reversed([*enumerate(said)]):
        begun = f"{argument} {more}"
        first = lines.add(f"first_{number}_{place}", begun if is_required else f"{begun} | {first}", place=number)
        following = f'", " {begun}'
        more = lines.add(f"more_{number}_{place}", following if is_required else f"{following} | {more}", place=number)
    return first


def _value(lines: GrammarLines, rule: str, number: int, schema: Schema, of: Any) -> str:
    """The rule of a value that fits `of`, a part of `schema`, as JSON or with Python's names. Within lists and objects
    it is as in JSON."""
    values = schema.values(of)
    if values is not None:
        texts = [json.dumps(each, ensure_ascii=False) for each in values]
        texts += [_PYTHON[text] for text in texts if text in _PYTHON]
        return f"({' | '.join(map(lines.literal, texts))})"
    types = schema.types(of)
    names = [*(["True", "False"] if "boolean" in types else []), *(["None"] if "null" in types else [])]
    lines.add(rule, json_of(schema.whole(of)), place=number)
    return f"({' | '.join([rule, *map(lines.literal, names)])})"


class PythonicReader(Bracketed):
    """Reads one call of a list."""

    def __init__(self, tags: PythonicFormat, begin: str, schemas: Mapping[str, Schema]) -> None:
        self._tags = tags
        self._is_first = tags.is_bracketed and not begin.startswith(",")
        """A list's bracket stands before the call."""
        self._schemas = schemas
        self._reader: ObjectReader | PythonArguments | None = None
        """Reads the call, once it is known how it is written."""

    @property
    def joint(self) -> str:
        return "," if self._tags.is_bracketed else "\n"

    @property
    def ends(self) -> tuple[str, ...]:
        closing = (",", "]") if self._tags.is_bracketed else ()
        return (*closing, self._tags.end) if self._tags.end else closing

    def head(self, text: str) -> Head | None:
        num_before = 0
        if self._is_first:
            if text[0] != "[":
                return Head(0)
            num_before = len(text) - len(text[1:].lstrip())
            if num_before == len(text):
                return None
        if text[num_before] == "{" and self._tags.begins and self._tags.is_bracketed:
            self._reader = self._reader or ObjectReader(self._tags.end)
            assert isinstance(self._reader, ObjectReader)
            head = self._reader.head(text[num_before:])
        else:
            head = head_of(text[num_before:], self._head)
        return None if head is None else head._replace(num_chars=head.num_chars + num_before)

    def _head(self, cursor: Cursor) -> Head:
        name = cursor.run(NAME)
        cursor.space()
        if not cursor.take("("):
            return Head(0)
        num_chars = cursor.position
        cursor.space()
        if not cursor.is_at(")"):
            key = cursor.run(_NAME_OF_ARGUMENT_SO_FAR)
            cursor.space()
            if not key or not cursor.take("=") or cursor.is_at("="):
                return Head(0)
        broken_by = (self._tags.end, *self._tags.begins) if self._tags.end else ()
        self._reader = PythonArguments(self._schemas.get(name, Schema(None)), broken_by)
        return Head(num_chars, name)

    def body(self, text: str) -> Body:
        assert self._reader is not None
        return self._reader.body(text)


_NAME_OF_ARGUMENT_SO_FAR = re.compile(f"(?:{KEY})?")
PYTHONIC = PythonicFormat(
    name="pythonic", opens="[", leads=PYTHON_TAG, known_by=("[func_name1(params_name1=params_value1",)
)  # fmt: skip
LLAMA4_PYTHONIC = PythonicFormat(
    name="llama4_pythonic", opens="[", leads=PYTHON_BEGIN, end=PYTHON_END, known_by=("[func_name1(param1=value1",)
)  # fmt: skip
LFM2 = PythonicFormat(
    name="lfm2", begins=(LFM2_BEGIN,), end=LFM2_END, known_by=(), known_by_one_of=(LFM2_BEGIN, "<|tool_list_start|>"),
    not_by=("```",),  # MiniCPM has the same words around Python in fences
)  # fmt: skip
OLMO3 = PythonicFormat(
    name="olmo3", begins=(OLMO_BEGIN,), end=OLMO_END, is_bracketed=False, known_by=(OLMO_BEGIN,), not_by=("<invoke",)
)  # fmt: skip
