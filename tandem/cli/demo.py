"""`tandem demo`: what `make demo` runs."""

from __future__ import annotations

import asyncio
import sys

import click

from kv_transfer import TRANSPORTS
from tandem.cli.options import examples
from worker_service.args import WorkerArgs


@click.command(
    short_help="Show Tandem at work.",
    epilog=examples("tandem demo", "tandem demo --prompt 'What is a KV cache?' --transport nixl"),
)
@click.option("--prompt", default="", help="What to ask. Default: a question whose answer takes a few sentences.")
@click.option("--transport", type=click.Choice(TRANSPORTS), default=WorkerArgs.transport, show_default=True,
              help="How KV moves from the prefill to the decode worker.")  # fmt: skip
@click.option("--verbose", "is_verbose", is_flag=True, help="Show the log lines of all processes.")
def demo(prompt: str, transport: str, is_verbose: bool) -> None:
    """Start a prefill and a decode worker, stream an answer, show what happened, stop everything."""
    from tandem.demo import run_demo

    sys.exit(asyncio.run(run_demo(prompt=prompt, transport=transport, is_verbose=is_verbose)))
