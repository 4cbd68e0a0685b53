"""What a worker keeps of its routers' sessions: streams by name, news for all of them, and a last message. No
network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from engine.llm_engine import EngineLoad
from engine.outputs import FinishReason, RequestOutput
from engine.scheduling.block_ledger import BlockLedger
from protos import tandem_worker_pb2 as pb
from rpc.errors import Draining, LeaseGone, Unreachable
from rpc.session import PROTOCOL_VERSION
from worker_service.messages import load_message
from worker_service.servicer import stale_grants
from worker_service.sessions import RouterSession, SessionHost, Stream

INCARNATION = "i"


class Generates:
    """A role that opens a stream for every command."""

    def __init__(self, host: SessionHost) -> None:
        self.host = host
        self.streams: list[Stream] = []
        self.cancelled: list[Stream] = []
        self.alive: list[RouterSession] = []
        """The session of each sign of life."""

    def on_command(self, session: RouterSession, command: Any) -> None:
        self.streams.append(self.host.open(session, command.generate))

    def on_beat(self, session: RouterSession) -> None:
        self.alive.append(session)

    def cancel(self, stream: Stream) -> None:
        self.cancelled.append(stream)

    def drop(self, session: RouterSession) -> None:
        pass


class Router:
    """The router's end of one session."""

    def __init__(self, host: SessionHost) -> None:
        self.commands: asyncio.Queue[pb.DecodeCommand] = asyncio.Queue()
        self.messages: list[pb.WorkerEvents] = []
        self.task = asyncio.create_task(host.serve(self._commands(), self))

    async def _commands(self) -> AsyncIterator[pb.DecodeCommand]:
        while True:
            yield await self.commands.get()

    async def write(self, message: pb.WorkerEvents) -> None:
        await asyncio.sleep(0)  # as a network does
        self.messages.append(message)

    def send(self, **command: Any) -> None:
        self.commands.put_nowait(pb.DecodeCommand(**command))


class Bench:
    def __init__(self, *, lease_ms: int = 10_000) -> None:
        self.load = pb.WorkerLoad()
        self.host = SessionHost(incarnation=INCARNATION, lease_ms=lease_ms, load=lambda: self.load)
        self.role = self.host.role = Generates(self.host)

    async def router(self) -> Router:
        router = Router(self.host)
        router.send(hello=pb.Hello(protocol_version=PROTOCOL_VERSION, router_id="r", incarnation=INCARNATION))
        await settle()
        return router


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def finished(engine_id: str) -> RequestOutput:
    return RequestOutput(engine_id, 0, [5], FinishReason.LENGTH, num_cached_tokens=0, waited_s=0)


async def test_a_name_that_comes_back_names_something_new_in_the_engine() -> None:
    """A cancelled prefill is cleaned up later, by its engine id. That must not hit the stream that has its name by
    then."""
    bench = Bench()
    router = await bench.router()
    router.send(generate=pb.EngineRequest(request_id="a", attempt=1))
    router.send(cancel=pb.Cancel(request_id="a", attempt=1))
    router.send(generate=pb.EngineRequest(request_id="a", attempt=1))
    await settle()
    first, second = bench.role.streams
    assert bench.role.cancelled == [first]
    assert first.engine_id != second.engine_id
    assert bench.host.find(first.engine_id) is None
    assert bench.host.find(second.engine_id) is second
    router.task.cancel()
    await asyncio.wait([router.task])


async def test_a_cancel_ends_the_attempt_that_it_names_and_no_other() -> None:
    bench = Bench()
    router = await bench.router()
    router.send(generate=pb.EngineRequest(request_id="a", attempt=1))
    router.send(generate=pb.EngineRequest(request_id="a", attempt=2))
    router.send(cancel=pb.Cancel(request_id="a", attempt=2))
    router.send(cancel=pb.Cancel(request_id="a", attempt=3))
    await settle()
    first, second = bench.role.streams
    assert bench.role.cancelled == [second]
    assert (first.is_open, second.is_open) == (True, False)
    router.task.cancel()
    await asyncio.wait([router.task])


async def test_each_command_is_a_sign_of_life_of_its_router() -> None:
    """A router beats only while it has nothing else to say: without this, the leases of a busy one would end."""
    bench = Bench()
    router, other = await bench.router(), await bench.router()
    router.send(generate=pb.EngineRequest(request_id="a", attempt=1))
    router.send(cancel=pb.Cancel(request_id="a", attempt=1))
    router.send(beat=pb.Beat())
    await settle()
    assert bench.role.alive == [bench.role.streams[0].session] * 3
    for each in (router, other):
        each.task.cancel()
    await asyncio.wait([router.task, other.task])


async def test_an_answer_that_is_complete_is_no_open_stream_any_more() -> None:
    """Whether or not its router says more about it: a worker that drains does not wait for that."""
    bench = Bench()
    router = await bench.router()
    router.send(generate=pb.EngineRequest(request_id="a", attempt=1))
    await settle()
    (stream,) = bench.role.streams
    bench.host.deliver([finished(stream.engine_id)])
    assert (stream.is_open, bench.host.find(stream.engine_id), stream.session.streams) == (False, None, {})
    await asyncio.wait_for(bench.host.drain(), 5)
    router.task.cancel()
    await asyncio.wait([router.task])


async def test_ending_the_sessions_says_what_was_still_to_be_said() -> None:
    bench = Bench()
    router = await bench.router()
    router.send(generate=pb.EngineRequest(request_id="a", attempt=1))
    await settle()
    bench.host.deliver([finished(bench.role.streams[0].engine_id)])
    await bench.host.end_sessions(1.0)
    assert router.task.done()
    assert router.messages[-1].events[0].tokens.token_ids == [5]
    late = await bench.router()
    with pytest.raises(Draining):
        await late.task


@pytest.mark.parametrize(("error", "code"), [("", 13), ("the grammar takes too much", 3)])
@pytest.mark.parametrize("is_prefill", [False, True])
async def test_what_the_engine_could_not_compute_is_not_tried_elsewhere(
    is_prefill: bool, error: str, code: int
) -> None:
    """A request whose logits are NaN would fail on one worker after another."""
    bench = Bench()
    router = await bench.router()
    router.send(generate=pb.EngineRequest(request_id="a", attempt=1))
    await settle()
    (stream,) = bench.role.streams
    if is_prefill:
        stream.first_token = asyncio.get_running_loop().create_future()
    failed = RequestOutput(stream.engine_id, 0, [], FinishReason.ERROR, 0, waited_s=0, grammar_error=error)
    bench.host.deliver([failed])
    await settle()
    failed = router.messages[-1].events[0].failed
    assert (failed.code, failed.can_retry) == (code, False)
    assert error in failed.message
    assert bench.host.find(stream.engine_id) is None
    if is_prefill:
        assert stream.first_token is not None
        assert stream.first_token.cancelled()  # the prefill's task cleans up
    router.task.cancel()
    await asyncio.wait([router.task])


async def test_tokens_that_were_kept_are_told_before_what_went_wrong_after_them() -> None:
    bench = Bench()
    router = await bench.router()
    router.send(generate=pb.EngineRequest(request_id="a", attempt=1))
    await settle()
    engine_id = bench.role.streams[0].engine_id
    kept = RequestOutput(engine_id, 1, [5, 6], None, num_cached_tokens=0, waited_s=0)
    bench.host.deliver([kept, RequestOutput(engine_id, 3, [], FinishReason.ERROR, num_cached_tokens=0, waited_s=0)])
    await settle()
    tokens, failed = router.messages[-1].events
    assert (list(tokens.tokens.token_ids), failed.WhichOneof("event")) == ([5, 6], "failed")
    router.task.cancel()
    await asyncio.wait([router.task])


@pytest.mark.parametrize(
    ("error", "can_retry"),
    [(asyncio.CancelledError(), True), (Unreachable("gone"), True), (KeyError("x"), True), (ValueError("bad"), False)],
)
async def test_what_ends_the_work_of_a_stream_is_told_to_the_router(error: BaseException, can_retry: bool) -> None:
    """Only the worker knows that the work has stopped: the request would wait for ever. An error in what the request
    itself asks for would come at any other worker, too."""
    bench = Bench()
    router = await bench.router()
    router.send(generate=pb.EngineRequest(request_id="a", attempt=1))
    await settle()

    async def work() -> None:
        raise error

    (stream,) = bench.role.streams
    bench.host.spawn(stream, work)
    await settle()
    assert router.messages[-1].events[0].HasField("failed")
    assert router.messages[-1].events[0].failed.can_retry is can_retry
    assert bench.role.cancelled == [stream]
    router.task.cancel()
    await asyncio.wait([router.task])


async def test_who_drains_waits_for_streams_that_are_open_and_opens_no_more() -> None:
    bench = Bench()
    router = await bench.router()
    router.send(generate=pb.EngineRequest(request_id="a", attempt=1))
    await settle()
    (stream,) = bench.role.streams
    drain = asyncio.create_task(bench.host.drain())
    await settle()
    assert bench.host.admit(stream.session, pb.EngineRequest(request_id="b", attempt=1)) is None
    await settle()
    assert router.messages[-1].events[0].failed.can_retry
    assert not drain.done()
    bench.host.answer_busy(stream)
    await drain
    await settle()
    assert router.messages[-1].events[0].HasField("busy")
    router.task.cancel()
    await asyncio.wait([router.task])


async def test_who_closes_ends_the_work_of_streams_and_waits_until_it_has_cleaned_up() -> None:
    bench = Bench()
    router = await bench.router()
    router.send(generate=pb.EngineRequest(request_id="a", attempt=1))
    await settle()
    has_cleaned_up = False

    async def work() -> None:
        nonlocal has_cleaned_up
        try:
            await asyncio.Event().wait()
        finally:
            await settle()
            has_cleaned_up = True

    bench.host.spawn(bench.role.streams[0], work)
    await settle()
    async with asyncio.timeout(10):
        await bench.host.finish_tasks()
    assert has_cleaned_up
    router.task.cancel()
    await asyncio.wait([router.task])


async def test_a_load_is_told_to_all_routers_though_nothing_else_is() -> None:
    bench = Bench()
    routers = [await bench.router() for _ in range(2)]
    bench.load = pb.WorkerLoad(num_running=7)
    bench.host.announce_load()
    await settle()
    assert [router.messages[-1].load.num_running for router in routers] == [7, 7]
    for router in routers:
        router.task.cancel()
        await asyncio.wait([router.task])


async def test_a_router_that_says_no_hello_is_told_why_its_session_ends() -> None:
    bench = Bench(lease_ms=20)
    with pytest.raises(LeaseGone):
        await Router(bench.host).task


async def test_draining_is_part_of_the_load() -> None:
    load = EngineLoad(0, 0, 0, 0, BlockLedger(1, 1, 0, 0, 0, 0))
    assert not load_message(load).is_draining
    assert load_message(load, is_draining=True).is_draining


@pytest.mark.parametrize("how", ["router dies", "router falls silent"])
async def test_the_end_of_a_session_cancels_all_its_streams(how: str) -> None:
    bench = Bench(lease_ms=10_000 if how == "router dies" else 200)
    router, other = await bench.router(), await bench.router()
    for name in ("a", "b"):
        router.send(generate=pb.EngineRequest(request_id=name, attempt=1))
    other.send(generate=pb.EngineRequest(request_id="c", attempt=1))
    await settle()
    *mine, of_other = bench.role.streams
    if how == "router dies":
        router.task.cancel()
    else:
        for _ in range(4):
            await asyncio.sleep(0.06)
            other.send(beat=pb.Beat())
    (end,) = await asyncio.gather(router.task, return_exceptions=True)
    assert isinstance(end, asyncio.CancelledError if how == "router dies" else LeaseGone)
    assert bench.role.cancelled == mine
    assert [bench.host.find(stream.engine_id) for stream in mine] == [None, None]
    assert bench.host.find(of_other.engine_id) is of_other
    other.task.cancel()
    await asyncio.wait([other.task])


def test_an_audit_sees_promises_of_memory_that_is_nobodys() -> None:
    before = {1: (5, 6), 2: (7,), 3: (8,)}
    assert stale_grants(before, before, {5, 6, 7, 8}) == []
    assert stale_grants(before, {1: (5, 6), 2: (7,)}, {5, 7}) == [
        "grant 1 names blocks that are not reserved for it: [6]"
    ], "the third went meanwhile"
