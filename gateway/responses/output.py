"""The items of an answer as they come, and the events of each. Pure.

    ── added ──> OPEN ── delta ── delta ── … ── another item begins, or the end ──> done

Items are in the order in which the model wrote them, one open at a time: thought, message, call, and again if a model
thinks or writes after a call (`gateway.spoken`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

from gateway.logprobs import OfContent, entries_of
from gateway.spoken import Event, Piece, Spoken
from protos.tandem_inference_pb2 import GenerateResponse, ToolCallDelta

Status = Literal["in_progress", "completed", "incomplete"]


class _Item(ABC):
    """One item of an answer. `index`: its position."""

    prefix: str
    """Prefix of its id."""

    def __init__(self, request_id: str, index: int) -> None:
        self.id = f"{self.prefix}_{request_id}_{index}"
        self.index = index
        self._pieces: list[str] = []
        self.status: Status = "in_progress"

    @abstractmethod
    def told(self) -> dict[str, Any]:
        """The item as it is now."""

    @abstractmethod
    def say(self, text: str, logprobs: list[dict[str, Any]]) -> Event:
        """Append text. Returns its event. `logprobs`: those of a message's tokens."""

    def begin(self) -> list[Event]:
        """The events that begin the item."""
        return [{"type": "response.output_item.added", "output_index": self.index, "item": self.told()}]

    def end(self, status: Status) -> list[Event]:
        """End the item. Returns its last events."""
        events = self._ends()
        self.status = status
        return [*events, {"type": "response.output_item.done", "output_index": self.index, "item": self.told()}]

    @abstractmethod
    def _ends(self) -> list[Event]:
        """The events about its complete content."""

    def _event(self, name: str, **fields: Any) -> Event:
        return {"type": f"response.{name}", "item_id": self.id, "output_index": self.index, **fields}

    @property
    def _text(self) -> str:
        return "".join(self._pieces)


class _OfOnePart(_Item):
    """An item whose content is one text."""

    kind: str
    """Name of the text's events."""

    @abstractmethod
    def _part(self) -> dict[str, Any]: ...

    def begin(self) -> list[Event]:
        part = self._part()
        return [*super().begin(), self._event("content_part.added", content_index=0, part=part)]

    def _ends(self) -> list[Event]:
        part = self._part()
        beside = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        return [
            self._event(f"{self.kind}.done", content_index=0, text=part["text"], **beside),
            self._event("content_part.done", content_index=0, part=part),
        ]

    @property
    def _content(self) -> list[dict[str, Any]]:
        """The content; empty before its part was added."""
        return [] if self.status == "in_progress" and not self._pieces else [self._part()]


class _Thought(_OfOnePart):
    prefix = "rs"
    kind = "reasoning_text"

    def say(self, text: str, logprobs: list[dict[str, Any]]) -> Event:
        self._pieces.append(text)
        return self._event("reasoning_text.delta", content_index=0, delta=text)

    def told(self) -> dict[str, Any]:
        return {"id": self.id, "type": "reasoning", "summary": [], "content": self._content, "status": self.status}

    def _part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self._text}


class _Message(_OfOnePart):
    prefix = "msg"
    kind = "output_text"

    def __init__(self, request_id: str, index: int) -> None:
        super().__init__(request_id, index)
        self._logprobs: list[dict[str, Any]] = []

    def say(self, text: str, logprobs: list[dict[str, Any]]) -> Event:
        self._pieces.append(text)
        self._logprobs += logprobs
        return self._event("output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def told(self) -> dict[str, Any]:
        said = {"role": "assistant", "content": self._content, "status": self.status}
        return {"id": self.id, "type": "message", **said}

    def _part(self) -> dict[str, Any]:
        logprobs = list(self._logprobs)
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": logprobs}


class _Call(_Item):
    prefix = "fc"

    def __init__(self, request_id: str, index: int, call: ToolCallDelta) -> None:
        super().__init__(request_id, index)
        self._call_id = call.id
        self._name = call.name

    def say(self, text: str, logprobs: list[dict[str, Any]]) -> Event:
        self._pieces.append(text)
        return self._event("function_call_arguments.delta", delta=text)

    def told(self) -> dict[str, Any]:
        said = {"call_id": self._call_id, "name": self._name, "arguments": self._text, "status": self.status}
        return {"id": self.id, "type": "function_call", **said}

    def _ends(self) -> list[Event]:
        return [self._event("function_call_arguments.done", arguments=self._text)]


class Output:
    """The items of one answer. Call `accept` for each message, then `end`."""

    def __init__(self, request_id: str, *, has_logprobs: bool) -> None:
        self._request_id = request_id
        self._has_logprobs = has_logprobs
        self._spoken = Spoken(request_id)
        self._items: list[_Item] = []
        """The items; the last one is open."""
        self._content = OfContent()
        self._last_logprobs: list[dict[str, Any]] = []
        """Logprobs of the last message without text: those of the tokens that end the answer."""

    def accept(self, message: GenerateResponse) -> list[Event]:
        """The events for `message`. Raises `StreamBroken` if it continues a call that is over."""
        events: list[Event] = []
        logprobs = entries_of(self._content.accept(message)) if self._has_logprobs else []
        if not message.text:
            self._last_logprobs = logprobs
        for piece in self._spoken.accept(message):
            if piece.is_first:
                events += self._begin(piece)
            if piece.text:
                events.append(self._items[-1].say(piece.text, logprobs))
        return events

    def end(self, status: Status) -> list[Event]:
        """The answer has ended. `status`: for the open item; an answer without items gets an empty message."""
        events = [] if self._items else self._begin(Piece("text", "", True))
        item = self._items[-1]
        if isinstance(item, _Message) and self._last_logprobs:
            events.append(item.say("", self._last_logprobs))
        return [*events, *item.end(status)]

    def cut(self) -> None:
        """The answer breaks off without an end."""
        if self._items:
            self._items[-1].status = "incomplete"

    def items(self) -> list[dict[str, Any]]:
        """The items as they are now."""
        return [item.told() for item in self._items]

    def _begin(self, piece: Piece) -> list[Event]:
        """Complete the open item and begin the next one."""
        before: Sequence[Event] = self._items[-1].end("completed") if self._items else ()
        index = len(self._items)
        if piece.call is not None:
            self._items.append(_Call(self._request_id, index, piece.call))
        else:
            kind = _Thought if piece.kind == "thought" else _Message
            self._items.append(kind(self._request_id, index))
        return [*before, *self._items[-1].begin()]
