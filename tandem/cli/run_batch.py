"""`tandem run-batch`: OpenAI's batch files, answered by a running server."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path
from textwrap import shorten
from typing import Any

import click

from tandem.batch.lines import BatchError
from tandem.batch.run import KEY_VARIABLE, BatchArgs, BatchProgress, ServerAway, answer_all
from tandem.cli.live import live_line
from tandem.cli.options import examples, json_option, no_nan
from tandem.interrupts import INTERRUPTED
from tandem.stderr import tell

FILE = click.Path(dir_okay=False, path_type=Path)


class _RunBatch(click.Command):
    """Tells vLLM's users, who give run-batch a model to load, where the model is named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from tandem.cli.up import up

            flag = error.option_name
            if all(flag not in (*parameter.opts, *parameter.secondary_opts) for parameter in up.params):
                raise
            raise click.UsageError(
                f"No such option {flag!r}: the requests go to a server that runs. Give {flag} to its `tandem up`, and "
                "here only --base-url",
                ctx,
            ) from error


@click.command(
    "run-batch",
    cls=_RunBatch,
    short_help="Answer a file of requests, in OpenAI's batch format.",
    epilog=examples(
        "tandem run-batch -i requests.jsonl -o answers.jsonl",
        "tandem run-batch -i requests.jsonl -o answers.jsonl --max-concurrency 256 --json",
    ),
)
@click.option("-i", "--input-file", type=FILE, required=True,
              help='JSON lines: {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {…}}. Also '
              "/v1/completions and /v1/responses.")  # fmt: skip
@click.option("-o", "--output-file", type=FILE, required=True,
              help="One JSON line for each request, in the order in which they end. Requests that already have a line "
              "in it are not sent again.")  # fmt: skip
@click.option(
    "--base-url", default="http://127.0.0.1:8000", show_default=True, help="URL of an OpenAI-compatible server."
)
@click.option(
    "--api-key", default="", envvar=KEY_VARIABLE, show_envvar=True, help="API key, if the server requires one."
)
@click.option("--ssl-ca-certs", default="", envvar="TANDEM_SSL_CA_CERTS", show_envvar=True,
              help="PEM file of the CA that signed the server's certificate.")  # fmt: skip
@click.option("--max-concurrency", type=click.IntRange(1, 4096), default=64, show_default=True,
              help="Maximum number of requests at once.")  # fmt: skip
@click.option("--priority", type=click.IntRange(-(2**31), 2**31 - 1), default=1, show_default=True,
              help="Priority of requests that set none; lower goes first. Those of other clients have 0, so by default "
              "these wait until no others do. 0: send no priority, for servers that do not support it.")  # fmt: skip
@click.option("--request-timeout-s", type=click.FloatRange(1, 86_400), default=3600.0, show_default=True,
              callback=no_nan, help="Timeout of each request, in seconds.")  # fmt: skip
@click.option("--retry-s", type=click.FloatRange(0, 86_400), default=600.0, show_default=True, callback=no_nan,
              help="How long to wait for a server that does not answer, in seconds. A server that is only full is "
              "waited for without limit.")  # fmt: skip
@json_option
def run_batch(is_json: bool, **options: Any) -> None:
    """Send the requests of a file to a server, and write each answer to the output file as soon as it is complete.

    All lines are checked before any request is sent. Requests that are refused for the moment (429, 502, 503) or whose
    connection breaks are retried; those that are refused for good get a line with the error. Running the same command
    again, whatever ended it, sends only the requests without a line; no request gets two lines.

    Exits with 0 if all requests that it sent are answered, with 1 if some were refused for good or the server was gone,
    and with 130 after Ctrl-C.
    """
    progress = BatchProgress()
    try:
        args = BatchArgs(**options)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    try:
        asyncio.run(_run(args, progress))
    except (BatchError, ServerAway, OSError) as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        tell("cancelled")
        if progress.num_left:
            tell(f"{progress.num_left} of {progress.num_requests} requests are left; run the same command to continue")
        sys.exit(INTERRUPTED)
    click.echo(json.dumps(summary_of(progress)) if is_json else described(progress, args))
    if progress.num_failed:
        is_one = progress.num_failed == 1
        what = "request failed; its line says why" if is_one else "requests failed; their lines say why. The last"
        raise click.ClickException(f"{progress.num_failed} {what}: {progress.last_failure}")


async def _run(args: BatchArgs, progress: BatchProgress) -> None:
    loop = asyncio.get_running_loop()
    start_s = loop.time()

    def line() -> str:  # called on the display's thread, which has no event loop
        return progress_line(progress, loop.time() - start_s)

    async with live_line(line):
        await answer_all(args, progress)


def progress_line(progress: BatchProgress, now_s: float) -> str:
    """The progress of a run in one line. `now_s`: seconds since its start."""
    ended = progress.num_before + progress.num_answered + progress.num_failed
    parts = [f"{ended}/{progress.num_requests} ended", f"{progress.num_running - progress.num_waiting} running"]
    if progress.num_waiting:
        why = shorten(progress.last_refusal, 60, placeholder="…")
        parts.append(f"{progress.num_waiting} waiting ({why})")
    if progress.num_failed:
        parts.append(f"{progress.num_failed} failed ({shorten(progress.last_failure, 60, placeholder='…')})")
    if now_s > 0:
        parts.append(f"{progress.num_output_tokens / now_s:.0f} tokens/s")
    return f"{now_s:.0f} s  " + ", ".join(parts)


def summary_of(progress: BatchProgress) -> dict[str, Any]:
    kept = asdict(progress)
    return {name: kept[name] for name in kept if name not in ("num_running", "num_waiting", "last_refusal")}


def described(progress: BatchProgress, args: BatchArgs) -> str:
    before = f", {progress.num_before} of them before" if progress.num_before else ""
    ended = progress.num_before + progress.num_answered + progress.num_failed
    return (
        f"{ended} of {progress.num_requests} requests have a line in {args.output_file}{before}; "
        f"{progress.num_prompt_tokens:,} tokens in, {progress.num_output_tokens:,} out, "
        f"{progress.num_retries} retries"
    )
