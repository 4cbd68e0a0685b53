"""`tandem profile`: shows the time of each operation in a worker's steps."""

from __future__ import annotations

import json
from pathlib import Path

import click

from rpc.tls import ClientTLS
from tandem.answer import message_to_dict
from tandem.cli.errors import readable_errors
from tandem.cli.options import examples, json_option, key_option, no_nan, router_option, tls_option
from tandem.client import Client
from tandem.tables import print_table, profile_line, profile_table


def _in_a_folder(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    if path is not None and not path.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no folder {path.parent}")
    return path


@click.command(
    short_help="Show where the time of a worker's steps goes.",
    epilog=examples("tandem profile decode-1", "tandem profile prefill-1 --steps 1 --trace trace.json.gz"),
)
@click.argument("worker_id")
@click.option("--steps", type=click.IntRange(1, 16), default=5, show_default=True, help="Number of steps to profile.")
@click.option("--top", type=click.IntRange(1, 200), default=15, show_default=True, help="Number of operations to show.")
@click.option(
    "--trace",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    callback=_in_a_folder,
    help="Write a gzipped trace to this file, for chrome://tracing or ui.perfetto.dev.",
)
@click.option(
    "--timeout-s",
    type=click.FloatRange(0.001, 600),
    callback=no_nan,
    default=30.0,
    show_default=True,
    help="Stop after this many seconds, with the steps profiled so far.",
)
@json_option
@router_option
@key_option
@tls_option
def profile(
    worker_id: str,
    steps: int,
    top: int,
    trace: Path | None,
    timeout_s: float,
    is_json: bool,
    address: str,
    api_key: str,
    tls: ClientTLS | None,
) -> None:
    """Profile the next steps of the worker WORKER_ID (`tandem status` shows it) and show the time of each operation.

    A worker takes steps only for requests: send some meanwhile. Steps are slower while they are profiled, and pause for
    up to half a second at the end.
    """
    with readable_errors(address), Client(address, api_key=api_key, tls=tls) as client:
        seen = client.profile(worker_id, num_steps=steps, timeout_s=timeout_s, with_trace=trace is not None)
    if trace is not None and seen.num_steps:
        try:
            trace.write_bytes(seen.trace_gz)
        except OSError as error:
            raise click.ClickException(f"--trace {trace}: {error.strerror}") from error
        seen.trace_gz = b""
    if is_json:
        click.echo(json.dumps(message_to_dict(seen), indent=2))
        return
    click.echo(profile_line(seen))
    if seen.num_steps:
        print_table(profile_table(seen, top))
