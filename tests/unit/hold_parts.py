"""The parts of a prefill worker, as `hold_world` drives them: the event loop, the engine's thread and the connection to
the receiver are scripted, everything else is the code that runs in a worker. See test_hold_exploration.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.config import SchedulerConfig
from engine.sampling_params import SamplingParams
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence as EngineSequence
from kv_transfer import GrantGone, HostPool, Identity, KVLayout, PeerUnreachable
from kv_transfer.base import BlockWriter, Link
from protos import tandem_kv_transfer_pb2 as kv_pb
from protos import tandem_worker_pb2 as pb
from worker_service.sessions import RouterSession, SessionHost, Stream

if TYPE_CHECKING:
    from hold_world import World

LEASE_S = 1
BLOCK_SIZE = 4
NUM_TOKENS = 5
"""Length of the prompt: its prefill takes two steps, each of which completes a block."""
NUM_BLOCKS = 8
STOP_TOKEN = 9
LAYOUT = KVLayout(
    num_layers=1, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_kv_heads=1, head_dim=1, dtype="float16"
)
IDENTITY = Identity(worker_id="p", incarnation="p-1", compat_digest="same")
POOL = HostPool(LAYOUT, np.zeros((1, NUM_BLOCKS, LAYOUT.block_bytes), dtype=np.uint8))


class Loop(asyncio.SelectorEventLoop):
    """A loop whose clock stands still, and on which the work of other threads is an event like any other."""

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
        """Run until nothing is ready, or for `max_turns` turns. Returns how many turns it ran."""
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
    """A call whose answer the service waits for."""

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

    def _cancel(self, stream: Stream) -> None:
        assert isinstance(stream, WatchedStream)
        stream.is_cancelled = True
        super()._cancel(stream)


class WatchedBlocks(BlockManager):
    world: World

    def free(self, seq: EngineSequence) -> None:
        self.world.check_release(seq)
        super().free(seq)


class Engine:
    """The part of an engine that the role uses: a scheduler, and a queue of commands that are run between two steps."""

    config = SimpleNamespace(cache=SimpleNamespace(block_size=BLOCK_SIZE))
    num_state_blocks = 0

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
            stream_interval=1,
            async_scheduling=False,
            speculation=None,
            draft_batch_tokens=0,
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
        return [*self.scheduler.sequences.waiting, *self.scheduler.sequences.running]

    def step(self, token_id: int) -> None:
        scheduled = self.scheduler.schedule()
        self.scheduler.begin(scheduled)
        outputs = self.scheduler.apply(scheduled, [[token_id] * s.num_sampled for s in scheduled.scheduled])
        loop, world = self.world.loop, self.world
        if scheduled.exports:
            loop.call_soon(world.role.on_layer_written, 0, scheduled.exports)
        loop.call_soon(world.host.deliver, outputs)

    # -- what commands ask --------------------------------------------------------------------------------------

    def add_prefill(
        self,
        engine_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        output_token_ids: Sequence[int],
        cache_salt: str,
        lora_name: str,
        lora_digest: str,
        num_receiver_blocks: int,
    ) -> None:
        if self.is_refusing:
            raise ValueError("refused")
        number = prompt_token_ids[0]
        seq = EngineSequence(number, engine_id, list(prompt_token_ids), len(prompt_token_ids), sampling_params)
        seq.is_prefill_only = True
        self.seqs[number] = seq
        self.scheduler.sequences.add(seq)

    def hold(self, engine_id: str) -> None:
        self.scheduler.sequences.hold(engine_id)

    def abort(self, engine_id: str) -> None:
        self.world.must(engine_id not in self.aborted, "released twice")
        self.aborted.append(engine_id)
        self.scheduler.sequences.abort(engine_id)


class Writer:
    """The data plane of one push, and what the receiver was told about that push."""

    may_still_write = False

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
        self.has_failed = False  # this post repairs the failure

    async def drain(self) -> None:
        if await self.world.ask(f"drain {self.number}", ["ok"], ["broken"]) == "broken":
            self.has_failed = True
            raise PeerUnreachable("broken")

    async def stop(self) -> None:
        if not self.is_stopped:
            await self.world.ask(f"stop {self.number}", ["ok"])
            self.is_stopped = True

    async def close(self) -> None:
        self.world.must(self.is_stopped, "ended before the last write")


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

    async def lost(self) -> None:
        await asyncio.Event().wait()  # these worlds never lose a link

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
