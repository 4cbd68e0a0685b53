"""A client leaves: once a worker has processed the cancel, it computes at most one more step for the request.

Router and workers are real, with a real model and gRPC between them, but all in this process, so that the tests see
each step of both engines and can hold it while a cancel is on its way. A proxy between the workers can slow the KV
down.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

import router.process
import worker_service.process
from decode_service.service import DecodeService
from engine.engine_args import EngineArgs
from engine.model_loader import create_engine_config
from engine.running.executor import Executor
from engine.sampling.sampled_tokens import SampledTokens
from engine.scheduling.sequence import SchedulerOutput
from prefill_service.service import PrefillService
from protos import tandem_worker_pb2 as pb
from router.args import RouterArgs
from router.policy import PolicyConfig
from router.process import Router, load_texts
from rpc import failpoints
from rpc.tracing import Untraced
from tandem.chaos.proxy import FaultyProxy
from tandem.client import AsyncClient
from worker_service.args import WorkerArgs
from worker_service.process import WorkerProcess
from worker_service.role import MakeService

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHUNK = 32
PROMPT = [(7 * i) % 40_000 + 100 for i in range(8 * CHUNK)]
"""Takes a quarter of a second, in chunks."""
MAX_NUM_SEQS = 3
"""Requests per worker at once."""
NUM_TOKENS = 200
"""Length of an answer, which takes seconds."""
SOON_S = 4.0
"""Far less than `HELD_S`."""
HELD_S = 60.0
_fresh_ids = itertools.count(20_000)
"""First tokens of prompts that no cache has seen."""


@dataclass
class Steps:
    """Watches what one engine computes. Patched into the engine before its first step."""

    executor: Executor
    computed: list[dict[str, int]] = field(default_factory=list)
    """For each step, noted when it begins: the number of tokens by request."""
    hold_at: tuple[str, int] | None = None
    """(request, n): hold the n-th step that computes something for this request."""
    is_holding: threading.Event = field(default_factory=threading.Event)
    may_go_on: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._launch, self.executor.launch = self.executor.launch, self._watch  # type: ignore[method-assign]

    def _watch(self, scheduled: SchedulerOutput) -> SampledTokens:
        self.computed.append({s.seq.request_id.split("/")[0]: s.num_new_tokens for s in scheduled.scheduled})
        if self.hold_at is not None and self.hold_at[1] == self.number_of(self.hold_at[0]):
            self.hold_at = None
            self.is_holding.set()
            assert self.may_go_on.wait(HELD_S)
        return self._launch(scheduled)

    def number_of(self, request_id: str) -> int:
        """How many steps have computed something for this request."""
        return sum(request_id in step for step in self.computed)

    def hold(self, request_id: str, number: int) -> None:
        self.is_holding.clear()
        self.may_go_on.clear()
        self.hold_at = request_id, number


class Worker:
    def __init__(self, process: WorkerProcess) -> None:
        self.process = process
        self.steps = Steps(process.engine._engine.executor)

    def knows(self, request_id: str) -> bool:
        """Whether the worker has been given this request and has not been told to stop."""
        return any(stream.request_id == request_id for stream in self.process.host._streams.values())

    async def is_at_rest(self) -> bool:
        ledger, problems = await self.process.engine.call(lambda engine: engine.audit())
        assert not problems
        is_free = ledger.num_free + ledger.num_cached == ledger.num_blocks
        return is_free and not self.process.service.open_grants()


@dataclass
class Cluster:
    """A router, one worker of each role, and a client."""

    prefill: Worker
    decode: Worker
    proxy: FaultyProxy
    """Stands in front of the decode worker."""
    front: Router
    client: AsyncClient

    @property
    def workers(self) -> tuple[Worker, Worker]:
        return self.prefill, self.decode

    async def wait_until_at_rest(self) -> None:
        for worker in self.workers:
            await wait_for(worker.is_at_rest, "every block free or cached")
        await asyncio.wait_for(self.prefill.process.host.wait_for_tasks(), SOON_S)  # held tasks would go on later
        # else it would plan the next request differently
        await wait_for(self.is_known_to_be_idle, "the router has heard of it")

    async def is_known_to_be_idle(self) -> bool:
        return not any(handle.num_queued_tokens or handle.load.num_running for handle in self.front._pool.handles)


async def wait_for(condition: Callable[[], Awaitable[bool]], what: str, timeout_s: float = SOON_S) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            while not await condition():  # noqa: ASYNC110 - threads change the condition, too
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"not within {timeout_s} s: {what}") from None


async def start_cluster(redis: str, model: Path, stack: AsyncExitStack) -> Cluster:
    addresses: list[str] = []
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    for module in (worker_service.process, router.process):
        patch.setattr(module, "announce", addresses.append)
    proxy = FaultyProxy(lambda: addresses[0])
    stack.callback(proxy.close)
    config = create_engine_config(
        EngineArgs(
            model=str(model), num_threads=1, kv_cache_gib=0.1, max_model_len=1024, prefill_chunk_tokens=CHUNK,
            max_num_seqs=MAX_NUM_SEQS,
        )
    )  # fmt: skip
    shared: dict[str, Any] = {"redis": redis, "listen": "127.0.0.1:0"}

    async def start_worker(role: pb.Role, make_service: MakeService, **flags: str) -> Worker:
        process = await WorkerProcess.start(role, WorkerArgs(**shared, **flags), config, make_service)
        stack.push_async_callback(process.close)
        return Worker(process)

    decode = await start_worker(pb.Role.ROLE_DECODE, DecodeService, advertise=proxy.address)
    prefill = await start_worker(pb.Role.ROLE_PREFILL, PrefillService)
    router_args = RouterArgs(**shared, model=str(model))
    front = Router(router_args, PolicyConfig(learn_costs=False), load_texts(router_args), Untraced())
    await front.start()
    stack.push_async_callback(front.close)
    client = await stack.enter_async_context(AsyncClient(addresses[-1]))

    async def have_joined() -> bool:
        return sum(worker.num_sessions > 0 for worker in (await client.status()).workers) == 2

    await wait_for(have_joined, "both workers have joined", 20)
    return Cluster(prefill, decode, proxy, front, client)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(redis_server: Any, few_layers: Path) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        yield await start_cluster(redis_server.url, few_layers, stack)


@pytest.fixture(autouse=True)
def nothing_stays_held(cluster: Cluster) -> Iterator[None]:
    yield
    for worker in cluster.workers:
        worker.steps.hold_at = None
        worker.steps.may_go_on.set()


class Asked:
    """A request under way."""

    def __init__(self, cluster: Cluster, num_prompt_tokens: int = len(PROMPT)) -> None:
        number = next(_fresh_ids)
        self.id = f"asked-{number}"
        self.num_received = 0
        self._cluster = cluster
        self._task = asyncio.create_task(self._read([number, *PROMPT[1:num_prompt_tokens]]))

    async def _read(self, prompt: list[int]) -> None:
        sampling: Any = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}
        async for response in self._cluster.client.stream(prompt, request_id=self.id, **sampling):
            self.num_received += len(response.token_ids)

    async def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        async def holds() -> bool:
            assert not self._task.done(), "it has ended"
            return condition()

        await wait_for(holds, what, 20)

    async def leave(self) -> Computed:
        """Stop reading; wait until both workers have processed the cancel. Return the steps computed until then."""
        assert not self._task.done(), "it has ended"
        self._task.cancel()
        await asyncio.wait([self._task])

        async def is_taken_in() -> bool:
            return not any(worker.knows(self.id) for worker in self._cluster.workers)

        await wait_for(is_taken_in, "both workers have taken the cancel in")
        return self.computed

    @property
    def computed(self) -> Computed:
        return Computed(*(worker.steps.number_of(self.id) for worker in self._cluster.workers))


class Computed(NamedTuple):
    """How many steps each worker has begun for one request."""

    prefill: int
    decode: int


def reached(caplog: pytest.LogCaptureFixture, point: str) -> bool:
    return any(getattr(record, "point", "") == point for record in caplog.records)


def arm(patch: pytest.MonkeyPatch, point: str, held_s: float = HELD_S) -> None:
    """Hold the request that reaches this failpoint."""
    patch.setattr(failpoints, "_armed", failpoints.parse(f"{point}=delay:{held_s}"))


@pytest.mark.slow
async def test_while_it_waits_in_the_router(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.worker_pool.STAY_SHARE", 1e9)  # else the prefill worker could keep it, if we look late
    others = [Asked(cluster) for _ in range(MAX_NUM_SEQS)]
    for other in others:
        await other.wait_for(lambda o=other: o.num_received > 1, "it decodes")  # type: ignore[misc]
    asked = Asked(cluster)

    async def waits() -> bool:
        return (await cluster.client.status()).num_queued_requests == 1

    await wait_for(waits, "it waits in the router")
    await asked.leave()
    for other in others:
        await other.leave()
    await cluster.wait_until_at_rest()
    assert asked.computed == (0, 0)


async def test_while_it_waits_in_the_prefill_worker(cluster: Cluster) -> None:
    """It waits behind a short prompt. The decode worker has work too, else it would prefill the request itself."""
    decoding = Asked(cluster)
    await decoding.wait_for(lambda: decoding.num_received > 1, "it decodes")
    short = Asked(cluster, 20)
    cluster.prefill.steps.hold(short.id, 1)
    await short.wait_for(cluster.prefill.steps.is_holding.is_set, "the other prompt is computed")
    asked = Asked(cluster)
    await asked.wait_for(lambda: cluster.prefill.knows(asked.id), "it waits there")
    await asked.leave()
    cluster.prefill.steps.may_go_on.set()
    await short.wait_for(lambda: short.num_received > 1, "the other goes on")
    for other in (decoding, short):
        await other.leave()
    await cluster.wait_until_at_rest()
    assert asked.computed == (0, 0)


@pytest.mark.parametrize("point", ["decode.reserved", "prefill.opened"])
async def test_while_it_has_memory_and_nothing_else(
    cluster: Cluster, point: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    arm(monkeypatch, point, held_s=2)
    asked = Asked(cluster)
    await asked.wait_for(lambda: reached(caplog, point), "memory is reserved")
    await asked.leave()
    await cluster.wait_until_at_rest()
    for worker in cluster.workers:  # held tasks go on, and must find that the request is gone
        await asyncio.wait_for(worker.process.host.wait_for_tasks(), 10)
    await cluster.wait_until_at_rest()
    assert asked.computed == (0, 0)


async def test_while_its_prompt_is_computed(cluster: Cluster) -> None:
    """The cancel comes during the first of eight chunks."""
    asked = Asked(cluster)
    cluster.prefill.steps.hold(asked.id, 1)
    await asked.wait_for(cluster.prefill.steps.is_holding.is_set, "the first chunk is computed")
    assert await asked.leave() == (1, 0)
    cluster.prefill.steps.may_go_on.set()
    await cluster.wait_until_at_rest()
    assert asked.computed.prefill <= 2
    assert asked.computed.decode == 0


async def test_while_the_decode_worker_computes_its_prompt(cluster: Cluster) -> None:
    """The decode worker computes the prompt because the prefill worker is busy."""
    other = Asked(cluster)
    cluster.prefill.steps.hold(other.id, 1)
    await other.wait_for(cluster.prefill.steps.is_holding.is_set, "the prefill worker has to do")
    asked = Asked(cluster)
    cluster.decode.steps.hold(asked.id, 1)
    await asked.wait_for(cluster.decode.steps.is_holding.is_set, "the first chunk is computed")
    assert await asked.leave() == (0, 1)
    cluster.decode.steps.may_go_on.set()
    cluster.prefill.steps.may_go_on.set()
    await other.leave()
    await cluster.wait_until_at_rest()
    assert asked.computed.prefill == 0
    assert asked.computed.decode <= 2


async def test_while_its_kv_is_pushed(cluster: Cluster) -> None:
    """The network is so slow that the whole transfer would take many times longer than the test waits."""
    num_bytes_before = cluster.proxy.num_bytes_up
    cluster.proxy.drip(300_000)
    asked = Asked(cluster)
    try:
        await asked.wait_for(lambda: asked.num_received == 1, "the first token, and with it all of the prompt")
        before = await asked.leave()
        await cluster.wait_until_at_rest()
    finally:
        cluster.proxy.drip(0)
    assert cluster.proxy.num_bytes_up - num_bytes_before < 2_000_000
    assert asked.computed == before == (len(PROMPT) // CHUNK, 0)


@pytest.mark.parametrize("point", ["prefill.before_commit", "decode.before_commit"])
async def test_while_its_kv_is_there_and_not_taken_over(
    cluster: Cluster, point: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    arm(monkeypatch, point)
    asked = Asked(cluster)
    await asked.wait_for(lambda: reached(caplog, point), "all is pushed")
    before = await asked.leave()
    await cluster.wait_until_at_rest()
    assert asked.computed == before == (len(PROMPT) // CHUNK, 0)


@pytest.mark.parametrize("number", [1, 20])
async def test_while_it_decodes(
    cluster: Cluster, number: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first step the prefill worker does not know yet that the decode worker has taken over."""
    if number == 1:
        arm(monkeypatch, "decode.after_commit")
    asked = Asked(cluster)
    cluster.decode.steps.hold(asked.id, number)
    await asked.wait_for(cluster.decode.steps.is_holding.is_set, "it decodes")
    if number == 1:
        await asked.wait_for(lambda: reached(caplog, "decode.after_commit"), "nobody is told")
    before = await asked.leave()
    assert before.decode == number
    cluster.decode.steps.may_go_on.set()
    await cluster.wait_until_at_rest()
    assert asked.computed.decode <= number + 1
    assert asked.computed.prefill == before.prefill
