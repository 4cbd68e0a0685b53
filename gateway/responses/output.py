"""What an answer is made of, as it comes: its items, and the events that tell of each. Pure.

    ── added ──> OPEN ── delta ── delta ── … ── something else is said, or the end ──> done

Items stand in the order in which they were said, one open at a time: thought, message, call, and again where a model
thinks or speaks after a call (`gateway.spoken`).
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
    """One of an answer's items. `index`: its place among them."""

    prefix: str
    """Of its id."""

    def __init__(self, request_id: str, index: int) -> None:
        self.id = f"{self.prefix}_{request_id}_{index}"
        self.index = index
        self._pieces: list[str] = []
        self.status: Status = "in_progress"

    @abstractmethod
    def told(self) -> dict[str, Any]:
        """As it is now."""

    @abstractmethod
    def say(self, text: str, logprobs: list[dict[str, Any]]) -> Event:
        """More of it. `logprobs`: of a message's tokens."""

    def begin(self) -> list[Event]:
        """That it is there."""
        return [{"type": "response.output_item.added", "output_index": self.index, "item": self.told()}]

    def end(self, status: Status) -> list[Event]:
        """That there is no more of it."""
        events = self._ends()
        self.status = status
        return [*events, {"type": "response.output_item.done", "output_index": self.index, "item": self.told()}]

    @abstractmethod
    def _ends(self) -> list[Event]:
        """What is said of its content when it is whole."""

    def _event(self, name: str, **fields: Any) -> Event:
        return {"type": f"response.{name}", "item_id": self.id, "output_index": self.index, **fields}

    @property
    def _text(self) -> str:
        return "".join(self._pieces)


class _OfOnePart(_Item):
    """An item whose content is one text."""

    kind: str
    """Of the events that tell of the text."""

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
        """Nothing, before its part was added."""
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
    """Of one answer. `accept` each message, then `end`."""

    def __init__(self, request_id: str, *, has_logprobs: bool) -> None:
        self._request_id = request_id
        self._has_logprobs = has_logprobs
        self._spoken = Spoken(request_id)
        self._items: list[_Item] = []
        """Of which the last one is open."""
        self._content = OfContent()
        self._last_logprobs: list[dict[str, Any]] = []
        """Of what ends the answer."""

    @property
    def num_thought_tokens(self) -> int:
        return self._spoken.num_thought_tokens

    def accept(self, message: GenerateResponse) -> list[Event]:
        """What is new with `message`. Raises `StreamBroken` where it tells more of a call that is over."""
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
        """There is no more. `status`: of the item that is open; an answer without any is an empty message."""
        events = [] if self._items else self._begin(Piece("text", "", True))
        item = self._items[-1]
        if isinstance(item, _Message) and self._last_logprobs:
            events.append(item.say("", self._last_logprobs))
        return [*events, *item.end(status)]

    def cut(self) -> None:
        """There is no more, and no end."""
        if self._items:
            self._items[-1].status = "incomplete"

    def items(self) -> list[dict[str, Any]]:
        """As they are now."""
        return [item.told() for item in self._items]

    def _begin(self, piece: Piece) -> list[Event]:
        """Whatever was open is whole."""
        before: Sequence[Event] = self._items[-1].end("completed") if self._items else ()
        index = len(self._items)
        if piece.call is not None:
            self._items.append(_Call(self._request_id, index, piece.call))
        else:
            kind = _Thought if piece.kind == "thought" else _Message
            self._items.append(kind(self._request_id, index))
        return [*before, *self._items[-1].begin()]
