"""How models write calls of tools in their answers: what families were trained on, under vLLM's names for its parsers.

    hermes        <tool_call>\\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\\n</tool_call>    Qwen, Hermes …
    llama3_json   {"name": "get_weather", "parameters": {"city": "Oslo"}}                               Llama 3

Owns the formats, telling from a chat template which of them it is, and the grammar of an answer that must be calls.
Does not own reading an answer (`tool_calls`). Pure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from router.structured_outputs import ON_ONE_LINE

ANY_OBJECT = {"type": "object"}


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
    description: str
    parameters: dict[str, Any] | None
    """A JSON schema. None: it takes none."""

    def to_template(self) -> dict[str, Any]:
        """As chat templates know it: OpenAI's shape, without what was not said."""
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}


def format_of_template(source: str) -> ToolFormat | None:
    """The format that a chat template teaches. None: none that is known here."""
    plain = source.replace("\\", "")
    for each in FORMATS.values():
        if each.known_by in plain and not any(other in plain for other in each.not_by):
            return each
    return None


def calls_grammar(tool_format: ToolFormat, tools: Sequence[Tool], *, is_one: bool) -> str:
    """Of an answer that is calls of some of `tools`, one or more, and nothing else. In Lark, as llguidance reads it."""
    begin, end = (f"{tool_format.begin}\n", f"\n{tool_format.end}") if tool_format.begin else ("", "")
    more = "" if is_one else f" ({_quoted(tool_format.between)} call)*"
    lines = [f"start: call{more}", f"call: {' | '.join(f'tool_{number}' for number in range(len(tools)))}"]
    for number, tool in enumerate(tools):
        head = f'{begin}{{"name": {json.dumps(tool.name)}, "{tool_format.arguments_key}": '
        schema = {**(tool.parameters or ANY_OBJECT)}
        schema.setdefault("x-guidance", dict(ON_ONE_LINE))
        lines.append(f"tool_{number}: {_quoted(head)} arguments_{number} {_quoted('}' + end)}")
        lines.append(f"arguments_{number}: %json {json.dumps(schema)}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
