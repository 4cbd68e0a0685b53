"""Latency and throughput of whole servers under load, in turn.

    python benchmarks/serve.py                                   # Tandem 1P+1D
    python benchmarks/serve.py --against vllm --rates 2,4,inf    # and vllm serve, one after the other
    python benchmarks/serve.py --arrangements 1p1d,2d            # disaggregated against aggregated

Poisson arrivals, random prompts (a new seed for every run: no prefix cache answers), greedy answers of one length. One
client for all (`benchmarks/load.py`), on the same cores as the server. A server's goodput is the highest rate of those
tried at which 99 % of the requests were good: first token within a second, the others at most 50 ms apart on average.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import click

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import targets
from benchmarks.load import Summary, Workload, run
from benchmarks.machine import machine
from benchmarks.report import save

MAX_TTFT_MS, MAX_TPOT_MS, GOOD_SHARE = 1000.0, 50.0, 0.99
COLUMNS = (
    "requests_per_s", "output_tokens_per_s", "p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p99_tpot_ms", "p50_itl_ms",
    "p99_itl_ms", "good_share",
)  # fmt: skip


def target_of(name: str) -> targets.Target:
    """ "vllm", or an arrangement of Tandem: "1p1d", "2d", "1p1d-nixl"."""
    if name == "vllm":
        return targets.vllm
    match = re.fullmatch(r"(?:(\d+)p)?(\d+)d(?:-(grpc|nixl))?", name)
    if match is None:
        raise click.UsageError(f"no such server: {name!r}; there are vllm, and 1p1d, 1p1d-nixl, 2d …")
    return targets.tandem(num_prefill=int(match[1] or 0), num_decode=int(match[2]), transport=match[3] or "grpc")


async def measure(name: str, workloads: list[Workload]) -> list[Summary]:
    """Start the server, warm it up, run the workloads one after the other, stop it."""
    async with target_of(name)() as send:
        first = workloads[0]
        warm_up = Workload(
            rate=float("inf"),
            num_requests=4,
            input_tokens=first.input_tokens,
            output_tokens=8,
            seed=first.seed + 10_000,
        )
        await run(warm_up, send, max_ttft_ms=MAX_TTFT_MS, max_tpot_ms=MAX_TPOT_MS)
        summaries = []
        for workload in workloads:
            summary = await run(workload, send, max_ttft_ms=MAX_TTFT_MS, max_tpot_ms=MAX_TPOT_MS)
            summaries.append(summary)
            click.echo(row_of(name, summary))
        return summaries


def row_of(name: str, summary: Summary) -> str:
    values = asdict(summary)
    return f"{name:<9} {summary.rate:>5g} {summary.failed:>6} " + " ".join(
        f"{values[column]:>{max(len(short(column)), 6)}.{2 if column == 'good_share' else 1}f}" for column in COLUMNS
    )


def short(column: str) -> str:
    return column.replace("output_tokens_per_s", "tok/s").replace("requests_per_s", "req/s").replace("_ms", "")


def goodput(summaries: list[Summary]) -> float:
    """The highest rate that was good; 0 if none was."""
    return max((s.rate for s in summaries if s.good_share >= GOOD_SHARE and s.rate != float("inf")), default=0.0)


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
    click.echo(f"{'server':<9} {'rate':>5} {'failed':>6} " + " ".join(f"{short(column):>6}" for column in COLUMNS))
    results: dict[str, list[Summary]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            workloads = [
                Workload(
                    rate=float(rate), num_requests=num_requests, input_tokens=input_tokens,
                    output_tokens=output_tokens, seed=next(seeds),
                )
                for rate in rates.split(",")
            ]  # fmt: skip
            results[name] += asyncio.run(measure(name, workloads))
    summary: dict[str, Any] = {
        "benchmark": "serve",
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "num_requests": num_requests,
        "goodput": {name: goodput(summaries) for name, summaries in results.items()},
        "results": {name: [asdict(s) for s in summaries] for name, summaries in results.items()},
    }
    click.echo(f"goodput: {json.dumps(summary['goodput'])}")
    save(
        "serve",
        json.loads(json.dumps(summary).replace("Infinity", '"inf"')) | machine(),
        lambda axes: plot(axes, results),
    )


def plot(axes: Any, results: dict[str, list[Summary]]) -> None:
    """p99 gap between tokens over the rate."""
    for name, summaries in results.items():
        points = sorted((s.rate, s.p99_itl_ms) for s in summaries if s.rate != float("inf"))
        axes.plot([rate for rate, _ in points], [itl for _, itl in points], marker="o", label=name)
    axes.axhline(MAX_TPOT_MS, color="grey", linewidth=0.5)
    axes.set_xlabel("requests/s")
    axes.set_ylabel("p99 gap between tokens, ms")
    axes.set_yscale("log")  # servers are not a few per cent apart
    axes.legend()


if __name__ == "__main__":
    main()
