"""Tools that a model may call: turns chats in OpenAI's format into messages of the wire, and calls back. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from protos import tandem_inference_pb2 as pb

CHOICES = {"auto": pb.TOOL_CHOICE_AUTO, "none": pb.TOOL_CHOICE_NONE, "required": pb.TOOL_CHOICE_REQUIRED}
MESSAGE_KEYS = {"role", "content", "tool_calls", "tool_call_id", "name"}
MESSAGE_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""The roles of OpenAI's messages."""
REASONING_KEYS = ("reasoning", "reasoning_content")
"""An assistant's earlier thoughts, under vLLM's present and former name."""


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A tool call in an answer."""

    id: str
    name: str
    arguments: str
    """A JSON object, as text; incomplete if the answer was cut off."""

    def to_dict(self) -> dict[str, Any]:
        """In OpenAI's format, as in a message that continues the chat."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class CallsStream:
    """Joins the pieces of an answer's calls."""

    def __init__(self) -> None:
        self._opened: list[pb.ToolCallDelta] = []
        self._arguments: list[list[str]] = []

    def accept(self, pieces: Sequence[pb.ToolCallDelta]) -> str | None:
        """Take in pieces of calls. Returns what is wrong with them; None: nothing."""
        for piece in pieces:
            if piece.id and piece.index == len(self._opened):
                self._opened.append(piece)
                self._arguments.append([])
            elif piece.id or piece.index >= len(self._opened):
                return f"a piece of call {piece.index} came, {len(self._opened)} had begun"
            self._arguments[piece.index].append(piece.arguments)
        return None

    def calls(self) -> list[ToolCall]:
        return [
            ToolCall(id=call.id, name=call.name, arguments="".join(arguments))
            for call, arguments in zip(self._opened, self._arguments, strict=True)
        ]


_OF_NO_USE = {"refusal", "annotations", "audio", "function_call", "parsed"}
"""Further fields of answers that OpenAI's clients send back. They are ignored."""
_MESSAGE_MAY_HAVE = {*MESSAGE_KEYS, *REASONING_KEYS, *_OF_NO_USE}


def chat_message(message: Any) -> pb.ChatMessage:
    """The wire's message from {"role", "content"} and, as in OpenAI's messages, "tool_calls", "tool_call_id" and
    "name". The content is a text or parts of texts; an assistant's message may have its "reasoning" as a text. Raises
    `ValueError` saying what is wrong."""
    if not (isinstance(message, Mapping) and _has_keys_of_a_message(message)):
        known = "a role and a content, and may have tool_calls, a tool_call_id and a name"
        raise ValueError(f"prompt: a message has {known}, not {message!r:.500}")
    said = {key: message[key] for key in MESSAGE_KEYS - {"tool_calls"} if message.get(key) is not None}
    if isinstance(message.get("content"), list | tuple):
        texts = _texts_of_parts(said.pop("content"))
        said |= {"parts": texts} if len(texts) > 1 else {"content": "".join(texts)}
    if message["role"] == "assistant":
        thoughts = (message.get(key) for key in REASONING_KEYS)
        said["reasoning"] = next((each for each in thoughts if each and isinstance(each, str)), "")
    try:
        made = pb.ChatMessage(**said)
        calls = list(message.get("tool_calls") or ())
    except (TypeError, ValueError) as error:
        raise ValueError(f"prompt: role and content of a message must be texts: {error}") from error
    for call in calls:
        _add_call(made, call)
    return made


def _has_keys_of_a_message(message: Mapping[Any, Any]) -> bool:
    has_something_to_say = "content" in message or bool(message.get("tool_calls"))
    return "role" in message and message.keys() <= _MESSAGE_MAY_HAVE and has_something_to_say


def _add_call(message: pb.ChatMessage, call: Any) -> None:
    """Add a call of an assistant's message."""
    try:
        function = call["function"]
        arguments = _json(function.get("arguments"))
        message.tool_calls.add(id=call.get("id") or "", name=function["name"], arguments=arguments)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        shape = '{"id", "type": "function", "function": {"name", "arguments"}}'
        raise ValueError(f"prompt: a message's call is not {shape}: {call!r:.500}") from error


def _texts_of_parts(parts: Sequence[Any]) -> list[str]:
    texts = []
    for number, part in enumerate(parts):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            shape = '{"type": "text", "text": ...}'
            raise ValueError(f"prompt: content[{number}] of a message must be {shape}, is {part!r:.200}")
        texts.append(text)
    return texts


def add_tools(chat: pb.Chat, tools: Any, tool_choice: Any, parallel_tool_calls: bool | None) -> None:
    """Add OpenAI's `tools`, `tool_choice` and `parallel_tool_calls` to `chat`. Raises `ValueError` naming the field."""
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ValueError(f"tools: must be a list, is {tools!r:.200}")
    for position, tool in enumerate(tools):
        _add_tool(chat, position, tool)
    if tool_choice is not None:
        _set_tool_choice(chat, tool_choice)
    if parallel_tool_calls is not None:
        if not isinstance(parallel_tool_calls, bool):
            raise ValueError(f"parallel_tool_calls: must be true or false, is {parallel_tool_calls!r:.80}")
        chat.parallel_tool_calls = parallel_tool_calls


def _add_tool(chat: pb.Chat, position: int, tool: Any) -> None:
    try:
        function = tool["function"]
        if tool.get("type", "function") != "function":
            raise ValueError(f"type is {tool['type']!r:.80}")
        said = {key: function.get(key) for key in ("description", "strict")}
        chat.tools.add(name=function["name"], parameters=_json(function.get("parameters")), **said)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        shape = '{"type": "function", "function": {"name", "description", "parameters", "strict"}}'
        raise ValueError(f"tools: number {position} is not {shape}: {error!r}") from error


def _set_tool_choice(chat: pb.Chat, tool_choice: Any) -> None:
    """Set one of `CHOICES`, or the one tool that must be called."""
    if isinstance(tool_choice, str) and tool_choice in CHOICES:
        chat.tool_choice = CHOICES[tool_choice]
        return
    try:
        chat.tool_name = tool_choice["function"]["name"]
    except (TypeError, KeyError, ValueError) as error:
        shape = ", ".join(map(repr, CHOICES)) + ' or {"type": "function", "function": {"name": …}}'
        raise ValueError(f"tool_choice: must be {shape}, is {tool_choice!r:.200}") from error
    if not chat.tool_name:
        raise ValueError("tool_choice: names no tool")
    chat.tool_choice = pb.TOOL_CHOICE_REQUIRED


def _json(value: Any) -> str:
    """`value` as JSON text, which it may be already; empty for None."""
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)
