"""Notices an engine that stands still within a step, because a GPU or its driver hangs: the process cannot end that.

    GOING ──no progress for a lease──> STALLED: routers are told, and move what they can to other workers
      ^                                │     │
      └──────────── progress ──────────┘     └──for `timeout_s`──> STUCK: the caller ends the process; peers and
                                                                   routers know how to handle that

A stall must also last three times as long as any earlier one that ended by itself, but at most three leases: a machine
that is slow with its longest prompts is reported about once, and one that has hung once may hang again. Stalls are
measured in polls of this event loop, not by the clock, so that a process that was stopped and continues is not stuck.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

LOOKS_PER_STALL = 10
"""Polls within the shorter of a lease and the timeout."""
LONGEST_TIMES = 3
"""A stall must last this many times the longest one that ended by itself,"""
MOST_STALLS = 3
"""but at most this many times the basic duration."""


class Progressing(Protocol):
    @property
    def progress(self) -> int | None: ...


class Stalls:
    """Decides from polls of its progress whether an engine stands still. Pure."""

    def __init__(self) -> None:
        self._seen: int | None = None
        self._num_longest = 0
        """The longest row of polls without progress that ended."""
        self.num_same = 0
        """Polls without progress in a row, up to now."""

    @property
    def is_stalled(self) -> bool:
        num_due = max(LOOKS_PER_STALL, LONGEST_TIMES * self._num_longest)
        return self.num_same >= min(num_due, MOST_STALLS * LOOKS_PER_STALL)

    def look(self, progress: int | None) -> None:
        """`progress`: see `AsyncLLMEngine.progress`."""
        if progress is not None and progress == self._seen:
            self.num_same += 1
        else:
            self._num_longest = max(self._num_longest, self.num_same)
            self.num_same = 0
        self._seen = progress


async def wait_until_stuck(
    engine: Progressing, *, stall_s: float, timeout_s: float, on_stall: Callable[[bool], None]
) -> None:
    """Return when `engine` has been in the same step for `timeout_s`, within a tenth; 0: never.

    Calls `on_stall(True)` when the engine has stood still for at least `stall_s`, and `on_stall(False)` when it
    continues.
    """
    look_s = min(stall_s, timeout_s or stall_s) / LOOKS_PER_STALL
    stalls = Stalls()
    is_stalled = False
    while not timeout_s or stalls.num_same * look_s < timeout_s:
        await asyncio.sleep(look_s)
        stalls.look(engine.progress)
        if stalls.is_stalled != is_stalled:
            is_stalled = stalls.is_stalled
            on_stall(is_stalled)
