"""What the proxy of chaos tests does to a connection, in one direction or in both, and how it passes on an end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tandem.chaos.proxy import Direction, FaultyProxy

SOON_S = 5.0
SILENCE_S = 0.2


class Server:
    """Records what it hears, and answers it. Ends its connections when it is told to."""

    def __init__(self) -> None:
        self.heard = b""
        self.has_heard = asyncio.Condition()
        self.has_lost = asyncio.Event()
        """Set when a client's connection has ended."""
        self.ends = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ending = asyncio.create_task(self.ends.wait())
        ending.add_done_callback(lambda _: writer.close())
        while data := await read(reader):
            async with self.has_heard:
                self.heard += data
                self.has_heard.notify_all()
            writer.write(data.upper())
        ending.cancel()
        self.has_lost.set()

    async def wait_heard(self, data: bytes) -> None:
        async with self.has_heard, asyncio.timeout(SOON_S):
            await self.has_heard.wait_for(lambda: self.heard == data)


async def read(reader: asyncio.StreamReader) -> bytes:
    """Read some bytes; returns none if the connection has ended, in whatever way."""
    try:
        return await reader.read(100)
    except ConnectionError:
        return b""


class Line:
    """A client's connection to the server, through the proxy."""

    def __init__(self, proxy: FaultyProxy, server: Server) -> None:
        self.proxy, self.server = proxy, server
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def hear(self) -> bytes:
        async with asyncio.timeout(SOON_S):
            return await self.reader.read(100)

    async def hears_nothing(self) -> bool:
        """Wait a moment, as silence is no event that a test can wait for."""
        try:
            async with asyncio.timeout(SILENCE_S):
                await self.reader.read(100)
        except TimeoutError:
            return True
        return False


@pytest.fixture
async def line() -> AsyncIterator[Line]:
    server = Server()
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        host, port = listening.sockets[0].getsockname()
        proxy = FaultyProxy(lambda: f"{host}:{port}")
        line = Line(proxy, server)
        line.reader, line.writer = await asyncio.open_connection(*proxy.address.split(":"))
        await line.say(b"a")
        assert await line.hear() == b"A"
        try:
            yield line
        finally:
            line.writer.close()
            await asyncio.to_thread(proxy.close)


async def test_answers_alone_do_not_arrive(line: Line) -> None:
    line.proxy.freeze(Direction.DOWN)
    await line.say(b"b")
    await line.server.wait_heard(b"ab")
    assert await line.hears_nothing()
    line.proxy.thaw()
    assert await line.hear() == b"B"


@pytest.mark.parametrize("directions", [(Direction.UP,), ()])
async def test_requests_do_not_arrive(line: Line, directions: tuple[Direction, ...]) -> None:
    line.proxy.freeze(*directions)
    await line.say(b"b")
    assert await line.hears_nothing()
    assert line.server.heard == b"a"
    line.proxy.thaw()
    assert await line.hear() == b"B"


async def test_what_is_under_way_arrives_when_requests_do_not(line: Line) -> None:
    line.proxy.freeze(Direction.DOWN)
    await line.say(b"b")
    await line.server.wait_heard(b"ab")
    line.proxy.thaw()
    line.proxy.freeze(Direction.UP)
    assert await line.hear() == b"B"


async def test_nobody_is_told_that_the_server_has_hung_up(line: Line) -> None:
    line.proxy.freeze(Direction.DOWN)
    line.server.ends.set()
    assert await line.hears_nothing()
    await line.say(b"to nobody")
    await line.say(b"to nobody")
    assert await line.hears_nothing()
    line.proxy.thaw()
    assert await line.hear() == b""


async def test_nobody_is_told_that_the_client_has_hung_up(line: Line) -> None:
    line.proxy.freeze(Direction.UP)
    line.writer.close()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(SILENCE_S):
            await line.server.has_lost.wait()
    line.proxy.thaw()
    async with asyncio.timeout(SOON_S):
        await line.server.has_lost.wait()


async def test_connections_are_reset_all_the_same(line: Line) -> None:
    line.proxy.freeze()
    line.proxy.cut()
    with pytest.raises(ConnectionError):
        await line.hear()
