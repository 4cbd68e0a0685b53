"""The routers' sessions with this worker, and the requests that each of them runs here.

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
    """Decode: the grant that reserves its memory."""
    first_token: asyncio.Future[RequestOutput] | None = None
    """Prefill: gets the output with the first token, which ends the prompt's computation."""
    num_tokens: int = 0
    """Tokens that it has been sent."""

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
    """Handles the commands of a prefill or decode service."""

    def on_command(self, session: RouterSession, command: pb.PrefillCommand | pb.DecodeCommand) -> None:
        """Handle a command other than hello and cancel."""

    def on_beat(self, session: RouterSession) -> None:
        """The session's router is alive."""

    def cancel(self, stream: Stream) -> None:
        """Free what the stream owns. The stream is already closed."""

    def drop(self, session: RouterSession) -> None:
        """The session has ended, and all its streams have been cancelled."""


class SessionServicer:
    """The RPC `Session` of a worker's role: one call for each router."""

    def __init__(self, host: SessionHost) -> None:
        self._host = host

    async def Session(  # noqa: N802
        self, request_iterator: AsyncIterator[Command], context: grpc.aio.ServicerContext
    ) -> None:
        await self._host.serve(request_iterator, context)


class SessionHost:
    """Serves sessions, and routes the engine's events to their streams. `role` must be set before the first session."""

    role: Role

    def __init__(self, *, incarnation: str, lease_ms: int, load: Callable[[], pb.WorkerLoad]) -> None:
        self._incarnation = incarnation
        self._lease_ms = lease_ms
        self._load = load
        self._sessions: dict[RouterSession, asyncio.Task[Any]] = {}
        """Each session with the task that serves it."""
        self._is_draining = False
        self._is_ended = False
        self._streams: dict[str, Stream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._kept: set[asyncio.Task[None]] = set()
        """Clean-up tasks, which are never cancelled."""
        self._num_streams_ever = 0
        self._has_no_streams = asyncio.Event()
        self._has_no_streams.set()

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    async def serve(self, commands: AsyncIterator[Command], context: grpc.aio.ServicerContext) -> None:
        """The body of a Session RPC: handles `commands`, writes events to `context`, cleans up at the end.

        Raises `Incompatible` for an incompatible peer, `LeaseGone` for a router that fell silent, `Draining` after
        `end_sessions`.
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
        session.outbox.post()  # send the load at once, which tells the router that the session is open
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
        """Send all pending messages, end every session properly, and accept no new ones. Waits at most `timeout_s`.

        Without this, a stopping server could cut off the last tokens of a finished request.
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
        """Run the `work` of a stream without making the session's next command wait.

        If `work` raises, the stream ends and the router is told, so that nobody waits forever.
        """
        task = asyncio.create_task(self._run(stream, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(self, stream: Stream, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except asyncio.CancelledError:
            # A cancelled stream is closed first. If this one is open, the cancel came from something that it awaited.
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
        """Run clean-up `work` to its end, even if its stream is cancelled."""
        task = asyncio.create_task(work)
        self._kept.add(task)
        task.add_done_callback(self._on_kept)

    def _on_kept(self, task: asyncio.Task[None]) -> None:
        self._kept.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            assert isinstance(error, Exception)
            log_bug(error, "clean-up")

    async def drain(self) -> None:
        """Refuse new attempts; return when no stream is open and all their tasks have ended."""
        self._is_draining = True
        await self._has_no_streams.wait()
        await self.wait_for_tasks()

    async def wait_for_tasks(self) -> None:
        """Wait until all tasks of streams have ended, including clean-up."""
        while tasks := [*self._tasks, *self._kept]:
            await asyncio.wait(tasks)

    async def finish_tasks(self) -> None:
        """Cancel the tasks of streams, and wait until they have cleaned up."""
        for task in list(self._tasks):
            task.cancel()
        await self.wait_for_tasks()

    def admit(self, session: RouterSession, request: pb.EngineRequest) -> Stream | None:
        """Open a stream. Returns None, after telling the router why, if the attempt is already open or this worker is
        leaving."""
        try:
            stream = self.open(session, request)
        except RequestExists as error:  # sent under the same name; the open stream continues
            Stream(session, request.request_id, request.attempt, "").post_failure(error, can_retry=False)
            return None
        if self._is_draining:
            self.refuse(stream, _leaving(), can_retry=True)
            return None
        return stream

    def open(self, session: RouterSession, request: pb.EngineRequest) -> Stream:
        """Make a new stream for an attempt. Raises `RequestExists` if the attempt is already open, and
        `InvalidRequest`, which ends the session, if its id is invalid."""
        if not 0 < len(request.request_id) <= MAX_NAME_LENGTH:
            message = f"must have 1 to {MAX_NAME_LENGTH} characters, has {len(request.request_id)}"
            raise InvalidRequest([("request_id", message)])
        key = (request.request_id, request.attempt)
        if key in session.streams:
            raise RequestExists(f"request {request.request_id!r}, attempt {request.attempt}, is open")
        # Unique: a request's id may be reused while its earlier stream is still being cleaned up.
        self._num_streams_ever += 1
        engine_id = f"{request.request_id}/{request.attempt}/{self._num_streams_ever}"
        stream = Stream(session, request.request_id, request.attempt, engine_id)
        session.streams[key] = stream
        self._streams[engine_id] = stream
        self._has_no_streams.clear()
        return stream

    def close(self, stream: Stream) -> None:
        """Close a stream: no more events are sent for the attempt. Safe to repeat."""
        stream.is_open = False
        stream.session.streams.pop((stream.request_id, stream.attempt), None)
        self._streams.pop(stream.engine_id, None)
        if not self._streams:
            self._has_no_streams.set()

    def refuse(self, stream: Stream, error: TandemError, *, can_retry: bool) -> None:
        """End an attempt with an error. The caller frees what the attempt owns in the engine."""
        stream.post_failure(error, can_retry=can_retry)
        self.close(stream)

    def answer_busy(self, stream: Stream) -> None:
        """End an attempt for which there is no room now: nothing was begun, nothing has failed."""
        stream.post(busy=pb.Busy())
        self.close(stream)

    def find(self, engine_id: str) -> Stream | None:
        return self._streams.get(engine_id)

    # -- reports of the engine ----------------------------------------------------------------------------------

    def deliver(self, outputs: Iterable[RequestOutput]) -> None:
        """Send one step's tokens, in one message to each router concerned. Closes finished streams."""
        events: dict[RouterSession, list[pb.WorkerEvent]] = {}
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue  # cancelled while the step was running
            if output.finish_reason is FinishReason.ERROR:
                stream.session.outbox.post(events.pop(stream.session, ()))  # with the tokens that were collected for it
                self._fail_for_good(stream, _error_of(output))
                continue
            events.setdefault(stream.session, []).append(stream.event(tokens=tokens_message(output)))
            stream.num_tokens += len(output.token_ids)
            if stream.first_token is not None:
                if not stream.first_token.done():
                    stream.first_token.set_result(output)
            elif output.is_finished:
                self.close(stream)
        for session, session_events in events.items():
            session.outbox.post(session_events)

    def _fail_for_good(self, stream: Stream, error: TandemError) -> None:
        """End an attempt that other engines could not compute either, so that the router does not retry it."""
        self.refuse(stream, error, can_retry=False)
        if stream.first_token is not None:
            stream.first_token.cancel()  # its task then cleans up

    def announce_load(self) -> None:
        """Send the load to every router, although there are no other events: memory was freed."""
        for session in self._sessions:
            session.outbox.post()


def _leaving() -> Draining:
    return Draining("this worker is shutting down")


def _error_of(output: RequestOutput) -> TandemError:
    """The error that says why there is no next token."""
    if output.grammar_error:
        return InvalidRequest([("sampling_params.structured_outputs", output.grammar_error)])
    return InternalError(output.error)
