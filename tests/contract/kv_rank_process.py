"""A rank's process without an engine: it has a pool in its memory and serves rank 0's requests for it."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

from kv_harness import make_pool

from worker_service.rank_pool import PoolServer


def main(
    connection: Connection[bytes, bytes], num_layers: int, num_blocks: int, seed: int | None, ucx_tls: str | None
) -> None:
    """The pool holds random bytes; zeros without a `seed`. `ucx_tls`: the current value of UCX_TLS, which may differ
    from the environment in which the process was forked."""
    if ucx_tls is not None:
        os.environ["UCX_TLS"] = ucx_tls
    PoolServer(make_pool(num_blocks, seed=seed, num_layers=num_layers), connection).run()
