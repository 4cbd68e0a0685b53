"""Tools that a model may call: chats as OpenAI's clients write them, to messages of the wire, and calls back. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from protos import tandem_inference_pb2 as pb

CHOICES = {"auto": pb.TOOL_CHOICE_AUTO, "none": pb.TOOL_CHOICE_NONE, "required": pb.TOOL_CHOICE_REQUIRED}
MESSAGE_KEYS = {"role", "content", "tool_calls", "tool_call_id", "name"}


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """That an answer makes."""

    id: str
    name: str
    arguments: str
    """A JSON object, as text; cut off where the answer was."""

    def to_dict(self) -> dict[str, Any]:
        """In OpenAI's shape, as a message to go on with may have it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass
class CallsStream:
    """Adds up the pieces of an answer's calls."""

    _calls: dict[int, pb.ToolCallDelta] = field(default_factory=dict)

    def accept(self, pieces: Sequence[pb.ToolCallDelta]) -> str | None:
        """What is wrong with them; None: nothing."""
        for piece in pieces:
            if piece.index not in self._calls and (piece.index != len(self._calls) or not piece.id):
                return f"a piece of call {piece.index} came, {len(self._calls)} had begun"
            call = self._calls.setdefault(piece.index, pb.ToolCallDelta())
            call.id, call.name = call.id or piece.id, call.name or piece.name
            call.arguments += piece.arguments
        return None

    def calls(self) -> list[ToolCall]:
        return [ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in self._calls.values()]


def chat_message(message: Any) -> pb.ChatMessage:
    """Of {"role", "content"}, and "tool_calls", "tool_call_id" and "name" as OpenAI's messages have them. Raises
    `ValueError`."""
    known = "a role and a content, and may have tool_calls, a tool_call_id and a name"
    if not isinstance(message, Mapping) or not {"role"} <= set(message) <= MESSAGE_KEYS:
        raise ValueError(f"prompt: a message has {known}, not {message!r}")
    calls = message.get("tool_calls") or ()
    if message.get("content") is None and not calls:
        raise ValueError(f"prompt: a message has {known}, not {message!r}")
    said = {key: message[key] for key in MESSAGE_KEYS - {"tool_calls"} if message.get(key) is not None}
    try:
        made = pb.ChatMessage(**said)
    except TypeError as error:
        raise ValueError(f"prompt: role and content of a message must be texts: {error}") from error
    for call in calls:
        try:
            function = call["function"]
            made.tool_calls.add(id=call.get("id") or "", name=function["name"], arguments=_json(function["arguments"]))
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            shape = '{"id", "type": "function", "function": {"name", "arguments"}}'
            raise ValueError(f"prompt: a message's call is not {shape}: {call!r}") from error
    return made


def add_tools(
    chat: pb.Chat, tools: Sequence[Mapping[str, Any]], tool_choice: Any, parallel_tool_calls: bool | None
) -> None:
    """What OpenAI's `tools`, `tool_choice` and `parallel_tool_calls` say. Raises `ValueError` naming the field."""
    for position, tool in enumerate(tools):
        try:
            function = tool["function"]
            parameters = function.get("parameters")
            text = "" if parameters is None else _json(parameters)
            description = function.get("description") or ""
            chat.tools.add(name=function["name"], description=description, parameters=text)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            shape = '{"type": "function", "function": {"name", "description", "parameters"}}'
            raise ValueError(f"tools: number {position} is not {shape}: {error!r}") from error
    if isinstance(tool_choice, str) and tool_choice in CHOICES:
        chat.tool_choice = CHOICES[tool_choice]
    elif tool_choice is not None:
        try:
            chat.tool_name = tool_choice["function"]["name"]
        except (TypeError, KeyError) as error:
            shape = ", ".join(map(repr, CHOICES)) + ' or {"type": "function", "function": {"name": …}}'
            raise ValueError(f"tool_choice: must be {shape}, is {tool_choice!r}") from error
        chat.tool_choice = pb.TOOL_CHOICE_REQUIRED
    if parallel_tool_calls is not None:
        chat.parallel_tool_calls = parallel_tool_calls


def _json(value: Any) -> str:
    """A JSON text, or what it says."""
    return value if isinstance(value, str) else json.dumps(value)
