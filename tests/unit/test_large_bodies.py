"""Request bodies that take long to read: meanwhile all streams wait."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.asked import Body
from gateway.messages.request import MessageRequest
from gateway.requests import ChatRequest, CompletionRequest

MANY = 20_000


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """The generations that Python's garbage collector has collected since."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.collect()
    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


@pytest.mark.parametrize(
    ("kind", "start", "each", "end"),
    [
        (CompletionRequest, '{"prompt": [', "[0]", "]}"),
        (ChatRequest, '{"messages": [{"role": "user", "content": [', '{"type": "text", "text": ""}', "]}]}"),
        (
            MessageRequest,
            '{"max_tokens": 1, "messages": [{"role": "user", "content": [',
            '{"type": "text", "text": "a"}',
            "]}]}",
        ),
    ],
)
def test_no_cycles_are_looked_for_while_a_body_is_read(
    collections: list[int], kind: type[Body], start: str, each: str, end: str
) -> None:
    body = f"{start}{','.join([each] * MANY)}{end}".encode()
    collections.clear()
    with pytest.raises(ValidationError) if kind is CompletionRequest else nullcontext():
        kind.read(body)
    assert not [generation for generation in collections if generation > 0], "but once, when it has been read"
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        CompletionRequest.read(b'{"prompt": "a"}')
        assert not gc.isenabled()
    finally:
        gc.enable()
