"""`tandem.client`: what calls of a closed client raise, whatever they are doing, and the event loop of an
`AsyncClient`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from scripted_router import EXACT, Scripted, breaking, scripted_router, tokens

from protos import tandem_inference_pb2 as pb
from tandem import AsyncClient, Client, ClientClosed
from tandem.resume import ResumableStream

CALLS: tuple[Callable[[Any], Any], ...] = (
    lambda client: client.generate("hi"), lambda client: client.generate_n("hi", 2), lambda client: client.abort("r"),
    lambda client: client.is_serving(), lambda client: client.model_info(), lambda client: client.status(),
    lambda client: client.audit(), lambda client: client.profile("w"),
)  # fmt: skip


@pytest.fixture
def server() -> Iterator[tuple[str, Scripted]]:
    with scripted_router() as served:
        yield served


# -- closed -----------------------------------------------------------------------------------------------------


def test_a_closed_client_says_so(server: tuple[str, Scripted]) -> None:
    address, scripted = server
    scripted.script = scripted.endless
    client = Client(address)
    stream = client.stream("hi")
    assert next(stream).text == "a"
    client.close()
    with pytest.raises(ClientClosed, match="the client is closed"):
        next(stream)
    for call in (*CALLS, lambda client: next(client.stream("hi"))):
        with pytest.raises(ClientClosed):
            call(client)
    client.close()
    assert scripted.was_cancelled.wait(5)


def test_closing_ends_what_another_thread_reads(server: tuple[str, Scripted]) -> None:
    address, scripted = server
    scripted.script = scripted.endless
    client = Client(address)
    stream = client.stream("hi")
    assert next(stream).text == "a"
    is_reading = threading.Event()

    def read() -> object:
        is_reading.set()
        return next(stream)

    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(read)
        assert is_reading.wait(5)
        client.close()
        assert isinstance(reading.exception(timeout=10), ClientClosed)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set as soon as a client waits for a router, for much longer than this test may take."""
    is_waiting = threading.Event()

    def wait_s(self: ResumableStream) -> float:
        is_waiting.set()
        return 60.0

    monkeypatch.setattr(ResumableStream, "_next_wait_s", wait_s)
    return is_waiting


def test_closing_ends_the_wait_for_a_router(server: tuple[str, Scripted], waits: threading.Event) -> None:
    address, scripted = server
    scripted.script = breaking
    client = Client(address, resume_s=60.0)
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(lambda: list(client.stream("hi")))
        assert waits.wait(10)
        client.close()
        assert isinstance(reading.exception(timeout=10), ClientClosed)


async def test_closing_ends_the_wait_of_a_task_for_a_router(
    server: tuple[str, Scripted], waits: threading.Event
) -> None:
    address, scripted = server
    scripted.script = breaking
    client = AsyncClient(address, resume_s=60.0)
    reading = asyncio.create_task(client.generate("hi"))
    async with asyncio.timeout(10):
        assert await asyncio.to_thread(waits.wait, 10)
        await client.close()
        with pytest.raises(ClientClosed):
            await reading


def test_closing_just_before_a_call_is_told_likewise(
    server: tuple[str, Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(server[0])
    generate = client._inference.Generate

    def generate_while_another_thread_closes(*args: Any, **kwargs: Any) -> Any:
        client.close()
        return generate(*args, **kwargs)

    monkeypatch.setattr(client._inference, "Generate", generate_while_another_thread_closes)
    with pytest.raises(ClientClosed):
        client.generate("hi")


async def test_a_closed_async_client_says_so(server: tuple[str, Scripted]) -> None:
    address, scripted = server
    scripted.script = scripted.endless
    client = AsyncClient(address)
    stream = client.stream("hi")
    assert (await anext(stream)).text == "a"
    await client.close()
    with pytest.raises(ClientClosed, match="the client is closed"):
        await anext(stream)
    for call in (*CALLS, lambda client: anext(client.stream("hi"))):
        with pytest.raises(ClientClosed):
            await call(client)
    await client.close()


async def close(client: AsyncClient, task: asyncio.Task[object]) -> None:
    await client.close()


async def cancel(client: AsyncClient, task: asyncio.Task[object]) -> None:
    task.cancel()


async def close_and_cancel(client: AsyncClient, task: asyncio.Task[object]) -> None:
    task.cancel()
    await client.close()


async def close_and_then_cancel(client: AsyncClient, task: asyncio.Task[object]) -> None:
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0)
    task.cancel()
    await closing


@pytest.mark.parametrize("num_received", [0, 1])
@pytest.mark.parametrize("end", [close, cancel, close_and_cancel, close_and_then_cancel])
async def test_closing_ends_what_another_task_reads_and_swallows_no_cancellation(
    server: tuple[str, Scripted], end: Callable[[AsyncClient, asyncio.Task[object]], Awaitable[None]], num_received: int
) -> None:
    address, scripted = server
    began = threading.Event()

    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        began.set()
        context.add_callback(scripted.was_cancelled.set)
        if num_received:
            yield tokens(0, 1, text="a")
        scripted.was_cancelled.wait(20)

    scripted.script = script
    client = AsyncClient(address)
    received: asyncio.Queue[pb.GenerateResponse] = asyncio.Queue()

    async def read() -> None:
        async for message in client.stream("hi"):
            received.put_nowait(message)

    task: asyncio.Task[Any] = asyncio.create_task(read())
    assert await asyncio.to_thread(began.wait, 5)
    for _ in range(num_received):
        await asyncio.wait_for(received.get(), 5)
    await end(client, task)
    await asyncio.wait([task], timeout=10)
    if end is close:
        assert isinstance(task.exception(), ClientClosed)
    else:
        assert task.cancelled()
    await client.close()
    assert await asyncio.to_thread(scripted.was_cancelled.wait, 5)


async def test_closing_takes_nothing_from_an_answer_that_is_whole(server: tuple[str, Scripted]) -> None:
    """All messages have come; only the status is missing."""
    address, scripted = server

    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        context.add_callback(scripted.was_cancelled.set)
        yield from EXACT
        scripted.was_cancelled.wait(20)

    scripted.script = script
    async_client = AsyncClient(address)
    async_stream = async_client.stream("hi")
    assert [(await anext(async_stream)).text for _ in EXACT] == ["a", "bc", "d"]
    await async_client.close()
    assert [message async for message in async_stream] == []
    scripted.was_cancelled.clear()
    client = Client(address)
    stream = client.stream("hi")
    assert [next(stream).text for _ in EXACT] == ["a", "bc", "d"]
    client.close()
    assert list(stream) == []


# -- event loops ------------------------------------------------------------------------------------------------


def test_an_async_client_is_made_anywhere_and_belongs_to_the_loop_of_its_first_use(
    server: tuple[str, Scripted],
) -> None:
    address, scripted = server
    scripted.script = lambda request, context: iter(EXACT)
    client = AsyncClient(address)

    async def ask() -> str:
        return (await client.generate("hi")).text

    async def ask_and_go_on_elsewhere() -> None:
        assert [await ask(), await ask()] == ["abcd", "abcd"]
        for call in (ask, client.is_serving, client.close):
            with pytest.raises(RuntimeError, match="this AsyncClient was first used on another event loop: make one"):
                await asyncio.to_thread(asyncio.run, call())
        assert await ask() == "abcd"
        await client.close()

    asyncio.run(ask_and_go_on_elsewhere())


def test_an_async_client_is_closed_without_having_been_used() -> None:
    client = AsyncClient("127.0.0.1:1")

    async def use() -> None:
        await client.close()
        with pytest.raises(ClientClosed):
            await client.generate("hi")

    asyncio.run(use())
