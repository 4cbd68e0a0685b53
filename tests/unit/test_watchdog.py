"""When an engine counts as stuck: within one step for too long, as this event loop sees it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator

from worker_service.watchdog import wait_until_stuck

TIMEOUT_S = 0.3


class Engine:
    def __init__(self, progress: Iterator[int | None]) -> None:
        self._progress = progress

    @property
    def progress(self) -> int | None:
        return next(self._progress)


async def is_stuck(engine: Engine, within_s: float = 4 * TIMEOUT_S) -> bool:
    try:
        async with asyncio.timeout(within_s):
            await wait_until_stuck(engine, TIMEOUT_S)
    except TimeoutError:
        return False
    return True


async def test_who_makes_no_progress_is_stuck_after_the_timeout() -> None:
    before_s = time.monotonic()
    assert await is_stuck(Engine(itertools.repeat(3)))
    assert time.monotonic() - before_s >= TIMEOUT_S


async def test_who_has_nothing_to_do_or_goes_on_is_not_stuck() -> None:
    assert not await is_stuck(Engine(itertools.repeat(None)))
    assert not await is_stuck(Engine(itertools.count()))
    assert not await is_stuck(Engine(itertools.cycle([1, None])))


async def test_a_process_that_was_stopped_is_not_stuck() -> None:
    engine = Engine(itertools.chain([7] * 3, itertools.count(8)))
    watching = asyncio.create_task(wait_until_stuck(engine, TIMEOUT_S))
    await asyncio.sleep(TIMEOUT_S / 5)
    time.sleep(2 * TIMEOUT_S)  # noqa: ASYNC251 - the whole process stands still
    await asyncio.sleep(TIMEOUT_S / 2)
    assert not watching.done()
    watching.cancel()
