"""One rank other than 0, in its own process, started by `RankProcesses`.

run_rank ──"here"──> all meet ──> loaded ──on_loaded──> computes the steps that rank 0 sends, until its connection
                                                        closes: the engine has ended, and this process ends at once

In parallel to the steps, threads of its own copy blocks to and from host memory (rank_copies.py) and read adapters
(rank_adapters.py).
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from engine.cache_dir import report
from engine.config import EngineConfig
from engine.kv_cache import KV_DTYPES
from engine.kv_memory import KVMemory
from engine.kv_shape import KVCacheShape
from engine.running.head_drafter import HeadDrafter
from engine.running.host_copies import HostCopies, num_host_blocks
from engine.running.worker import Worker
from engine.step_input import StepInput
from engine.tensor_parallel.group import RankGroup
from engine.tensor_parallel.rank_adapters import FollowedAdapters
from engine.tensor_parallel.rank_copies import follow_copies
from engine.tensor_parallel.rank_processes import CHANGE, CONFIG, FIRST_ROUND, HERE, ROUND, STEP

PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""


def run_rank(
    fds: Sequence[int],
    rank: int,
    meeting_file: Path,
    on_loaded: Callable[[EngineConfig, Worker], None] = lambda config, worker: None,
) -> int:
    """Run until the engine ends. Returns the exit code. `fds`: connections for steps, copies (rank_copies.py) and
    adapters (rank_adapters.py). `on_loaded` is called before the first step."""
    fd, copies_fd, adapters_fd = fds
    _be_killed_with_engine()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # left to the engine's process, which lets running answers finish
    connection: Connection[bytes, bytes] = Connection(fd)
    threading.Thread(target=_end_with, args=(fd,), name="engine-watch", daemon=True).start()
    config = CONFIG.validate_json(connection.recv_bytes())
    if config.device.device != "cpu":
        torch.cuda.set_device(rank)

    def allocate(shape: KVCacheShape, device: str) -> torch.Tensor:
        return KVMemory().allocate(shape, device) if device != "cpu" else _map_pool(config, shape, rank, connection)

    connection.send_bytes(HERE)
    group = RankGroup(rank, config.parallel.tensor_parallel_size, config.device.device, meeting_file)
    try:
        worker = Worker(config, None, allocate, group)
        num_blocks = 0 if config.device.device == "cpu" else num_host_blocks(config, worker.kv_shape)
        if num_blocks:
            follow_copies(HostCopies(worker.kv_pool, num_blocks), Connection(copies_fd))
    except ValueError as error:
        report(f"rank {rank}: {error}")
        return 2
    adapters = None
    if worker.runner.adapters is not None:
        device = None if config.device.device == "cpu" else torch.device("cuda", rank)
        adapters = FollowedAdapters(worker.runner.adapters, Connection(adapters_fd), device)
    on_loaded(config, worker)
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return 0
        kind, told = message[:1], memoryview(message)[1:]
        if kind == STEP:
            worker.runner.follow(StepInput.from_bytes(told))
        elif kind in (FIRST_ROUND, ROUND):
            assert isinstance(worker.drafter, HeadDrafter)
            worker.drafter.follow_round(StepInput.from_bytes(told), is_first=kind == FIRST_ROUND)
        else:
            assert kind == CHANGE
            assert adapters is not None
            adapters.change(told)


def _map_pool(
    config: EngineConfig, shape: KVCacheShape, rank: int, connection: Connection[bytes, bytes]
) -> torch.Tensor:
    """Map this rank's part of the pool that rank 0 allocates for all ranks."""
    told = json.loads(connection.recv_bytes())
    shape = replace(shape, num_blocks=told["num_blocks"])
    fd = os.open(told["path"], os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(fd, config.parallel.tensor_parallel_size * shape.pool_bytes)
    finally:
        os.close(fd)
    part = torch.frombuffer(memory, dtype=torch.uint8)[rank * shape.pool_bytes : (rank + 1) * shape.pool_bytes]
    return part.view(KV_DTYPES[shape.dtype]).view(shape.axes)


def _be_killed_with_engine() -> None:
    """Let the kernel kill this process when the engine's thread ends, even if this process is stopped or hangs: it
    would keep its device's memory and the worker's pipes. Linux only; on other systems only `_end_with` ends the
    process."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _end_with(fd: int) -> None:
    """End this process when the other end of `fd` is closed. A rank that waits within a step would not notice."""
    connection = select.poll()
    connection.register(fd, select.POLLRDHUP)
    connection.poll()
    os._exit(0)
