"""Faults between processes, and to Redis: damage, cuts, delays, partitions. After each, every answer has the tokens of
a run without faults and ends once, the audit finds no problem, and every block is free or cached."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis
from clusters import wait_until
from fragile_cluster import LEASE_MS, SAMPLING, FragileCluster, ask, fresh_prompts

from protos import tandem_inference_pb2 as inference_pb
from rpc.errors import TandemError
from tandem.chaos.proxy import Direction, FaultyProxy

Fault = Callable[[FaultyProxy, Any], None]
LONG = 1200
"""Length of a prompt in tokens; its KV has 3.7 MB."""


@pytest.fixture(scope="module")
def redis_proxy(redis_server: Any) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(lambda: str(redis_server.socket))
    yield proxy
    proxy.close()


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, redis_proxy: FaultyProxy, few_layers: Path
) -> Iterator[FragileCluster]:
    url = f"redis://{redis_proxy.address}/0"
    running = FragileCluster.start(tmp_path_factory.mktemp("chaos"), redis_url=url, model=few_layers, num_decode=2)
    yield running
    running.close()


def check(cluster: FragileCluster, prompts: list[list[int]], answers: list[list[int]]) -> None:
    cluster.heal()
    cluster.wait_until_at_rest()
    assert answers == ask(cluster, prompts)  # now without faults, on other workers, from caches


def num_reset_at_decode_workers(cluster: FragileCluster) -> int:
    return sum(cluster.proxy(name).num_reset for name in ("decode-1", "decode-2"))


def repairs(cluster: FragileCluster) -> int:
    return sum(worker.num_repairs for worker in cluster.workers().values())


def test_damaged_kv_is_noticed_and_pushed_again(cluster: FragileCluster) -> None:
    prompts, before = fresh_prompts(), repairs(cluster)
    for name in ("decode-1", "decode-2"):
        cluster.proxy(name).damage(2)
    answers = ask(cluster, prompts)
    assert sum(cluster.proxy(name).num_damaged for name in ("decode-1", "decode-2"))
    # A damaged bit in a frame's header breaks the connection instead, which also reveals the damage.
    assert repairs(cluster) > before or any("session lost" in s.log.read_text() for s in cluster.services.values())
    check(cluster, prompts, answers)


@pytest.mark.slow
def test_kv_that_is_always_damaged_is_computed_where_it_is_needed(cluster: FragileCluster) -> None:
    """Pushing again does not help: after two repairs the router gives the attempt up, and the next attempt needs no
    transfer."""
    prompts = fresh_prompts(3)
    for name in ("decode-1", "decode-2"):
        cluster.proxy(name).damage(10**6)
    with cluster.client() as client:
        finished = [client.generate(prompt, **SAMPLING) for prompt in prompts]
    assert all(answer.timings.attempts > 1 for answer in finished)
    check(cluster, prompts, [answer.token_ids for answer in finished])


@pytest.mark.parametrize("num_bytes", [pytest.param(1, marks=pytest.mark.slow), 500_000])
def test_connections_cut_in_the_middle(cluster: FragileCluster, num_bytes: int) -> None:
    """After 1 byte the cut hits the commands, after 500,000 the KV."""
    prompts = fresh_prompts(num_tokens=LONG)
    for name in ("prefill-1", "decode-1", "decode-2"):
        cluster.proxy(name).cut_after(num_bytes if name != "prefill-1" else min(num_bytes, 10_000))
    num_before = num_reset_at_decode_workers(cluster)
    answers = ask(cluster, prompts)
    assert num_reset_at_decode_workers(cluster) > num_before, "nothing was cut where KV flows"
    check(cluster, prompts, answers)


def test_a_partition_in_the_middle_of_streams(cluster: FragileCluster) -> None:
    """All packets to and from a decode worker vanish for more than a lease: its streams continue elsewhere, its grants
    end."""
    prompts, num_before = fresh_prompts(), cluster.num_found_silent("decode-1")
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(ask, cluster, prompts)
        wait_until(lambda: cluster.num_running("decode-1") > 0, 20, "something decodes there")
        cluster.proxy("decode-1").freeze()
        try:
            cluster.wait_until_found_silent("decode-1", num_before)
        finally:
            cluster.proxy("decode-1").thaw()
        answers = asked.result(100)
    check(cluster, prompts, answers)


@pytest.mark.parametrize(
    ("direction", "why"),
    [
        # for the router the same as above
        pytest.param(Direction.DOWN, "the worker has sent nothing", marks=pytest.mark.slow),
        (Direction.UP, "ABORTED: "),
    ],
)
def test_a_partition_in_one_direction(cluster: FragileCluster, direction: Direction, why: str) -> None:
    """Packets from a decode worker vanish, or packets to it: its streams continue elsewhere. If the worker hears
    nothing from a router, it gives the session up and says so, which still arrives."""
    prompts, num_before = fresh_prompts(), cluster.num_sessions_lost("decode-1", why)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(ask, cluster, prompts)
        wait_until(lambda: cluster.num_running("decode-1") > 0, 20, "something decodes there")
        cluster.proxy("decode-1").freeze(direction)
        try:
            what = "the session is lost"
            wait_until(lambda: cluster.num_sessions_lost("decode-1", why) > num_before, 5 * LEASE_MS / 1000, what)
        finally:
            cluster.proxy("decode-1").thaw()
        answers = asked.result(100)
    check(cluster, prompts, answers)


class Reader:
    """One answer, which a thread of its own reads, with the arrival times of its chunks."""

    def __init__(self, cluster: FragileCluster, prompt: list[int]) -> None:
        self.token_ids: list[int] = []
        self.came_s: list[float] = []
        self._cluster, self._prompt = cluster, prompt
        self.asked_s = time.monotonic()
        self._thread = ThreadPoolExecutor(1)
        self._timings = self._thread.submit(self._read)
        self._thread.shutdown(wait=False)

    def _read(self) -> inference_pb.Timings:
        with self._cluster.client() as client:
            for chunk in client.stream(self._prompt, **SAMPLING):
                self.came_s.append(time.monotonic())
                self.token_ids += chunk.token_ids
        return chunk.timings

    def timings(self) -> inference_pb.Timings:
        """The timings, at the answer's end."""
        return self._timings.result(60)


@pytest.mark.slow
def test_kv_that_drips(cluster: FragileCluster) -> None:
    """A slow receiver is not taken for dead, although pings take longer than the timeout for a hanging peer: the push
    goes on for seconds, and the first token arrives long before its end."""
    timings, first_s, second_s = dripped_in_one_attempt(cluster)
    assert timings.kv_transfer.num_bytes > 3_000_000
    assert second_s > 6, "it did not drip"  # the second token comes from the decode worker, once it has the KV
    assert first_s < second_s / 4, "the first token waited for the transfer"


def dripped_in_one_attempt(cluster: FragileCluster, max_tries: int = 3) -> tuple[inference_pb.Timings, float, float]:
    """Return the timings of an answer whose KV drips, and when its first and second token came. Try again if sessions
    were lost because the whole machine stood still. A failure that the dripping causes occurs in every try."""
    for _ in range(max_tries):
        (prompt,) = fresh_prompts(1, LONG)
        for name in ("decode-1", "decode-2"):
            cluster.proxy(name).drip(450_000)
        answer = Reader(cluster, prompt)
        timings = answer.timings()
        first_s, second_s = (came_s - answer.asked_s for came_s in answer.came_s[:2])
        check(cluster, [prompt], [answer.token_ids])
        if timings.attempts == 1:
            return timings, first_s, second_s
    raise AssertionError("\n".join(cluster.failed_attempts()[-max_tries:]))


@pytest.mark.slow
def test_a_prefill_worker_told_to_leave_stays_until_its_kv_has_arrived(cluster: FragileCluster) -> None:
    (prompt,) = fresh_prompts(1, LONG)
    worker = cluster.services["prefill-1"]
    assert worker.process is not None
    for name in ("decode-1", "decode-2"):
        cluster.proxy(name).drip(1_200_000)
    answer = Reader(cluster, prompt)
    wait_until(lambda: bool(answer.token_ids), 20, "the first token")
    worker.signal(signal.SIGTERM)
    wait_until(lambda: " draining " in worker.log.read_text(), 5, "the worker has heard it")
    heard_s = time.monotonic()
    timings = answer.timings()
    assert worker.process.wait(20) == 0
    cluster.heal()
    worker.restart()
    cluster.wait_for_workers(1)
    assert timings.attempts == 1, "\n".join(cluster.failed_attempts()[-2:])
    assert timings.prefill_worker == "prefill-1"
    assert answer.came_s[1] - heard_s > 1, "its KV had arrived before"
    check(cluster, [prompt], [answer.token_ids])


def test_a_slow_network(cluster: FragileCluster) -> None:
    prompts = fresh_prompts(3)
    proxies = [cluster.proxy(name) for name in ("prefill-1", "decode-1", "decode-2")]
    nums_before = [proxy.num_delayed for proxy in proxies]
    for proxy in proxies:
        proxy.delay(0.05)
    answers = ask(cluster, prompts)
    assert all(proxy.num_delayed > before for proxy, before in zip(proxies, nums_before, strict=True))
    check(cluster, prompts, answers)


def test_nobody_to_be_reached(cluster: FragileCluster) -> None:
    """All decode workers refuse connections: requests fail at once with `NoWorker`. The cluster recovers by itself."""
    for name in ("decode-1", "decode-2"):
        cluster.proxy(name).refuse(True)
        cluster.proxy(name).cut()
    wait_until(lambda: outcome(cluster) == "NoWorker", 20, "requests are refused", lambda: outcome(cluster))
    start_s = time.monotonic()
    assert outcome(cluster) == "NoWorker"
    assert time.monotonic() - start_s < 5
    cluster.heal()
    wait_until(lambda: outcome(cluster) == "OK", 30, "requests are served again", lambda: outcome(cluster))
    cluster.wait_until_at_rest()


def outcome(cluster: FragileCluster) -> str:
    """Send one small request; return "OK" or the error's name."""
    try:
        with cluster.client() as client:
            client.generate([5, 6, 7], max_tokens=2, temperature=0.0, timeout_s=20)
    except TandemError as error:
        return type(error).__name__
    return "OK"


# -- between services and Redis ---------------------------------------------------------------------------------------


def num_struck(proxy: FaultyProxy) -> int:
    return proxy.num_delayed + proxy.num_frozen + proxy.num_reset


def slow(proxy: FaultyProxy, _: Any) -> None:
    """Answers from Redis take two seconds."""
    proxy.delay(1.0)


def cut_off(proxy: FaultyProxy, _: Any) -> None:
    proxy.freeze()


def lost(proxy: FaultyProxy, server: Any) -> None:
    """Redis loses all connections and data, and refuses new connections."""
    proxy.refuse(True)
    proxy.cut()
    with redis.Redis.from_url(server.url) as client:
        client.flushall()


# test_cli.py covers client requests while Redis does not answer.
@pytest.mark.parametrize("fault", [*(pytest.param(fault, marks=pytest.mark.slow) for fault in (slow, cut_off)), lost])
def test_redis_fails_while_requests_run(
    cluster: FragileCluster, redis_proxy: FaultyProxy, redis_server: Any, fault: Fault
) -> None:
    running, new, num_before = fresh_prompts(3), fresh_prompts(3), num_struck(redis_proxy)
    with ThreadPoolExecutor(1) as thread, cluster.client() as client:
        asked = thread.submit(ask, cluster, running)
        wait_until(lambda: client.status().num_running_requests > 0, 20, "requests run")
        fault(redis_proxy, redis_server)
        during = ask(cluster, new)
        answers = asked.result(100)
        start_s = time.monotonic()
        answer = client.generate([3, 4, 5], max_tokens=1, temperature=0.0, timeout_s=20)
        assert answer.timings.time_to_first_token_ms < 1500, "a request waits for Redis"
        assert time.monotonic() - start_s < 2
        assert num_struck(redis_proxy) > num_before, "nobody asked Redis anything"
        redis_proxy.heal()
        wait_until(lambda: client.status().is_registry_reachable, 20, "Redis is reachable again")
    cluster.wait_until_at_rest()
    assert answers == ask(cluster, running)
    assert during == ask(cluster, new)
