"""What a rank's process does, without its engine: a pool in its memory, with which it does what rank 0 asks."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

from kv_harness import make_pool

from worker_service.rank_pool import PoolServer


def main(
    connection: Connection[bytes, bytes], num_layers: int, num_blocks: int, seed: int | None, ucx_tls: str | None
) -> None:
    """The pool holds random bytes, zeros without a `seed`. `ucx_tls`: of the environment as it is now, which is not
    that in which the process was forked."""
    if ucx_tls is not None:
        os.environ["UCX_TLS"] = ucx_tls
    PoolServer(make_pool(num_blocks, seed=seed, num_layers=num_layers), connection).run()
