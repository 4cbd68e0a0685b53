"""Processes die, hang, or are restarted in turn, under load. After each fault, every answer has the tokens of a run
without faults and ends once, the audit finds no problem, and every block is free or cached."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from clusters import wait_until
from fragile_cluster import LEASE_MS, SAMPLING, FragileCluster, Service, ask, fresh_prompts

from protos import tandem_worker_pb2 as pb
from rpc.errors import Draining, TandemError, Unreachable
from rpc.failpoints import EXIT_CODE, POINTS
from tandem.client import AsyncClient

LEAVING = ("prefill-1", "decode-1", "decode-2", "router-1")
TIMEOUT_S = 4.0
"""Timeout of a step where one hangs: no other step takes as long, however busy the machine is."""


@pytest.fixture(scope="module")
def hangs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file exists, the engine of decode-1 hangs within a step; its process still sends heartbeats."""
    return tmp_path_factory.mktemp("slowed") / "hangs"


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, redis_server: Any, few_layers: Path, hangs: Path
) -> Iterator[FragileCluster]:
    running = FragileCluster.start(
        tmp_path_factory.mktemp("chaos"), redis_url=redis_server.url, model=few_layers, num_routers=2, num_prefill=2,
        num_decode=2, slowed={"decode-1": hangs},
    )  # fmt: skip
    yield running
    running.close()


def check(cluster: FragileCluster, prompts: list[list[int]], answers: list[list[int]]) -> None:
    cluster.wait_until_at_rest()
    assert answers == ask(cluster, prompts)  # now without faults


def with_load(cluster: FragileCluster, worker: str) -> bool:
    """Whether the worker computes a request."""
    return cluster.num_running(worker) > 0


def test_a_decode_worker_hangs_and_comes_back(cluster: FragileCluster) -> None:
    """The worker is stopped in the middle of its streams until the router takes it for dead. The router ignores what it
    sends afterwards."""
    prompts, num_before = fresh_prompts(), cluster.num_found_silent("decode-1")
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(ask, cluster, prompts)
        wait_until(lambda: with_load(cluster, "decode-1"), 20, "decode-1 works")
        cluster.services["decode-1"].signal(signal.SIGSTOP)
        try:
            cluster.wait_until_found_silent("decode-1", num_before)
        finally:
            cluster.services["decode-1"].signal(signal.SIGCONT)
        answers = asked.result(100)
    check(cluster, prompts, answers)


def test_a_router_is_killed_beside_another(cluster: FragileCluster) -> None:
    """The killed router's clients get an error at once; clients of the other router notice nothing; workers free the
    killed router's blocks."""
    prompts, lost = fresh_prompts(), fresh_prompts(2)
    with ThreadPoolExecutor(2) as threads:
        asked = threads.submit(ask, cluster, prompts, router=2)
        doomed = threads.submit(ask, cluster, lost, router=1)
        for router in (1, 2):
            with cluster.client(router) as client:
                wait_until(lambda c=client: c.status().num_running_requests > 0, 20, "requests run")  # type: ignore[misc]
        cluster.services["router-1"].signal(signal.SIGKILL)
        with pytest.raises(Unreachable):
            doomed.result(10)
        answers = asked.result(100)
    cluster.services["router-1"].restart()
    cluster.wait_for_workers(1)
    check(cluster, prompts, answers)


def ask_until_it_hangs(
    cluster: FragileCluster, hangs: Path, thread: Executor
) -> tuple[list[list[int]], Future[list[list[int]]]]:
    """Send prompts until decode-1 decodes some of them, then make it hang. Return these prompts and the future of their
    answers."""
    while True:
        prompts = fresh_prompts()
        asked = thread.submit(ask, cluster, prompts)
        while not asked.done():
            if with_load(cluster, "decode-1"):
                hangs.touch()
                return prompts, asked
        asked.result()


def test_streams_leave_an_engine_that_hangs_until_it_goes_on(cluster: FragileCluster, hangs: Path) -> None:
    def load() -> pb.WorkerLoad:
        return cluster.workers()["decode-1"].record.load

    others, process = fresh_prompts(), cluster.services["decode-1"].process
    with ThreadPoolExecutor(1) as thread:
        prompts, asked = ask_until_it_hangs(cluster, hangs, thread)
        before_s = time.monotonic()
        try:
            answers = asked.result(60)
            assert time.monotonic() - before_s > 0.8 * LEASE_MS / 1000
            assert load().is_stalled
            answers += ask(cluster, others)  # these do not wait for decode-1
            assert any("decode-1" in problem and "stuck in a step" in problem for problem in cluster.problems())
            assert load().is_stalled
        finally:
            hangs.unlink()  # else the client threads would wait on
    wait_until(lambda: not load().is_stalled, 10, "decode-1 goes on")
    assert process is not None
    assert process.poll() is None
    check(cluster, prompts + others, answers)


@pytest.mark.slow
def test_an_engine_that_hangs_for_too_long_ends_and_says_where(cluster: FragileCluster, hangs: Path) -> None:
    service = cluster.services["decode-1"]
    restart(cluster, service, "--engine-iteration-timeout-s", str(TIMEOUT_S))
    with ThreadPoolExecutor(1) as thread:
        prompts, asked = ask_until_it_hangs(cluster, hangs, thread)
        before_s = time.monotonic()
        try:
            assert service.process is not None
            assert service.process.wait(10 * TIMEOUT_S) == 1
        finally:
            hangs.unlink()  # else the client threads would wait on
        assert time.monotonic() - before_s > 0.8 * TIMEOUT_S
        answers = asked.result(100)
    log = service.log.read_text()
    assert "the engine is stuck in a step" in log
    assert "slowed_step" in log, "no word of where it hangs"
    restart(cluster, service)
    check(cluster, prompts, answers)


def restart(cluster: FragileCluster, service: Service, *flags: str) -> None:
    """Kill the worker if it still runs, start it again, and wait until both routers have all workers."""
    service.signal(signal.SIGKILL)
    service.start(*flags)
    for router in (1, 2):
        cluster.wait_for_workers(router)


def test_clients_that_leave_at_any_moment(cluster: FragileCluster) -> None:
    """Clients leave while their requests are queued, granted, prefilling, pushing or decoding: nothing is left over."""
    moments, places = random.Random(9), asyncio.Semaphore(8)

    async def leave_early(client: AsyncClient, prompt: list[int]) -> bool:
        """Return whether the client left before it had its answer."""
        with suppress(TimeoutError):
            async with places, asyncio.timeout(moments.uniform(0.005, 1.5)):
                await client.generate(prompt, **SAMPLING)
                return False
        return True

    async def all_leave() -> list[bool]:
        async with AsyncClient(cluster.services["router-1"].address) as client:
            return await asyncio.gather(*(leave_early(client, prompt) for prompt in fresh_prompts(24)))

    assert sum(asyncio.run(all_leave())) > 6
    cluster.wait_until_at_rest(10)


@pytest.mark.slow
def test_a_rolling_restart_loses_no_request(cluster: FragileCluster) -> None:
    """Both decode workers, which hold the streams, and one process of each other kind are stopped by SIGTERM in turn
    and started again, while two clients send request after request."""
    is_over, answers, errors = threading.Event(), [], []
    prompts = fresh_prompts(8)

    def ask_on(number: int) -> None:
        router, both = number, [stack.enter_context(cluster.client(router)) for router in (1, 2)]
        while not is_over.is_set():
            prompt, received = prompts[len(answers) % len(prompts)], []
            try:
                for chunk in both[router].stream(prompt, **SAMPLING, timeout_s=60):
                    received += chunk.token_ids
                answers.append((prompt, received))
                is_over.wait(0.4)  # the restarting process needs a core, too
            except TandemError as error:
                # A draining router refuses new requests: ask the other one, as a load balancer would.
                if received or not isinstance(error, Draining | Unreachable):
                    errors.append(f"after {len(received)} tokens: {error!r}")
                router = 1 - router
                is_over.wait(0.05)

    with ExitStack() as stack, ThreadPoolExecutor(2) as threads:
        clients = [threads.submit(ask_on, number) for number in range(2)]
        try:
            for name in LEAVING:
                service, num_before = cluster.services[name], len(answers)
                wait_until(
                    lambda num=num_before: len(answers) > num or bool(errors), 60, f"answers before {name} leaves"
                )
                service.signal(signal.SIGTERM)
                assert service.process is not None
                assert service.process.wait(40) == 0, name
                service.restart()
                for router in (1, 2):
                    cluster.wait_for_workers(router)
        finally:
            is_over.set()
        for client in clients:
            client.result(100)
    assert not errors
    expected = dict(zip(map(tuple, prompts), ask(cluster, prompts), strict=True))
    assert len(answers) >= len(LEAVING)
    assert all(expected[tuple(prompt)] == answer for prompt, answer in answers)
    cluster.wait_until_at_rest()


# -- at named points --------------------------------------------------------------------------------------------------


def start_armed(cluster: FragileCluster, specs: dict[str, str]) -> None:
    """Start these workers with their failpoints armed; kill and restart those that run. A running worker without new
    failpoints is left alone: it has passed the ones it had."""
    started = []
    for name, spec in specs.items():
        service = cluster.services[name]
        assert service.process is not None
        is_running = service.process.poll() is None
        if is_running and spec:
            service.signal(signal.SIGKILL)
        if spec or not is_running:
            service.launch("--failpoints", spec)
            started.append(service)
    for service in started:  # all load their models at the same time
        service.wait_until_listening()
    for router in (1, 2):
        cluster.wait_for_workers(router)


@pytest.mark.slow
def test_workers_die_where_their_peers_do_not_know_yet_what_has_happened(cluster: FragileCluster) -> None:
    """A prefill worker and a decode worker exit at each of their failpoints, beside one of each that lives on."""
    prompts: list[list[int]] = []
    answers: list[list[int]] = []
    names = ("prefill-1", "decode-1")
    for points in zip_longest(*map(points_of, names)):
        point_of = dict(zip(names, points, strict=True))
        start_armed(cluster, {name: f"{point}=exit" if point else "" for name, point in point_of.items()})
        doomed = [name for name, point in point_of.items() if point]
        processes = [cluster.services[name].process for name in doomed]
        num_before = len(prompts)
        # the router may choose other workers
        while any(process is not None and process.poll() is None for process in processes):
            assert len(prompts) < num_before + 60, f"of {points} not all is reached"
            more = fresh_prompts(6)  # several at once, else no decode worker prefills a prompt itself
            prompts += more
            answers += ask(cluster, more)
        assert [process and process.returncode for process in processes] == [EXIT_CODE] * len(doomed)
    start_armed(cluster, dict.fromkeys(names, ""))
    check(cluster, prompts, answers)


def test_every_point_fails_once(cluster: FragileCluster) -> None:
    """At prefill.before_commit the worker is only delayed, by more than a lease: grants stay valid as long as the
    router lives."""
    late = f"delay:{1.5 * LEASE_MS / 1000}"
    before = {point: cluster.num_reached(point) for point in POINTS}
    actions = {point: late if point == "prefill.before_commit" else "fail" for point in POINTS}
    names = ("prefill-1", "decode-1")
    start_armed(cluster, {name: ",".join(f"{point}={actions[point]}" for point in points_of(name)) for name in names})
    prompts: list[list[int]] = []
    answers: list[list[int]] = []
    while any(cluster.num_reached(point) == before[point] for point in POINTS):
        assert len(prompts) < 90, "not all points are reached"
        more = fresh_prompts(6)
        prompts += more
        answers += ask(cluster, more)
    check(cluster, prompts, answers)


def points_of(name: str) -> list[str]:
    return [point for point in POINTS if point.startswith(name.split("-")[0])]
