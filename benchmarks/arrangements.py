"""Compares arrangements of workers under a load, simulated: how many workers should prefill, and how many decode?

    python benchmarks/arrangements.py                                  # 1 prefill and 1 decode worker, or 2 for both
    python benchmarks/arrangements.py --hardware h200 --arrangements 1p3d,2p2d,4d --rates 20,60,inf
    python benchmarks/arrangements.py --step-ms 12 --token-us 500      # a machine of your own

Runs minutes of load in seconds, on any machine: the router's choices are the real ones, the workers' steps are formulas
(`simulated_cluster.py`). All arrangements get the same requests: random prompts, Poisson arrivals. The goodput of an
arrangement is the highest of the tested rates at which 99 % of the requests were good. Real servers (`serve.py`) also
have what is left out here: the network, the router's own time, memory that runs out.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.flags import COUNT, Numbers, Positive, wrong_usage
from benchmarks.simulated_cluster import HARDWARE, Hardware, SimulatedCluster
from tandem.bench.summary import Summary, max_good_rate, parse_goodput, summarise
from tandem.bench.workload import RandomShape, TokenSource, Workload, random_workload
from tandem.tables import Table, print_table


class Arrangements(click.ParamType):
    """Comma-separated arrangements, as a dict from their names to numbers of prefill and decode workers."""

    name = "arrangements"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        found = {}
        for name in value.split(","):
            match = re.fullmatch(r"(?:(\d{1,3})p)?([1-9]\d{0,2})d", name)
            if match is None:
                self.fail(f"must be like 1p1d or 2d, is {name!r}", param, ctx)
            found[name] = int(match[1] or 0), int(match[2])
        return found


def simulated(
    num_prefill: int, num_decode: int, hardware: Hardware, workload: Workload, objectives: dict[str, float]
) -> tuple[Summary, list[str]]:
    """The summary of a workload's outcomes, and notes on the cluster: the share of the time that each worker stepped,
    how many requests were served in each mode, and how many moved while they ran."""
    cluster = SimulatedCluster(num_prefill, num_decode, hardware)
    summary = summarise(workload.request_rate, cluster.run(workload), objectives=objectives, percentiles=(50, 99))
    busy = [f"{100 * worker.busy_s / summary.duration:.0f}" for worker in cluster.workers.values()]
    modes = [f"{number} {mode}" for mode, number in cluster.modes.items()]
    if cluster.num_moves:
        modes.append(f"{cluster.num_moves} moved")
    return summary, [" ".join(busy), ", ".join(modes)]


def row_of(name: str, summary: Summary, notes: list[str]) -> tuple[str, ...]:
    values = summary.to_dict()

    def both(metric: str) -> str:
        p50, p99 = (values.get(f"p{percent}_{metric}_ms", 0.0) for percent in (50, 99))
        return f"{p50:,.0f} {p99:,.0f}"

    good = f"{100 * (summary.good_share or 0):.0f}"
    rate, done = f"{summary.request_rate:g}", f"{summary.request_throughput:.2f}"
    return name, rate, done, *map(both, ("ttft", "tpot", "itl", "e2el")), good, *notes


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--arrangements", default="1p1d,2d", type=Arrangements(), show_default=True, help="Comma-separated.")
@click.option("--hardware", default="zen4-core", type=click.Choice(list(HARDWARE)), show_default=True)
@click.option("--step-ms", type=Positive(), help="The least that a step takes: reading the weights. [of --hardware]")
@click.option("--token-us", type=Positive(), help="What a prompt's token takes beside others. [of --hardware]")
@click.option(
    "--rates", default="2,4,8,inf", type=Numbers(float), show_default=True, help="Requests per second, comma-separated."
)
@click.option("--requests", "num_requests", default=200, type=COUNT, show_default=True, help="Requests per rate.")
@click.option("--input-tokens", default=256, type=COUNT, show_default=True)
@click.option("--output-tokens", default=64, type=COUNT, show_default=True)
@click.option(
    "--range-ratio",
    default=0.0,
    type=click.FloatRange(0, 1),
    show_default=True,
    help="Lengths are drawn from 1 - r to 1 + r times these.",
)
@click.option(
    "--goodput", default="ttft:1000 tpot:50", show_default=True, help="Latency objectives of a good answer, in ms."
)
@click.option("--seed", default=1, type=click.IntRange(0), show_default=True, help="Of requests and arrivals.")
def main(
    arrangements: dict[str, tuple[int, int]],
    hardware: str,
    step_ms: float | None,
    token_us: float | None,
    rates: tuple[float, ...],
    num_requests: int,
    input_tokens: int,
    output_tokens: int,
    range_ratio: float,
    goodput: str,
    seed: int,
) -> None:
    """Compare arrangements of workers under a load, simulated."""
    with wrong_usage("--goodput"):
        objectives = parse_goodput(goodput)
    of = HARDWARE[hardware]
    of = replace(of, weights_s=step_ms / 1e3) if step_ms else of
    of = replace(of, token_s=token_us / 1e6) if token_us else of
    shape = RandomShape(input_len=input_tokens, output_len=output_tokens, range_ratio=range_ratio)
    rows: list[tuple[str, ...]] = []
    summaries: dict[str, list[Summary]] = {name: [] for name in arrangements}
    for run, rate in enumerate(rates):
        workload = random_workload(shape, TokenSource(seed=seed, run=run), rate=rate, count=num_requests)
        for name, (num_prefill, num_decode) in arrangements.items():
            summary, notes = simulated(num_prefill, num_decode, of, workload, objectives)
            summaries[name].append(summary)
            rows.append(row_of(name, summary, notes))
    headings = [f">{metric} p50 p99" for metric in ("TTFT", "TPOT", "gap", "answer")]
    print_table(Table(headers=("", ">rate", ">done/s", *headings, ">good %", ">busy %", "modes"), rows=rows))
    goodputs = {name: max_good_rate(each) for name, each in summaries.items()}
    known = {name: rate for name, rate in goodputs.items() if rate is not None}
    if known:
        click.echo(f"goodput: {json.dumps(known)}")
    results = {name: [each.to_dict() for each in found] for name, found in summaries.items()}
    click.echo(json.dumps({"benchmark": "arrangements", "hardware": hardware, "goodput": goodputs, "results": results}))


if __name__ == "__main__":
    main()
