"""The world of a prefill worker: the events that can happen next, what must hold, and the search through all orders of
events. See test_hold_exploration.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CoroutineType
from typing import Any

from hold_parts import (
    BLOCK_SIZE,
    IDENTITY,
    LEASE_S,
    NUM_BLOCKS,
    NUM_TOKENS,
    POOL,
    STOP_TOKEN,
    Call,
    Engine,
    Loop,
    ScriptedTransport,
    WatchedHost,
    WatchedStream,
    Writer,
)

from engine.scheduling.sequence import INVALID_TOKEN
from engine.scheduling.sequence import Sequence as EngineSequence
from kv_transfer import KVSender
from prefill_service.prefill import PrefillRole
from protos import tandem_inference_pb2 as inference_pb
from protos import tandem_kv_transfer_pb2 as kv_pb
from protos import tandem_worker_pb2 as pb
from rpc.session import PROTOCOL_VERSION


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
        """The receiver's answers to commits."""
        self.habit = ""
        """If set, the receiver's answer to every further commit."""
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
        asyncio._set_running_loop(loop)  # some of these objects need a running loop when they are made
        try:
            self.host = WatchedHost(incarnation="p-1", lease_ms=10**9, load=pb.WorkerLoad)
            self.host.world = self
            self.engine = Engine(self)
            transport: Any = ScriptedTransport(self)
            self.sender = KVSender(transport=transport, pool=POOL, identity=IDENTITY)
            engine: Any = self.engine
            self.role = PrefillRole(
                host=self.host, engine=engine, sender=self.sender, num_blocks=NUM_BLOCKS, on_handed_over=lambda _: None
            )
            self.host.role = self.role
            self.inbox: asyncio.Queue[pb.PrefillCommand] = asyncio.Queue()
        finally:
            asyncio._set_running_loop(None)
        context: Any = self
        self.session = loop.create_task(self.host.serve(self._commands(), context))
        hello = pb.Hello(protocol_version=PROTOCOL_VERSION, router_id="r", incarnation="p-1")
        self.inbox.put_nowait(pb.PrefillCommand(hello=hello))
        self.send_prefill()
        loop.settle()

    def _on_bug(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "never retrieved" not in context["message"]:  # asyncio says this of runs that were cut short
            self.wrongs.append(repr(context))

    # -- the router ---------------------------------------------------------------------------------------------

    async def _commands(self) -> AsyncIterator[pb.PrefillCommand]:
        while True:
            yield await self.inbox.get()

    async def write(self, message: pb.WorkerEvents) -> None:
        self.heard += message.events

    def send_prefill(self) -> None:
        """Send the same attempt each time, but with a new grant. The grant's number is also the prompt's first
        token."""
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
        return function(block_ids)  # perhaps too late: the sender discards the digests of a failed push

    # -- events -------------------------------------------------------------------------------------------------

    def choices(self) -> list[str]:
        """All events that can happen now. The names of faults end with "!"."""
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
            faults = [fault for fault in faults if fault == "router: repeats!"]  # there is nothing left to disturb
        return names + [fault for fault in faults if fault not in self.done_once and self.is_explored(fault)]

    def is_explored(self, fault: str) -> bool:
        return not self.faults or any(fault.startswith(name) for name in self.faults)

    def fire(self, choice: str) -> None:
        """Make the event happen, without running the loop."""
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
                self.drain = self.loop.create_task(self.host.drain())

    # -- what must hold -----------------------------------------------------------------------------------------

    def must(self, condition: bool, what: str) -> None:
        """Record a violation. The service would catch an exception raised here."""
        if not condition:
            self.wrongs.append(what)

    def check_read(self, number: int, block_ids: Sequence[int]) -> None:
        self.must({*block_ids} <= {*self.engine.seqs[number].block_table}, "a read of blocks that are free")

    def check_release(self, seq: EngineSequence) -> None:
        """Called just before the blocks of `seq` are freed."""
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
        """Check what must hold in every state in which the loop is idle."""
        if self.drain is not None and self.drain.done() and "drained" not in self.done_once:
            self.done_once.add("drained")
            self.drain.result()
            self.engine.run_commands()  # commands already posted: the engine's thread runs them before it ends
            self.loop.settle()
            self.must(self.is_all_free, "drained before all is free")
        if not self.engine.commands:
            for seq in self.engine.active:
                self.must(self.host.find(seq.request_id) is not None, "still computed for nobody")
        assert not self.wrongs, "; ".join(self.wrongs)

    def check_end(self) -> None:
        """Check what must hold once nothing can happen any more."""
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
        num_refusals = sum(event.failed.code == 6 for event in self.heard)  # 6: the attempt is open already
        assert not is_alive or len(self.heard) == num_said + num_refusals, "said, and not heard"
        self.session.cancel()
        self.loop.settle()
        closing = self.loop.create_task(self.sender.close())
        self.loop.settle()
        assert closing.done(), "the sender cannot be closed"
        self.check()
        assert not self.loop.tasks, "tasks are left"

    def key(self) -> tuple[object, ...]:
        """What distinguishes this state from others: all that can differ, down to the instruction at which each task
        waits."""
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
    """The chain of coroutines that a task is in, each with the instruction at which it waits."""
    places = []
    awaited: Any = task.get_coro()
    while isinstance(awaited, CoroutineType):
        frame = awaited.cr_frame
        places.append((awaited.__qualname__, frame.f_lasti if frame is not None else -1))
        awaited = awaited.cr_await
    return tuple(places)


Path = tuple[tuple[str, int | None], ...]
"""Events, each with the number of turns that the loop ran after it; None: it ran until it was idle."""


@contextmanager
def new_loop() -> Iterator[Loop]:
    loop = Loop()
    try:
        yield loop
    finally:
        sweep(loop)
        loop.close()


def sweep(loop: Loop) -> None:
    """Cancel the tasks that an unfinished run has left."""
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
    """Prefixes of the names of the faults to explore; empty: all faults."""
    num_runs: int = 0
    pending: list[Path] = field(default_factory=lambda: [()])
    seen: set[tuple[object, ...]] = field(default_factory=set)

    def explore(self) -> None:
        """Run every order of events. A run ends when it reaches a state that an earlier run has reached."""
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
