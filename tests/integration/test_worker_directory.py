"""Registration and directory over a real Redis: expiry, incarnations, drains, outages, malformed records."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import redis
from standstill import hold_up

from engine.lora.modules import MAX_MODULES, NAME
from protos import tandem_worker_pb2 as pb
from registry import workers
from registry.keys import Keys
from registry.workers import WorkerDirectory, WorkerRegistration

if TYPE_CHECKING:
    from tests.conftest import RedisServer

NAMESPACE = "test"
TIMEOUT_S = 15.0
Records = list[pb.WorkerRecord]


def record(worker_id: str = "w1", incarnation: str = "i1", **fields: object) -> pb.WorkerRecord:
    made = pb.WorkerRecord(worker_id=worker_id, incarnation=incarnation, role=pb.ROLE_DECODE, address="127.0.0.1:1")
    made.MergeFrom(pb.WorkerRecord(**fields))  # type: ignore[arg-type]
    return made


def registration(
    url: str, made: pb.WorkerRecord, *, ttl_ms: int = 1000, beat_ms: int = 100, namespace: str = NAMESPACE
) -> WorkerRegistration:
    return WorkerRegistration(
        url,
        namespace=namespace,
        worker_id=made.worker_id,
        incarnation=made.incarnation,
        record=lambda: made,
        ttl_ms=ttl_ms,
        beat_ms=beat_ms,
    )


@asynccontextmanager
async def registered(url: str, made: pb.WorkerRecord, **options: int) -> AsyncIterator[WorkerRegistration]:
    worker = registration(url, made, **options)
    worker.start()
    try:
        yield worker
    finally:
        await worker.close()


class Watcher:
    """A directory, with a way to wait until its on_change reports a change."""

    def __init__(self, url: str, ttl_ms: int = 1000) -> None:
        self.changes: list[Records] = []
        self._changed = asyncio.Event()
        self.directory = WorkerDirectory(
            url, namespace=NAMESPACE, on_change=self._on_change, ttl_ms=ttl_ms, refresh_ms=20
        )

    def _on_change(self, records: Records) -> None:
        self.changes.append(records)
        self._changed.set()

    async def until(self, is_so: Callable[[Records], bool]) -> Records:
        async with asyncio.timeout(TIMEOUT_S):
            while not is_so(self.directory.records):
                self._changed.clear()
                await self._changed.wait()
        return self.directory.records


@asynccontextmanager
async def watching(url: str, ttl_ms: int = 1000) -> AsyncIterator[Watcher]:
    watcher = Watcher(url, ttl_ms)
    await watcher.directory.start()
    try:
        yield watcher
    finally:
        await watcher.directory.close()


async def until(is_so: Callable[[], bool]) -> None:
    """Poll a condition that has no event to wait for: the state of Redis, seen from outside."""
    async with asyncio.timeout(TIMEOUT_S):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_record_arrives_whole_and_leaves_on_close(redis_url: str) -> None:
    made = record(compat_digest="d", prefix_key=b"\x00\xff", load=pb.WorkerLoad(num_running=3), lease_ms=500)
    async with watching(redis_url) as watcher:
        async with registered(redis_url, made):
            assert await watcher.until(bool) == [made]
            assert watcher.directory.records == [made]
        assert await watcher.until(lambda records: not records) == []
    with redis.Redis.from_url(redis_url) as client:
        assert client.exists("test:worker:w1", "test:workers") == 0


async def test_worker_that_dies_expires(redis_url: str) -> None:
    worker = registration(redis_url, record(), ttl_ms=300)
    worker.start()
    async with watching(redis_url) as watcher:
        await watcher.until(bool)
        assert worker._task is not None
        worker._task.cancel()  # no more beats, as of a killed process
        started = time.monotonic()
        await watcher.until(lambda records: not records)
        assert time.monotonic() - started < 2
        with redis.Redis.from_url(redis_url) as client:
            assert client.smembers("test:workers") == set()  # pruned by the reader
        with pytest.raises(asyncio.CancelledError):
            await worker.close()


async def test_load_is_fresh_but_changes_tell_only_of_standing(redis_url: str) -> None:
    made = record()
    async with watching(redis_url) as watcher, registered(redis_url, made, ttl_ms=10_000, beat_ms=5_000) as worker:
        await watcher.until(bool)
        made.load.num_running = 7
        worker.beat_now()
        await until(lambda: watcher.directory.records[0].load.num_running == 7)
        assert len(watcher.changes) == 1
        made.is_draining = True
        worker.beat_now()
        await watcher.until(lambda records: records[0].is_draining)
        assert len(watcher.changes) == 2


async def test_new_incarnation_replaces_the_old_whose_close_leaves_it_alone(redis_url: str) -> None:
    async with watching(redis_url) as watcher:
        old = registration(redis_url, record(incarnation="i1"), ttl_ms=10_000, beat_ms=5_000)
        old.start()
        await watcher.until(bool)
        async with registered(redis_url, record(incarnation="i2")):
            await watcher.until(lambda records: records[0].incarnation == "i2")
            await old.close()
            await watcher.directory.refresh()
            assert [each.incarnation for each in watcher.directory.records] == ["i2"]


async def test_a_worker_that_drains_leaves_the_record_to_its_successor(redis_url: str) -> None:
    """A worker that is started under the same id before the draining one has left gets new requests at once, and keeps
    the record when the other leaves."""
    leaving, is_beating = record(incarnation="i1"), asyncio.Event()

    def told() -> pb.WorkerRecord:
        is_beating.set()
        return leaving

    async with watching(redis_url) as watcher:
        old = WorkerRegistration(redis_url, namespace=NAMESPACE, worker_id="w1", incarnation="i1", record=told)
        old.start()
        await watcher.until(bool)
        async with registered(redis_url, record(incarnation="i2"), ttl_ms=10_000, beat_ms=5_000):
            await watcher.until(lambda records: records[0].incarnation == "i2")
            leaving.is_draining = True
            is_beating.clear()
            old.beat_now()
            await is_beating.wait()
            await old.close()
            await watcher.directory.refresh()
            assert [each.incarnation for each in watcher.directory.records] == ["i2"]
            assert not [records for records in watcher.changes if not records or records[0].is_draining]


async def test_namespaces_do_not_see_each_other(redis_url: str) -> None:
    other = registration(redis_url, record("w2"), namespace="other")
    other.start()
    async with watching(redis_url) as watcher, registered(redis_url, record("w1")):
        await watcher.until(bool)
        await watcher.directory.refresh()
        assert [each.worker_id for each in watcher.directory.records] == ["w1"]
    await other.close()


async def test_directory_keeps_records_while_redis_is_away(
    own_redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    url = own_redis_server.url
    async with watching(url) as watcher, registered(url, record()) as worker:
        await watcher.until(bool)
        own_redis_server.stop()
        await until(lambda: not watcher.directory.is_reachable and not worker.is_reachable)
        assert await watcher.directory.refresh() is False
        assert [each.worker_id for each in watcher.directory.records] == ["w1"]
        warnings = [entry.getMessage() for entry in caplog.records if "Redis does not answer" in entry.getMessage()]
        assert len(warnings) == 2  # one from each, however often they tried
        own_redis_server.start()


async def test_redis_restarted_empty_heals_and_nobody_disappears_meanwhile(own_redis_server: RedisServer) -> None:
    url = own_redis_server.url
    async with watching(url, ttl_ms=6000) as watcher, registered(url, record()) as worker:
        await watcher.until(bool)
        own_redis_server.stop()
        await until(lambda: not watcher.directory.is_reachable and not worker.is_reachable)
        own_redis_server.start()
        await until(lambda: watcher.directory.is_reachable)
        with redis.Redis.from_url(url) as client:
            await until(lambda: client.exists("test:worker:w1") == 1)
        assert watcher.changes == [watcher.directory.records]  # the record came once and never went away


async def test_redis_that_has_become_a_replica_is_left_for_whoever_has_its_name_now(
    redis_url: str, own_redis_server: RedisServer
) -> None:
    """After a failover the connections to the old master stay open, but it refuses all writes."""
    name = own_redis_server.folder / "name"
    name.symlink_to(own_redis_server.socket)
    async with watching(f"unix://{name}") as watcher, registered(f"unix://{name}", record()):
        await watcher.until(bool)
        with redis.Redis.from_url(own_redis_server.url) as demoted:
            demoted.replicaof("127.0.0.1", 1)
        await until(lambda: not watcher.directory.is_reachable)
        name.unlink()
        name.symlink_to(redis_url.removeprefix("unix://"))
        with redis.Redis.from_url(redis_url) as promoted:
            await until(lambda: bool(promoted.exists("test:worker:w1")))
        await until(lambda: watcher.directory.is_reachable)
        assert watcher.directory.records == [record()]


async def test_record_that_expired_while_redis_was_away_stays_until_workers_could_beat(
    own_redis_server: RedisServer,
) -> None:
    with redis.Redis.from_url(own_redis_server.url) as client:
        client.sadd("test:workers", "w1")
        client.set("test:worker:w1", record().SerializeToString(), px=1500)
        async with watching(own_redis_server.url, ttl_ms=500) as watcher:
            assert len(watcher.directory.records) == 1
            hold_up(own_redis_server.pid)
            await until(lambda: not watcher.directory.is_reachable)
            await asyncio.sleep(0.6)  # plus the second of the failed call: longer than the record lives
            os.kill(own_redis_server.pid, signal.SIGCONT)
            await until(lambda: watcher.directory.is_reachable)
            assert client.exists("test:worker:w1") == 0
            assert len(watcher.directory.records) == 1
            await watcher.until(lambda records: not records)


async def test_redis_emptied_behind_the_connection_loses_nobody_who_lives(redis_url: str) -> None:
    """FLUSHALL breaks no connection; the directory notices by the generation key. A worker that does not beat again is
    dropped after ttl_ms."""
    async with watching(redis_url, ttl_ms=1500) as watcher:
        async with registered(redis_url, record("alive"), ttl_ms=2000, beat_ms=600):
            dead = registration(redis_url, record("dead"), ttl_ms=60_000, beat_ms=30_000)
            dead.start()
            await watcher.until(lambda records: len(records) == 2)
            with redis.Redis.from_url(redis_url) as client:
                client.flushall()
            await watcher.directory.refresh()
            assert len(watcher.directory.records) == 2
            await watcher.until(lambda records: len(records) == 1)
            assert [each.worker_id for each in watcher.directory.records] == ["alive"]
            assert all(any(each.worker_id == "alive" for each in records) for records in watcher.changes[1:])
            await dead.close()


async def test_a_worker_of_as_many_adapters_as_there_may_be(redis_url: str) -> None:
    """The adapters have the longest names, of letters that take the most bytes."""
    names = [chr(0x1D400 + i % 16) * 127 + chr(0x1D400 + i // 16) for i in range(MAX_MODULES)]
    assert len(set(names)) == MAX_MODULES
    assert all(map(NAME.fullmatch, names))
    made = record("w1")
    made.model.lora_names.extend(names)
    made.lora_digests.update(dict.fromkeys(names, "0" * 32))
    async with watching(redis_url) as watcher, registered(redis_url, made):
        await watcher.until(bool)
        assert dict(watcher.directory.records[0].lora_digests) == dict(made.lora_digests)


async def test_malformed_records_are_skipped_and_logged_once(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    bad: dict[str, bytes] = {
        "garbage": b"\xff\xff\xff",
        "empty-handed": pb.WorkerRecord(worker_id="empty-handed").SerializeToString(),
        "impostor": record("somebody-else").SerializeToString(),
        "roleless": pb.WorkerRecord(worker_id="roleless", incarnation="i", address="a:1").SerializeToString(),
        "odd name": record("odd name").SerializeToString(),
        "odd-incarnation": record("odd-incarnation", "a:b").SerializeToString(),
        "huge": record("huge", prefix_key=b"x" * workers.MAX_RECORD_BYTES).SerializeToString(),
    }
    with redis.Redis.from_url(redis_url) as client:
        for worker_id, data in bad.items():
            client.sadd("test:workers", worker_id)
            client.set(f"test:worker:{worker_id}", data)
        client.sadd("test:workers", b"\xff\xfe")
        client.set(b"test:worker:\xff\xfe", b"x")
    async with watching(redis_url) as watcher, registered(redis_url, record("good")):
        await watcher.until(bool)
        for _ in range(3):
            assert await watcher.directory.refresh()
        assert [each.worker_id for each in watcher.directory.records] == ["good"]
    warnings = [entry for entry in caplog.records if "is skipped" in entry.getMessage()]
    assert len(warnings) == len(bad) + 1


async def test_key_of_a_wrong_type_counts_as_an_outage_and_heals(redis_url: str) -> None:
    async with watching(redis_url) as watcher, registered(redis_url, record()) as worker:
        await watcher.until(bool)
        with redis.Redis.from_url(redis_url) as client:
            client.set("test:workers", "not a set")
            await until(lambda: not watcher.directory.is_reachable and not worker.is_reachable)
            assert [each.worker_id for each in watcher.directory.records] == ["w1"]
            client.delete("test:workers")
        await until(lambda: watcher.directory.is_reachable and worker.is_reachable)


async def test_slow_redis_holds_up_no_close(own_redis_server: RedisServer) -> None:
    url = own_redis_server.url
    watcher, worker = Watcher(url), registration(url, record())
    await watcher.directory.start()
    worker.start()
    await watcher.until(bool)
    hold_up(own_redis_server.pid)
    try:
        started = time.monotonic()
        await asyncio.gather(watcher.directory.close(), worker.close())
        assert time.monotonic() - started < 4 * workers.REDIS_TIMEOUT_S
    finally:
        os.kill(own_redis_server.pid, signal.SIGCONT)


async def test_start_without_redis_waits_for_nothing(own_redis_server: RedisServer) -> None:
    own_redis_server.stop()
    async with watching(own_redis_server.url) as watcher, registered(own_redis_server.url, record()):
        assert watcher.directory.records == []
        assert not watcher.directory.is_reachable
        own_redis_server.start()
        await watcher.until(bool)


async def test_hundreds_of_workers_are_one_round_trip(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        pipe = client.pipeline()
        for i in range(500):
            pipe.sadd("test:workers", f"w{i:03}")
            pipe.set(f"test:worker:w{i:03}", record(f"w{i:03}").SerializeToString())
        pipe.execute()
        directory = WorkerDirectory(redis_url, namespace=NAMESPACE)
        await directory.refresh()  # loads the script
        before = client.info("commandstats")
        assert await directory.refresh()
        after = client.info("commandstats")
    assert [each.worker_id for each in directory.records] == [f"w{i:03}" for i in range(500)]
    assert after["cmdstat_evalsha"]["calls"] - before["cmdstat_evalsha"]["calls"] == 1
    await directory.close()


@pytest.mark.parametrize("name", ["", "a:b", "a b", "é", "x" * 129, "a\n"])
def test_names_that_would_make_keys_ambiguous_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="namespace must be"):
        Keys(name)
    with pytest.raises(ValueError, match="worker_id must be"):
        Keys("n").worker(name)
    with pytest.raises(ValueError, match="incarnation must be"):
        Keys("n").prefix("w", name)


async def test_ttl_shorter_than_two_beats_is_refused(redis_url: str) -> None:
    with pytest.raises(ValueError, match="ttl_ms must be at least twice beat_ms"):
        registration(redis_url, record(), ttl_ms=100, beat_ms=100)


async def test_bug_in_the_record_is_logged_when_it_happens(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    worker = WorkerRegistration(
        redis_url, namespace=NAMESPACE, worker_id="w1", incarnation="i1", record=lambda: record("w2")
    )
    worker.start()
    with caplog.at_level(logging.ERROR):
        await until(lambda: "heartbeat of w1 ended with an error" in caplog.text)
    with pytest.raises(AssertionError):
        await worker.close()
