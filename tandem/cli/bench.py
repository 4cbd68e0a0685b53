"""`tandem bench`: puts load on a server, and reports the results."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from rpc.entrypoint import build, options_of
from rpc.keys import first_key
from tandem.bench.args import HTTP_KEY_VARIABLE, ROUTER_KEY_VARIABLE, BenchArgs
from tandem.bench.outcome import Progress
from tandem.cli.live import live_line
from tandem.cli.options import examples, json_option
from tandem.cli.stdout import give_up_stdout
from tandem.interrupts import INTERRUPTED
from tandem.stderr import tell

if TYPE_CHECKING:
    from tandem.bench.report import Report


@click.command(
    short_help="Put load on a server and measure its answers.",
    epilog=examples(
        "tandem bench --request-rate 1,2,4 --goodput 'ttft:1000 tpot:50' --save-result",
        "tandem bench --backend openai --base-url http://127.0.0.1:8000 --request-rate 2",
        "tandem bench --dataset-name trace --dataset-path conversation_trace.jsonl --trace-length-factor 0.05 "
        "--request-rate 2",
    ),
)
@options_of(BenchArgs, "TANDEM_BENCH")
@json_option
@click.pass_context
def bench(context: click.Context, /, is_json: bool, **flags: Any) -> None:
    """Send requests at random times, or at the times of a trace, whether or not the server keeps up, and measure the
    answers.

    Every answer's stream is checked. Latencies count from the time a request was due. Refusals (429, 503,
    RESOURCE_EXHAUSTED) are counted apart from failures. Exits with 1 if no request was answered, or if an answer
    failed the check. Ctrl-C or SIGTERM stops it with a report of the requests that had ended, and exit
    code 130.
    """
    if context.get_parameter_source("api_key") is ParameterSource.ENVIRONMENT:
        flags["api_key"] = _key_in_environment(flags["backend"])
    args = build(BenchArgs, flags)
    from tandem.bench.backends import ServerGone
    from tandem.bench.curve import run_bench
    from tandem.bench.traces import TraceError

    if args.save_result:  # check this before measuring for an hour
        try:
            Path(args.result_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise click.ClickException(f"--result-dir: {error}") from error
    interrupted: list[Report] = []
    try:
        report = asyncio.run(run_bench(args, watch=watch, on_interrupt=interrupted.append))
    except (ServerGone, TraceError, OSError) as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        tell("cancelled")
        if interrupted and any(run.outcomes for run in interrupted[0].runs):
            try:
                _hand_over(interrupted[0], is_json)
            except BrokenPipeError:  # the reader of the pipe got the same Ctrl-C
                give_up_stdout()
            tell(interrupted[0].problem)
        sys.exit(INTERRUPTED)
    _hand_over(report, is_json)
    if report.problem:
        raise click.ClickException(report.problem)


def _key_in_environment(backend: str) -> str:
    if backend != "grpc":
        return os.environ.get(HTTP_KEY_VARIABLE, "")
    try:
        return first_key(ROUTER_KEY_VARIABLE, os.environ.get(ROUTER_KEY_VARIABLE, ""))
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _hand_over(report: Report, is_json: bool) -> None:
    """Save the report to files, if wanted, and then print it to stdout, which may have no reader any more."""
    from tandem.bench.report import table, to_dict
    from tandem.tables import print_table

    if report.args.save_result:
        _keep(report)
    if is_json:
        click.echo(json.dumps(to_dict(report)))
    else:
        print_table(table(report.runs))


def _keep(report: Report) -> None:
    from tandem.bench.report import NO_PLOTS
    from tandem.bench.save import save

    try:
        paths = save(report)
    except OSError as error:
        raise click.ClickException(f"--result-dir: {error}") from error
    tell(f"kept in {paths[0].parent}: {', '.join(path.name for path in paths)}")
    if not any(path.suffix == ".svg" for path in paths):
        tell(NO_PLOTS)


def progress_line(what: str, progress: Progress, now_s: float) -> str:
    """The progress of a run in one line. `now_s`: seconds since its start."""
    parts = [
        f"{progress.num_sent}/{progress.num_requests} sent",
        f"{progress.num_running} running",
        f"{progress.num_answered} answered",
    ]
    if progress.num_refused:
        parts.append(f"{progress.num_refused} refused")
    if progress.num_failed:
        parts.append(f"{progress.num_failed} failed ({shorten(progress.last_error, 60, placeholder='…')})")
    if now_s > 0:
        parts.append(f"{progress.num_tokens / now_s:.0f} tokens/s")
    return f"{what}  {now_s:.0f} s  " + ", ".join(parts)


@asynccontextmanager
async def watch(what: str, progress: Progress) -> AsyncIterator[None]:
    """Show a line that follows `progress`."""
    loop = asyncio.get_running_loop()
    start_s = loop.time()

    def line() -> str:
        return progress_line(what, progress, loop.time() - start_s)

    async with live_line(line):
        yield
