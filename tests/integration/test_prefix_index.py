"""Prefix reports and lookups over a real Redis: order, gaps, outages, bounds."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import redis
from standstill import hold_up

from registry import prefix_index
from registry.connection import Outage
from registry.prefix_index import PrefixIndex, PrefixReporter

if TYPE_CHECKING:
    from tests.conftest import RedisServer

TIMEOUT_S = 15.0
W1 = [("w1", "i1")]


@dataclass(frozen=True)
class Event:
    is_stored: bool
    block_hash: bytes


def h(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Cache:
    """An engine's prefix cache, as far as a reporter sees it."""

    def __init__(self) -> None:
        self.hashes: set[bytes] = set()
        self.num_snapshots = 0

    async def snapshot(self) -> list[bytes]:
        self.num_snapshots += 1
        return list(self.hashes)

    def store(self, *numbers: int) -> list[Event]:
        self.hashes.update(map(h, numbers))
        return [Event(True, h(number)) for number in numbers]

    def evict(self, *numbers: int) -> list[Event]:
        self.hashes.difference_update(map(h, numbers))
        return [Event(False, h(number)) for number in numbers]


def reporter_of(
    url: str, cache: Cache, worker_id: str = "w1", incarnation: str = "i1", **options: int
) -> PrefixReporter:
    settings = {"ttl_ms": 2000, "beat_ms": 100, "flush_ms": 1, **options}
    return PrefixReporter(
        url, namespace="test", worker_id=worker_id, incarnation=incarnation, snapshot=cache.snapshot, **settings
    )


@asynccontextmanager
async def reporting(url: str, cache: Cache, worker_id: str = "w1", **options: int) -> AsyncIterator[PrefixReporter]:
    reporter = reporter_of(url, cache, worker_id, **options)
    reporter.start()
    try:
        yield reporter
    finally:
        await reporter.close()


@asynccontextmanager
async def index_of(url: str, **options: float) -> AsyncIterator[PrefixIndex]:
    index = PrefixIndex(url, namespace="test", **{"timeout_s": 5.0, **options})  # type: ignore[arg-type]
    try:
        yield index
    finally:
        await index.close()


def members(url: str, worker_id: str = "w1", incarnation: str = "i1") -> set[bytes]:
    with redis.Redis.from_url(url) as client:
        return set(client.smembers(f"test:prefix:{worker_id}:{incarnation}"))


async def until(is_so: Callable[[], bool]) -> None:
    """Poll a condition that has no event to wait for: the state of Redis, seen from outside."""
    async with asyncio.timeout(TIMEOUT_S):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def first_answer(index: PrefixIndex, hashes: list[bytes]) -> dict[str, int]:
    """Return the first non-empty answer of the index for w1."""
    async with asyncio.timeout(TIMEOUT_S):
        while not (matches := await index.longest_match(hashes, W1)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return matches


async def test_two_workers_longest_match(redis_url: str) -> None:
    one, two = Cache(), Cache()
    one.store(1, 2, 3)
    async with reporting(redis_url, one, "w1"), reporting(redis_url, two, "w2") as second, index_of(redis_url) as index:
        second.report(two.store(1, 9, 4))
        await until(lambda: members(redis_url, "w1") == one.hashes and members(redis_url, "w2") == two.hashes)
        workers = [("w1", "i1"), ("w2", "i1"), ("w1-of-yore", "i0")]
        matches = await index.longest_match([h(1), h(2), h(3), h(4)], workers)
        assert matches == {"w1": 3, "w2": 1, "w1-of-yore": 0}
        assert await index.longest_match([h(8)], workers) == {"w1": 0, "w2": 0, "w1-of-yore": 0}
        assert await index.longest_match([h(1)], [("w1", "another")]) == {"w1": 0}


def hold(url: str, num_hits: dict[str, int]) -> list[tuple[str, str]]:
    """Write to Redis what reporters would for workers that have these numbers of leading blocks. Return the workers."""
    with redis.Redis.from_url(url) as client, client.pipeline(transaction=False) as pipe:
        for worker_id, number in num_hits.items():
            if number:
                pipe.sadd(f"test:prefix:{worker_id}:i1", *(h(i) for i in range(number)))
        pipe.execute()
    return [(worker_id, "i1") for worker_id in num_hits]


async def test_leading_hits_are_counted_exactly(redis_url: str) -> None:
    ends = [0, 1, 2, 3, 8, 9, 10, 80, 81, 82, 1000, 2998, 2999, 3000]
    chosen = random.Random(1)
    numbers = [*ends, *ends[::-1], *(end for end in ends for _ in range(3)), *chosen.choices(range(3001), k=50)]
    num_hits = {f"w{i}": number for i, number in enumerate(numbers)}
    workers = hold(redis_url, num_hits)
    async with index_of(redis_url) as index:
        assert await index.longest_match([h(i) for i in range(3000)], workers) == num_hits
        for asked in (1, 2, 9, 10, 1000):
            expected = {worker_id: min(number, asked) for worker_id, number in num_hits.items()}
            assert await index.longest_match([h(i) for i in range(asked)], workers) == expected


async def test_a_beginning_that_a_fleet_shares_is_looked_up_once_a_worker(redis_url: str) -> None:
    """One Redis serves all routers' lookups: it must not check a thousand blocks of each of a hundred workers."""
    num_hits = {f"w{i}": 1000 for i in range(100)}
    workers = hold(redis_url, num_hits)
    with redis.Redis.from_url(redis_url) as client:
        client.config_resetstat()
        async with index_of(redis_url) as index:
            assert await index.longest_match([h(i) for i in range(2000)], workers) == num_hits
        assert client.info("commandstats")["cmdstat_smismember"]["calls"] < 110


async def test_order_within_and_across_batches(redis_url: str) -> None:
    """Random stores and evictions of few hashes: in the end Redis has what the engine has."""
    randomness, cache = random.Random(1), Cache()
    async with reporting(redis_url, cache) as reporter:
        await until(lambda: reporter.num_resyncs == 1 and reporter.num_pending == 0)
        for _ in range(300):
            events = []
            for _ in range(randomness.randrange(1, 6)):
                number = randomness.randrange(12)
                events += cache.evict(number) if h(number) in cache.hashes else cache.store(number)
            reporter.report(events)
            if randomness.random() < 0.5:
                await asyncio.sleep(0.001)
        await until(lambda: members(redis_url) == cache.hashes)
        assert reporter.num_resyncs == 1


async def test_heartbeats_keep_the_set_and_death_expires_it(redis_url: str) -> None:
    cache = Cache()
    cache.store(1)
    reporter = reporter_of(redis_url, cache, ttl_ms=2000, beat_ms=50)
    reporter.start()
    await until(lambda: members(redis_url) == {h(1)})
    with redis.Redis.from_url(redis_url) as client:
        for key in client.keys("test:prefix*"):
            left_ms = [2000]

            def has_more_left(key: bytes = key, left_ms: list[int] = left_ms) -> bool:
                left_ms.append(client.pttl(key))
                return left_ms[-1] > left_ms[-2]

            await until(has_more_left)
        assert members(redis_url) == {h(1)}
        assert reporter.num_resyncs == 1
        assert reporter._task is not None
        reporter._task.cancel()  # no more heartbeats, as of a killed process
        await until(lambda: client.keys("test:prefix*") == [])
    await reporter.close()


async def cancel_after(num_steps: int, index: PrefixIndex) -> None:
    """Start a lookup and cancel it `num_steps` steps of the loop later: it must be cancelled unless it had ended."""
    asking = asyncio.create_task(index.longest_match([h(1)], W1))
    for _ in range(num_steps):
        await asyncio.sleep(0)
    is_over = asking.done()
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled() != is_over


@pytest.mark.parametrize("num_steps", range(12))
async def test_who_is_cancelled_while_asking_is_cancelled(redis_url: str, num_steps: int) -> None:
    """Cancels at each step of the event loop: a lookup that went on would plan a request that no client waits for."""
    async with index_of(redis_url) as index:
        await index.longest_match([h(1)], W1)  # connected
        await cancel_after(num_steps, index)
        assert await index.longest_match([h(1)], W1) == {"w1": 0}, "the answer to the one before is not taken for ours"


@pytest.mark.parametrize("num_steps", range(12))
async def test_who_is_cancelled_while_a_connection_breaks_is_cancelled(redis_url: str, num_steps: int) -> None:
    async with resetting(redis_url) as (url, reset), index_of(url) as index:
        await index.longest_match([h(1)], W1)  # connected
        reset()
        await asyncio.sleep(0.001)  # whether the index notices before or in the lookup does not matter
        await cancel_after(num_steps, index)


@asynccontextmanager
async def resetting(redis_url: str) -> AsyncIterator[tuple[str, Callable[[], None]]]:
    """A TCP relay to Redis; yields its URL and a function that resets all connections (RST, while Redis would send
    FIN)."""
    path, writers, relays = redis_url.removeprefix("unix://"), list[asyncio.StreamWriter](), set[asyncio.Task[None]]()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        redis_reader, redis_writer = await asyncio.open_unix_connection(path)
        writers.extend((writer, redis_writer))
        relays.update(asyncio.create_task(relay(*ends)) for ends in ((reader, redis_writer), (redis_reader, writer)))

    def reset() -> None:
        for writer in writers:
            writer.transport.abort()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        try:
            yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", reset
        finally:
            reset()
            for task in relays:
                task.cancel()
            await asyncio.gather(*relays, return_exceptions=True)


async def test_close_deletes(redis_url: str) -> None:
    cache = Cache()
    cache.store(1)
    async with reporting(redis_url, cache):
        await until(lambda: members(redis_url) == {h(1)})
    with redis.Redis.from_url(redis_url) as client:
        assert client.keys("test:prefix*") == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda client: client.flushall(),
        lambda client: client.delete("test:prefix-seq:w1:i1"),
        lambda client: client.incr("test:prefix-seq:w1:i1"),
        lambda client: client.delete("test:prefix:w1:i1"),
        lambda client: client.sadd("test:prefix:w1:i1", h(77)),
        lambda client: client.set("test:prefix:w1:i1", "not a set"),
    ],
    ids=["emptied", "seq lost", "seq ahead", "set lost", "set tampered with", "set of another type"],
)
async def test_gap_is_noticed_without_traffic_and_repaired(
    redis_url: str, damage: Callable[[redis.Redis], object]
) -> None:
    cache = Cache()
    cache.store(1, 2)
    async with reporting(redis_url, cache) as reporter:
        await until(lambda: members(redis_url) == cache.hashes)
        reporter.report(cache.store(3))  # a batch: numbers begin anew with the set, and this one is not the first
        await until(lambda: members(redis_url) == cache.hashes)
        with redis.Redis.from_url(redis_url) as client:
            damage(client)
            await until(lambda: reporter.num_resyncs == 2)
            await until(lambda: client.type("test:prefix:w1:i1") == b"set" and members(redis_url) == cache.hashes)
            reporter.report(cache.store(4))
            await until(lambda: members(redis_url) == cache.hashes)
        assert reporter.num_resyncs == 2


async def test_redis_restarted_empty_heals(own_redis_server: RedisServer) -> None:
    url, cache = own_redis_server.url, Cache()
    async with reporting(url, cache) as reporter, index_of(url) as index:
        reporter.report(cache.store(1, 2))
        await until(lambda: members(url) == cache.hashes)
        own_redis_server.stop()
        assert await index.longest_match([h(1)], W1) == {}
        assert not index.is_reachable
        reporter.report(cache.store(3) + cache.evict(1))
        await until(lambda: not reporter.is_reachable)
        own_redis_server.start()
        await until(lambda: members(url) == {h(2), h(3)})
        assert await first_answer(index, [h(2), h(3)]) == {"w1": 2}
        assert index.is_reachable


async def test_batch_that_redis_refuses_is_made_up_for(own_redis_server: RedisServer) -> None:
    url, cache = own_redis_server.url, Cache()
    async with reporting(url, cache) as reporter:
        reporter.report(cache.store(1))
        await until(lambda: members(url) == cache.hashes)
        with redis.Redis.from_url(url) as client:
            client.config_set("maxmemory", 1)
            reporter.report(cache.store(2))
            await until(lambda: not reporter.is_reachable)
            assert members(url) == {h(1)}
            client.config_set("maxmemory", 0)
        await until(lambda: members(url) == cache.hashes)


async def test_too_many_pending_events_cost_a_resync_not_memory(redis_url: str) -> None:
    cache = Cache()
    async with reporting(redis_url, cache, max_pending=10) as reporter:
        await until(lambda: reporter.num_resyncs == 1)
        reporter.report(cache.store(*range(500)))
        assert reporter.num_pending == 0
        await until(lambda: members(redis_url) == cache.hashes)
        assert reporter.num_resyncs == 2


async def test_events_during_a_snapshot_are_not_lost(redis_url: str) -> None:
    """Events that happen between the taking of a snapshot and its arrival are applied after the snapshot."""
    cache = Cache()
    cache.store(1, 2)
    taken, may_arrive = asyncio.Event(), asyncio.Event()

    async def snapshot() -> list[bytes]:
        hashes = list(cache.hashes)
        taken.set()
        await may_arrive.wait()
        return hashes

    reporter = PrefixReporter(redis_url, namespace="test", worker_id="w1", incarnation="i1", snapshot=snapshot)
    reporter.start()
    await taken.wait()
    reporter.report(cache.evict(1))
    reporter.report(cache.store(3))
    may_arrive.set()
    await until(lambda: members(redis_url) == {h(2), h(3)})
    await reporter.close()


async def test_large_cache_goes_in_bounded_commands(redis_url: str) -> None:
    cache = Cache()
    cache.store(*range(10_000))
    async with reporting(redis_url, cache) as reporter:
        await until(lambda: members(redis_url) == cache.hashes)
        reporter.report(cache.evict(*range(5_000)) + cache.store(*range(20_000, 25_000)))
        await until(lambda: members(redis_url) == cache.hashes)
        assert reporter.num_resyncs == 1


async def test_lookup_is_one_command_for_all_workers(redis_url: str) -> None:
    async with index_of(redis_url) as index:
        workers = [(f"w{i}", "i") for i in range(50)]
        hashes = [h(i) for i in range(100)]
        await index.longest_match(hashes, workers)  # loads the script
        with redis.Redis.from_url(redis_url) as client:
            before = client.info("commandstats")["cmdstat_evalsha"]["calls"]
            assert await index.longest_match(hashes, workers) == {worker_id: 0 for worker_id, _ in workers}
            assert client.info("commandstats")["cmdstat_evalsha"]["calls"] - before == 1


async def test_lookup_looks_at_max_hashes_only(redis_url: str) -> None:
    cache = Cache()
    cache.store(*range(40))
    async with reporting(redis_url, cache), index_of(redis_url, max_hashes=30) as index:
        await until(lambda: members(redis_url) == cache.hashes)
        assert await index.longest_match([h(i) for i in range(40)], W1) == {"w1": 30}


async def test_nothing_asked_nothing_answered(redis_url: str) -> None:
    async with index_of(redis_url) as index:
        assert await index.longest_match([], W1) == {}
        assert await index.longest_match([h(1)], []) == {}


async def test_slow_redis_costs_one_timeout_and_answers_stay_paired(
    own_redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    url = own_redis_server.url
    cache = Cache()
    cache.store(1, 2)
    async with reporting(url, cache), index_of(url, timeout_s=0.05) as index:
        await until(lambda: members(url) == cache.hashes)
        assert await first_answer(index, [h(1), h(2)]) == {"w1": 2}
        hold_up(own_redis_server.pid)
        try:
            started = time.monotonic()
            assert await index.longest_match([h(1), h(2)], W1) == {}
            assert 0.04 < time.monotonic() - started < 2
            started = time.monotonic()
            for _ in range(100):  # within LOOKUP_RETRY_S nobody waits again
                assert await index.longest_match([h(1)], W1) == {}
            assert time.monotonic() - started < 2  # together they would wait for five seconds
            assert not index.is_reachable
        finally:
            os.kill(own_redis_server.pid, signal.SIGCONT)
        # The answer given up above ({w1: 2}) must not be taken for that of the next question.
        assert await first_answer(index, [h(2), h(9)]) == {"w1": 1}
    assert not [line for line in caplog.messages if line.startswith("prefix index")], "one answer late is no outage"


def test_an_outage_is_told_once_it_has_lasted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    moments_s = iter((100.0, 100.6, 101.1, 101.7, 102.0, 102.9))
    monkeypatch.setattr("registry.connection.time", SimpleNamespace(monotonic=lambda: next(moments_s)))
    outage = Outage(logging.getLogger("test"), "prefix index", told_after_s=1.0)
    for num_failures in (4, 1, 1):
        for _ in range(num_failures):
            outage.failed(TimeoutError())
            assert not outage.is_reachable
        outage.answered()
    assert caplog.messages == [
        "prefix index: Redis does not answer (no answer in time), continuing with what is known",
        "prefix index: Redis answers again, after 4 failed calls",
    ]


async def test_many_lookups_at_once_share_few_connections(redis_url: str) -> None:
    cache = Cache()
    cache.store(1, 2)
    async with reporting(redis_url, cache), index_of(redis_url) as index:
        await until(lambda: members(redis_url) == cache.hashes)
        asked = [index.longest_match([h(1), h(2), h(3)], W1) for _ in range(200)]
        assert await asyncio.gather(*asked) == [{"w1": 2}] * 200
        with redis.Redis.from_url(redis_url) as client:
            assert len(client.client_list()) <= prefix_index.MAX_CONCURRENT_LOOKUPS + 8
