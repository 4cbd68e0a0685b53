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


async def test_a_pool_that_closes_closes_all_though_one_leaves_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = OneWorker(monkeypatch)
    stays, leaves = worker.record_of("1"), worker.record_of("2")
    worker.pool.set_records([stays, leaves])
    leaving = await worker.open_handle()
    assert leaving.session is not None
    leaving.session.attach("r", lambda _: None)
    worker.pool.set_records([stays])  # the other one finishes what it has

    async def finish() -> None:
        assert leaving.session is not None
        leaving.session.detach("r")
        worker.pool.workers._on_load(leaving, leaving.record.load)

    monkeypatch.setattr(worker.channels[0], "close", finish)
    await worker.pool.close()
    assert worker.channels[1].is_closed
