"""A rank's process, without its engine: a pool in this process' memory, with which it does what rank 0 asks over FD.

`python kv_rank_process.py FD NUM_LAYERS NUM_BLOCKS SEED`; the pool holds random bytes, zeros without a seed ("-")."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

from kv_harness import make_pool

from worker_service.rank_pool import PoolServer


def main(fd: int, num_layers: int, num_blocks: int, seed: int | None) -> None:
    connection: Connection[bytes, bytes] = Connection(fd)
    PoolServer(make_pool(num_blocks, seed=seed, num_layers=num_layers), connection).run()


main(*(int(argument) for argument in sys.argv[1:4]), None if sys.argv[4] == "-" else int(sys.argv[4]))
