"""`python -m gateway`: OpenAI's HTTP API, and Anthropic's, in front of a router."""

from __future__ import annotations

from rpc import starting

starting.before_imports(__name__)

import asyncio
import sys
from typing import Any

import click

from gateway.args import GatewayArgs
from gateway.process import run_gateway
from rpc.entrypoint import build, options_of, run_until_signal
from rpc.logs import write_logs

starting.after_imports()


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options_of(GatewayArgs)
def main(**flags: Any) -> None:
    """Serve OpenAI's HTTP API, and Anthropic's, until SIGTERM, which lets running requests finish.

    /v1/completions, /v1/chat/completions, /v1/responses, /v1/messages, /v1/models, a chat page at /, /health, /load,
    /metrics. Once it listens it prints one line, "listening http=HOST:PORT". Any number of gateways may stand before a
    router.

    Example: python -m gateway --router 127.0.0.1:50051 --listen 0.0.0.0:8000
    """
    args = build(GatewayArgs, flags)
    write_logs(args.log_level, args.log_format, "gateway")

    async def serve(stop: asyncio.Event) -> int:
        return await run_gateway(args, stop)

    sys.exit(run_until_signal(serve))


if __name__ == "__main__":
    main(prog_name="python -m gateway")
