"""Sessions that are lost, opened again, and closed: the pool's part. No network."""

from __future__ import annotations

import pytest
from one_worker import OneWorker


async def test_a_worker_that_was_away_for_hours_is_connected_again(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = OneWorker(monkeypatch)
    handle = await worker.open_handle()
    handle.num_lost = 10_000
    await worker.lose_session(num_requests=0)
    assert await worker.open_handle() is handle
    await worker.pool.close()
