"""`python -m prefill_service`: one prefill worker."""

from __future__ import annotations

import sys
from typing import Any

import click

from engine.config import EngineArgs
from prefill_service.service import PrefillService
from protos import tandem_worker_pb2 as pb
from rpc.entrypoint import build, options_of, run_until_signal, setup_logging
from worker_service.args import WorkerArgs
from worker_service.process import worker_command


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options_of(WorkerArgs)
@options_of(EngineArgs)
def main(**flags: Any) -> None:
    """Run one prefill worker until SIGTERM, which drains it.

    It registers in Redis, where routers find it. Once it accepts RPCs it prints one line, "listening grpc=HOST:PORT".
    """
    args = build(WorkerArgs, flags)
    engine_args = build(EngineArgs, flags)
    setup_logging(args.log_level, args.worker_id or "prefill")
    sys.exit(run_until_signal(worker_command(pb.Role.ROLE_PREFILL, args, engine_args, PrefillService)))


if __name__ == "__main__":
    main(prog_name="python -m prefill_service")
