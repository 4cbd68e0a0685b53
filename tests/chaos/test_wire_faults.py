"""What happens between processes, Redis included: damage, cuts, delays, partitions. After each: the tokens of the run
without faults, one end each, balanced books, and every block free or cached."""

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
"""Tokens of a prompt, with 3.7 MB of KV."""


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
    # A bit of a frame's header breaks the connection instead, which is another way to notice.
    assert repairs(cluster) > before or any("session lost" in s.log.read_text() for s in cluster.services.values())
    check(cluster, prompts, answers)


def test_kv_that_is_always_damaged_is_computed_where_it_is_needed(cluster: FragileCluster) -> None:
    """Pushing again does not help: after two repairs the attempt is given up, and the next one does without."""
    prompts = fresh_prompts(3)
    for name in ("decode-1", "decode-2"):
        cluster.proxy(name).damage(10**6)
    with cluster.client() as client:
        finished = [client.generate(prompt, **SAMPLING) for prompt in prompts]
    assert all(answer.timings.attempts > 1 for answer in finished)
    check(cluster, prompts, [answer.token_ids for answer in finished])


@pytest.mark.parametrize("num_bytes", [pytest.param(1, marks=pytest.mark.slow), 500_000])
def test_connections_cut_in_the_middle(cluster: FragileCluster, num_bytes: int) -> None:
    """Early: at the commands. Later: in the middle of the KV."""
    prompts = fresh_prompts(num_tokens=LONG)
    for name in ("prefill-1", "decode-1", "decode-2"):
        cluster.proxy(name).cut_after(num_bytes if name != "prefill-1" else min(num_bytes, 10_000))
    num_before = num_reset_at_decode_workers(cluster)
    answers = ask(cluster, prompts)
    assert num_reset_at_decode_workers(cluster) > num_before, "nothing was cut where KV flows"
    check(cluster, prompts, answers)


def test_a_partition_in_the_middle_of_streams(cluster: FragileCluster) -> None:
    """All packets of a decode worker vanish for more than a lease: its streams go on elsewhere, its grants end."""
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
        pytest.param(Direction.DOWN, "the worker has sent nothing", marks=pytest.mark.slow),  # as above, to the router
        (Direction.UP, "ABORTED: "),
    ],
)
def test_a_partition_in_one_direction(cluster: FragileCluster, direction: Direction, why: str) -> None:
    """What a decode worker sends does not arrive, or what is sent to it: its streams go on elsewhere. It gives a router
    up that it hears nothing of, and says so, which arrives."""
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
    """One answer, read by a thread of its own, and when its pieces came."""

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
        """At its end."""
        return self._timings.result(60)


@pytest.mark.slow
def test_kv_that_drips(cluster: FragileCluster) -> None:
    """Slow is not dead, though pings, too, take longer than a peer that hangs is given: the push goes on for seconds,
    and the first token has come long before."""
    timings, first_s, second_s = dripped_in_one_attempt(cluster)
    assert timings.kv_transfer.num_bytes > 3_000_000
    assert second_s > 6, "it did not drip"  # the second token comes from where the KV is by then
    assert first_s < second_s / 4, "the first token waited for the transfer"


def dripped_in_one_attempt(cluster: FragileCluster, max_tries: int = 3) -> tuple[inference_pb.Timings, float, float]:
    """Of an answer whose KV drips: what it took, when its first token came, and when its second one. Where all of a
    machine stands still, sessions are lost for that, and another is asked for; what the fault does, it does to each."""
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
    """All decode workers refuse connections: an answer at once, that says so; and recovery without anybody's doing."""
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
    """Of one small request: "OK", or the error's name."""
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
    """Two seconds until an answer."""
    proxy.delay(1.0)


def cut_off(proxy: FaultyProxy, _: Any) -> None:
    proxy.freeze()


def lost(proxy: FaultyProxy, server: Any) -> None:
    """All connections break, nothing is in it any more, and nobody can connect."""
    proxy.refuse(True)
    proxy.cut()
    with redis.Redis.from_url(server.url) as client:
        client.flushall()


# One that does not answer, before a client: test_cli.py.
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
