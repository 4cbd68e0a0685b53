"""Messages of a chat that a body says in other words, and where in it each of them stands. Pure."""

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
    """A message as a chat has it, and where in the body it comes from."""

    place: str
    """What says it first."""
    role: str
    contents: list[str] = field(default_factory=list)
    """Its text, in parts: there may be thousands."""
    thoughts: list[str] = field(default_factory=list)
    tool_call_id: str | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    places_of_calls: list[str] = field(default_factory=list)
    is_spoken: bool = False
    """It has content, be it empty."""

    def call(self, call_id: str, name: str, arguments: str | dict[str, Any], place: str) -> None:
        """It calls that, too."""
        function = {"name": name, "arguments": arguments}
        self.tool_calls.append({"id": call_id, "type": "function", "function": function})
        self.places_of_calls.append(place)

    def to_prompt(self) -> dict[str, Any]:
        # What an assistant said was one text, which answers have in pieces.
        content = "".join(self.contents) if self.role == "assistant" else content_of(self.contents)
        said = {"role": self.role, "content": content, "reasoning": "".join(self.thoughts) or None}
        return {**said, "tool_calls": self.tool_calls, "tool_call_id": self.tool_call_id, "name": self.name}


def place_of(field: str, messages: Sequence[PlacedMessage]) -> str:
    """In the body, of a field of the wire: of a message, what it comes from."""
    if (found := _MESSAGE.match(field)) is None or int(found[1]) >= len(messages):
        return name_in_body(field)
    message = messages[int(found[1])]
    if found[2] is None:
        return message.place + field[found.end() :]
    return message.places_of_calls[int(found[3] or 0)] + field[found.end() :]
