"""Chat messages made from a body of another format, with the place in the body that each comes from. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.names import name_in_body
from gateway.texts import content_of

_MESSAGE = re.compile(r"chat\.messages\[(\d+)\](\.tool_calls(?:\[(\d+)\])?)?")


@dataclass(slots=True)
class PlacedMessage:
    """A chat message, and where in the body it comes from."""

    place: str
    """The place of its first part."""
    role: str
    contents: list[str] = field(default_factory=list)
    """Its text, in parts, of which there may be thousands."""
    thoughts: list[str] = field(default_factory=list)
    tool_call_id: str | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    places_of_calls: list[str] = field(default_factory=list)
    is_spoken: bool = False
    """It has content, possibly empty."""

    def call(self, call_id: str, name: str, arguments: str | dict[str, Any], place: str) -> None:
        """Add a tool call."""
        function = {"name": name, "arguments": arguments}
        self.tool_calls.append({"id": call_id, "type": "function", "function": function})
        self.places_of_calls.append(place)

    def to_prompt(self) -> dict[str, Any]:
        # An assistant's content was one text, which some answers contain in pieces.
        content = "".join(self.contents) if self.role == "assistant" else content_of(self.contents)
        said = {"role": self.role, "content": content, "reasoning": "".join(self.thoughts) or None}
        return {**said, "tool_calls": self.tool_calls, "tool_call_id": self.tool_call_id, "name": self.name}


def place_of(field: str, messages: Sequence[PlacedMessage]) -> str:
    """The place in the body for a field of the wire; for a field of a message, the place that it comes from."""
    if (found := _MESSAGE.match(field)) is None or int(found[1]) >= len(messages):
        return name_in_body(field)
    message = messages[int(found[1])]
    if found[2] is None:
        return message.place + field[found.end() :]
    return message.places_of_calls[int(found[3] or 0)] + field[found.end() :]
