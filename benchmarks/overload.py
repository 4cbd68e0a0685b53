"""Sends many times more requests than can be served, each with a deadline, and measures how many are answered in time,
and how the others are refused.

    python benchmarks/overload.py                               # 10 times the sustainable load for 30 s
    python benchmarks/overload.py --seconds 10 --prefill 0 --decode 2

First, enough clients to keep the workers busy send one request after the other: this gives the best goodput (answers
within their deadline, per second). Then an open stream of requests comes at many times that rate. Then the first phase
is repeated. The memory of all processes is compared before and after. All prompts are random and have one length, and
all answers another; the client runs on the same cores.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.flags import COUNT, Positive, wrong_usage
from benchmarks.machine import machine
from engine.engine_args import EngineArgs
from rpc.errors import DeadlinePassed, Overloaded, TandemError
from tandem.bench.summary import percentile
from tandem.client import AsyncClient
from tandem.cluster import Cluster, ClusterError
from tandem.cluster_args import ClusterArgs
from tandem.tables import Table, print_table

ANSWERED, REFUSED, TIMED_OUT = "answered", "refused", "timed out"
NUM_CLIENTS = 8
MAX_MODEL_LEN = 4096
RECOVERY_S = 3.0
"""Wait between the overload, whose last answer has come, and the last phase."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    prompt_tokens: int
    output_tokens: int
    deadline_s: float


@dataclass(slots=True)
class Phase:
    """The outcomes of the requests of one phase."""

    seconds: float
    num_by_outcome: Counter[str] = field(default_factory=Counter)
    refusal_ms: list[float] = field(default_factory=list)
    retry_after_s: list[float] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        return self.num_by_outcome[ANSWERED] / self.seconds

    def to_dict(self) -> dict[str, Any]:
        return {
            "requests": sum(self.num_by_outcome.values()),
            **dict.fromkeys((ANSWERED, REFUSED, TIMED_OUT), 0),
            **self.num_by_outcome,
            "goodput_per_s": round(self.goodput, 2),
            "p50_refusal_ms": round(percentile(self.refusal_ms, 50), 1) if self.refusal_ms else None,
            "p99_refusal_ms": round(percentile(self.refusal_ms, 99), 1) if self.refusal_ms else None,
            "p50_retry_after_s": round(percentile(self.retry_after_s, 50), 2) if self.retry_after_s else None,
        }


class Load:
    def __init__(self, client: AsyncClient, shape: Shape, seed: int) -> None:
        self._client = client
        self._shape = shape
        self._dice = random.Random(seed)

    async def closed(self, num_clients: int, seconds: float) -> Phase:
        """Run `num_clients` clients, each of which sends one request after the other."""
        phase, end_s = Phase(seconds), time.monotonic() + seconds

        async def ask_on() -> None:
            while time.monotonic() < end_s:
                if await self._ask(phase) == REFUSED:  # a well-behaved client waits as told
                    await asyncio.sleep(min(phase.retry_after_s[-1], 1.0))

        start_s = time.monotonic()
        await asyncio.gather(*(ask_on() for _ in range(num_clients)))
        phase.seconds = time.monotonic() - start_s
        return phase

    async def open(self, rate: float, seconds: float) -> Phase:
        """Send `rate` requests per second on average, at random moments, regardless of their outcomes."""
        phase, at_s = Phase(seconds), time.monotonic()
        start_s, end_s = at_s, at_s + seconds
        async with asyncio.TaskGroup() as group:
            while at_s < end_s:
                await asyncio.sleep(max(0.0, at_s - time.monotonic()))
                group.create_task(self._ask(phase))
                at_s += self._dice.expovariate(rate)
        phase.seconds = time.monotonic() - start_s  # with the last answers, which are counted, too
        return phase

    async def _ask(self, phase: Phase) -> str:
        """Send one request and return its outcome."""
        shape, start_s = self._shape, time.monotonic()
        prompt = [self._dice.randrange(100, 40_000) for _ in range(shape.prompt_tokens)]
        try:
            await self._client.generate(
                prompt, max_tokens=shape.output_tokens, temperature=0.0, ignore_eos=True, timeout_s=shape.deadline_s
            )
            outcome = ANSWERED
        except Overloaded as error:
            outcome = REFUSED
            phase.refusal_ms.append(1e3 * (time.monotonic() - start_s))
            phase.retry_after_s.append(error.retry_after_s or 0.0)
        except DeadlinePassed:
            outcome = TIMED_OUT
        except TandemError as error:
            outcome = type(error).__name__
        phase.num_by_outcome[outcome] += 1
        return outcome


def memory_mib(cluster: Cluster) -> dict[str, float]:
    """Resident memory of every process. Linux only."""
    sizes = {}
    for name, pid in cluster.pids.items():
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        sizes[name] = round(pages * 4096 / 2**20, 1)
    return sizes


async def measure(
    args: ClusterArgs, shape: Shape, *, factor: float, seconds: float, baseline_s: float
) -> dict[str, Any]:
    async with (
        Cluster(args, on_line=lambda *_: None, on_event=lambda _: None) as cluster,
        AsyncClient(cluster.router_address) as client,
    ):
        load = Load(client, shape, seed=int(time.time()))
        await load.closed(2, 2.0)  # warm up
        before = await load.closed(NUM_CLIENTS, baseline_s)
        if not before.goodput:
            raise click.ClickException(f"nothing was answered in {baseline_s:g} s: --baseline-seconds must be longer")
        memory_before = memory_mib(cluster)
        during = await load.open(factor * before.goodput, seconds)
        await asyncio.sleep(RECOVERY_S)
        after = await load.closed(NUM_CLIENTS, baseline_s)
        memory_after = memory_mib(cluster)
        audit = await client.audit()
    at_rest = all(w.blocks.num_free + w.blocks.num_cached == w.blocks.num_blocks for w in audit.workers)
    return {
        "before": before.to_dict(),
        "overload": during.to_dict(),
        "after": after.to_dict(),
        "memory_growth_mib": {name: round(memory_after[name] - memory_before[name], 1) for name in memory_before},
        "at_rest": at_rest,
    }


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--seconds", default=30.0, type=Positive(), show_default=True, help="Duration of the overload.")
@click.option(
    "--baseline-seconds",
    default=12.0,
    type=Positive(),
    show_default=True,
    help="Duration of the normal load before it, and again after it.",
)
@click.option(
    "--factor",
    default=10.0,
    type=Positive(),
    show_default=True,
    help="Load during overload, as a multiple of the rate that can be served.",
)
@click.option("--prompt-tokens", default=512, type=COUNT, show_default=True)
@click.option("--output-tokens", default=32, type=COUNT, show_default=True)
@click.option("--deadline-s", default=6.0, type=Positive(), show_default=True)
@click.option(
    "--prefill",
    default=1,
    type=click.IntRange(0),
    show_default=True,
    help="Prefill workers. 0: decode workers prefill, too.",
)
@click.option("--decode", default=1, type=COUNT, show_default=True, help="Decode workers.")
@click.option("--json", "only_json", is_flag=True, help="Print only the JSON line.")
def main(
    seconds: float,
    baseline_seconds: float,
    factor: float,
    prompt_tokens: int,
    output_tokens: int,
    deadline_s: float,
    prefill: int,
    decode: int,
    only_json: bool,
) -> None:
    """Measure goodput under a multiple of the load that can be served."""
    if prompt_tokens + output_tokens > MAX_MODEL_LEN:
        raise click.UsageError(f"--prompt-tokens and --output-tokens must be at most {MAX_MODEL_LEN} together")
    with wrong_usage():
        args = ClusterArgs(
            engine=EngineArgs(max_model_len=MAX_MODEL_LEN, kv_cache_gib=0.5),
            num_prefill=prefill or 1,
            num_decode=decode,
            is_aggregated=prefill == 0,
            listen="127.0.0.1:0",
            log_level="warning",
        )
    shape = Shape(prompt_tokens=prompt_tokens, output_tokens=output_tokens, deadline_s=deadline_s)
    try:
        summary = asyncio.run(measure(args, shape, factor=factor, seconds=seconds, baseline_s=baseline_seconds))
    except ClusterError as error:
        raise click.ClickException(str(error)) from error
    if not only_json:
        columns = ("requests", ANSWERED, REFUSED, TIMED_OUT, "goodput_per_s", "p50_refusal_ms", "p99_refusal_ms")
        rows = [
            (phase, *(str(summary[phase].get(column) or 0) for column in columns))
            for phase in ("before", "overload", "after")
        ]
        print_table(Table(headers=("phase", *(f">{column}" for column in columns)), rows=rows))
    print(json.dumps({"benchmark": "overload", "factor": factor, "shape": vars(shape), **summary, **machine()}))


if __name__ == "__main__":
    main()
