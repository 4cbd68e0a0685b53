"""What an answer is made of, as it comes: its items, and the events that tell of each. Pure.

    ── added ──> OPEN ── delta ── delta ── … ── something else is said, or the end ──> done

Items stand in the order in which they were said, one open at a time: thought, message, call, and again where a model
thinks or speaks after a call. Of what one message of the router has at once, the call that is open comes first, then
the thought, the text, and new calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from gateway.logprobs import OfContent, entries_of
from protos.tandem_inference_pb2 import GenerateResponse, ToolCallDelta
from tandem.answer import StreamBroken

Event = dict[str, Any]
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

    def say(self, text: str) -> Event:
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
        self.number = call.index
        """Among the answer's calls."""

    def say(self, arguments: str) -> Event:
        self._pieces.append(arguments)
        return self._event("function_call_arguments.delta", delta=arguments)

    def told(self) -> dict[str, Any]:
        said = {"call_id": self._call_id, "name": self._name, "arguments": self._text, "status": self.status}
        return {"id": self.id, "type": "function_call", **said}

    def _ends(self) -> list[Event]:
        return [self._event("function_call_arguments.done", arguments=self._text)]


_Spoken = TypeVar("_Spoken", _Thought, _Message)


class Output:
    """Of one answer. `accept` each message, then `end`."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._items: list[_Item] = []
        self._open: _Item | None = None
        """The last one."""
        self._content = OfContent()
        self._last_logprobs: list[dict[str, Any]] = []
        """Of what ends the answer."""
        self._num_untold = 0
        """Of such tokens."""
        self.num_thought_tokens = 0
        """Of messages that told a thought, and of those before them that told nothing."""

    def accept(self, message: GenerateResponse) -> list[Event]:
        """What is new with `message`. Raises `StreamBroken` where it tells more of a call that is over."""
        events: list[Event] = []
        calls = list(message.tool_calls)
        self._count(message)
        logprobs = entries_of(self._content.accept(message))
        while calls and not calls[0].id:
            events += self._go_on(calls.pop(0))
        if message.reasoning:
            thought, begun = self._opened(_Thought)
            events += [*begun, thought.say(message.reasoning)]
        if message.text:
            spoken, begun = self._opened(_Message)
            events += [*begun, spoken.say(message.text, logprobs)]
        else:
            self._last_logprobs = logprobs
        for call in calls:
            events += self._call(call) if call.id else self._go_on(call)
        return events

    def end(self, status: Status) -> list[Event]:
        """There is no more. `status`: of the item that is open; an answer without any is an empty message."""
        events: list[Event] = []
        if self._open is None:
            _, events = self._opened(_Message)
        if isinstance(self._open, _Message) and self._last_logprobs:
            events.append(self._open.say("", self._last_logprobs))
        assert self._open is not None
        return [*events, *self._open.end(status)]

    def cut(self) -> None:
        """There is no more, and no end."""
        if self._open is not None:
            self._open.status = "incomplete"

    def items(self) -> list[dict[str, Any]]:
        """As they are now."""
        return [item.told() for item in self._items]

    def _count(self, message: GenerateResponse) -> None:
        self._num_untold += len(message.token_ids)
        if message.reasoning:
            self.num_thought_tokens += self._num_untold
        if message.reasoning or message.text or message.tool_calls:
            self._num_untold = 0

    def _opened(self, kind: type[_Spoken]) -> tuple[_Spoken, list[Event]]:
        """The item of that kind which is open: it is begun unless it is."""
        if isinstance(self._open, kind):
            return self._open, []
        item = kind(self._request_id, len(self._items))
        return item, self._begin(item)

    def _call(self, call: ToolCallDelta) -> list[Event]:
        events = self._begin(_Call(self._request_id, len(self._items), call))
        return [*events, *self._go_on(call)]

    def _go_on(self, call: ToolCallDelta) -> list[Event]:
        if not isinstance(self._open, _Call) or self._open.number != call.index:
            raise StreamBroken(f"request {self._request_id}: a piece of call {call.index} came after its end")
        return [self._open.say(call.arguments)] if call.arguments else []

    def _begin(self, item: _Item) -> list[Event]:
        """Whatever was open is whole."""
        before: Sequence[Event] = () if self._open is None else self._open.end("completed")
        self._items.append(item)
        self._open = item
        return [*before, *item.begin()]
