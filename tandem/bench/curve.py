"""One call of `tandem bench`, from its flags to its results: a run for each rate, one after the other.

open the server ──> warm up ──> rate 1 ──> rate 2 ──> … ──> Report
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

from tandem.bench.args import BenchArgs
from tandem.bench.backends import ServerGone, open_grpc, open_http
from tandem.bench.outcome import Outcome, Progress
from tandem.bench.report import Report, Run, rate_text
from tandem.bench.run import Backend, run_load
from tandem.bench.summary import summarise
from tandem.bench.traces import Record, TraceError, read_trace, trace_workload
from tandem.bench.workload import TokenSource, Workload, random_workload, warm_up_workload

Watch = Callable[[str, Progress], AbstractAsyncContextManager[object]]
"""From a run's name and progress to a context that shows the progress while the run is under way."""


def workloads_of(args: BenchArgs) -> list[Workload]:
    """A workload for each rate, with prompts of its own. Raises `TraceError`."""
    records: list[Record] = []
    if args.dataset_name == "trace":
        try:
            records = read_trace(
                Path(args.dataset_path),
                skip=args.trace_skip,
                limit=args.num_prompts,
                length_factor=args.trace_length_factor,
                max_total_len=args.trace_max_total_len,
            )
        except (TraceError, OSError) as error:
            raise TraceError(f"--dataset-path: {error}") from error
    return [_workload(args, records, replace(args.source, run=number), rate) for number, rate in enumerate(args.rates)]


def _workload(args: BenchArgs, records: list[Record], source: TokenSource, rate: float | None) -> Workload:
    if rate is None or records:
        workload = trace_workload(
            records,
            source,
            length_factor=args.trace_length_factor,
            time_factor=args.trace_time_factor,
            rate=rate,
            max_total_len=args.trace_max_total_len,
        )
        return replace(workload, about={**workload.about, "file": Path(args.dataset_path).name})
    return random_workload(args.shape, source, rate=rate, count=args.num_prompts, burstiness=args.burstiness)


async def run_bench(args: BenchArgs, *, watch: Watch, on_interrupt: Callable[[Report], None]) -> Report:
    """Run the whole bench. If it is cancelled, `on_interrupt` gets the report so far. Raises `ServerGone`, and
    `TraceError` as `workloads_of` does."""
    workloads = workloads_of(args)
    if args.backend == "grpc":
        opened = open_grpc(args.address, args.sending, args.vocab_size, api_key=args.api_key, tls=args.tls)
    else:
        opened = open_http(args.http_server, args.sending)
    async with opened as (backend, model):
        await _warm_up(args, workloads[0], backend, watch)
        runs = []
        for workload in workloads:
            progress = Progress(len(workload.requests))
            try:
                outcomes = await _watched(_name_of(workload), workload, backend, watch, progress)
            except asyncio.CancelledError:
                runs.append(_run_of(args, workload, sorted(progress.ended, key=lambda outcome: outcome.due_s)))
                on_interrupt(Report(args=args, model=model, runs=runs))
                raise
            runs.append(_run_of(args, workload, outcomes))
    return Report(args=args, model=model, runs=runs)


def _name_of(workload: Workload) -> str:
    """The name of a run in its progress."""
    rate = rate_text(workload.request_rate)
    return rate if math.isinf(workload.request_rate) else f"{rate}/s"


async def _warm_up(args: BenchArgs, workload: Workload, backend: Backend, watch: Watch) -> None:
    """Send the warm-up requests. Raises `ServerGone` if none is answered, since no other request would be."""
    warm_up = warm_up_workload(workload, args.source, args.num_warmups)
    if not warm_up.requests:
        return
    outcomes = await _watched("warm-up", warm_up, backend, watch, Progress(len(warm_up.requests)))
    if not any(outcome.is_answered for outcome in outcomes):
        first = outcomes[0]
        raise ServerGone(f"the server answered no warm-up request ({first.code}: {first.message})")


def _run_of(args: BenchArgs, workload: Workload, outcomes: list[Outcome]) -> Run:
    summary = summarise(
        workload.request_rate,
        outcomes,
        objectives=args.objectives,
        metrics=args.metrics,
        percentiles=args.percentiles,
    )
    num_unfinished = len(workload.requests) - len(outcomes)
    return Run(summary=summary, outcomes=outcomes, about=workload.about, num_unfinished=num_unfinished)


async def _watched(what: str, workload: Workload, backend: Backend, watch: Watch, progress: Progress) -> list[Outcome]:
    async with watch(what, progress):
        return await run_load(workload, backend, progress)
