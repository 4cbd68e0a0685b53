"""How models write calls of tools in their answers: what families were trained on, under vLLM's names for its parsers.

    hermes        <tool_call>\\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\\n</tool_call>    Qwen, Hermes …
    llama3_json   {"name": "get_weather", "parameters": {"city": "Oslo"}}                               Llama 3

Owns the formats, telling from a chat template which of them it is, and the grammar of an answer that must be calls.
Does not own reading an answer (`tool_calls`). Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.text.structured_outputs import ON_ONE_LINE

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolFormat:
    """`begin` JSON `end` is a call; calls are set apart by `between`."""

    name: str
    begin: str = ""
    """Empty: a call begins where an answer does, and after `between`."""
    end: str = ""
    between: str
    arguments_key: str
    known_by: str
    """What of a chat template tells, without backslashes."""
    not_by: tuple[str, ...] = ()
    """And what must not be there: others begin their calls alike."""


HERMES = ToolFormat(
    name="hermes",
    begin="<tool_call>",
    end="</tool_call>",
    between="\n",
    arguments_key="arguments",
    known_by="<tool_call>",
    not_by=("<function=", "<arg_key>"),
)
LLAMA3_JSON = ToolFormat(
    name="llama3_json",
    between="; ",
    arguments_key="parameters",
    known_by='"parameters": dictionary of argument name and its value',
)
FORMATS = {each.name: each for each in (HERMES, LLAMA3_JSON)}
AUTO = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """What a model may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    """A JSON schema of an object. None: it takes none."""

    def to_template(self) -> dict[str, Any]:
        """As chat templates know it: OpenAI's shape, and all of it, which some take for granted."""
        parameters = NO_PARAMETERS if self.parameters is None else self.parameters
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


def format_of_template(source: str) -> ToolFormat | None:
    """The format that a chat template teaches. None: none that is known here."""
    plain = without_comments(source).replace("\\", "")
    for each in FORMATS.values():
        if each.known_by in plain and not any(other in plain for other in each.not_by):
            return each
    return None


def without_comments(source: str) -> str:
    """A chat template without what it says to people."""
    return _COMMENT.sub("", source)


LINES_BEFORE_TOOLS = 2
LINES_OF_A_TOOL = 2
"""Of a grammar: whoever reads its errors counts."""


def calls_grammar(
    tool_format: ToolFormat, tools: Sequence[Tool], *, is_one: bool, or_form: Mapping[str, Any] | None = None
) -> str:
    """Of an answer that is calls of some of `tools`, one or more, or JSON that fits the schema `or_form`, and nothing
    else. In Lark, as llguidance reads it."""
    begin, end = (f"{tool_format.begin}\n", f"\n{tool_format.end}") if tool_format.begin else ("", "")
    more = "" if is_one else f" ({_quoted(tool_format.between)} call)*"
    either = "" if or_form is None else " | form"
    names = " | ".join(f"tool_{number}" for number in range(len(tools)))
    lines = [f"start: call{more}{either}", f"call: {names}"]
    for number, tool in enumerate(tools):
        head = f'{begin}{{"name": {json.dumps(tool.name)}, "{tool_format.arguments_key}": '
        lines.append(f"tool_{number}: {_quoted(head)} arguments_{number} {_quoted('}' + end)}")
        lines.append(f"arguments_{number}: %json {json.dumps(_guided({**(tool.parameters or {}), 'type': 'object'}))}")
    if or_form is not None:
        lines.append(f"form: %json {json.dumps(_guided(dict(or_form)))}")
    return "\n".join(lines) + "\n"


def _guided(schema: dict[str, Any]) -> dict[str, Any]:
    """On one line, which what reads calls relies on. Keywords that llguidance does not know (`uniqueItems`, formats of
    one's own) are not held to: agents send many, and mean them for people."""
    return {**schema, "x-guidance": {**ON_ONE_LINE, "lenient": True}}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
