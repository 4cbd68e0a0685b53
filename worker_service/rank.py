"""`python -m worker_service.rank FDS RANK MEETING_FILE POOL_FD`: another rank of a worker with several GPUs. Computes
like `engine.tensor_parallel`'s ranks, and serves its pool's blocks to rank 0 over POOL_FD (rank_pool.py)."""

from __future__ import annotations

import gc

gc.disable()  # imports create no garbage, and looking for it takes a third of the start

import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from engine.config import EngineConfig
from engine.running.worker import Worker
from engine.tensor_parallel.rank import run_rank
from worker_service.pool_memory import transfer_pool
from worker_service.rank_pool import PoolServer

gc.freeze()  # what they created stays alive
gc.enable()


def main(fds: Sequence[int], rank: int, meeting_file: Path, pool_fd: int) -> int:
    connection: Connection[bytes, bytes] = Connection(pool_fd)

    def serve_pool(config: EngineConfig, worker: Worker) -> None:
        PoolServer(transfer_pool(worker.kv_pool, worker.kv_shape, config.cache.kv_order), connection).start()

    return run_rank(fds, rank, meeting_file, serve_pool)


if __name__ == "__main__":
    sys.exit(main([*map(int, sys.argv[1].split(","))], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])))
