"""Notices an engine that stands still within a step, which nothing in its process can end: a GPU or its driver hangs.

    GOING ──no progress for a lease──> STALLED: routers are told, and take elsewhere what they can
      ^                                │     │
      └──────────── progress ──────────┘     └──for `timeout_s`──> STUCK: who watches ends the process; peers and
                                                                   routers know what to do

A stall must also be three times as long as any that came to an end here, up to three leases: a machine that takes long
for its longest prompts is slow, and is told so about once; one that hung once may hang again. Silence is counted in
looks of this event loop, not by the clock: a process that was stopped and goes on is not stuck.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

LOOKS_PER_STALL = 10
"""In the shorter of a lease and the timeout."""
LONGEST_TIMES = 3
"""What a stall must last, of the longest that ended by itself,"""
MOST_STALLS = 3
"""and at most so many times what any must."""


class Progressing(Protocol):
    @property
    def progress(self) -> int | None: ...


class Stalls:
    """Whether an engine stands still, in looks at its progress. Pure."""

    def __init__(self) -> None:
        self._seen: int | None = None
        self._num_longest = 0
        """Looks without progress in a row, that ended."""
        self.num_same = 0
        """Looks without progress in a row, up to now."""

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
    """Return when `engine` has been within one step for `timeout_s`, give or take a tenth; 0: never.

    `on_stall(True)` is called when it has stood still for `stall_s` at least, and `on_stall(False)` when it goes on.
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
