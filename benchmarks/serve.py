"""Latency and throughput of whole servers under load, in turn.

    python benchmarks/serve.py                                   # Tandem 1P+1D
    python benchmarks/serve.py --against vllm --rates 2,4,inf    # and vllm serve, one after the other
    python benchmarks/serve.py --arrangements 1p1d,2d            # disaggregated against aggregated

Poisson arrivals, random prompts (a new seed for every run: no prefix cache answers), greedy answers of one length. One
client for all (`tandem/bench/`), on the same cores as the server. A server's goodput is the highest rate of those
tried at which 99 % of the requests were good: first token within a second, the others at most 50 ms apart on average.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from itertools import count
from pathlib import Path
from typing import Any

import click

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import targets
from benchmarks.machine import machine
from benchmarks.report import save
from tandem.bench.run import run_load
from tandem.bench.summary import Summary, max_good_rate, summarise
from tandem.bench.workload import RandomShape, TokenSource, Workload, random_workload, warm_up_workload

MAX_TPOT_MS = 50.0
OBJECTIVES = {"ttft": 1000.0, "tpot": MAX_TPOT_MS}
PERCENTILES = (50, 99)
COLUMNS = {
    "request_throughput": "req/s",
    "output_throughput": "tok/s",
    **{
        f"p{percent}_{metric}_ms": f"p{percent}_{metric}"
        for metric in ("ttft", "tpot", "itl")
        for percent in PERCENTILES
    },
    "good_share": "good_share",
}
"""What is shown of a summary -> its heading."""


def target_of(name: str) -> targets.Target:
    """ "vllm", or an arrangement of Tandem: "1p1d", "2d", "1p1d-nixl"."""
    if name == "vllm":
        return targets.vllm
    match = re.fullmatch(r"(?:(\d+)p)?(\d+)d(?:-(grpc|nixl))?", name)
    if match is None:
        raise click.UsageError(f"no such server: {name!r}; there are vllm, and 1p1d, 1p1d-nixl, 2d …")
    return targets.tandem(num_prefill=int(match[1] or 0), num_decode=int(match[2]), transport=match[3] or "grpc")


async def measure(name: str, workloads: list[Workload], source: TokenSource) -> list[Summary]:
    """Start the server, warm it up, run the workloads one after the other, stop it."""
    async with target_of(name)() as backend:
        await run_load(warm_up_workload(workloads[0], source, 4), backend)
        summaries = []
        for workload in workloads:
            outcomes = await run_load(workload, backend)
            summary = summarise(workload.request_rate, outcomes, objectives=OBJECTIVES, percentiles=PERCENTILES)
            if not summary.completed:
                raise click.ClickException(f"{name} answered no request: {outcomes[0].code} {outcomes[0].message}")
            summaries.append(summary)
            click.echo(row_of(name, summary))
        return summaries


def row_of(name: str, summary: Summary) -> str:
    values = summary.to_dict()
    num_failed = summary.refused + summary.failed
    return f"{name:<9} {summary.request_rate:>5g} {num_failed:>6} " + " ".join(
        f"{values.get(column, 0.0):>{max(len(heading), 6)}.{2 if column == 'good_share' else 1}f}"
        for column, heading in COLUMNS.items()
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--arrangements", default="1p1d", show_default=True, help="Of Tandem, with commas: 1p1d, 1p1d-nixl, 2d …")
@click.option("--against", default="", help="vllm: measured in turn (see peers.py).")
@click.option("--rates", default="2,4,inf", show_default=True, help="Requests per second, with commas.")
@click.option("--requests", "num_requests", default=64, show_default=True, help="Per rate.")
@click.option("--input-tokens", default=256, show_default=True)
@click.option("--output-tokens", default=64, show_default=True)
@click.option("--rounds", default=1, show_default=True, help="How often each server is measured, in turn.")
@click.option("--seed", default=1, show_default=True, help="Of the first run; each run has its own.")
def main(
    arrangements: str,
    against: str,
    rates: str,
    num_requests: int,
    input_tokens: int,
    output_tokens: int,
    rounds: int,
    seed: int,
) -> None:
    """Measure servers under load, in turn."""
    names = [*arrangements.split(","), *(name for name in against.split(",") if name)]
    for name in names:
        target_of(name)
    seeds = count(seed * 1000)
    shape = RandomShape(input_len=input_tokens, output_len=output_tokens)
    click.echo(f"{'server':<9} {'rate':>5} {'failed':>6} " + " ".join(f"{heading:>6}" for heading in COLUMNS.values()))
    results: dict[str, list[Summary]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            sources = [TokenSource(seed=next(seeds)) for _ in rates.split(",")]
            workloads = [
                random_workload(shape, source, rate=float(rate), count=num_requests)
                for source, rate in zip(sources, rates.split(","), strict=True)
            ]
            results[name] += asyncio.run(measure(name, workloads, sources[0]))
    summary: dict[str, Any] = {
        "benchmark": "serve",
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "num_requests": num_requests,
        "goodput": {name: max_good_rate(summaries) for name, summaries in results.items()},
        "results": {name: [s.to_dict() for s in summaries] for name, summaries in results.items()},
    }
    click.echo(f"goodput: {json.dumps(summary['goodput'])}")
    save(
        "serve",
        summary | machine(),
        lambda axes: plot(axes, results),
    )


def plot(axes: Any, results: dict[str, list[Summary]]) -> None:
    """p99 gap between tokens over the rate."""
    for name, summaries in results.items():
        points = sorted(
            (s.request_rate, s.spreads["itl"].percentiles[99])
            for s in summaries
            if s.request_rate != float("inf") and "itl" in s.spreads
        )
        axes.plot([rate for rate, _ in points], [itl for _, itl in points], marker="o", label=name)
    axes.axhline(MAX_TPOT_MS, color="grey", linewidth=0.5)
    axes.set_xlabel("requests/s")
    axes.set_ylabel("p99 gap between tokens, ms")
    axes.set_yscale("log")  # servers are not a few per cent apart
    axes.legend()


if __name__ == "__main__":
    main()
