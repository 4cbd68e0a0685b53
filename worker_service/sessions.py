"""The sessions that routers have with this worker, and the requests that each of them runs here.

Owns the sessions and the streams. A stream is one attempt of one request: it belongs to one session, has one engine
request, and closes once. When a session ends (its router ends it, dies, or is silent for a lease), all its streams are
cancelled, in the one `finally` of `SessionHost.serve`.

    session:  Hello ──> OPEN ──commands, beats──> ended: every stream of it cancelled
    stream:   open ──events──> closed (finished, failed, refused, or cancelled by its router)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc

from engine.async_llm_engine import EngineDeadError
from engine.lora.table import AdapterGone
from engine.outputs import FinishReason, RequestOutput
from protos import tandem_worker_pb2 as pb
from rpc.errors import (
    Draining,
    Incompatible,
    InternalError,
    InvalidRequest,
    LeaseGone,
    RequestCancelled,
    RequestExists,
    TandemError,
    code_of,
)
from rpc.interceptors import log_bug
from rpc.session import MAX_NAME_LENGTH, Command, EventOutbox, check_hello, run_session
from worker_service.messages import tokens_message


@dataclass(slots=True, eq=False)
class Stream:
    """One attempt of one request. `engine_id` names it in the engine, across all sessions."""

    session: RouterSession
    request_id: str
    attempt: int
    engine_id: str
    is_open: bool = True
    grant_id: int | None = None
    """Decode: the memory promised to it."""
    first_token: asyncio.Future[RequestOutput] | None = None
    """Prefill: what the prompt's computation ends with."""

    def event(self, **event: object) -> pb.WorkerEvent:
        return pb.WorkerEvent(request_id=self.request_id, attempt=self.attempt, **event)  # type: ignore[arg-type]

    def post(self, **event: object) -> None:
        self.session.outbox.post([self.event(**event)])

    def post_failure(self, error: TandemError, *, can_retry: bool) -> None:
        self.post(failed=pb.Failed(code=code_of(error), message=error.message, can_retry=can_retry))


@dataclass(slots=True, eq=False)
class RouterSession:
    """One router's session. Also the owner of its grants."""

    outbox: EventOutbox
    streams: dict[tuple[str, int], Stream] = field(default_factory=dict)


class Role(Protocol):
    """What a prefill or a decode service does with commands."""

    def on_command(self, session: RouterSession, command: pb.PrefillCommand | pb.DecodeCommand) -> None:
        """A command other than hello and cancel."""

    def on_beat(self, session: RouterSession) -> None:
        """The session's router is alive."""

    def cancel(self, stream: Stream) -> None:
        """Free what the stream owns. It is closed already."""

    def drop(self, session: RouterSession) -> None:
        """The session has ended, and all its streams are cancelled."""


class SessionServicer:
    """`Session` of a worker's role: one for each router."""

    def __init__(self, host: SessionHost) -> None:
        self._host = host

    async def Session(  # noqa: N802
        self, request_iterator: AsyncIterator[Command], context: grpc.aio.ServicerContext
    ) -> None:
        await self._host.serve(request_iterator, context)


class SessionHost:
    """Serves sessions, and routes the engine's events to the streams they are for. `role` is set before the first."""

    role: Role

    def __init__(self, *, incarnation: str, lease_ms: int, load: Callable[[], pb.WorkerLoad]) -> None:
        self._incarnation = incarnation
        self._lease_ms = lease_ms
        self._load = load
        self._sessions: dict[RouterSession, asyncio.Task[Any]] = {}
        """Each with the task that serves it."""
        self._is_draining = False
        self._is_ended = False
        self._streams: dict[str, Stream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._kept: set[asyncio.Task[None]] = set()
        """Clean-up, which nothing cancels."""
        self._num_streams_ever = 0
        self._has_no_streams = asyncio.Event()
        self._has_no_streams.set()

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    async def serve(self, commands: AsyncIterator[Command], context: grpc.aio.ServicerContext) -> None:
        """The body of a Session RPC: takes in `commands`, writes events to `context`, cleans up at the end.

        Raises `Incompatible` for a peer that is not ours, `LeaseGone` for a router that fell silent, `Draining` once
        sessions have been ended.
        """
        try:
            async with asyncio.timeout(self._lease_ms / 1000):
                first = await anext(commands, None)
        except TimeoutError as error:
            raise LeaseGone(f"no hello for {self._lease_ms} ms") from error
        if self._is_ended:
            raise _leaving()
        if first is None:
            raise Incompatible("the session ended before its hello")
        check_hello(first, incarnation=self._incarnation)
        session = RouterSession(EventOutbox(self._load))
        task = asyncio.current_task()
        assert task is not None
        self._sessions[session] = task
        session.outbox.post()  # the load at once: it tells the router that the session is open
        try:
            await run_session(
                commands,
                context,
                session.outbox,
                lambda command: self._handle(session, command),
                lease_ms=self._lease_ms,
            )
        finally:
            del self._sessions[session]
            for stream in list(session.streams.values()):
                self._cancel(stream)
            self.role.drop(session)

    async def end_sessions(self, timeout_s: float) -> None:
        """Say what is still to be said, end every session well, and take no new ones. Waits at most `timeout_s`.

        Without it, a server that stops could cut off the last tokens of a request that has finished.
        """
        self._is_ended = True
        for session in self._sessions:
            session.outbox.close()
        if tasks := list(self._sessions.values()):
            await asyncio.wait(tasks, timeout=timeout_s)

    def _handle(self, session: RouterSession, command: pb.PrefillCommand | pb.DecodeCommand) -> None:
        self.role.on_beat(session)
        match command.WhichOneof("command"):
            case "cancel":
                stream = session.streams.get((command.cancel.request_id, command.cancel.attempt))
                if stream is not None:
                    self._cancel(stream)
            case "beat":
                pass
            case "hello":
                raise InvalidRequest([("hello", "must be the first command, and only the first")])
            case _:
                self.role.on_command(session, command)

    def _cancel(self, stream: Stream) -> None:
        self.close(stream)
        self.role.cancel(stream)

    # -- streams ------------------------------------------------------------------------------------------------

    def spawn(self, stream: Stream, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Do the `work` of a stream without making the session's next command wait.

        What it raises ends the stream: the router is told, whatever happened, and nobody waits for ever.
        """
        task = asyncio.create_task(self._run(stream, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(self, stream: Stream, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except asyncio.CancelledError:
            # Whoever cancels a stream closes it first. If it is open, this came from something that it awaited.
            self._fail(stream, RequestCancelled("its work was cancelled from within"), can_retry=True)
            raise
        except EngineDeadError:
            pass  # the process is ending, and its sessions with it
        except AdapterGone as error:
            self._fail(stream, Incompatible(str(error)), can_retry=True)
        except ValueError as error:
            self._fail(stream, InvalidRequest((), str(error)), can_retry=False)
        except TandemError as error:
            self._fail(stream, error, can_retry=True)
        except Exception as error:
            self._fail(stream, log_bug(error, f"request {stream.request_id}"), can_retry=True)

    def _fail(self, stream: Stream, error: TandemError, *, can_retry: bool) -> None:
        if stream.is_open:
            stream.post_failure(error, can_retry=can_retry)
            self._cancel(stream)

    def keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Do clean-up `work` to its end, whatever happens to the stream that asks for it."""
        task = asyncio.create_task(work)
        self._kept.add(task)
        task.add_done_callback(self._on_kept)

    def _on_kept(self, task: asyncio.Task[None]) -> None:
        self._kept.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            assert isinstance(error, Exception)
            log_bug(error, "clean-up")

    async def drain(self) -> None:
        """Refuse new attempts; return when no stream is open and all that was done for them has ended."""
        self._is_draining = True
        await self._has_no_streams.wait()
        await self.wait_for_tasks()

    async def wait_for_tasks(self) -> None:
        """Until all that streams do here has ended, clean-up included."""
        while tasks := [*self._tasks, *self._kept]:
            await asyncio.wait(tasks)

    async def finish_tasks(self) -> None:
        """Cancel what streams still do here, and wait until they have cleaned up."""
        for task in list(self._tasks):
            task.cancel()
        await self.wait_for_tasks()

    def admit(self, session: RouterSession, request: pb.EngineRequest) -> Stream | None:
        """`open`, or None where the router has been told why not: the attempt is open already, or this worker is
        leaving."""
        try:
            stream = self.open(session, request)
        except RequestExists as error:  # told under the same name; the stream that is open goes on
            Stream(session, request.request_id, request.attempt, "").post_failure(error, can_retry=False)
            return None
        if self._is_draining:
            self.refuse(stream, _leaving(), can_retry=True)
            return None
        return stream

    def open(self, session: RouterSession, request: pb.EngineRequest) -> Stream:
        """A new stream for an attempt. Raises `RequestExists` for one that is open already, and `InvalidRequest`, which
        ends the session, for one that cannot be named."""
        if not 0 < len(request.request_id) <= MAX_NAME_LENGTH:
            message = f"must have 1 to {MAX_NAME_LENGTH} characters, has {len(request.request_id)}"
            raise InvalidRequest([("request_id", message)])
        key = (request.request_id, request.attempt)
        if key in session.streams:
            raise RequestExists(f"request {request.request_id!r}, attempt {request.attempt}, is open")
        # Never the same twice: a request's name may come back while what it named before is still being cleaned up.
        self._num_streams_ever += 1
        engine_id = f"{request.request_id}/{request.attempt}/{self._num_streams_ever}"
        stream = Stream(session, request.request_id, request.attempt, engine_id)
        session.streams[key] = stream
        self._streams[engine_id] = stream
        self._has_no_streams.clear()
        return stream

    def close(self, stream: Stream) -> None:
        """Nothing more is said of the attempt. Repeating it is harmless."""
        stream.is_open = False
        stream.session.streams.pop((stream.request_id, stream.attempt), None)
        self._streams.pop(stream.engine_id, None)
        if not self._streams:
            self._has_no_streams.set()

    def refuse(self, stream: Stream, error: TandemError, *, can_retry: bool) -> None:
        """End an attempt with its error. Whoever calls frees what it owns in the engine."""
        stream.post_failure(error, can_retry=can_retry)
        self.close(stream)

    def answer_busy(self, stream: Stream) -> None:
        """End an attempt for which there is no room now: nothing was begun, and nothing has failed."""
        stream.post(busy=pb.Busy())
        self.close(stream)

    def find(self, engine_id: str) -> Stream | None:
        return self._streams.get(engine_id)

    # -- what the engine says -----------------------------------------------------------------------------------

    def deliver(self, outputs: Iterable[RequestOutput]) -> None:
        """Send one step's tokens: one message to each router concerned. Finished streams close."""
        events: dict[RouterSession, list[pb.WorkerEvent]] = {}
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue  # cancelled while the step ran
            if output.finish_reason is FinishReason.ERROR:
                stream.session.outbox.post(events.pop(stream.session, ()))  # its own tokens that were kept, too
                self._fail_for_good(stream, _error_of(output))
                continue
            events.setdefault(stream.session, []).append(stream.event(tokens=tokens_message(output)))
            if stream.first_token is not None:
                if not stream.first_token.done():
                    stream.first_token.set_result(output)
            elif output.is_finished:
                self.close(stream)
        for session, session_events in events.items():
            session.outbox.post(session_events)

    def _fail_for_good(self, stream: Stream, error: TandemError) -> None:
        """What the engine could not do, another could not either: the router must not try it there."""
        self.refuse(stream, error, can_retry=False)
        if stream.first_token is not None:
            stream.first_token.cancel()  # its task then cleans up

    def announce_load(self) -> None:
        """Tell every router the load, though nothing else happened: memory was freed."""
        for session in self._sessions:
            session.outbox.post()


def _leaving() -> Draining:
    return Draining("this worker is leaving")


def _error_of(output: RequestOutput) -> TandemError:
    """Why there is no next token."""
    if output.grammar_error:
        return InvalidRequest([("sampling_params.structured_outputs", output.grammar_error)])
    return InternalError(output.error)
