"""The command line of a worker process, the same for both roles."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import click

from engine.engine_args import EngineArgs
from protos import tandem_worker_pb2 as pb
from registry.workers import role_name
from rpc import failpoints
from rpc.entrypoint import build, options_of, run_until_signal
from rpc.logs import write_logs
from worker_service.args import WorkerArgs
from worker_service.process import run_worker
from worker_service.role import MakeService


def worker_command(role: pb.Role, make_service: MakeService) -> click.Command:
    """The command that runs one worker until SIGTERM, which drains it."""
    name = role_name(role)

    @click.command(
        context_settings={"help_option_names": ["-h", "--help"]},
        help=f"Run one {name} worker until SIGTERM, which drains it.\n\n"
        "It registers in Redis, where routers find it. Once it accepts RPCs it prints one line, "
        '"listening grpc=HOST:PORT".',
    )
    @options_of(WorkerArgs)
    @options_of(EngineArgs)
    def main(**flags: Any) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch's profiler logs to stderr when it starts and stops
        args, engine_args = build(WorkerArgs, flags), build(EngineArgs, flags)
        write_logs(args.log_level, args.log_format, args.worker_id or name)
        failpoints.arm(args.failpoints)

        async def serve(stop: asyncio.Event) -> int:
            return await run_worker(role, args, engine_args, make_service, stop)

        sys.exit(run_until_signal(serve))

    return main
