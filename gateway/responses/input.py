"""Turns `input` of a request to /v1/responses, a text or items, into chat messages. Pure.

    message of a user, system, developer ──────────────> a message
    reasoning, message of an assistant, function_call ──> one assistant's message, for all items of one answer
    function_call_output ───────────────────────────────> a message of a tool

Items may be those of earlier answers' `output`: their further fields (id, status, annotations …) are ignored. A field
that is null is absent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from gateway.asked import MAX_ITEMS, WithoutNulls, only
from gateway.placed import PlacedMessage
from gateway.texts import role_of, text_of, text_or_objects, text_or_parts, texts_of

_NOT_READ = "encrypted reasoning cannot be read here; send reasoning in content"

# -- items ----------------------------------------------------------------------------------------------------------


class Item(WithoutNulls):
    """Fields of an answer's items that clients send back."""

    id: Any = None
    status: Any = None


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: role_of("system", "developer", "user", "assistant")  # type: ignore[valid-type]
    content: text_or_parts(Literal["input_text", "output_text"])  # type: ignore[valid-type]
    phase: Any = None


class ReasoningItem(Item):
    type: Literal["reasoning"]
    content: text_or_parts(Literal["reasoning_text"]) = ""  # type: ignore[valid-type]
    summary: Any = None
    """Ignored: it is not the thought itself."""
    encrypted_content: only(instead=_NOT_READ) = None  # type: ignore[valid-type]


class CallItem(Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    """A JSON object, as text."""
    parsed_arguments: Any = None


class CallOutputItem(Item):
    type: Literal["function_call_output"]
    call_id: str
    output: text_or_parts(Literal["input_text"])  # type: ignore[valid-type]
    name: str | None = None


_KINDS = {
    "message": MessageItem,
    "reasoning": ReasoningItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
}
SAY_AGAIN = "this server stores no responses: send the whole conversation in input"
Input = text_or_objects(
    "an item",
    _KINDS,
    untyped="message",
    instead={"item_reference": SAY_AGAIN},
    min_length=1,
    max_length=MAX_ITEMS,
)


# -- messages -------------------------------------------------------------------------------------------------------


def _takes(message: PlacedMessage, item: Item) -> bool:
    """Whether `item` belongs to the same answer as the message: an answer that has called tools continues until the
    tools' results."""
    return message.role == "assistant" and (
        isinstance(item, CallItem) or bool(message.tool_calls) or (_is_answer(item) and not message.is_spoken)
    )


def _take(message: PlacedMessage, item: Item, place: str) -> None:
    match item:
        case MessageItem():
            message.contents.append(text_of(item.content))
            message.is_spoken = True
        case ReasoningItem():
            message.thoughts.append(text_of(item.content))
        case CallItem():
            message.call(item.call_id, item.name, item.arguments, place)


def messages_of(instructions: str | None, said: str | Sequence[Item]) -> list[PlacedMessage]:
    """The chat messages. Empty `instructions` make none; thoughts without content are left out."""
    messages = [PlacedMessage("instructions", "system", [instructions])] if instructions else []
    if isinstance(said, str):
        return [*messages, PlacedMessage("input", "user", [said])]
    for number, item in enumerate(said):
        place = f"input[{number}]"
        if isinstance(item, CallOutputItem):
            outputs = texts_of(item.output)
            messages.append(PlacedMessage(place, "tool", outputs, tool_call_id=item.call_id, name=item.name))
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append(PlacedMessage(place, item.role, texts_of(item.content)))
        elif _is_told(item):
            if not messages or not _takes(messages[-1], item):
                messages.append(PlacedMessage(place, "assistant"))
            _take(messages[-1], item, place)
    return messages


def says_something(said: str | Sequence[Item]) -> bool:
    """Whether `said` has more than thoughts without content."""
    return isinstance(said, str) or any(map(_is_told, said))


def _is_told(item: Item) -> bool:
    """Whether the item has content here: a thought may be stored elsewhere."""
    return not isinstance(item, ReasoningItem) or bool(item.content)


def _is_answer(item: Item) -> bool:
    return isinstance(item, MessageItem | ReasoningItem)
