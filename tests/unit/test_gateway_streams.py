"""How the gateway reads a stream while it may have to leave, and how it merges several streams into one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from gateway.run import _under_free_name
from gateway.streams import EventStream, Leaving, until_leaving
from protos.tandem_inference_pb2 import GenerateResponse
from rpc.errors import RequestExists
from rpc.merge import merged


class Source:
    """A stream of the items that a test puts into it."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[int | Exception | None] = asyncio.Queue()
        """None ends the stream."""
        self.is_closed = False

    async def read(self) -> AsyncGenerator[int, None]:
        try:
            while (item := await self.items.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.is_closed = True


async def test_all_items_come_and_then_the_end() -> None:
    source = Source()
    for item in (1, 2, None):
        source.items.put_nowait(item)
    assert [item async for item in until_leaving(source.read(), asyncio.Event())] == [1, 2]


async def test_leaving_ends_what_waits() -> None:
    source, leaving = Source(), asyncio.Event()
    source.items.put_nowait(1)
    items = until_leaving(source.read(), leaving)
    assert await anext(items) == 1
    waiting = asyncio.ensure_future(anext(items))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    leaving.set()
    with pytest.raises(Leaving):
        await waiting
    assert source.is_closed


async def test_leaving_while_nobody_waits_is_told_to_whoever_waits_next() -> None:
    source, leaving = Source(), asyncio.Event()
    source.items.put_nowait(1)
    items = until_leaving(source.read(), leaving)
    assert await anext(items) == 1
    leaving.set()
    await asyncio.sleep(0.01)
    source.items.put_nowait(2)
    with pytest.raises(Leaving):
        await anext(items)
    assert source.is_closed


@pytest.mark.parametrize("error", [TimeoutError("its own"), ValueError("no")], ids=lambda error: type(error).__name__)
async def test_an_error_of_the_items_is_told_as_it_is(error: Exception) -> None:
    source = Source()
    source.items.put_nowait(error)
    with pytest.raises(type(error), match=str(error)):
        await anext(until_leaving(source.read(), asyncio.Event()))


async def test_who_is_cancelled_while_it_waits_closes_them() -> None:
    source, leaving = Source(), asyncio.Event()
    items = until_leaving(source.read(), leaving)
    waiting = asyncio.ensure_future(anext(items))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert source.is_closed
    assert asyncio.all_tasks() == {asyncio.current_task()}, "nobody watches any more"


@pytest.mark.parametrize("num", [1, 3])
async def test_streams_are_merged_with_their_numbers_and_closed(num: int) -> None:
    sources = [Source() for _ in range(num)]
    for index, source in enumerate(sources):
        source.items.put_nowait(10 * index)
    streams = merged([source.read() for source in sources])
    assert sorted([await anext(streams) for _ in range(num)]) == [(index, 10 * index) for index in range(num)]
    await streams.aclose()
    assert all(source.is_closed for source in sources)


@pytest.mark.parametrize("num", [1, 2])
async def test_a_slow_reader_slows_streams_down(num: int) -> None:
    sources = [Source() for _ in range(num)]
    for source in sources:
        for item in range(9):
            source.items.put_nowait(item)
    streams = merged([source.read() for source in sources])
    await anext(streams)
    for _ in range(20):
        await asyncio.sleep(0)
    assert sum(9 - source.items.qsize() for source in sources) <= 1 + 2 * num
    await streams.aclose()


@pytest.mark.parametrize("num", [1, 3])
async def test_a_cancellation_from_within_one_stream_ends_them_all(num: int) -> None:
    """As when the channel of a call is closed: nothing then waits for the other streams, or for ever."""

    async def cancelled() -> AsyncGenerator[int, None]:
        raise asyncio.CancelledError
        yield 1

    sources = [Source() for _ in range(num - 1)]
    streams = merged([cancelled(), *(source.read() for source in sources)])
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(2):
            await anext(streams)
    assert all(source.is_closed for source in sources)


@pytest.mark.parametrize("has_begun", [False, True])
async def test_only_a_stream_that_has_not_begun_is_asked_for_under_another_name(has_begun: bool) -> None:
    """It would begin again from its first token."""

    async def stream(num_tokens: int, error: Exception | None = None) -> AsyncGenerator[GenerateResponse, None]:
        for index in range(num_tokens):
            yield GenerateResponse(offset=index, token_ids=[index])
        if error is not None:
            raise error

    received: list[int] = []
    renamed = _under_free_name(stream(int(has_begun), RequestExists("running")), lambda: stream(2))
    try:
        async for message in renamed:
            received += message.token_ids
    except RequestExists:
        assert has_begun
    assert received == ([0] if has_begun else [0, 1])


async def test_a_stream_that_has_ended_is_kept_alive_no_longer() -> None:
    sent: list[Any] = []

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"

    async def send(message: Any) -> None:
        sent.append(message)

    await EventStream(events(), {}, keep_alive_s=60.0)({}, asyncio.Queue().get, send)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert [message.get("body") for message in sent] == [None, b"data: 1\n\n", b""]
