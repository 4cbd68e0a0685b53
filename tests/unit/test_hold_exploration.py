"""Every order of what can happen to a prompt's held blocks, through the code that prefill workers run.

Real are the role, the session host and its session, the sender and its pushes, the scheduler and its blocks. Scripted
are the router, the engine's thread, the receiver and the way to it, streaming or one-sided. What these still owe is an
event: the answer to a connect, start, drain, commit or abandon, a stopped writer, digests, a step, commands taken from
the engine's queue. So are the faults: an error, a mismatch once or always, a lost answer, a dead peer, a lease that
passes, a step without a token, an engine that refuses, a router that cancels, dies or sends the attempt again, a drain.

From every state each event is tried next, with up to two faults; the loop runs until it is idle between two events.
With up to one fault, once in each run, it is also cut short after each number of turns at which it still had work. A
run ends where it comes to a state that was seen before: 5550 states, 6850 runs.

Checked: blocks are freed once, when nothing reads them, and for a one-sided sender after the receiver was told; handed
over is said once, after COMMITTED; nothing is said of a closed stream; an attempt that was not cancelled has one end; a
drain returns when all is free, or ordered to be on the engine's queue. When nothing can happen any more all is free,
and no task, push or stream is left. Mechanisms are then taken out, one at a time: each must be missed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CoroutineType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.block_manager import BlockManager
from engine.config import SchedulerConfig
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import INVALID_TOKEN
from engine.sequence import Sequence as EngineSequence
from kv_transfer import GrantGone, Identity, KVLayout, KVPool, KVSender, PeerUnreachable, Push, TransferError
from kv_transfer.base import BlockWriter, Link
from prefill_service.prefill import PrefillRole
from protos import tandem_inference_pb2 as inference_pb
from protos import tandem_kv_transfer_pb2 as kv_pb
from protos import tandem_worker_pb2 as pb
from rpc.errors import TandemError, Unreachable
from rpc.session import PROTOCOL_VERSION
from worker_service.sessions import Role, RouterSession, SessionHost, Stream

LEASE_S = 1
BLOCK_SIZE = 4
NUM_TOKENS = 5
"""Of the prompt: two steps, each of which ends a block."""
NUM_BLOCKS = 8
STOP_TOKEN = 9
LAYOUT = KVLayout(
    num_layers=1, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_kv_heads=1, head_dim=1, dtype="float16"
)
IDENTITY = Identity(worker_id="p", incarnation="p-1", compat_digest="same")
POOL = KVPool(LAYOUT, np.zeros((1, NUM_BLOCKS, LAYOUT.block_bytes), dtype=np.uint8))


class Loop(asyncio.SelectorEventLoop):
    """Time stands still, and other threads' work is an event like any other."""

    world: World
    now_s = 0.0

    def __init__(self) -> None:
        super().__init__()
        self._ever: list[asyncio.Task[Any]] = []

    def time(self) -> float:
        return self.now_s

    def create_task(self, *args: Any, **options: Any) -> asyncio.Task[Any]:
        task = super().create_task(*args, **options)
        self._ever.append(task)
        return task

    def run_in_executor(self, executor: Any, function: Any, *args: Any) -> Any:  # type: ignore[override]
        return self.create_task(self.world.digest(function, *args))

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        self._ever = [task for task in self._ever if not task.done()]
        return self._ever

    @property
    def is_idle(self) -> bool:
        return not self._ready  # type: ignore[attr-defined]

    def run_turns(self, max_turns: int = 1000) -> int:
        """Run until nothing is ready, or so many turns. Returns their number."""
        num_turns = 0

        def end_turn() -> None:
            nonlocal num_turns
            num_turns += 1
            if self.is_idle or num_turns == max_turns:
                self.stop()
            else:
                self.call_soon(end_turn)

        if self.is_idle or max_turns == 0:
            return 0
        self.call_soon(end_turn)
        self.run_forever()
        return num_turns

    def settle(self) -> int:
        num_turns = self.run_turns()
        assert self.is_idle, "the loop never rests"
        return num_turns


@dataclass(eq=False)
class Call:
    """Something that the service waits for."""

    what: str
    well: tuple[str, ...]
    ill: tuple[str, ...]
    answer: asyncio.Future[str]
    deadline_s: float | None


@dataclass(slots=True, eq=False)
class WatchedStream(Stream):
    world: Any = None
    number: int = 0
    said: list[str] = field(default_factory=list)
    num_ends: int = 0
    is_cancelled: bool = False

    def event(self, **event: Any) -> pb.WorkerEvent:
        message = Stream.event(self, **event)
        what = message.WhichOneof("event") or ""
        must = self.world.must
        must(self.is_open and not self.is_cancelled, f"{what} said of a stream that is closed or cancelled")
        must(self.num_ends == 0, f"{what} said after the end")
        if what == "handed_over":
            must(self.world.writers[self.number].is_committed, "handed over before it was committed")
        if what == "failed" and self.world.num_bugs == 0:
            must(message.failed.code != 13, f"a bug: {message.failed.message}")
        self.num_ends += what in ("handed_over", "failed") or message.tokens.finish_reason != 0
        self.said.append(what)
        return message


class WatchedHost(SessionHost):
    world: World

    def open(self, session: RouterSession, request: pb.EngineRequest) -> Stream:
        plain = super().open(session, request)
        stream = WatchedStream(session, plain.request_id, plain.attempt, plain.engine_id)
        stream.world, stream.number = self.world, request.prompt_token_ids[0]
        session.streams[stream.request_id, stream.attempt] = self._streams[stream.engine_id] = stream
        self.world.streams.append(stream)
        return stream

    def _cancel(self, role: Role, stream: Stream) -> None:
        assert isinstance(stream, WatchedStream)
        stream.is_cancelled = True
        super()._cancel(role, stream)


class WatchedBlocks(BlockManager):
    world: World

    def free(self, seq: EngineSequence) -> None:
        self.world.check_release(seq)
        super().free(seq)


class Engine:
    """What the role knows of an engine: a scheduler, behind a queue that is worked off between two steps."""

    config = SimpleNamespace(cache=SimpleNamespace(block_size=BLOCK_SIZE))

    def __init__(self, world: World) -> None:
        self.world = world
        self.blocks = WatchedBlocks(
            num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, prefix_key=b"k", enable_prefix_caching=False
        )
        self.blocks.world = world
        config = SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=64,
            prefill_chunk_tokens=BLOCK_SIZE,
            prefill_batch_tokens=64,
            max_itl_ms=0,
        )
        self.scheduler = Scheduler(config, self.blocks, max_model_len=100, eos_token_ids=frozenset())
        self.commands: list[tuple[Callable[[Engine], Any], asyncio.Future[Any] | None]] = []
        self.seqs: dict[int, EngineSequence] = {}
        self.aborted: list[str] = []
        self.is_refusing = False

    async def call(self, function: Callable[[Engine], Any]) -> Any:
        future = asyncio.get_running_loop().create_future()
        self.commands.append((function, future))
        return await future

    def post(self, function: Callable[[Engine], Any]) -> None:
        self.commands.append((function, None))

    def run_commands(self) -> None:
        commands, self.commands = self.commands, []
        for function, future in commands:
            try:
                result = function(self)
            except ValueError as error:
                assert future is not None
                if not future.done():
                    future.set_exception(error)
            else:
                if future is not None and not future.done():
                    future.set_result(result)
        self.is_refusing = False

    @property
    def active(self) -> list[EngineSequence]:
        return [*self.scheduler.waiting, *self.scheduler.running]

    def step(self, token_id: int) -> None:
        scheduled = self.scheduler.schedule()
        outputs = self.scheduler.apply(scheduled, [token_id if s.samples else None for s in scheduled.scheduled])
        loop, world = self.world.loop, self.world
        if scheduled.exports:
            loop.call_soon(world.role.on_layer_written, 0, scheduled.exports)
        loop.call_soon(world.host.deliver, outputs)

    # -- what commands ask --------------------------------------------------------------------------------------

    def add_prefill(
        self,
        engine_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        output_token_ids: Sequence[int],
        num_receiver_blocks: int,
    ) -> None:
        if self.is_refusing:
            raise ValueError("refused")
        number = prompt_token_ids[0]
        seq = EngineSequence(number, engine_id, list(prompt_token_ids), len(prompt_token_ids), params)
        seq.is_prefill_only = True
        self.seqs[number] = seq
        self.scheduler.add(seq)

    def hold(self, engine_id: str) -> None:
        self.scheduler.hold(engine_id)

    def abort(self, engine_id: str) -> None:
        self.world.must(engine_id not in self.aborted, "released twice")
        self.aborted.append(engine_id)
        self.scheduler.abort(engine_id)


class Writer:
    """The data plane of one push, and all that the receiver was told of it."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.is_stopped = False
        self.is_committing = False
        self.is_committed = False
        self.has_failed = False
        self.is_abandon_sent = False
        self.does_receiver_know = False

    def state(self) -> tuple[object, ...]:
        return tuple(value for name, value in vars(self).items() if name != "world")

    async def start(self) -> None:
        if await self.world.ask(f"start {self.number}", ["ok"], ["gone"]) == "gone":
            self.has_failed = True
            raise GrantGone("revoked")

    def post(self, layer: int, src_block_ids: Sequence[int], dst_block_ids: Sequence[int]) -> None:
        self.world.must(not self.is_stopped, "posted to a writer that has been stopped")
        self.world.check_read(self.number, src_block_ids)
        self.has_failed = False  # a repair

    async def drain(self) -> None:
        if await self.world.ask(f"drain {self.number}", ["ok"], ["broken"]) == "broken":
            self.has_failed = True
            raise PeerUnreachable("broken")

    async def stop(self) -> None:
        if not self.is_stopped:
            await self.world.ask(f"stop {self.number}", ["ok"])
            self.is_stopped = True


class ScriptedLink:
    is_broken = False
    num_blocks = 0

    def __init__(self, world: World) -> None:
        self.world = world
        self.is_one_sided = world.is_one_sided

    async def connect(self, request: kv_pb.ConnectRequest, timeout_s: float) -> kv_pb.ConnectResponse:
        if await self.world.ask("connect", ["ok"], ["refused"]) == "refused":
            raise PeerUnreachable("refused")
        return kv_pb.ConnectResponse(
            worker_id="d", incarnation="d-1", compat_digest="same", layout=self.world.sender.pool.layout.to_proto()
        )

    async def adopt(self, response: kv_pb.ConnectResponse) -> None:
        self.num_blocks = response.layout.num_blocks

    def writer(self, grant: kv_pb.Grant) -> BlockWriter:
        writer = self.world.writers[grant.grant_id] = Writer(self.world, grant.grant_id)
        return writer

    async def commit(self, request: kv_pb.CommitRequest) -> kv_pb.CommitResponse:
        world, writer = self.world, self.world.writers[request.grant_id]
        world.must(not writer.is_stopped, "a commit after the writer was stopped")
        world.must(bool(world.engine.seqs[writer.number].block_table), "a commit of blocks that are free")
        writer.is_committing, writer.has_failed = True, False
        try:
            answer = world.habit or await world.ask(
                f"commit {request.grant_id}",
                ["committed"],
                ["mismatch", "always a mismatch", "gone", "lost", "dead"],
            )
        finally:
            writer.is_committing = False
        world.answers.append(answer)
        if answer in ("always a mismatch", "dead"):
            world.habit = answer
        writer.is_committed = answer == "committed"
        writer.has_failed = not writer.is_committed
        match answer:
            case "committed":
                return kv_pb.CommitResponse(outcome=kv_pb.CommitResponse.COMMITTED)
            case "mismatch" | "always a mismatch":
                return kv_pb.CommitResponse(outcome=kv_pb.CommitResponse.MISMATCH, mismatched_blocks=[1])
            case "gone":
                return kv_pb.CommitResponse(outcome=kv_pb.CommitResponse.GRANT_GONE)
        raise PeerUnreachable(answer)

    async def wait_connected(self, timeout_s: float) -> None:
        """A dead peer does not come back."""
        if self.world.habit == "dead" or await self.world.ask("reconnect", ["ok"], timeout_s=timeout_s) != "ok":
            raise PeerUnreachable("no connection for a lease")

    async def abandon(self, request: kv_pb.AbandonRequest, timeout_s: float) -> None:
        world, writer = self.world, self.world.writers[request.grant_id]
        world.must(self.is_one_sided, "a streaming sender needs no abandon")
        world.must(writer.is_stopped, "abandoned before the last write")
        world.must(not writer.is_abandon_sent, "abandoned twice")
        writer.is_abandon_sent = True
        is_dead = world.habit == "dead"
        answer = (
            "" if is_dead else await world.ask(f"abandon {request.grant_id}", ["ok"], ["lost"], timeout_s=timeout_s)
        )
        writer.does_receiver_know = True
        if answer != "ok":
            raise PeerUnreachable("nobody listens")

    async def close(self) -> None:
        pass


class ScriptedTransport:
    name = "scripted"

    def __init__(self, world: World) -> None:
        self.world = world

    async def dial(self, address: str) -> Link:
        return ScriptedLink(self.world)

    async def close(self) -> None:
        pass


class World:
    """One run: the service, and everything around it."""

    def __init__(self, loop: Loop, explorer: Explorer) -> None:
        self.loop = loop
        loop.world = self
        self.is_one_sided = explorer.is_one_sided
        self.num_faults = explorer.num_faults
        self.faults = explorer.faults
        self.num_bugs = 0
        self.answers: list[str] = []
        """To commits."""
        self.habit = ""
        """What the receiver answers every commit with from now on."""
        self.wrongs: list[str] = []
        self.calls: list[Call] = []
        self.writers: dict[int, Writer] = {}
        self.streams: list[WatchedStream] = []
        self.num_sent = 0
        self.done_once: set[str] = set()
        self.heard: list[pb.WorkerEvent] = []
        self.drain: asyncio.Task[None] | None = None
        self.path: Path = ()
        loop.set_exception_handler(self._on_bug)
        asyncio._set_running_loop(loop)  # some of what follows is made on a loop
        try:
            self.host = WatchedHost(incarnation="p-1", lease_ms=10**9, load=pb.WorkerLoad)
            self.host.world = self
            self.engine = Engine(self)
            transport: Any = ScriptedTransport(self)
            self.sender = KVSender(transport=transport, pool=POOL, identity=IDENTITY)
            engine: Any = self.engine
            self.role = PrefillRole(host=self.host, engine=engine, sender=self.sender)
            self.inbox: asyncio.Queue[pb.PrefillCommand] = asyncio.Queue()
        finally:
            asyncio._set_running_loop(None)
        context: Any = self
        self.session = loop.create_task(self.host.serve(self.role, self._commands(), context))
        hello = pb.Hello(protocol_version=PROTOCOL_VERSION, router_id="r", incarnation="p-1")
        self.inbox.put_nowait(pb.PrefillCommand(hello=hello))
        self.send_prefill()
        loop.settle()

    def _on_bug(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "never retrieved" not in context["message"]:  # said of runs that were not played to their end
            self.wrongs.append(repr(context))

    # -- the router ---------------------------------------------------------------------------------------------

    async def _commands(self) -> AsyncIterator[pb.PrefillCommand]:
        while True:
            yield await self.inbox.get()

    async def write(self, message: pb.WorkerEvents) -> None:
        self.heard += message.events

    def send_prefill(self) -> None:
        """The same attempt each time, under a grant of its own: its number is also the prompt's first token."""
        self.num_sent += 1
        number = self.num_sent
        params = inference_pb.SamplingParams(
            max_tokens=8, temperature=0, top_p=1, repetition_penalty=1, seed=0, stop_token_ids=[STOP_TOKEN]
        )
        request = pb.EngineRequest(
            request_id="r", attempt=1, prompt_token_ids=[number, *[0] * (NUM_TOKENS - 1)], sampling_params=params
        )
        grant = kv_pb.Grant(
            worker_id="d", incarnation="d-1", kv_address="d:1", grant_id=number, epoch=number,
            block_ids=[1, 2], lease_ms=1000 * LEASE_S,
        )  # fmt: skip
        self.inbox.put_nowait(pb.PrefillCommand(prefill=pb.PrefillRequest(request=request, grant=grant)))

    # -- what the service waits for -----------------------------------------------------------------------------

    async def ask(
        self, what: str, well: Sequence[str], ill: Sequence[str] = (), *, timeout_s: float | None = None
    ) -> str:
        deadline_s = None if timeout_s is None else self.loop.time() + timeout_s
        call = Call(what, tuple(well), tuple(ill), self.loop.create_future(), deadline_s)
        self.calls.append(call)
        try:
            return await call.answer
        finally:
            self.calls.remove(call)

    async def digest(self, function: Callable[[Sequence[int]], Any], block_ids: Sequence[int]) -> Any:
        number = next(n for n, seq in self.engine.seqs.items() if {*block_ids} <= {*seq.block_table})
        await self.ask(f"digest {number}", ["ok"])
        return function(block_ids)  # late, perhaps: of a push that has failed, they are thrown away

    # -- events -------------------------------------------------------------------------------------------------

    def choices(self) -> list[str]:
        """All that can happen now. Faults end with "!"."""
        names, faults = [], []
        for call in self.calls:
            if not call.answer.done():
                names += [f"{call.what}: {outcome}" for outcome in call.well]
                faults += [f"{call.what}: {outcome}!" for outcome in call.ill]
        if self.engine.commands:
            names.append("engine: takes")
            if any(future is not None for _, future in self.engine.commands):
                faults.append("engine: refuses!")
        if active := self.engine.active:
            if any(seq.num_uncomputed_tokens <= BLOCK_SIZE for seq in active):
                names += ["step: token", "step: last token"]
                faults.append("step: no token!")
            else:
                names.append("step: chunk")
        if not self.session.done():
            faults += ["router: dies!", "router: repeats!"]
            if any(stream.is_open for stream in self.streams):
                faults.append("router: cancels!")
        faults.append("drain: begins!")
        if any(call.deadline_s is not None and not call.answer.done() for call in self.calls):
            faults.append("lease: passes!")
        if self.num_faults == 0:
            return names
        if not names:
            faults = [fault for fault in faults if fault == "router: repeats!"]  # nothing is left to disturb
        return names + [fault for fault in faults if fault not in self.done_once and self.is_explored(fault)]

    def is_explored(self, fault: str) -> bool:
        return not self.faults or any(fault.startswith(name) for name in self.faults)

    def fire(self, choice: str) -> None:
        """Let it happen, without running the loop."""
        if choice.endswith("!"):
            self.num_faults -= 1
        what, _, how = choice.rstrip("!").partition(": ")
        match what:
            case "engine":
                self.engine.is_refusing = how == "refuses"
                self.engine.run_commands()
            case "step":
                self.num_bugs += how == "no token"
                self.engine.step({"token": 7, "chunk": 7, "last token": STOP_TOKEN, "no token": INVALID_TOKEN}[how])
            case "router" | "drain":
                self.done_once.add(choice)
                self._disturb(how)
            case "lease":
                self.loop.now_s += LEASE_S
                for call in self.calls:
                    if call.deadline_s is not None and call.deadline_s <= self.loop.now_s and not call.answer.done():
                        call.answer.set_result("lost")
            case _:
                call = next(call for call in self.calls if call.what == what and not call.answer.done())
                call.answer.set_result(how)

    def _disturb(self, how: str) -> None:
        match how:
            case "cancels":
                self.inbox.put_nowait(pb.PrefillCommand(cancel=pb.Cancel(request_id="r", attempt=1)))
            case "repeats":
                self.send_prefill()
            case "dies":
                self.session.cancel()
            case "begins":
                self.drain = self.loop.create_task(self.role.drain())

    # -- what must hold -----------------------------------------------------------------------------------------

    def must(self, condition: bool, what: str) -> None:
        """Raising would only be caught by the service."""
        if not condition:
            self.wrongs.append(what)

    def check_read(self, number: int, block_ids: Sequence[int]) -> None:
        self.must({*block_ids} <= {*self.engine.seqs[number].block_table}, "a read of blocks that are free")

    def check_release(self, seq: EngineSequence) -> None:
        """The blocks of `seq` are about to be free."""
        writer = self.writers[seq.seq_id]
        self.must(writer.is_stopped, "freed while a writer may read it")
        self.must(not writer.is_committing, "freed while it is committed")
        if self.is_one_sided and not writer.is_committed:
            self.must(writer.is_abandon_sent, "freed and the receiver not told")
            self.must(writer.has_failed or writer.does_receiver_know, "freed before the receiver knows")

    @property
    def is_all_free(self) -> bool:
        return self.engine.blocks.ledger().num_free == NUM_BLOCKS

    def check(self) -> None:
        """In every state in which the loop is idle."""
        if self.drain is not None and self.drain.done() and "drained" not in self.done_once:
            self.done_once.add("drained")
            self.drain.result()
            self.engine.run_commands()  # that order was given: the engine's thread works it off before it ends
            self.loop.settle()
            self.must(self.is_all_free, "drained before all is free")
        if not self.engine.commands:
            for seq in self.engine.active:
                self.must(self.host.find(seq.request_id) is not None, "still computed for nobody")
        assert not self.wrongs, "; ".join(self.wrongs)

    def check_end(self) -> None:
        """Nothing can happen any more."""
        assert self.is_all_free, "blocks are never freed"
        assert not any(stream.is_open for stream in self.streams), "a stream is left"
        assert not self.role._pushes, "a push is left"
        assert not self.calls, f"left waiting: {self.calls}"
        assert self.drain is None or self.drain.done(), "the drain never returns"
        for stream in self.streams:
            assert stream.num_ends == 1 or stream.is_cancelled, f"no end was said: {stream.said}"
        for writer in self.writers.values():
            assert writer.is_stopped, "a writer is left"
        is_alive = not self.session.done()
        num_said = sum(len(stream.said) for stream in self.streams)
        num_refusals = sum(event.failed.code == 6 for event in self.heard)  # of an attempt that is open already
        assert not is_alive or len(self.heard) == num_said + num_refusals, "said, and not heard"
        self.session.cancel()
        self.loop.settle()
        closing = self.loop.create_task(self.sender.close())
        self.loop.settle()
        assert closing.done(), "the sender cannot be closed"
        self.check()
        assert not self.loop.tasks, "tasks are left"

    def key(self) -> tuple[object, ...]:
        """What tells this state from others: all that can differ, down to the line at which each task waits."""
        loop_s = self.loop.time()
        return (
            self.num_faults,
            self.habit,
            tuple(self.answers),
            frozenset(self.done_once),
            tuple((c.what, c.deadline_s and c.deadline_s - loop_s) for c in self.calls if not c.answer.done()),
            tuple((s.is_open, s.is_cancelled, s.num_ends, *s.said) for s in self.streams),
            tuple(writer.state() for writer in self.writers.values()),
            tuple((s.request_id, s.status, s.num_computed_tokens, *s.block_table) for s in self.engine.seqs.values()),
            tuple((f.__code__.co_firstlineno, future is None) for f, future in self.engine.commands),
            frozenset(self.engine.aborted),
            tuple(sorted(where(task) for task in self.loop.tasks)),
        )


def where(task: asyncio.Task[Any]) -> tuple[tuple[str, int], ...]:
    """The calls that a task is in."""
    places = []
    awaited: Any = task.get_coro()
    while isinstance(awaited, CoroutineType):
        frame = awaited.cr_frame
        places.append((awaited.__qualname__, frame.f_lasti if frame is not None else -1))
        awaited = awaited.cr_await
    return tuple(places)


Path = tuple[tuple[str, int | None], ...]
"""Events, each with the turns that the loop has had after it; None: until it was idle."""


@contextmanager
def new_loop() -> Iterator[Loop]:
    loop = Loop()
    try:
        yield loop
    finally:
        sweep(loop)
        loop.close()


def sweep(loop: Loop) -> None:
    """End what a run has left that was not played to its end."""
    while loop.tasks or not loop.is_idle:
        for task in loop.tasks:
            task.cancel()
        loop.settle()


@dataclass
class Explorer:
    is_one_sided: bool
    num_faults: int
    max_hurries: int
    faults: Sequence[str] = ()
    """What they begin with; all if there are none."""
    num_runs: int = 0
    pending: list[Path] = field(default_factory=lambda: [()])
    seen: set[tuple[object, ...]] = field(default_factory=set)

    def explore(self) -> None:
        """Run every order of events. A run ends where it comes to a state that was seen before."""
        with new_loop() as loop:
            while self.pending:
                world = World(loop, self)
                try:
                    self._run(world, self.pending.pop())
                except AssertionError as error:
                    raise AssertionError(f"{error}, after {world.path}") from error
                sweep(loop)
                self.num_runs += 1

    def _run(self, world: World, path: Path) -> None:
        for number, (choice, num_turns) in enumerate(path, start=1):
            self._advance(world, choice, num_turns, is_new=number == len(path))
        while True:
            if world.loop.is_idle:
                key = world.key()
                if key in self.seen:
                    return
                self.seen.add(key)
            choices = world.choices()
            if choices:
                self.pending += [(*world.path, (choice, None)) for choice in choices[1:]]
                self._advance(world, choices[0], None, is_new=True)
            elif world.loop.is_idle:
                world.check_end()
                return
            else:
                world.loop.settle()
                world.check()

    def _advance(self, world: World, choice: str, num_turns: int | None, *, is_new: bool) -> None:
        before = world.path
        world.path = (*before, (choice, num_turns))
        world.fire(choice)
        if num_turns is not None:
            world.loop.run_turns(num_turns)
            return
        num_turns = world.loop.settle()
        world.check()
        if is_new and sum(turns is not None for _, turns in before) < self.max_hurries:
            self.pending += [(*before, (choice, turns)) for turns in range(num_turns)]


def explore(is_one_sided: bool, num_faults: int, max_hurries: int = 0, faults: Sequence[str] = ()) -> Explorer:
    explorer = Explorer(is_one_sided, num_faults, max_hurries, faults)
    explorer.explore()
    return explorer


@pytest.mark.parametrize("is_one_sided", [False, True])
@pytest.mark.parametrize(("num_faults", "max_hurries", "num_states"), [(0, 0, 15), (2, 0, 1500), (1, 1, 200)])
def test_every_order(is_one_sided: bool, num_faults: int, max_hurries: int, num_states: int) -> None:
    explorer = explore(is_one_sided, num_faults, max_hurries)
    assert len(explorer.seen) >= num_states


# -- mechanisms taken out -----------------------------------------------------------------------------------------


def release_at_once(self: Any, stream: Stream, push: Push, *, is_settled: bool) -> Any:
    async def let_go() -> None:
        self._engine.post(lambda engine: engine.hold(stream.engine_id))
        del self._pushes[stream.engine_id]
        self._engine.post(lambda engine: engine.abort(stream.engine_id))
        await push.abandon()

    return let_go()


async def let_go_without_hold(self: Any, stream: Stream, push: Push, *, is_settled: bool) -> None:
    await push.abandon()
    del self._pushes[stream.engine_id]
    self._engine.post(lambda engine: engine.abort(stream.engine_id))


async def let_go_where_it_went_well(self: Any, stream: Stream, push: Push, *, is_settled: bool) -> None:
    if is_settled:
        await LET_GO(self, stream, push, is_settled=is_settled)


async def let_go_twice(self: Any, stream: Stream, push: Push, *, is_settled: bool) -> None:
    await LET_GO(self, stream, push, is_settled=is_settled)
    self._engine.post(lambda engine: engine.abort(stream.engine_id))


async def let_go_and_keep_the_push(self: Any, stream: Stream, push: Push, *, is_settled: bool) -> None:
    await LET_GO(self, stream, push, is_settled=is_settled)
    self._pushes[stream.engine_id] = push


def cancel_and_close_later(self: SessionHost, role: Role, stream: Stream) -> None:
    role.cancel(stream)


async def drain_without_clean_up(self: Any) -> None:
    self._is_draining = True
    await self._host.wait_until_idle()


async def say_whatever_happened(self: Any, stream: Stream, command: pb.PrefillRequest) -> None:
    try:
        await self._serve(stream, command)
    except TransferError as error:
        stream.post_failure(Unreachable(str(error)), can_retry=True)
    self._host.close(stream)


def fail_silently(self: SessionHost, stream: Stream, error: TandemError) -> None:
    stream.post_failure(error, can_retry=False)
    self.close(stream)


async def believe(self: Push, *args: Any) -> None:
    await self._writer.drain()


async def say_nothing(self: Push) -> None:
    pass


async def abandon_while_writing(self: Any) -> None:
    self._is_open = False
    await self._send_abandon()
    await self._writer.stop()


async def abandon_what_is_open(self: Any) -> None:
    was_open, self._is_open = self._is_open, False
    await self._writer.stop()
    if was_open:
        await self._send_abandon()


async def abandon_in_the_background(self: Any) -> None:
    self._is_open = False
    await self._writer.stop()
    self._sender.spawn(self._send_abandon())


def write_for_ever(self: Any, layer: int, first_block: int, src_block_ids: Sequence[int]) -> None:
    self._post(layer, src_block_ids, self._dst_block_ids[first_block : first_block + len(src_block_ids)])


def free_what_failed(self: Any, seq: EngineSequence) -> RequestOutput:
    output = FAIL(self, seq)
    self.abort(seq.request_id)
    return output


async def open_and_stop_in_line(self: Any, grant: kv_pb.Grant) -> Push:
    link = await self._link(grant)
    writer = link.writer(grant)
    try:
        await writer.start()
    except BaseException:
        await writer.stop()
        raise
    return Push(self, link, writer, grant)


LET_GO: Any = PrefillRole._let_go
FAIL = Scheduler._fail
CANCELS = "router: cancels!"


@pytest.mark.parametrize(
    ("owner", "mechanism", "without", "faults", "what"),
    [
        (PrefillRole, "_let_go", release_at_once, [CANCELS], "freed while a writer may read"),
        (PrefillRole, "_let_go", let_go_without_hold, [CANCELS], "computed for nobody"),
        (PrefillRole, "_let_go", let_go_where_it_went_well, [CANCELS], "never freed"),
        (PrefillRole, "_let_go", let_go_where_it_went_well, ["commit 1: gone!"], "never freed"),
        (PrefillRole, "_let_go", let_go_twice, [], "released twice"),
        (PrefillRole, "_let_go", let_go_and_keep_the_push, [], "a push is left"),
        (PrefillRole, "cancel", lambda *_: None, [CANCELS], "closed or cancelled|never freed|computed for nobody"),
        (PrefillRole, "drain", drain_without_clean_up, ["drain", CANCELS], "drained before"),
        (PrefillRole, "_run", say_whatever_happened, ["drain 1: broken!", CANCELS], "closed or cancelled"),
        (SessionHost, "_cancel", cancel_and_close_later, [CANCELS], "closed or cancelled"),
        (SessionHost, "_fail", lambda *_, **__: None, ["engine: refuses!"], "a stream is left"),
        (SessionHost, "_fail_for_good", fail_silently, ["step: no token!"], "never freed"),
        (KVSender, "spawn", lambda _, work: work.close(), ["commit 1: gone!"], "not told"),
        (KVSender, "open", open_and_stop_in_line, ["start 1: gone!", CANCELS], "a writer is left"),
        (Push, "_push_until_committed", believe, [], "before it was committed"),
        (Push, "_send_abandon", say_nothing, [CANCELS], "not told"),
        (Push, "abandon", abandon_while_writing, [CANCELS], "before the last write"),
        (Push, "abandon", abandon_what_is_open, ["commit 1: gone!", CANCELS], "not told"),
        (Push, "abandon", abandon_in_the_background, [CANCELS], "before the receiver knows"),
        (Push, "write", write_for_ever, [CANCELS], "posted to a writer"),
        (Writer, "stop", say_nothing, [], "freed while a writer may read"),
        (Scheduler, "_fail", free_what_failed, ["step: no token!"], "freed while a writer may read"),
    ],
)
def test_each_mechanism_is_missed(
    owner: type, mechanism: str, without: object, faults: list[str], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, mechanism, without)
    with pytest.raises(AssertionError, match=what):
        explore(True, len(faults), int(len(faults) == 2), faults or ["none"])
