"""Measures the CPU time that a router and Redis spend on a request as a fleet grows to 10, 100 and more workers.

    python benchmarks/fleet.py                          # 8, 64 and 512 workers
    python benchmarks/fleet.py --workers 1000 --rate 40

Router, Redis, registry, sessions, prefix sets and clients are the real ones. The workers are not, because a machine can
run only few: these implement the workers' protocol, but compute nothing and send token 0 after each `--step-ms`. All of
them have the beginning of every prompt in their caches, as with a shared system prompt; the rest of each prompt is
unique. Measures CPU time as the kernel accounts it, not wall time. The workers and the clients run on the same cores
and are not counted.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import grpc

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.flags import COUNT, Numbers, Positive, wrong_usage
from benchmarks.machine import machine
from benchmarks.streams import cpu_seconds, tiny_model
from engine.engine_args import EngineArgs
from prefix_hash import block_hashes
from protos import tandem_inference_pb2 as inference_pb
from protos import tandem_worker_pb2 as pb
from protos.tandem_worker_pb2_grpc import add_DecodeServicer_to_server
from registry.prefix_index import PrefixReporter
from registry.workers import WorkerDirectory, WorkerRegistration
from rpc.server import Server
from rpc.session import Command, EventOutbox, check_hello, run_session
from tandem.client import AsyncClient
from tandem.cluster import Cluster
from tandem.cluster_args import ClusterArgs
from tandem.tables import Table, print_table

NUM_BLOCKS = 4096
OWN_TOKENS = 64
IDLE_S = 5.0
SLOWER = 3


class QuickWorker:
    """A decode worker that computes nothing. Its record is a copy of a real worker's, under another id."""

    def __init__(self, model: pb.WorkerRecord, worker_id: str, step_s: float) -> None:
        self.record = pb.WorkerRecord()
        self.record.CopyFrom(model)
        self.record.worker_id = self.record.incarnation = worker_id
        self.record.load.Clear()
        self._step_s = step_s
        self.has_session = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()
        self._server = Server("127.0.0.1:0")
        self._server.add(add_DecodeServicer_to_server, self, "tandem.v1.Decode")

    @asynccontextmanager
    async def serving(self, redis_url: str, namespace: str, prefix: list[bytes]) -> AsyncIterator[None]:
        """Serve and stay in the registry, with the blocks of `prefix` in the cache."""

        async def snapshot() -> list[bytes]:
            return prefix

        self.record.address = await self._server.start()
        names = {"namespace": namespace, "worker_id": self.record.worker_id, "incarnation": self.record.incarnation}
        registration = WorkerRegistration(redis_url, **names, record=self._record)
        reporter = PrefixReporter(redis_url, **names, snapshot=snapshot)
        registration.start()
        reporter.start()
        try:
            yield
        finally:
            await registration.close()
            await reporter.close()
            await self._server.drain(0)

    async def Session(self, commands: AsyncIterator[Command], context: grpc.aio.ServicerContext) -> None:  # noqa: N802
        check_hello(await anext(commands), incarnation=self.record.incarnation)
        outbox = EventOutbox(self._load)
        outbox.post()
        self.has_session.set()

        def handle(command: Command) -> None:
            if command.WhichOneof("command") == "generate":
                task = asyncio.create_task(self._answer(command.generate, outbox))
                self._running.add(task)
                task.add_done_callback(self._running.discard)

        await run_session(commands, context, outbox, handle, lease_ms=self.record.lease_ms)

    async def _answer(self, request: pb.EngineRequest, outbox: EventOutbox) -> None:
        last = request.sampling_params.max_tokens - 1
        for index in range(last + 1):
            await asyncio.sleep(self._step_s)
            tokens = pb.Tokens(index=index, token_ids=[0])
            if index == last:
                tokens.finish_reason = inference_pb.FINISH_REASON_LENGTH
            outbox.post([pb.WorkerEvent(request_id=request.request_id, attempt=request.attempt, tokens=tokens)])

    def _record(self) -> pb.WorkerRecord:
        self.record.load.CopyFrom(self._load())
        return self.record

    def _load(self) -> pb.WorkerLoad:
        num_used = 16 * len(self._running)
        blocks = pb.BlockLedger(num_blocks=NUM_BLOCKS, num_free=NUM_BLOCKS - num_used, num_sequence=num_used)
        return pb.WorkerLoad(num_running=len(self._running), blocks=blocks)


class Fleet:
    """A running cluster of one real worker and further simulated ones."""

    def __init__(self, cluster: Cluster, load: Load) -> None:
        self._cluster = cluster
        self._load = load
        self._shared = [1000 + i % 1000 for i in range(load.shared_tokens)]
        self._random = random.Random(0)

    async def measure(self, num_workers: int) -> dict[str, Any]:
        url, namespace = self._cluster.redis_url, self._cluster.args.namespace
        (model,) = await records_of(url, namespace, 1)
        prefix = block_hashes(self._shared, model.model.block_size, model.prefix_key)
        async with AsyncExitStack() as stack:
            step_s = self._load.step_ms / 1000
            steps_s = [step_s * (SLOWER if i < self._load.slow else 1) for i in range(num_workers - 1)]
            workers = [QuickWorker(model, f"quick-{i}", each_s) for i, each_s in enumerate(steps_s)]
            for worker in workers:
                await stack.enter_async_context(worker.serving(url, namespace, prefix))
            async with AsyncClient(self._cluster.router_address) as client, asyncio.timeout(120):
                for worker in workers:
                    await worker.has_session.wait()
                idle = await self._spent(asyncio.sleep(IDLE_S))
                ttfts_ms: list[float] = []
                tpots_ms: list[float] = []
                busy = await self._spent(self._ask(client, ttfts_ms, tpots_ms))
        ttfts_ms.sort()
        return {
            "workers": num_workers,
            "idle_percent": {name: round(100 * each / IDLE_S, 1) for name, each in idle.items()},
            "ms_per_request": {
                name: round(1e3 * (busy[name] - idle[name] * self._load.seconds / IDLE_S) / len(ttfts_ms), 2)
                for name in busy
            },
            "tpot_mean_ms": round(sum(tpots_ms) / len(tpots_ms), 1),
            "ttft_p50_ms": round(ttfts_ms[len(ttfts_ms) // 2], 1),
            "ttft_p99_ms": round(ttfts_ms[len(ttfts_ms) * 99 // 100], 1),
        }

    async def _spent(self, work: Any) -> dict[str, float]:
        """CPU seconds that router and Redis spend while `work` runs."""
        pids = {name: pid for name, pid in self._cluster.pids.items() if name in ("router", "redis")}
        before = {name: cpu_seconds(pid) for name, pid in pids.items()}
        await work
        return {name: cpu_seconds(pid) - before[name] for name, pid in pids.items()}

    async def _ask(self, client: AsyncClient, ttfts_ms: list[float], tpots_ms: list[float]) -> None:
        async def one() -> None:
            prompt = self._shared + [self._random.randrange(2000, 4000) for _ in range(OWN_TOKENS)]
            told_s = [time.monotonic()]
            async for _ in client.stream(prompt, max_tokens=self._load.tokens, temperature=0.0, ignore_eos=True):
                told_s.append(time.monotonic())
            ttfts_ms.append(1e3 * (told_s[1] - told_s[0]))
            tpots_ms.append(1e3 * (told_s[-1] - told_s[1]) / (self._load.tokens - 1))

        async with asyncio.TaskGroup() as group:
            end_s = time.monotonic() + self._load.seconds
            while time.monotonic() < end_s:
                group.create_task(one())
                await asyncio.sleep(self._random.expovariate(self._load.rate))


async def records_of(redis_url: str, namespace: str, num_workers: int) -> list[pb.WorkerRecord]:
    """The registry's records, once there are `num_workers`."""
    directory = WorkerDirectory(redis_url, namespace=namespace)
    await directory.start()
    try:
        async with asyncio.timeout(60):
            while len(directory.records) < num_workers:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.2)
        return directory.records
    finally:
        await directory.close()


@dataclass(frozen=True, kw_only=True)
class Load:
    """The load on a fleet."""

    shared_tokens: int
    tokens: int
    rate: float
    seconds: float
    step_ms: float
    slow: int


async def measure(sizes: tuple[int, ...], load: Load) -> list[dict[str, Any]]:
    found = []
    for num_workers in sizes:
        with tempfile.TemporaryDirectory() as folder:
            engine = EngineArgs(
                model=str(tiny_model(Path(folder))), load_format="dummy", num_kv_blocks=512, num_threads=1
            )
            args = ClusterArgs(
                engine=engine, is_aggregated=True, listen="127.0.0.1:0", http_port=0, log_level="warning"
            )
            async with Cluster(args, on_line=lambda *_: None, on_event=lambda _: None) as cluster:
                found.append(await Fleet(cluster, load).measure(num_workers))
                print(json.dumps(found[-1]), file=sys.stderr)
    return found


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--workers", type=Numbers(), default="8,64,512", show_default=True, help="Numbers of workers, comma-separated."
)
@click.option(
    "--slow",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Number of slow workers, which take three times as long.",
)
@click.option(
    "--shared-tokens",
    type=COUNT,
    default=1024,
    show_default=True,
    help="Length of the prefix that all prompts share, in tokens.",
)
@click.option(
    "--tokens", type=click.IntRange(2), default=16, show_default=True, help="Length of each answer, in tokens."
)
@click.option("--rate", type=Positive(), default=20.0, show_default=True, help="Requests per second.")
@click.option(
    "--seconds", type=Positive(), default=15.0, show_default=True, help="Duration for each number of workers."
)
@click.option("--step-ms", type=Positive(), default=20.0, show_default=True, help="Step time of a simulated worker.")
@click.option("--json", "only_json", is_flag=True, help="Print only the JSON line.")
def main(workers: tuple[int, ...], only_json: bool, **asked: Any) -> None:
    """Measure the CPU time that a request costs the router and Redis, with many workers."""
    with wrong_usage():
        found = asyncio.run(measure(workers, Load(**asked)))
    if not only_json:
        headers = (">workers", ">router idle", ">redis idle", ">router, ms/request", ">redis, ms/request")
        rows = [
            (
                str(each["workers"]),
                *(f"{each['idle_percent'][name]} %" for name in ("router", "redis")),
                *(str(each["ms_per_request"][name]) for name in ("router", "redis")),
                f"{each['ttft_p50_ms']} / {each['ttft_p99_ms']}",
                str(each["tpot_mean_ms"]),
            )
            for each in found
        ]
        print_table(Table(headers=(*headers, ">TTFT p50/p99, ms", ">TPOT, ms"), rows=rows))
    print(json.dumps({"benchmark": "fleet", **asked, "found": found, **machine()}))


if __name__ == "__main__":
    main()
