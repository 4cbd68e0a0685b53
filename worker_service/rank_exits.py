"""Notices when one of an engine's ranks (the processes with the other parts of its model) ends.

watch(pids) ── one of them ends ─────────────────────┐
lose(error), from any thread: one cannot be reached ─┴─> has_lost_one, on_lost(error) on the event loop
close
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable

from engine.running.executor import RankLost


class RankExits:
    """One per worker process. Created and used on its event loop, except `lose`. Owns a pidfd of each rank."""

    def __init__(self, on_lost: Callable[[RankLost], None]) -> None:
        self.has_lost_one = False
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._fds: list[int] = []

    def watch(self, pids: Iterable[int]) -> None:
        """Notice the end of a rank at once, instead of by a failing step: an idle engine runs no steps."""
        for pid in pids:
            fd = os.pidfd_open(pid)
            self._fds.append(fd)
            self._loop.add_reader(fd, self._on_end, fd)

    def lose(self, error: RankLost) -> None:
        """A rank's part of the pool can no longer be reached. May be called on any thread."""
        self._loop.call_soon_threadsafe(self._lose, error)

    def close(self) -> None:
        """Stop watching: from now on ranks may end."""
        while self._fds:
            fd = self._fds.pop()
            self._loop.remove_reader(fd)
            os.close(fd)

    def _on_end(self, fd: int) -> None:
        self._loop.remove_reader(fd)
        self._lose(RankLost("a rank of the engine has exited"))

    def _lose(self, error: RankLost) -> None:
        self.has_lost_one = True
        self._on_lost(error)
