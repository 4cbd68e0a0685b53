"""The generic part of the `Session` streams between a router and a worker (protos/tandem_worker.proto).

Handles the batching of events to the router, the handshake and the session's lease. Knows nothing about requests: the
service's own `finally` ends what a session has started on the worker.

    router                         worker's handler:  async def Session(self, request_iterator, context)
    Hello ───────────────────────> check_hello(await anext(request_iterator))     raises Incompatible
                                   await run_session(…):
    commands, Beat ──────────────>   handle(command) for each                     raises LeaseGone after lease_ms
    <── WorkerEvents ─────────────   outbox.messages()  <── outbox.post(events)   of silence
    <── WorkerEvents, only load ──   at least four times per lease: tells the router that the worker is alive
                                   run_session returns: the router has closed its side, or outbox.close() was called
    stream dropped ──────────────> run_session is cancelled
                                   finally: free what the session owns

    EventOutbox: OPEN ── post()* ── close() ──> CLOSED: pending events are still sent, then messages() ends
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from itertools import islice
from typing import Any, TypeVar

from protos import tandem_worker_pb2 as pb
from rpc.errors import Incompatible, InvalidRequest, LeaseGone

PROTOCOL_VERSION = 1
"""Version of the Session streams; increased when an old peer would misread a new one."""

BEATS_PER_LEASE = 4
"""Minimum signs of life from each side per lease."""

MAX_NAME_LENGTH = 256
"""Maximum characters in the id of a router or a request: ids are stored, logged and sent back."""

MAX_EVENTS_PER_MESSAGE = 1024
MAX_BYTES_PER_MESSAGE = 4 << 20
"""Size limit of events in a message, unless a single event is larger: a long prompt's logprobs take 2 MB."""

Command = TypeVar("Command", pb.PrefillCommand, pb.DecodeCommand)


class EventOutbox:
    """Events of one session on their way to its router. Used only on the event loop's thread; one reader.

    Unbounded, since no event may be lost, and there are only as many as the session's requests have tokens. A slow
    reader gets fewer, larger messages.
    """

    def __init__(self, load: Callable[[], pb.WorkerLoad]) -> None:
        """`load` returns the latest load, which goes into every message."""
        self._load = load
        self._pending: deque[pb.WorkerEvent] = deque()
        self._news = asyncio.Event()
        """Set while a message is due: events are pending, a load was requested, or the outbox is closed."""
        self.is_closed = False

    def post(self, events: Iterable[pb.WorkerEvent] = ()) -> None:
        """Send the events of one engine step, after all earlier ones. Without events, send only the load.

        After `close`, events are dropped: their session has ended.
        """
        if self.is_closed:
            return
        self._pending.extend(events)
        self._news.set()

    def close(self) -> None:
        """Accept no more events; `messages` ends when the pending ones are sent. Safe to repeat."""
        self.is_closed = True
        self._news.set()

    async def messages(self) -> AsyncIterator[pb.WorkerEvents]:
        """Yield messages with all pending events, each of bounded size, until closed and empty."""
        while True:
            await self._news.wait()
            if self.is_closed and not self._pending:
                return
            yield self._take()

    def _take(self) -> pb.WorkerEvents:
        num_events = min(len(self._pending), MAX_EVENTS_PER_MESSAGE)
        message = pb.WorkerEvents(events=islice(self._pending, num_events), load=self._load())
        while num_events > 1 and message.ByteSize() > MAX_BYTES_PER_MESSAGE:
            num_events //= 2
            del message.events[num_events:]
        for _ in range(num_events):
            self._pending.popleft()
        if not self._pending and not self.is_closed:
            self._news.clear()
        return message


async def run_session(
    commands: AsyncIterator[Command],
    context: Any,
    outbox: EventOutbox,
    handle: Callable[[Command], None],
    *,
    lease_ms: int,
) -> None:
    """Pass each of `commands` to `handle` and write the outbox' messages to `context` until either side ends.

    Returns when the router has closed its side, or the outbox was closed; pending events are written first.
    Raises `LeaseGone` when no command comes for `lease_ms` (the router is dead or cut off; a hanging write to it is
    given up). Raises what `handle` raises, after writing pending events. The outbox is closed in any case.
    """
    reader = asyncio.create_task(_read_all(commands, handle, lease_ms))
    writer = asyncio.create_task(_write_all(outbox, context))
    beats = asyncio.create_task(_beat(outbox, lease_ms))
    try:
        await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
        outbox.close()
        if not (reader.done() and isinstance(reader.exception(), LeaseGone)):
            # A write is never cancelled while the router lives: gRPC would lose the status that follows it.
            await asyncio.wait({writer}, timeout=lease_ms / 1000)
        if reader.done():
            reader.result()
        if writer.done():
            writer.result()
    finally:
        outbox.close()
        for task in (reader, writer, beats):
            task.cancel()
        await asyncio.wait({reader, writer, beats})


async def _read_all(commands: AsyncIterator[Command], handle: Callable[[Command], None], lease_ms: int) -> None:
    while True:
        try:
            async with asyncio.timeout(lease_ms / 1000):
                command = await anext(commands, None)
        except TimeoutError as error:
            raise LeaseGone(f"no command and no beat for {lease_ms} ms") from error
        if command is None:
            return
        handle(command)


async def _write_all(outbox: EventOutbox, context: Any) -> None:
    async for message in outbox.messages():
        await context.write(message)


async def _beat(outbox: EventOutbox, lease_ms: int) -> None:
    while True:
        await asyncio.sleep(lease_ms / 1000 / BEATS_PER_LEASE)
        outbox.post()


def check_hello(command: pb.PrefillCommand | pb.DecodeCommand, *, incarnation: str) -> None:
    """Check the first command of a session: a Hello for this worker's `incarnation`. Raises `Incompatible`, and
    `InvalidRequest` for an invalid router id."""
    if command.WhichOneof("command") != "hello":
        raise Incompatible("the first command of a session must be hello")
    hello = command.hello
    if len(hello.router_id) > MAX_NAME_LENGTH:
        raise InvalidRequest([("router_id", f"may have {MAX_NAME_LENGTH} characters, has {len(hello.router_id)}")])
    if hello.protocol_version != PROTOCOL_VERSION:
        raise Incompatible(f"protocol_version {hello.protocol_version} is not ours, {PROTOCOL_VERSION}")
    if hello.incarnation != incarnation:
        raise Incompatible(f"incarnation {hello.incarnation!r} has ended; this is {incarnation!r}")
