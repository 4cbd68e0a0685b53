"""Two live workers with the same id overwrite each other's record, and operators are told. Workers that follow each
other under one id are not reported."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from click.testing import CliRunner
from tiny_cluster import Cluster, wait_for

from protos import tandem_worker_pb2 as pb
from registry.workers import WorkerRegistration
from tandem.cli.status import status


class Beating:
    """A worker's registration that sends a heartbeat only when the test tells it to."""

    def __init__(self, url: str, incarnation: str, ttl_ms: int = 60_000) -> None:
        self.record = pb.WorkerRecord(worker_id="w", incarnation=incarnation, address=f"{incarnation}:1")
        self._num_asked = 0
        self.registration = WorkerRegistration(
            url,
            namespace="test",
            worker_id="w",
            incarnation=incarnation,
            record=self._record,
            ttl_ms=ttl_ms,
            beat_ms=ttl_ms // 2,
        )

    def _record(self) -> pb.WorkerRecord:
        self._num_asked += 1
        return self.record

    async def beat(self) -> None:
        """Send one heartbeat; when this returns, the previous one has ended."""
        num_before = self._num_asked
        if self.registration._task is None:
            self.registration.start()
        else:
            self.registration.beat_now()

        async def is_asked() -> bool:
            return self._num_asked > num_before

        await wait_for(is_asked, "it beats")

    async def beat_twice(self) -> None:
        await self.beat()
        await self.beat()

    @property
    def rival(self) -> str:
        return self.registration.rival_address


@pytest.fixture
def beating(redis_url: str) -> Callable[..., Beating]:
    return lambda incarnation, **options: Beating(redis_url, incarnation, **options)


async def test_each_of_two_learns_of_the_other(
    beating: Callable[..., Beating], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = beating("first"), beating("second")
    await first.beat_twice()
    for _ in range(3):
        await second.beat_twice()
        await first.beat_twice()
    assert (first.rival, second.rival) == ("second:1", "first:1")
    said = [line.getMessage() for line in caplog.records]
    assert sorted(said) == [
        f"another worker has the same id w, at {name}:1; give each its own --worker-id" for name in ("first", "second")
    ]
    await first.registration.close()
    await second.registration.close()


async def test_a_rival_that_writes_no_more_is_forgotten(beating: Callable[..., Beating]) -> None:
    first, second = beating("first", ttl_ms=400), beating("second", ttl_ms=400)
    first.registration.start()
    second.registration.start()

    async def is_known() -> bool:
        return first.rival == "second:1"

    async def is_forgotten() -> bool:
        return not first.rival

    await wait_for(is_known, "both have beaten in turn")
    await second.registration.close()
    await wait_for(is_forgotten, "its rival has gone")
    await first.registration.close()


async def test_a_worker_that_was_killed_is_no_rival_of_its_successor(beating: Callable[..., Beating]) -> None:
    killed, successor = beating("killed"), beating("successor")
    await killed.beat_twice()
    assert killed.registration._task is not None
    killed.registration._task.cancel()
    for _ in range(3):
        await successor.beat()
    assert not successor.rival
    await successor.registration.close()
    with pytest.raises(asyncio.CancelledError):
        await killed.registration.close()


async def test_a_worker_that_drains_and_its_successor_are_no_rivals(
    beating: Callable[..., Beating], redis_url: str
) -> None:
    """No conflict is reported, even if the draining worker has the record for a moment after Redis was emptied."""
    leaving, successor = beating("leaving"), beating("successor")
    leaving.record.is_draining = True
    await leaving.beat_twice()
    for _ in range(2):
        await successor.beat_twice()
        await leaving.beat_twice()
    with redis.Redis.from_url(redis_url) as client:
        client.delete("test:worker:w")
    await leaving.beat_twice()
    await successor.beat_twice()
    assert (leaving.rival, successor.rival) == ("", "")
    await leaving.registration.close()
    await successor.registration.close()


async def test_operators_are_told_of_two_workers_of_one_id(
    tiny_cluster: Cluster, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The router's log and the status report both, whichever of the two workers has the record."""
    pair = [await tiny_cluster.start_decode_worker("twin", tiny_model) for _ in range(2)]
    addresses = [worker._address for worker in pair]
    fix = "too: drain one, or give it another --worker-id"
    said = ""

    async def says_so() -> bool:
        nonlocal said
        for worker in pair:
            worker._registration.beat_now()
        said = (await asyncio.to_thread(CliRunner().invoke, status, ["--router", tiny_cluster.address])).output
        return fix in said

    await wait_for(says_so, "the status tells")
    assert all(address in said for address in addresses)

    def told() -> list[tuple[str, str, str]]:
        lines = [line for line in caplog.records if line.getMessage() == "two workers of one id"]
        return [(line.worker, line.addresses, line.fix) for line in lines]  # type: ignore[attr-defined]

    async def has_told() -> bool:
        return bool(told())

    await wait_for(has_told, "the router's log tells")
    both = " and ".join(sorted(addresses))
    assert set(told()) == {("twin", both, "drain one, or give it another --worker-id")}
