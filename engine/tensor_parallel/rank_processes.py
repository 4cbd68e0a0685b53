"""Rank 0's view of the other ranks' processes: starts them, sends them each step, ends them.

    RankProcesses(config, …) ──start, configuration──> "here" ──> all meet (group.py), and load
           └── tell_pool, then tell once a step ──> … ── close, or any end of this process ──> they end

Owns the processes and three connections to each, which carry bytes, never pickles: for steps and changes between them,
for copies, and for reading adapters.

When a rank ends, exchanges of the others fail with gloo. With NCCL they hang on the device, and so does the host when
it waits for the device. Once all ranks have loaded, `RankWatch` ends that wait (rank_watch.py). Before that, there may
be no communicator to abort: `ending_with` ends the process.
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
"""Name prefix of the folder of the ranks' meeting file."""
HERE = b"here"
START_S = 300.0
"""Timeout until a rank reports that it has started; its imports take seconds."""
END_S = 10.0
"""A rank ends at once when its connection closes; if it does not, as on a device that hangs, it is killed after
this."""
WATCH_S = 1.0
"""Interval of checking the ranks while all load."""
CONFIG = TypeAdapter(EngineConfig)
STEP, FIRST_ROUND, ROUND, CHANGE = b"s", b"f", b"r", b"a"
"""First byte of a message after the initial ones: a step, a round of guesses before it (the first, or a later one), or
a change of an adapter before the next step."""


class RankProcesses:
    """Created and used by the stepping thread. `close` may be called repeatedly; a finalizer calls it if nobody
    does."""

    def __init__(self, config: EngineConfig, memory: KVMemory) -> None:
        self._folder = OwnedFolder(FOLDER_PREFIX)
        self.meeting_file = self._folder.path / "meeting"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection[bytes, bytes]] = []
        self.copy_connections: list[Connection[bytes, bytes]] = []
        """See rank_copies.py. Their user must stop using them before `close`."""
        self.adapter_connections: list[Connection[bytes, bytes]] = []
        """See rank_adapters.py."""
        self._watches: list[RankWatch] = []
        connections = self._connections, self.copy_connections, self.adapter_connections
        self._close = weakref.finalize(self, _close, self._watches, self._processes, connections, self._folder)
        for rank in range(1, config.parallel.tensor_parallel_size):
            self._start(rank, memory.rank_program(config.device.device))
        self._send(CONFIG.dump_json(config))

    def wait_until_here(self) -> None:
        """Wait until all ranks have started, so that none waits at the meeting for one that never comes. Raises
        `RankLost`."""
        for rank, connection in enumerate(self._connections, start=1):
            try:
                if not connection.poll(START_S) or connection.recv_bytes() != HERE:
                    raise RankLost(f"rank {rank} of the engine did not start within {START_S:g} s")
            except (EOFError, OSError) as error:
                raise RankLost(f"rank {rank} of the engine has ended; see its output above") from error

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def tell_pool(self, fd: int, num_blocks: int) -> None:
        """Tell the ranks, on a CPU, which memory holds all pools: `fd` is a file descriptor of this process."""
        self._send(json.dumps({"path": f"/proc/{os.getpid()}/fd/{fd}", "num_blocks": num_blocks}).encode())

    def tell(self, step: StepInput) -> None:
        """Send the next step to compute. Raises `RankLost`."""
        self._send(STEP + step.to_bytes())

    def tell_round(self, step: StepInput, is_first: bool) -> None:
        """Send the next round of guesses (`HeadDrafter.on_round`). Raises `RankLost`."""
        self._send((FIRST_ROUND if is_first else ROUND) + step.to_bytes())

    def tell_change(self, change: bytes) -> None:
        """Send an adapter's change, before the next step (rank_adapters.py). Raises `RankLost`."""
        self._send(CHANGE + change)

    def check(self) -> None:
        """Raise `RankLost` if a rank has ended or ends within a second: its connections break before its process
        ends."""
        until_s = time.monotonic() + 1.0
        for rank, process in enumerate(self._processes, start=1):
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(max(0.0, until_s - time.monotonic()))
                raise RankLost(what_ended(rank, status))

    def watch(self, abort: Callable[[], None]) -> RankWatch:
        """Watch the ranks, which must have loaded. `abort`: see `RankWatch`. `close` closes the watch first."""
        self._watches.append(watch := RankWatch(self._processes, self._connections, abort))
        return watch

    def ending_with_them(self) -> AbstractContextManager[None]:
        """See `ending_with`."""
        return ending_with(self._processes)

    def close(self) -> None:
        """End the ranks, and wait until they have ended."""
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
    """Within this context, the process ends when one of these ranks ends, unless the context is left soon after."""
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
            report(f"{ended[0]}; exiting")
            os._exit(1)  # a thread that waits for a device cannot be woken


def _close(
    watches: Sequence[RankWatch],
    processes: Sequence[subprocess.Popen[bytes]],
    connections: Sequence[Sequence[Connection[bytes, bytes]]],
    folder: OwnedFolder,
) -> None:
    # First: a connection that a thread still polls stays open when it is closed, and its rank would not notice.
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
