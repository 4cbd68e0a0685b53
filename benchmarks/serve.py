"""Measures latency and throughput of whole servers under load, in turn.

    python benchmarks/serve.py                                   # Tandem 1P+1D
    python benchmarks/serve.py --against vllm,llama --rates 2,4,inf   # and vllm serve and llama-server, one by one
    python benchmarks/serve.py --arrangements 1p1d,2d            # disaggregated against aggregated
    python benchmarks/serve.py --trace conversation_trace.jsonl --trace-length-factor 0.0625 --rates 0.5,1

The load is Poisson arrivals of random prompts (with a new seed for every rate, so that no prefix is cached) and greedy
answers of one length; or a trace, stretched to each rate, with the prefixes that its prompts share. Every server gets
the same requests at the same times. The same client (`tandem/bench/`) is used for all, on the same cores as the server.
A server's goodput is the highest of the tested rates at which 99 % of the requests were good: by default, with the
first token within a second, and the others at most 50 ms apart on average.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import click

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import targets
from benchmarks.flags import COUNT, Numbers, Positive, wrong_usage
from benchmarks.machine import machine
from benchmarks.report import save
from kv_transfer import TRANSPORTS
from tandem.bench.plots import plain_numbers
from tandem.bench.run import run_load
from tandem.bench.summary import GOOD_SHARE, Summary, max_good_rate, parse_goodput, summarise
from tandem.bench.traces import Record, read_trace, trace_workload
from tandem.bench.workload import RandomShape, TokenSource, Workload, random_workload, warm_up_workload
from tandem.cluster import ClusterError

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
"""Displayed fields of a summary -> their headings."""


def target_of(name: str) -> targets.Target:
    """ "vllm", "llama", or an arrangement of Tandem: "1p1d", "2d", "1p1d-ipc". Raises `click.UsageError`."""
    if name in targets.PEERS:
        return targets.PEERS[name].served
    match = re.fullmatch(rf"(?:(\d+)p)?(\d+)d(?:-({'|'.join(TRANSPORTS)}))?", name)
    if match is None:
        raise click.UsageError(
            f"no such server: {name!r}; there are {' and '.join(targets.PEERS)}, and 1p1d, 1p1d-ipc, 2d …"
        )
    with wrong_usage(name):
        return targets.tandem(num_prefill=int(match[1] or 0), num_decode=int(match[2]), transport=match[3] or "grpc")


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The load on every server, at every rate: a trace, or random prompts."""

    num_requests: int
    shape: RandomShape
    records: list[Record]
    """Records of the trace; empty: random prompts."""
    length_factor: float
    max_total_len: int

    def workload(self, rate: float, source: TokenSource) -> Workload:
        if not self.records:
            return random_workload(self.shape, source, rate=rate, count=self.num_requests)
        with wrong_usage("--trace"):
            workload = trace_workload(
                self.records, source, length_factor=self.length_factor, rate=rate, max_total_len=self.max_total_len
            )
        return replace(workload, request_rate=rate)


async def measure(
    name: str, workloads: list[Workload], source: TokenSource, objectives: dict[str, float]
) -> list[Summary]:
    """Start the server, warm it up, run the workloads one after the other, stop the server."""
    async with target_of(name)() as backend:
        await run_load(warm_up_workload(workloads[0], source, 4), backend)
        summaries = []
        for workload in workloads:
            outcomes = await run_load(workload, backend)
            summary = summarise(workload.request_rate, outcomes, objectives=objectives, percentiles=PERCENTILES)
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
@click.option(
    "--arrangements",
    default="1p1d",
    show_default=True,
    help="Arrangements of Tandem, comma-separated: 1p1d, 1p1d-ipc, 2d …",
)
@click.option("--against", default="", help="Peers to measure in turn, comma-separated: vllm, llama (see peers.py).")
@click.option(
    "--rates", default="2,4,inf", type=Numbers(float), show_default=True, help="Requests per second, comma-separated."
)
@click.option("--requests", "num_requests", default=64, type=COUNT, show_default=True, help="Requests per rate.")
@click.option("--input-tokens", default=256, type=COUNT, show_default=True)
@click.option("--output-tokens", default=64, type=COUNT, show_default=True)
@click.option("--trace", "trace_path", default="", help="Trace of real traffic to replay, instead of random prompts.")
@click.option(
    "--trace-length-factor",
    default=1.0,
    type=Positive(),
    show_default=True,
    help="Factor for all lengths of the trace.",
)
@click.option(
    "--trace-max-total-len",
    default=4000,
    type=COUNT,
    show_default=True,
    help="Leave out records that are longer than this after scaling, in tokens.",
)
@click.option(
    "--goodput", default="ttft:1000 tpot:50", show_default=True, help="Latency objectives of a good answer, in ms."
)
@click.option("--rounds", default=1, type=COUNT, show_default=True, help="Times to measure each server, in turn.")
@click.option(
    "--seed",
    default=1,
    type=click.IntRange(0),
    show_default=True,
    help="Seed of the first rate; each rate has its own.",
)
def main(
    arrangements: str,
    against: str,
    rates: tuple[float, ...],
    num_requests: int,
    input_tokens: int,
    output_tokens: int,
    trace_path: str,
    trace_length_factor: float,
    trace_max_total_len: int,
    goodput: str,
    rounds: int,
    seed: int,
) -> None:
    """Measure servers under load, in turn."""
    names = [*arrangements.split(","), *(name for name in against.split(",") if name)]
    for name in names:
        target_of(name)
        if name in targets.PEERS:
            with wrong_usage("--against"):
                targets.PEERS[name].files()  # before other servers are measured for an hour
    with wrong_usage("--goodput"):
        objectives = parse_goodput(goodput)
    records: list[Record] = []
    if trace_path:
        with wrong_usage("--trace"):
            records = read_trace(
                Path(trace_path),
                limit=num_requests,
                length_factor=trace_length_factor,
                max_total_len=trace_max_total_len,
            )
    traffic = Traffic(
        num_requests=num_requests,
        shape=RandomShape(input_len=input_tokens, output_len=output_tokens),
        records=records,
        length_factor=trace_length_factor,
        max_total_len=trace_max_total_len,
    )
    click.echo(f"{'server':<9} {'rate':>5} {'failed':>6} " + " ".join(f"{heading:>6}" for heading in COLUMNS.values()))
    results: dict[str, list[Summary]] = {name: [] for name in names}
    seeds = count(seed * 1000)
    for _ in range(rounds):
        sources = [TokenSource(seed=next(seeds)) for _ in rates]
        workloads = [traffic.workload(rate, source) for source, rate in zip(sources, rates, strict=True)]
        for name in names:
            try:
                results[name] += asyncio.run(measure(name, workloads, sources[0], objectives))
            except (ClusterError, RuntimeError) as error:
                raise click.ClickException(f"{name}: {error}") from error
    what = f"{input_tokens} in, {output_tokens} out"
    if trace_path:
        what = f"{Path(trace_path).stem}, lengths x {trace_length_factor:g}"
    summary: dict[str, Any] = {
        "benchmark": "serve",
        "traffic": what,
        "num_requests": num_requests,
        "objectives_ms": objectives,
        "goodput": {name: max_good_rate(summaries) for name, summaries in results.items()},
        "results": {name: [s.to_dict() for s in summaries] for name, summaries in results.items()},
    }
    known = {name: rate for name, rate in summary["goodput"].items() if rate is not None}
    if known:
        click.echo(f"goodput: {json.dumps(known)}")
    save("serve", summary | machine(), lambda figure: draw(figure, what, results, objectives))


def draw(figure: Any, what: str, results: dict[str, list[Summary]], objectives: dict[str, float]) -> None:
    """Plot over the rate: p99 of the time to the first token and of the gaps, and the share of good answers."""

    def p99(metric: str, summary: Summary) -> float:
        spread = summary.spreads.get(metric)
        return spread.percentiles[99] if spread else math.nan  # answers of one token have no gaps

    panels: list[tuple[str, Callable[[Summary], float], float | None]] = [
        ("p99 TTFT, ms", lambda s: p99("ttft", s), objectives.get("ttft")),
        ("p99 gap between tokens, ms", lambda s: p99("itl", s), None),
        ("good answers, %", lambda s: 100 * (s.good_share or 0.0), 100 * GOOD_SHARE),
    ]
    for position, (title, value, bound) in enumerate(panels, 1):
        axes = figure.add_subplot(1, len(panels), position)
        for name, summaries in results.items():
            points = sorted((s.request_rate, value(s)) for s in summaries if s.request_rate != float("inf"))
            label = name if name in targets.PEERS else f"tandem {name}"
            axes.plot([rate for rate, _ in points], [v for _, v in points], marker="o", markersize=3, label=label)
        if bound is not None:
            axes.axhline(bound, color="grey", linewidth=0.8, linestyle="--")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("requests/s")
        axes.grid(alpha=0.25)
        if "ms" in title:
            axes.set_yscale("log")  # differences between servers are large
            plain_numbers(axes)
        else:
            axes.set_ylim(0, 103)
    figure.axes[0].legend(fontsize=8)
    figure.suptitle(what, fontsize=11)


if __name__ == "__main__":
    main()
