"""Watches the other ranks while an engine lives, so that nothing waits for a rank that has ended.

    RankWatch(…) ── a connection ends ──> lost: which rank, how ──> `abort`: the device's wait ends ──> RankLost
         │                                                             └─ not within NOTICE_S ──> this process ends
         └── close ──> stops watching

The owner of the ranks closes the watch before it ends them (rank_processes.py). Owns one thread, which sleeps until a
rank ends, and its finding, which each step checks twice.

With gloo, exchanges with a rank that has ended fail. With NCCL they hang on the device, and so does the host when it
waits for the device. After the communicator is aborted, they end without an error and with invalid results. So the
watch records the lost rank before it aborts, and no step's tokens are taken without checking that record.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe, wait

from engine.cache_dir import report
from engine.running.executor import RankLost

LOST = "a rank of the engine has ended; see its output above"
"""The message if it is not known yet which rank ended, and how."""
STATUS_S = 1.0
"""Timeout from the end of a rank's connection until its process has ended, which comes later."""
LAUNCH_S = 1.0
"""Timeout for a launch in progress to finish before the abort; if the device's queue is full, the launch hangs, too."""
LEFT = b"left"
END_S = 10.0
"""Timeout for the thread to end; it may be recording a loss."""
NOTICE_S = 30.0
"""Time after a rank's end for the stepping thread to notice; then this process ends."""


class RankWatch:
    """The stepping thread uses `launching` and `taking`."""

    def __init__(
        self,
        processes: Sequence[subprocess.Popen[bytes]],
        connections: Sequence[Connection[bytes, bytes]],
        abort: Callable[[], None],
    ) -> None:
        """`processes`, `connections`: of ranks 1, 2, … `abort`: ends what the device waits for; called on a thread of
        its own, since it may block."""
        self._processes, self._connections, self._abort = processes, connections, abort
        self._lost = ""
        """Which rank has ended, and how; empty if none has."""
        self._is_lost = threading.Event()
        self._is_within = False
        self._is_left = threading.Event()
        """Set when the stepping thread has noticed the loss, or when the watch is closed."""
        self._launch_lock = threading.Lock()
        self._wakes, self._woken = Pipe()
        self._thread = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._thread.start()

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Context for launching a step. Raises `RankLost` at once if a rank has ended, and instead of an error within
        that a rank's end has caused."""
        with self._launch_lock, self.taking():
            yield

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Context for taking a step's tokens from the device, or for other work that waits for all ranks. Raises
        `RankLost`; what was taken must not be used then."""
        self._is_within = True  # set before the check: the watching thread reads this after recording a loss
        try:
            self._check()
            try:
                yield
            except RuntimeError as error:
                # The error may be a broken connection; which rank ended, and how, is known soon and says more.
                if self._is_lost.wait(2 * STATUS_S):
                    raise RankLost(self._lost) from error
                raise
            self._check()
        finally:
            self._is_within = False
            if self._lost:
                self._is_left.set()

    def close(self) -> None:
        """Stop watching, before the ranks and their connections are ended. Returns when the thread no longer uses the
        connections."""
        self._is_left.set()
        # Send a message instead of closing: a forked process may hold this end, too.
        self._wakes.send_bytes(LEFT)
        if self._thread is not threading.current_thread():
            self._thread.join(END_S)

    def _check(self) -> None:
        if self._lost:
            raise RankLost(self._lost)

    def _watch(self) -> None:
        """Runs on the watching thread."""
        ended = wait([self._woken, *self._connections])
        if self._woken in ended:
            return
        rank = min(rank for rank, connection in enumerate(self._connections, start=1) if connection in ended)
        self._lost = _what_ended(rank, self._processes[rank - 1])
        self._is_lost.set()
        # Let a launch finish: NCCL's abort frees what a call on another thread still uses.
        if self._launch_lock.acquire(timeout=LAUNCH_S):
            self._launch_lock.release()
        # The abort returns only when no recorded step uses the communicator, long after the device has continued.
        threading.Thread(target=self._abort, name="rank-abort", daemon=True).start()
        if self._is_within and not self._is_left.wait(NOTICE_S):
            report(f"{self._lost}; exiting")
            os._exit(1)  # the thread still waits for the device in spite of the abort, and cannot be woken


def _what_ended(rank: int, process: subprocess.Popen[bytes]) -> str:
    try:
        return what_ended(rank, process.wait(STATUS_S))
    except subprocess.TimeoutExpired:
        return f"rank {rank} of the engine has let go of its connection; see its output above"


def what_ended(rank: int, status: int) -> str:
    how = signal.Signals(-status).name if status < 0 else str(status)
    return f"rank {rank} of the engine has ended with {how}; see its output above"
