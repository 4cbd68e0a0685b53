"""Watches the other ranks while an engine lives, so that nobody waits for one that has ended.

    RankWatch(…) ── a connection ends ──> lost: who, and how ──> `abort`: the device's wait ends ──> RankLost
         │                                                          └─ it does not, in NOTICE_S ──> this process ends
         └── close ──> it watches no more

Who owns the ranks closes it before it ends them (rank_processes.py). Owns one thread, which sleeps until a rank ends,
and what it has found. A step pays for two looks at that.

Over gloo exchanges with a rank that is gone fail. NCCL's wait on the device, and whoever waits for the device does.
Once the communicator is aborted, what waits there ends and says nothing: its numbers are rubbish. So whoever was lost
is known before, and no step's tokens are taken without a look at that.
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

LOST = "a rank of the engine has ended; what it said stands above"
"""Where nobody knows yet which one, nor how."""
STATUS_S = 1.0
"""From the end of a rank's connection until it has ended. Its connections break before."""
LAUNCH_S = 1.0
"""What is being launched when a rank ends is let into the device's queue, unless that is full: it waits, too."""
LEFT = b"left"
END_S = 10.0
"""At most, for a thread that has been told to end, and may be noting a loss."""
NOTICE_S = 30.0
"""After a rank's end, until what waits for it, or has failed for a reason of its own, is given up with the process."""


class RankWatch:
    """`launching` and `taking` are the stepping thread's."""

    def __init__(
        self,
        processes: Sequence[subprocess.Popen[bytes]],
        connections: Sequence[Connection[bytes, bytes]],
        abort: Callable[[], None],
    ) -> None:
        """Of ranks 1, 2, … `abort`: ends what the device waits for, on a thread of its own: it may wait itself."""
        self._state = _State(processes, connections, abort)
        self._thread = threading.Thread(target=self._state.watch, name="rank-watch", daemon=True)
        self._thread.start()

    @contextmanager
    def launching(self) -> Iterator[None]:
        """A step. Raises `RankLost`, before where a rank is gone already; of errors within, where one is the reason."""
        with self._state.launch_lock, self._state.within():
            yield

    @contextmanager
    def taking(self) -> Iterator[None]:
        """A step's tokens from the device, or what else all ranks do, waiting for it. Raises `RankLost`: what was taken
        is not to be used."""
        with self._state.within():
            yield

    def close(self) -> None:
        """Before the ranks are ended, and their connections. Returns when nobody looks at these any more."""
        self._state.leave()
        if self._thread is not threading.current_thread():
            self._thread.join(END_S)


class _State:
    """What both threads know."""

    def __init__(
        self,
        processes: Sequence[subprocess.Popen[bytes]],
        connections: Sequence[Connection[bytes, bytes]],
        abort: Callable[[], None],
    ) -> None:
        self._processes, self._connections, self._abort = processes, connections, abort
        self._lost = ""
        """Why nothing can be computed any more, once a rank has ended."""
        self._is_lost = threading.Event()
        self._is_within = False
        self._is_left = threading.Event()
        """The stepping thread has heard of it, or lets go of all ranks."""
        self.launch_lock = threading.Lock()
        self._wakes, self._woken = Pipe()

    @contextmanager
    def within(self) -> Iterator[None]:
        self._is_within = True  # before the look: whoever notes a loss looks here after it
        try:
            self._check()
            try:
                yield
            except RuntimeError as error:
                # A connection that broke says less than who ended first, and how: that is known soon.
                if self._is_lost.wait(2 * STATUS_S):
                    raise RankLost(self._lost) from error
                raise
            self._check()
        finally:
            self._is_within = False
            if self._lost:
                self._is_left.set()

    def watch(self) -> None:
        ended = wait([self._woken, *self._connections])
        if self._woken in ended:
            return
        rank = min(rank for rank, connection in enumerate(self._connections, start=1) if connection in ended)
        self._lost = _what_ended(rank, self._processes[rank - 1])
        self._is_lost.set()
        # NCCL lets go of what a call on another thread still uses.
        if self.launch_lock.acquire(timeout=LAUNCH_S):
            self.launch_lock.release()
        # It waits until no recorded step is left that would use the communicator, long after the device goes on.
        threading.Thread(target=self._abort, name="rank-abort", daemon=True).start()
        if self._is_within and not self._is_left.wait(NOTICE_S):
            report(f"{self._lost}; this process ends, too")
            os._exit(1)  # what waits for a device that was told not to cannot be woken

    def leave(self) -> None:
        self._is_left.set()
        # Said, not closed: a process that was forked off meanwhile has this end, too.
        self._wakes.send_bytes(LEFT)

    def _check(self) -> None:
        if self._lost:
            raise RankLost(self._lost)


def _what_ended(rank: int, process: subprocess.Popen[bytes]) -> str:
    try:
        return what_ended(rank, process.wait(STATUS_S))
    except subprocess.TimeoutExpired:
        return f"rank {rank} of the engine has let go of its connection; what it said stands above"


def what_ended(rank: int, status: int) -> str:
    how = signal.Signals(-status).name if status < 0 else str(status)
    return f"rank {rank} of the engine has ended with {how}; what it said stands above"
