"""Turns `system` and `messages` of a request to /v1/messages into chat messages. Pure.

    system ────────────────────────────────────> the first message
    text of a user ────────────────────────────> a message
    tool_result of a user ─────────────────────> a message of a tool
    thinking, text, tool_use of an assistant ──> one message

Blocks may be those of earlier answers' `content`. `cache_control` has no effect: prefixes are cached anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import model_validator

from gateway.asked import Known, WithoutNulls, only
from gateway.placed import PlacedMessage
from gateway.texts import role_of, text_of, text_or_objects, text_or_parts, texts_of

_Texts = text_or_parts(Literal["text"])


class Block(WithoutNulls):
    type: str
    cache_control: Any = None


class TextBlock(Block):
    type: Literal["text"]
    text: str
    citations: only([]) = None  # type: ignore[valid-type]


class ThinkingBlock(Block):
    type: Literal["thinking"]
    thinking: str
    signature: Any = None
    """Not checked."""


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: only({"type": "direct"}) = None  # type: ignore[valid-type]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: _Texts = ""  # type: ignore[valid-type]
    is_error: bool | None = None
    """Chat templates have no place for it: the content says what went wrong."""


_OF_ROLE = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}
_KINDS = {"text": TextBlock, "thinking": ThinkingBlock, "tool_use": ToolUseBlock, "tool_result": ToolResultBlock}
System = _Texts


class MessageParam(Known):
    role: role_of(*_OF_ROLE)  # type: ignore[valid-type]
    content: text_or_objects("a block", _KINDS)  # type: ignore[valid-type]

    @model_validator(mode="after")
    def _check_blocks(self) -> Self:
        kinds = _OF_ROLE[self.role]
        for number, block in enumerate(() if isinstance(self.content, str) else self.content):
            if block.type not in kinds:
                a = f"a message of role {self.role} may only have blocks of type {', '.join(kinds)}"
                raise ValueError(f"{a}; content[{number}] is of type {block.type}")
        return self


def messages_of(system: Any, said: Sequence[MessageParam]) -> list[PlacedMessage]:
    """The chat messages. An empty `system` makes none."""
    text = text_of(system or "")
    messages = [PlacedMessage("system", "system", [text])] if text else []
    for number, message in enumerate(said):
        place = f"messages[{number}]"
        if isinstance(message.content, str):
            messages.append(PlacedMessage(place, message.role, [message.content]))
        else:
            messages += _of_blocks(place, message.role, message.content)
    return messages


def _of_blocks(place: str, role: str, blocks: Sequence[Block]) -> list[PlacedMessage]:
    """One message; several for a user's, since its tool results are messages of their own."""
    messages: list[PlacedMessage] = []
    for number, block in enumerate(blocks):
        place_of_block = f"{place}.content[{number}]"
        if isinstance(block, ToolResultBlock):
            results = texts_of(block.content)
            messages.append(PlacedMessage(place_of_block, "tool", results, tool_call_id=block.tool_use_id))
            continue
        if not messages or messages[-1].role != role:
            messages.append(PlacedMessage(place, role))
        match block:
            case TextBlock():
                messages[-1].contents.append(block.text)
            case ThinkingBlock():
                messages[-1].thoughts.append(block.thinking)
            case ToolUseBlock():
                messages[-1].call(block.id, block.name, block.input, place_of_block)
    return messages or [PlacedMessage(place, role)]
