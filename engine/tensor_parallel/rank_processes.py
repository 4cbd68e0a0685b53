"""The processes of ranks other than 0, as rank 0 has them: started, told of each step, ended.

    RankProcesses(config, …) ──start, configuration──> "here" ──> all meet (group.py), and load
           └── tell_pool, then tell once a step ──> … ── close, or this process' end, whatever it is ──> they end

Owns the processes and three connections to each, which carry bytes, never pickles: for steps and what comes between
them, for copies, and for adapters that are to be read.

Where a rank ends, exchanges of the others fail over gloo. NCCL's do not: on the device they wait for it, and whoever
waits for the device does. Once all have loaded, `RankWatch` ends that wait (rank_watch.py). Before, there may be no
communicator that could be aborted: `ending_with` ends the process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from itertools import chain
from multiprocessing.connection import Connection, Pipe

from pydantic import TypeAdapter

from engine.cache_dir import report
from engine.config import EngineConfig
from engine.kv_memory import KVMemory, RankProgram
from engine.owned_folder import OwnedFolder
from engine.running.executor import RankLost
from engine.step_input import StepInput
from engine.tensor_parallel.rank_watch import LOST, NOTICE_S, RankWatch, what_ended

FOLDER_PREFIX = "tandem-ranks-"
"""Of the folder in which ranks meet."""
HERE = b"here"
START_S = 300.0
"""Until a rank says that it is there: what it imports takes seconds."""
END_S = 10.0
"""A rank ends at once when its connection does; one that does not, on a device that hangs, is killed after so long."""
WATCH_S = 1.0
"""Between two looks at the ranks, while all load."""
CONFIG = TypeAdapter(EngineConfig)
STEP, CHANGE = b"s", b"a"
"""What a message after the first ones begins with: a step, and an adapter's change before the next one."""


class RankProcesses:
    """Made and used by the stepping thread. `close` may be called again, and is where nobody calls it."""

    def __init__(self, config: EngineConfig, memory: KVMemory) -> None:
        self._folder = OwnedFolder(FOLDER_PREFIX)
        self.meeting_file = self._folder.path / "meeting"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection[bytes, bytes]] = []
        self.copy_connections: list[Connection[bytes, bytes]] = []
        """See rank_copies.py. Whoever looks at them ends that before `close`."""
        self.adapter_connections: list[Connection[bytes, bytes]] = []
        """See rank_adapters.py."""
        self._watches: list[RankWatch] = []
        connections = self._connections, self.copy_connections, self.adapter_connections
        self._close = weakref.finalize(self, _close, self._watches, self._processes, connections, self._folder)
        for rank in range(1, config.parallel.tensor_parallel_size):
            self._start(rank, memory.rank_program(config.device.device))
        self._send(CONFIG.dump_json(config))

    def wait_until_here(self) -> None:
        """Until all have begun, so that nobody waits at the meeting for one that never comes. Raises `RankLost`."""
        for rank, connection in enumerate(self._connections, start=1):
            try:
                if not connection.poll(START_S) or connection.recv_bytes() != HERE:
                    raise RankLost(f"rank {rank} of the engine did not start within {START_S:g} s")
            except (EOFError, OSError) as error:
                raise RankLost(f"rank {rank} of the engine has ended; what it said stands above") from error

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def tell_pool(self, fd: int, num_blocks: int) -> None:
        """Of the memory that all ranks' pools lie in, on a CPU: a file descriptor of this process."""
        self._send(json.dumps({"path": f"/proc/{os.getpid()}/fd/{fd}", "num_blocks": num_blocks}).encode())

    def tell(self, step: StepInput) -> None:
        """What they are to compute next. Raises `RankLost`."""
        self._send(STEP + step.to_bytes())

    def tell_change(self, change: bytes) -> None:
        """Of an adapter, before the next step (rank_adapters.py). Raises `RankLost`."""
        self._send(CHANGE + change)

    def check(self) -> None:
        """Raises `RankLost` where one has ended, or does within a second: its connections break before."""
        until_s = time.monotonic() + 1.0
        for rank, process in enumerate(self._processes, start=1):
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(max(0.0, until_s - time.monotonic()))
                raise RankLost(what_ended(rank, status))

    def watch(self, abort: Callable[[], None]) -> RankWatch:
        """From now on: over ranks that have loaded. `abort`: see `RankWatch`. Closed before they are ended."""
        self._watches.append(watch := RankWatch(self._processes, self._connections, abort))
        return watch

    def ending_with_them(self) -> AbstractContextManager[None]:
        """See `ending_with`."""
        return ending_with(self._processes)

    def close(self) -> None:
        """End them; returns when they have ended."""
        self._close()

    def _start(self, rank: int, program: RankProgram) -> None:
        theirs = []
        for connections in (self._connections, self.copy_connections, self.adapter_connections):
            our_end, their_end = Pipe()
            connections.append(our_end)
            theirs.append(their_end)
        with ExitStack() as closing:
            for each in theirs:
                closing.enter_context(each)
            fds = [each.fileno() for each in theirs]
            arguments = [",".join(map(str, fds)), str(rank), str(self.meeting_file)]
            if program.connection is not None:
                closing.enter_context(program.connection)
                fds.append(program.connection.fileno())
                arguments.append(str(fds[-1]))
            command = [sys.executable, "-m", program.module, *arguments]
            self._processes.append(subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL))

    def _send(self, message: bytes) -> None:
        try:
            for connection in self._connections:
                connection.send_bytes(message)
        except OSError as error:
            self.check()
            raise RankLost(LOST) from error


@contextmanager
def ending_with(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Within, this process ends when a rank of these has, unless the context is left soon after."""
    is_left = threading.Event()
    threading.Thread(target=_watch, args=(processes, is_left), name="rank-watch", daemon=True).start()
    try:
        yield
    finally:
        is_left.set()


def _watch(processes: Sequence[subprocess.Popen[bytes]], is_left: threading.Event) -> None:
    while not is_left.wait(WATCH_S):
        ended = [what_ended(rank, p.returncode) for rank, p in enumerate(processes, start=1) if p.poll() is not None]
        if ended and not is_left.wait(NOTICE_S):
            report(f"{ended[0]}; this process ends, too")
            os._exit(1)  # what waits for a device cannot be woken


def _close(
    watches: Sequence[RankWatch],
    processes: Sequence[subprocess.Popen[bytes]],
    connections: Sequence[Sequence[Connection[bytes, bytes]]],
    folder: OwnedFolder,
) -> None:
    # First: a connection that somebody still looks at stays open when it is closed, and its rank would not hear of it.
    for watch in watches:
        watch.close()
    for connection in chain(*connections):
        connection.close()
    for process in processes:
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    folder.cleanup()
