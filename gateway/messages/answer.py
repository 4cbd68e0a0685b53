"""The answer of /v1/messages in Anthropic's format: the whole object, and a stream's events. Pure.

    message_start ── of each block: start ── delta ── … ── stop ──> message_delta (why, how many tokens) ── message_stop

Both are made from the same messages, in the order of `gateway.spoken`'s pieces. The last object has `timings`, as on
other routes.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import from_json

from gateway.answers import timings_of
from gateway.errors import Refusal
from gateway.messages.errors import error_of
from gateway.spoken import Event, Piece, Spoken
from protos.tandem_inference_pb2 import FinishReason, GenerateResponse, Usage

_DELTAS = {
    "thought": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class MessageAnswer:
    """The answer to one request."""

    def __init__(self, *, request_id: str, model: str) -> None:
        self._request_id = request_id
        self._spoken = Spoken(request_id)
        self._told = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": model}
        self._blocks: list[dict[str, Any]] = []
        """The content blocks; the last one is open. Their texts are in `_texts`."""
        self._texts: list[list[str]] = []
        self._end: dict[str, Any] = {}
        self._has_begun = False

    def opening(self) -> list[Event]:
        """No events: `message_start` contains the prompt's length, which comes with the first message."""
        return []

    def accept(self, message: GenerateResponse) -> list[Event]:
        """The events for `message`; for the last one, with those of the end. Raises `StreamBroken`."""
        events: list[Event] = [] if self._has_begun else [self._start(message)]
        self._has_begun = True
        for piece in self._spoken.accept(message):
            if piece.is_first:
                events += [*self._close(), self._begin(piece)]
            if piece.text:
                self._texts[-1].append(piece.text)
                kind, name = _DELTAS[piece.kind]
                events.append(self._event("delta", delta={"type": kind, name: piece.text}))
        if message.HasField("usage"):
            events += [*self._close(), *self._ends(message)]
        return events

    def failed(self, refusal: Refusal) -> Event:
        """The last event of an answer that fails."""
        return error_of(refusal, self._request_id)

    def whole(self) -> dict[str, Any]:
        """The whole answer, after the last message."""
        content = [_with_text(*each) for each in zip(self._blocks, map("".join, self._texts), strict=True)]
        return {**self._told, "content": content, **self._end}

    def _start(self, first: GenerateResponse) -> Event:
        """The event that begins the answer. Only the last events report how many tokens of the prompt were cached."""
        usage = _usage(Usage(prompt_tokens=first.prompt_tokens))
        why = {"stop_reason": None, "stop_sequence": None}
        return {"type": "message_start", "message": {**self._told, "content": [], **why, "usage": usage}}

    def _begin(self, piece: Piece) -> Event:
        if piece.call is not None:
            block = {"type": "tool_use", "id": piece.call.id, "name": piece.call.name, "input": {}}
        elif piece.kind == "thought":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            block = {"type": "text", "text": ""}
        self._blocks.append(block)
        self._texts.append([])
        return self._event("start", content_block=dict(block))

    def _close(self) -> list[Event]:
        """The events that close the open block, if there is one. A thought gets the message's id as its signature: it
        proves nothing, but some clients do not send back a thought that is not signed."""
        if not self._blocks:
            return []
        events = [self._event("stop")]
        if self._blocks[-1]["type"] == "thinking":
            self._blocks[-1]["signature"] = self._told["id"]
            signed = {"type": "signature_delta", "signature": self._told["id"]}
            events.insert(0, self._event("delta", delta=signed))
        return events

    def _event(self, name: str, **fields: Any) -> Event:
        return {"type": f"content_block_{name}", "index": len(self._blocks) - 1, **fields}

    def _ends(self, message: GenerateResponse) -> list[Event]:
        calls = any(block["type"] == "tool_use" for block in self._blocks)
        why = {"stop_reason": _why(message, calls), "stop_sequence": message.stop_reason or None}
        usage = _usage(message.usage)
        timings = timings_of([message.timings])
        self._end = {**why, "usage": usage, "timings": timings}
        return [
            {"type": "message_delta", "delta": why, "usage": usage, "timings": timings},
            {"type": "message_stop"},
        ]


def _with_text(block: dict[str, Any], text: str) -> dict[str, Any]:
    """The block with its text. The input of a call that was cut off is what can be parsed of it, as Anthropic's clients
    parse a streamed one; if it is not JSON, the input is empty."""
    if block["type"] != "tool_use":
        return {**block, block["type"]: text}
    try:
        value = from_json(text, allow_partial=True, allow_inf_nan=False)
        json.dumps(value, allow_nan=False)  # 1e999 can be parsed but not written
    except ValueError:
        value = None
    return {**block, "input": value if isinstance(value, dict) else {}}


def _why(message: GenerateResponse, has_calls: bool) -> str | None:
    """The `stop_reason`. None for an aborted answer, for which Anthropic has no word."""
    if message.finish_reason == FinishReason.FINISH_REASON_LENGTH:
        return "max_tokens"
    if message.finish_reason != FinishReason.FINISH_REASON_STOP:
        return None
    if message.stop_reason:
        return "stop_sequence"
    return "tool_use" if has_calls else "end_turn"


def _usage(usage: Usage) -> dict[str, Any]:
    """The usage. Cached tokens are counted separately. `cache_creation_input_tokens` counts tokens that clients pay to
    have cached, which do not exist here."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }
