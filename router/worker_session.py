"""The router's end of one Session with one worker process.

Owns the stream, the heartbeats that keep the worker's leases alive, and the inboxes of the requests that use this
worker.

    CONNECTING ──first message from the worker──> OPEN ──stream ends, or a lease of silence──> LOST
                                                             every request here is told WorkerLost, once

A lost session never comes back, since the worker frees everything that it had started. A new one is opened instead.

The worker sends heartbeats, too. The session measures the worker's silence in its own beats and not by the clock: a
router that was held up itself, with a lease's time gone and the worker's messages still unread, must not take the
worker for dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

import grpc

from protos import tandem_worker_pb2 as pb
from protos.tandem_inference_pb2 import FinishReason
from protos.tandem_worker_pb2_grpc import DecodeStub, PrefillStub
from router.request_events import Event, WorkerKey, WorkerLost, WorkerSaid, WorkerStalled
from rpc.errors import from_rpc_error
from rpc.interceptors import log_bug
from rpc.server_status import server_status_kept
from rpc.session import BEATS_PER_LEASE, PROTOCOL_VERSION

_FINISH_REASONS = frozenset(FinishReason.values())

Inbox: TypeAlias = Callable[[Event], None]
"""Receives the events of one request."""


class WorkerSession:
    """One stream to one worker. Create and use it on the event loop."""

    def __init__(
        self,
        *,
        record: pb.WorkerRecord,
        router_id: str,
        channel: grpc.aio.Channel,
        on_load: Callable[[pb.WorkerLoad], None],
        on_open: Callable[[], None],
        on_lost: Callable[[], None],
    ) -> None:
        self.key = WorkerKey.of(record)
        self._role = record.role
        self._hello = pb.Hello(protocol_version=PROTOCOL_VERSION, router_id=router_id, incarnation=record.incarnation)
        self._vocab_size = record.model.vocab_size
        self._lease_ms = record.lease_ms
        self._beat_s = max(0.05, record.lease_ms / 1000 / BEATS_PER_LEASE)
        self._num_silent_beats = 0
        """This router's beats since the worker's last message."""
        self._channel = channel
        self._on_load = on_load
        self._on_open = on_open
        self._on_lost = on_lost
        self._commands: asyncio.Queue[pb.PrefillCommand | pb.DecodeCommand] = asyncio.Queue()
        self._inboxes: dict[str, Inbox] = {}
        self.is_open = False
        self.is_lost = False
        self.lost_why = ""
        self.num_requests_lost = 0
        """How many requests used this session when it was lost."""
        self.is_our_fault = False
        """The worker ended the session because it had not heard from this router for a lease."""
        self._task = asyncio.create_task(self._run(), name=f"session {record.worker_id}")

    @property
    def num_requests(self) -> int:
        return len(self._inboxes)

    @property
    def names(self) -> set[str]:
        """Names of the requests that have an inbox here."""
        return set(self._inboxes)

    def attach(self, request_id: str, inbox: Inbox) -> None:
        """From now on, the worker's events for `request_id` go to `inbox`."""
        self._inboxes[request_id] = inbox

    def tell_stalled(self) -> None:
        """Tell all requests here that the worker's engine is stalled."""
        for inbox in list(self._inboxes.values()):
            inbox(WorkerStalled(self.key))

    def detach(self, request_id: str) -> None:
        """The request has ended: drop further events for it."""
        self._inboxes.pop(request_id, None)

    def send(self, command: pb.PrefillCommand | pb.DecodeCommand) -> None:
        """Send `command` after all earlier ones. A lost session drops it: its requests have been told WorkerLost."""
        if not self.is_lost:
            self._commands.put_nowait(command)

    async def close(self) -> None:
        """End the stream; the worker frees what it began."""
        self._task.cancel()
        await asyncio.wait([self._task])

    # -- inside -------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        stream = self._open_stream()
        watch = asyncio.create_task(self._watch(stream))
        try:
            what = "ended the session"
            with server_status_kept(stream):
                what = await self._read_all(stream)
            self.lost_why = f"the worker {what}"
        except grpc.aio.AioRpcError as error:
            self.lost_why = f"{error.code().name}: {from_rpc_error(error).message}"  # with what to do about it
            self.is_our_fault = error.code() is grpc.StatusCode.ABORTED
        except Exception as error:  # a bug in a handler of its messages: the requests here cannot go on
            self.lost_why = log_bug(error, f"the session with {self.key.worker_id}").message
        finally:
            stream.cancel()  # has no effect if the stream has ended
            watch.cancel()
            self._lose()

    async def _read_all(self, stream: grpc.aio.StreamStreamCall[Any, Any]) -> str:
        """Take in the worker's messages. Returns what it did to end that."""
        async for message in stream:
            self._num_silent_beats = 0
            if (complaint := self._complaint(message)) is not None:
                return f"sent {complaint}"
            assert message is not None
            was_open, self.is_open = self.is_open, True
            self._take_in(message)
            if not was_open:
                self._on_open()
        return "ended the session"

    async def _watch(self, stream: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        """End the session if the worker hangs, or if nothing arrives from it: TCP may not notice for hours."""
        while self._num_silent_beats <= BEATS_PER_LEASE:
            await asyncio.sleep(self._beat_s)
            self._num_silent_beats += 1
        self.lost_why = f"the worker has sent nothing for {self._lease_ms} ms"
        stream.cancel()

    def _open_stream(self) -> grpc.aio.StreamStreamCall[pb.PrefillCommand | pb.DecodeCommand, pb.WorkerEvents | None]:
        stub = PrefillStub if self._role == pb.Role.ROLE_PREFILL else DecodeStub
        return stub(self._channel).Session(self._outgoing())

    async def _outgoing(self) -> AsyncIterator[pb.PrefillCommand | pb.DecodeCommand]:
        command_type = pb.PrefillCommand if self._role == pb.Role.ROLE_PREFILL else pb.DecodeCommand
        yield command_type(hello=self._hello)
        while True:
            try:
                async with asyncio.timeout(self._beat_s):
                    command = await self._commands.get()
            except TimeoutError:
                command = command_type(beat=pb.Beat())
            yield command

    def _complaint(self, message: pb.WorkerEvents | None) -> str | None:
        """What is wrong with a message in itself, if anything; `RequestState` checks whether it fits the request."""
        if message is None:  # how gRPC's clients deliver bytes that do not parse
            return "bytes that cannot be parsed"
        for event in message.events:
            if event.HasField("tokens"):
                if max(event.tokens.token_ids, default=0) >= self._vocab_size:
                    return f"token id {max(event.tokens.token_ids)}, outside the vocabulary of {self._vocab_size}"
                if event.tokens.finish_reason not in _FINISH_REASONS:
                    return f"finish reason {event.tokens.finish_reason}, which is unknown"
        return None

    def _take_in(self, message: pb.WorkerEvents) -> None:
        """Put the events into inboxes, where they wait, and take over the load at once. So a request that acts on an
        event sees the load that came with it."""
        for event in message.events:
            inbox = self._inboxes.get(event.request_id)
            if inbox is not None:
                inbox(WorkerSaid(self.key, event))
        self._on_load(message.load)

    def _lose(self) -> None:
        self.is_lost = True
        self.is_open = False
        inboxes, self._inboxes = list(self._inboxes.values()), {}
        self.num_requests_lost = len(inboxes)
        for inbox in inboxes:
            inbox(WorkerLost(self.key))
        self._on_lost()
