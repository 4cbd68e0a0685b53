"""Sessions that are lost, opened again, and closed: the pool's part. No network."""

from __future__ import annotations

import asyncio
import logging

import pytest
from one_worker import OneWorker


async def test_a_worker_that_was_away_for_hours_is_connected_again(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = OneWorker(monkeypatch)
    handle = await worker.open_handle()
    handle.num_lost = 10_000
    await worker.lose_session(num_requests=0)
    assert await worker.open_handle() is handle
    await worker.pool.close()


async def test_a_worker_that_leaves_in_order_has_not_lost_its_session(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = OneWorker(monkeypatch)
    session = (await worker.open_handle()).session
    assert session is not None
    with caplog.at_level(logging.WARNING):
        worker.pool.set_records([])
        await asyncio.wait([session._task])
    assert caplog.messages == []
    await worker.pool.close()
