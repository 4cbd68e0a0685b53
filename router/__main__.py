"""`python -m router`: the front door of a cluster."""

from __future__ import annotations

from rpc import starting

starting.before_imports(__name__)

import asyncio
import sys
from typing import Any

import click

from router.args import RouterArgs
from router.policy import PolicyConfig
from router.process import run_router
from rpc.entrypoint import build, options_of, run_until_signal
from rpc.logs import write_logs

starting.after_imports()


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options_of(RouterArgs, defaults={"listen": "127.0.0.1:50051"})
@options_of(PolicyConfig)
def main(**flags: Any) -> None:
    """Run one router until SIGTERM, which drains it. Any number of routers may share one Redis.

    It finds workers in Redis. Once it accepts RPCs it prints one line, "listening grpc=HOST:PORT"; its health says
    SERVING for "tandem.v1.Inference" while a decode worker is there.

    Example: python -m router --model "$(tandem fetch)" --redis redis://127.0.0.1:6379/0
    """
    args = build(RouterArgs, flags)
    policy = build(PolicyConfig, flags)
    write_logs(args.log_level, args.log_format, "router")

    async def serve(stop: asyncio.Event) -> int:
        return await run_router(args, policy, stop)

    sys.exit(run_until_signal(serve))


if __name__ == "__main__":
    main(prog_name="python -m router")
