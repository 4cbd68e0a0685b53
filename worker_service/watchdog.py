"""Notices an engine that stands still within a step, which nothing in its process can end: a GPU or its driver hangs.

    stepping ──no progress for `timeout_s`──> STUCK: who watches ends the process; peers and routers know what to do

Silence is counted in looks of this event loop, not by the clock: a process that was stopped and goes on is not stuck.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

NUM_LOOKS = 10


class Progressing(Protocol):
    @property
    def progress(self) -> int | None: ...


async def wait_until_stuck(engine: Progressing, timeout_s: float) -> None:
    """Return when `engine` has been within one step for `timeout_s`, give or take a tenth."""
    seen: int | None = None
    num_same = 0
    while num_same < NUM_LOOKS:
        await asyncio.sleep(timeout_s / NUM_LOOKS)
        progress = engine.progress
        num_same = num_same + 1 if progress is not None and progress == seen else 0
        seen = progress
