"""What a chat says of tools: checked, and as the template, the answer's reader and its grammar need it. Pure."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from protos import tandem_inference_pb2 as pb
from router.model_info import ModelInfo
from router.sampling import Violations
from router.tool_calls import ToolCallParser
from router.tool_formats import FORMATS, Tool, calls_grammar

MAX_TOOLS = 128
MAX_TOOL_BYTES = 65_536
"""Of all tools: names, descriptions and schemas."""
MAX_CALL_BYTES = 1 << 20
"""Of the arguments of one call that a message tells of."""
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
AUTO, NONE, REQUIRED = pb.TOOL_CHOICE_AUTO, pb.TOOL_CHOICE_NONE, pb.TOOL_CHOICE_REQUIRED


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedTools:
    """Of one request."""

    tools: tuple[Tool, ...] = ()
    parser: str = ""
    """How the model writes calls. Empty: nothing is taken for one."""
    is_one: bool = False
    """An answer makes one call at most."""
    form: str = ""
    """The grammar of an answer that must be calls. Empty: it need not."""

    @property
    def words(self) -> tuple[str, ...]:
        """That tell calls from other text."""
        return (FORMATS[self.parser].begin, FORMATS[self.parser].end) if self.parser else ()

    def reader(self, id_of: Callable[[int], str]) -> ToolCallParser | None:
        """Of one answer. None: there are no calls in it."""
        return ToolCallParser(FORMATS[self.parser], id_of, is_one=self.is_one) if self.parser else None


NO_TOOLS = AskedTools()


def check_tools(chat: pb.Chat, model: ModelInfo, violations: Violations) -> AskedTools:
    """What `chat` says of tools."""
    num_before = len(violations)
    choice = chat.tool_choice or AUTO
    if choice not in pb.ToolChoice.values():
        violations.append(("chat.tool_choice", f"must be one of {', '.join(pb.ToolChoice.keys())}, is {choice}"))
    if not chat.tools:
        for field in ("tool_choice", "tool_name", "parallel_tool_calls"):
            if _is_given(chat, field):
                violations.append((f"chat.{field}", "is of no use without tools"))
        return NO_TOOLS
    if not model.tool_call_parser:
        cannot = f"cannot be had: {model.no_tools_because}"
        violations.append(("chat.tools", cannot))
    tools = _check_each(chat, violations)
    _check_name(chat, choice, violations)
    if len(violations) > num_before:
        return NO_TOOLS
    is_one = bool(chat.tool_name) or (chat.HasField("parallel_tool_calls") and not chat.parallel_tool_calls)
    if choice == NONE:
        return AskedTools(tools=tools)
    form = ""
    if choice == REQUIRED:
        callable_ = [tool for tool in tools if chat.tool_name in ("", tool.name)]
        form = calls_grammar(FORMATS[model.tool_call_parser], callable_, is_one=is_one)
    return AskedTools(tools=tools, parser=model.tool_call_parser, is_one=is_one, form=form)


def _is_given(chat: pb.Chat, field: str) -> bool:
    if field == "parallel_tool_calls":
        return chat.HasField(field)
    value = getattr(chat, field)
    return bool(value) and value not in (AUTO, NONE)  # which ask for nothing


def _check_each(chat: pb.Chat, violations: Violations) -> tuple[Tool, ...]:
    if len(chat.tools) > MAX_TOOLS:
        violations.append(("chat.tools", f"may hold {MAX_TOOLS} tools, has {len(chat.tools)}"))
        return ()
    num_bytes = sum(tool.ByteSize() for tool in chat.tools)
    if num_bytes > MAX_TOOL_BYTES:
        violations.append(("chat.tools", f"must have at most {MAX_TOOL_BYTES} bytes in all, has {num_bytes}"))
        return ()
    checked = []
    for position, tool in enumerate(chat.tools):
        field = f"chat.tools[{position}]"
        if NAME.fullmatch(tool.name) is None:
            bound = f'must be 1 to 64 letters, digits, "_" and "-", is {tool.name[:80]!r}'
            violations.append((f"{field}.name", bound))
        schema = _object(tool.parameters, f"{field}.parameters", violations) if tool.parameters else None
        checked.append(Tool(name=tool.name, description=tool.description, parameters=schema))
    if twice := [name for name, number in Counter(tool.name for tool in chat.tools).items() if number > 1]:
        violations.append(("chat.tools", f"must have names of their own, {twice[0][:80]!r} is there twice"))
    return tuple(checked)


def _check_name(chat: pb.Chat, choice: int, violations: Violations) -> None:
    if not chat.tool_name:
        return
    if choice != REQUIRED:
        violations.append(("chat.tool_name", "goes with TOOL_CHOICE_REQUIRED, and with no other"))
    elif chat.tool_name not in {tool.name for tool in chat.tools}:
        violations.append(("chat.tool_name", f"must be one of the tools, is {chat.tool_name[:80]!r}"))


def problem_of_tools(reason: str) -> tuple[str, str]:
    """The field, and what is wrong with it, of what was said of the grammar of calls: which has two lines for each
    tool, after two."""
    match = re.search(r"at (\d+)\(\d+\): (.*)", reason)
    if match is None or int(match[1]) < 3:
        return "chat.tools", reason.removeprefix("grammar").removeprefix(": ")
    return f"chat.tools[{(int(match[1]) - 3) // 2}].parameters", f"cannot be kept to: {match[2]}"


def check_calls(
    message: pb.ChatMessage, position: int, model: ModelInfo, violations: Violations
) -> tuple[dict[str, Any], ...]:
    """The calls that `message` tells of, as chat templates know them."""
    if message.tool_calls and not model.shows_tools:
        cannot = f"cannot be told of: {model.no_tools_because}"
        violations.append((f"chat.messages[{position}].tool_calls", cannot))
        return ()
    calls = []
    for number, call in enumerate(message.tool_calls):
        field = f"chat.messages[{position}].tool_calls[{number}]"
        if not call.name:
            violations.append((f"{field}.name", "must not be empty"))
        arguments = _object(call.arguments, f"{field}.arguments", violations) if call.arguments else {}
        function = {"name": call.name, "arguments": arguments}
        calls.append({**({"id": call.id} if call.id else {}), "type": "function", "function": function})
    return tuple(calls)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _object(text: str, field: str, violations: Violations) -> dict[str, Any] | None:
    if len(text) > MAX_CALL_BYTES:
        violations.append((field, f"must have at most {MAX_CALL_BYTES} characters, has {len(text)}"))
        return None
    try:
        value = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        violations.append((field, f"must be a JSON object, is no JSON: {error}"))
        return None
    if not isinstance(value, dict):
        violations.append((field, f"must be a JSON object, is a {type(value).__name__}"))
        return None
    return value
