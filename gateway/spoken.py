"""Splits an answer into its pieces in order: thoughts, texts and calls, one of them open at a time. Pure.

If a message of the router has several parts, the open call comes first, then the thought, the text, and new calls.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from protos.tandem_inference_pb2 import GenerateResponse, ToolCallDelta
from tandem.answer import StreamBroken

Event = dict[str, Any]
"""An event of a stream, before it is encoded as JSON."""
Kind = Literal["thought", "text", "call"]


class Piece(NamedTuple):
    """More of the open part, or the beginning of the next one."""

    kind: Kind
    text: str
    """For a call: a piece of its arguments."""
    is_first: bool
    """This piece begins a new part: the part that was open is complete."""
    call: ToolCallDelta | None = None
    """Set with the first piece of a call."""


class Spoken:
    """The pieces of one answer."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._open: tuple[Kind, int] | None = None
        """Kind of the open part, and the index of a call (else 0)."""

    def accept(self, message: GenerateResponse) -> list[Piece]:
        """The new pieces in `message`. Raises `StreamBroken` if it continues a call that is over."""
        calls = list(message.tool_calls)
        pieces: list[Piece] = []
        while calls and not calls[0].id:
            pieces.append(self._call(calls.pop(0)))
        if message.reasoning:
            pieces.append(Piece("thought", message.reasoning, self._opens("thought")))
        if message.text:
            pieces.append(Piece("text", message.text, self._opens("text")))
        return [*pieces, *map(self._call, calls)]

    def _opens(self, kind: Kind, number: int = 0) -> bool:
        before, self._open = self._open, (kind, number)
        return before != self._open

    def _call(self, call: ToolCallDelta) -> Piece:
        if self._opens("call", call.index) != bool(call.id):
            raise StreamBroken(f"request {self._request_id}: a piece of call {call.index} came after its end")
        return Piece("call", call.arguments, bool(call.id), call if call.id else None)
