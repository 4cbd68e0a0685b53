"""What one request leaves behind in the router, however it ends. No network."""

from __future__ import annotations

import time

from lifecycle_bench import Bench, load, settle


async def test_who_leaves_while_it_waits_is_not_taken_for_hours_of_waiting() -> None:
    bench = Bench()
    bench.decode.set_load(load(0))
    asked = bench.request("r")
    await settle()
    assert len(bench.queue) == 1
    await asked.leave()
    await settle()
    assert len(bench.queue) == 0
    forecast, later_s = bench.cluster.forecast, time.monotonic() + 7200
    forecast.queued(later_s)  # the next one to wait
    forecast.planned(10, later_s + 0.01, is_last=True)
    forecast.num_running = 1
    assert forecast.needed_s(10, 0, 0, 0, 0) < 1, "what later ones are refused by"
