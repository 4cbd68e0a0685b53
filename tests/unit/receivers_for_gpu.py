"""Receiving processes for benchmarks/transfer.py that end in every possible way."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection

from benchmarks import transfer


def well(pipe: Connection, transport: str, pool_arguments: transfer.PoolArguments) -> None:
    transfer.serve(pipe, transport, pool_arguments)


def without_memory(pipe: Connection, transport: str, pool_arguments: transfer.PoolArguments) -> None:
    def make_pool(*_: object, seed: int) -> None:
        raise RuntimeError("no memory")

    transfer.make_pool = make_pool  # type: ignore[assignment]
    transfer.serve(pipe, transport, pool_arguments)


def dying(pipe: Connection, transport: str, pool_arguments: transfer.PoolArguments) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
