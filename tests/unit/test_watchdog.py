"""When an engine counts as stalled, and when as stuck: within one step for too long, as this event loop sees it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable, Iterator

import pytest

from worker_service.watchdog import LONGEST_TIMES, LOOKS_PER_STALL, MOST_STALLS, Stalls, wait_until_stuck

TIMEOUT_S = 0.3
L = LOOKS_PER_STALL


class Engine:
    def __init__(self, progress: Iterator[int | None]) -> None:
        self._progress = progress

    @property
    def progress(self) -> int | None:
        return next(self._progress)


class Watch:
    """A task that watches an engine, and what it reported."""

    def __init__(self, progress: Iterable[int | None], *, stall_s: float = 9.0, timeout_s: float = TIMEOUT_S) -> None:
        self.heard: list[bool] = []
        self.task = asyncio.create_task(
            wait_until_stuck(Engine(iter(progress)), stall_s=stall_s, timeout_s=timeout_s, on_stall=self.heard.append)
        )

    async def is_stuck(self, within_s: float = 4 * TIMEOUT_S) -> bool:
        await asyncio.wait([self.task], timeout=within_s)
        is_stuck = self.task.done()
        self.task.cancel()
        return is_stuck


async def test_who_makes_no_progress_is_stuck_after_the_timeout() -> None:
    before_s = time.monotonic()
    assert await Watch(itertools.repeat(3)).is_stuck()
    assert time.monotonic() - before_s >= TIMEOUT_S


async def test_who_has_nothing_to_do_or_goes_on_is_not_stuck() -> None:
    watches = [Watch(itertools.repeat(None)), Watch(itertools.count()), Watch(itertools.cycle([1, None]))]
    assert not any(await asyncio.gather(*(watch.is_stuck() for watch in watches)))
    assert not any(watch.heard for watch in watches)


async def test_a_process_that_was_stopped_is_not_stuck() -> None:
    watch = Watch(itertools.chain([7] * 3, itertools.count(8)))
    await asyncio.sleep(TIMEOUT_S / 5)
    time.sleep(2 * TIMEOUT_S)  # noqa: ASYNC251 - the whole process stands still
    assert not await watch.is_stuck(TIMEOUT_S / 2)
    assert watch.heard == []


async def test_a_stall_is_told_long_before_the_end_and_so_is_that_it_is_over() -> None:
    progress = itertools.chain([7] * (2 * L), itertools.count(8))
    watch = Watch(progress, stall_s=TIMEOUT_S / 5, timeout_s=10 * TIMEOUT_S)
    assert not await watch.is_stuck(2 * TIMEOUT_S)
    assert watch.heard == [True, False]


async def test_who_is_never_stuck_is_watched_all_the_same() -> None:
    watch = Watch(itertools.repeat(7), stall_s=TIMEOUT_S / 5, timeout_s=0)
    assert not await watch.is_stuck(TIMEOUT_S)
    assert watch.heard == [True]


@pytest.mark.parametrize(
    ("num_before", "num_due"),
    [(0, L), (1, L), (L // 2, LONGEST_TIMES * (L // 2)), (L - 1, LONGEST_TIMES * (L - 1)), (50 * L, MOST_STALLS * L)],
)
def test_a_stall_is_longer_than_any_that_ended_by_itself_up_to_a_bound(num_before: int, num_due: int) -> None:
    stalls = Stalls()
    for progress in [1] * (num_before + 1) + [2, 3, None]:
        stalls.look(progress)
    for _ in range(num_due):
        stalls.look(4)
        assert not stalls.is_stalled
    stalls.look(4)
    assert stalls.is_stalled
    stalls.look(None)
    assert not stalls.is_stalled
