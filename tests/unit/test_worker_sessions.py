"""Sessions that are lost, opened again and closed, on the pool's side. No network."""

from __future__ import annotations

import asyncio
import logging

import grpc
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


@pytest.mark.parametrize("how", ["its last request ends", "its session is lost"])
async def test_a_worker_that_has_left_the_registry_is_kept_as_long_as_it_has_requests(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    worker = OneWorker(monkeypatch)
    handle = await worker.open_handle()
    session, workers = handle.session, worker.pool.workers
    assert session is not None
    session.attach("r", lambda _: None)
    worker.pool.set_records([])
    assert workers.handles == {handle.key: handle}
    if how == "its last request ends":
        session.detach("r")
        workers._on_load(handle, handle.record.load)
    else:
        worker.channels[0].ends[0].set_result(grpc.StatusCode.UNAVAILABLE)
    await asyncio.wait([session._task])
    while tasks := list(workers._tasks):
        await asyncio.wait(tasks)
    assert (workers.handles, handle.is_forgotten) == ({}, True)
    assert (worker.channels[0].is_closed, len(worker.channels[0].ends)) == (True, 1)
    await worker.pool.close()


async def test_a_worker_that_was_full_is_asked_again_once_its_session_is_open_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it had has ended with the session, and no load will show that."""
    worker = OneWorker(monkeypatch)
    handle = await worker.open_handle()
    handle.note_busy(handle.num_frees)
    assert handle.is_full
    await worker.lose_session(num_requests=0)
    assert not (await worker.open_handle()).is_full
    await worker.pool.close()


async def test_a_pool_that_closes_closes_all_though_one_leaves_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = OneWorker(monkeypatch)
    stays, leaves = worker.record_of("1"), worker.record_of("2")
    worker.pool.set_records([stays, leaves])
    leaving = await worker.open_handle()
    assert leaving.session is not None
    leaving.session.attach("r", lambda _: None)
    worker.pool.set_records([stays])  # the other worker finishes the request it has

    async def finish() -> None:
        assert leaving.session is not None
        leaving.session.detach("r")
        worker.pool.workers._on_load(leaving, leaving.record.load)

    monkeypatch.setattr(worker.channels[0], "close", finish)
    await worker.pool.close()
    assert worker.channels[1].is_closed


async def test_a_worker_that_leaves_as_it_has_said_alarms_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that leaves while it has requests, or unannounced, causes a warning."""
    caplog.set_level(logging.INFO, "router.known_workers")
    worker = OneWorker(monkeypatch)
    told = []
    for is_leaving, num_requests in ((True, 0), (True, 1), (False, 0)):
        await worker.lose_session(num_requests=num_requests, code=None, is_leaving=is_leaving)
        told += [(r.levelname, r.message) for r in caplog.records if r.message != "worker joined"]
        caplog.clear()
    await worker.pool.close()
    assert told == [("INFO", "worker left"), ("WARNING", "session lost"), ("WARNING", "session lost")]


async def test_two_that_take_turns_under_one_id_join_once_each(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says "worker joined" once for each, and once more after a session was lost."""
    caplog.set_level(logging.INFO, "router.known_workers")
    worker = OneWorker(monkeypatch)
    first, second = worker.record_of("1"), worker.record_of("2")
    first.rival_address, second.rival_address = "b:1", "a:1"
    for written in [first, second] * 3:
        worker.pool.set_records([written])
        assert (await worker.open_handle()).key.incarnation == written.incarnation
    assert caplog.messages == ["worker joined", "worker joined"]
    await worker.lose_session(num_requests=0)
    await worker.open_handle()
    assert caplog.messages[2:] == ["session lost", "worker joined"]
    await worker.pool.close()


async def test_what_to_do_about_a_worker_that_cannot_be_called_is_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = OneWorker(monkeypatch)
    await worker.open_handle()
    worker.channels[-1].details = "Hostname Verification Check failed."
    await worker.lose_session(num_requests=0)
    await worker.pool.close()
    assert vars(caplog.records[-1])["why"] == (
        "UNAVAILABLE: Hostname Verification Check failed. "
        "(its certificate (subjectAltName) does not contain the address that it was called by)"
    )
