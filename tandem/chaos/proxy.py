"""A TCP proxy in front of one server that misbehaves on demand: it delays, drips, damages, freezes, and cuts.

    clients ──connection──> FaultyProxy ──connection──> target
                                │  pump up: delay, freeze, drip, damage      (what clients send: commands, KV)
                                └─ pump down: delay, freeze                  (what the server answers)

Runs on an event loop in its own thread. Its methods may be called from any thread, and affect all connections, existing
ones included. Owns its connections: `close` ends them.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from enum import Enum

CHUNK_BYTES = 64 * 1024
MIN_DAMAGED_BYTES = 16 * 1024
"""Smaller pieces are not damaged: they contain commands, even those of a burst of requests; larger ones contain KV."""


class Direction(Enum):
    UP = "from clients to the server"
    DOWN = "from the server to clients"

    @property
    def opposite(self) -> Direction:
        return Direction.DOWN if self is Direction.UP else Direction.UP


class FaultyProxy:
    """A faulty proxy. Clients connect to `address`."""

    def __init__(self, target: Callable[[], str], seed: int = 0) -> None:
        """`target`: returns the server's current "host:port", or the path of its Unix socket, or "" while there is no
        server; connections are then reset."""
        self._target = target
        self.num_damaged = 0
        """Pieces that were damaged so far."""
        self.num_bytes_up = 0
        self.num_reset = 0
        """Connections that were reset in use."""
        self.num_delayed = 0
        """Pieces that were delayed."""
        self.num_frozen = 0
        """Pieces that a freeze has held up."""
        self._random = random.Random(seed)
        self._delay_s = 0.0
        self._bytes_per_s = 0.0
        self._num_to_damage = 0
        self._cut_after_bytes: int | None = None
        self._is_refusing = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="faulty-proxy", daemon=True)
        self._thread.start()
        self._flows = {direction: asyncio.Event() for direction in Direction}
        self._server = self._call(self._listen())
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"

    # -- faults -------------------------------------------------------------------------------------------------

    def delay(self, seconds: float) -> None:
        """Delay every piece, in both directions. 0: stop delaying."""
        self._delay_s = seconds

    def drip(self, bytes_per_s: float) -> None:
        """Limit the rate of what clients send. 0: no limit."""
        self._bytes_per_s = bytes_per_s

    def damage(self, num_pieces: int) -> None:
        """Flip one bit in each of the next `num_pieces` large pieces that clients send."""
        self._num_to_damage = num_pieces

    def freeze(self, *directions: Direction) -> None:
        """Stop the flow in these directions (none given: in both), without any error: a partition. The end of a
        connection does not get through in these directions either."""
        for direction in directions or Direction:
            self._do(self._flows[direction].clear)

    def thaw(self) -> None:
        """Deliver everything that was held up."""
        for flows in self._flows.values():
            self._do(flows.set)

    def cut(self) -> None:
        """Reset all connections. New ones are accepted."""
        self._do(self._reset_all)

    def cut_after(self, num_bytes: int) -> None:
        """Reset all connections once clients have sent `num_bytes` more bytes."""
        self._cut_after_bytes = self.num_bytes_up + num_bytes

    def refuse(self, is_refusing: bool) -> None:
        """Reset connections as soon as they are made."""
        self._is_refusing = is_refusing

    def heal(self) -> None:
        """End all faults."""
        self._delay_s, self._bytes_per_s, self._num_to_damage = 0.0, 0.0, 0
        self._cut_after_bytes, self._is_refusing = None, False
        self.thaw()

    def close(self) -> None:
        self.thaw()
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # -- connections --------------------------------------------------------------------------------------------

    async def _listen(self) -> asyncio.Server:
        for flows in self._flows.values():
            flows.set()
        return await asyncio.start_server(self._accept, "127.0.0.1", 0)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        target = self._target()
        if self._is_refusing or not target:
            _reset(writer)
            self._writers.discard(writer)
            return
        try:
            up_reader, up_writer = await _connect(target)
        except OSError:
            _reset(writer)
            self._writers.discard(writer)
            return
        self._writers.add(up_writer)
        pumps = [
            asyncio.create_task(self._pump(reader, up_writer, Direction.UP)),
            asyncio.create_task(self._pump(up_reader, writer, Direction.DOWN)),
        ]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        for end in (writer, up_writer):
            end.close()
            self._writers.discard(end)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction) -> None:
        """Pass pieces on until one end is gone and, unless frozen, the other may learn so."""
        flows = self._flows[direction]
        while piece := await _read(reader):
            if self._delay_s:
                self.num_delayed += 1
                await asyncio.sleep(self._delay_s)
            if not flows.is_set():
                self.num_frozen += 1
                await flows.wait()
            try:
                writer.write(self._on_way_up(piece) if direction is Direction.UP else piece)
                await writer.drain()
            except OSError:  # the receiver is gone; the sender would learn so by the opposite direction
                await self._flows[direction.opposite].wait()
                return
            if direction is Direction.UP and self._bytes_per_s:
                await asyncio.sleep(len(piece) / self._bytes_per_s)
        await flows.wait()

    def _on_way_up(self, piece: bytes) -> bytes:
        self.num_bytes_up += len(piece)
        if self._cut_after_bytes is not None and self.num_bytes_up >= self._cut_after_bytes:
            self._cut_after_bytes = None
            self._loop.call_soon(self._reset_all)
        if self._num_to_damage and len(piece) >= MIN_DAMAGED_BYTES:
            self._num_to_damage -= 1
            self.num_damaged += 1
            at = self._random.randrange(len(piece) // 4, len(piece))
            return piece[:at] + bytes([piece[at] ^ 1 << self._random.randrange(8)]) + piece[at + 1 :]
        return piece

    def _reset_all(self) -> None:
        self.num_reset += len(self._writers) // 2  # each has two ends
        for writer in list(self._writers):
            _reset(writer)

    async def _close(self) -> None:
        self._server.close()
        self._reset_all()
        if self._connections:
            await asyncio.wait(self._connections)

    def _call(self, coroutine: object) -> asyncio.Server:
        future: Future[asyncio.Server] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)  # type: ignore[arg-type]
        return future.result(10)

    def _do(self, action: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(action)


async def _read(reader: asyncio.StreamReader) -> bytes:
    """The next piece; empty: the connection has ended, for whatever reason."""
    try:
        return await reader.read(CHUNK_BYTES)
    except OSError:
        return b""


async def _connect(target: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if target.startswith("/"):
        return await asyncio.open_unix_connection(target)
    host, _, port = target.rpartition(":")
    return await asyncio.open_connection(host, int(port))


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection with RST: data in transit is lost."""
    connection = writer.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:  # otherwise the connection is gone already
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
