"""Faults in the middle of one-sided transfers, whose writes neither a proxy nor the receiver sees. After each, answers
have the tokens of a run without faults, the audit finds no problem, and all blocks, also those that were being written,
are free or cached."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from clusters import wait_until
from fragile_cluster import SAMPLING, FragileCluster, ask, fresh_prompts
from nixl_marks import needs_nixl

from protos import tandem_worker_pb2 as pb
from protos.tandem_inference_pb2_grpc import InferenceStub
from tandem.client import Client
from tandem.requests import generate_request

SOON_S = 3.0
SLOW_S = 0.1
"""Added to each chunk of a prompt, so that prompts take long however fast the machine is."""


@pytest.fixture(scope="module", params=["ipc", pytest.param("nixl", marks=[needs_nixl, pytest.mark.slow])])
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, redis_server: Any, few_layers: Path
) -> Iterator[FragileCluster]:
    slow = tmp_path_factory.mktemp("slowed") / "seconds"
    running = FragileCluster.start(
        tmp_path_factory.mktemp("chaos"), redis_url=redis_server.url, model=few_layers, num_decode=2,
        worker_flags=["--transport", request.param, "--prefill-chunk-tokens", "32"], slowed={"prefill-1": slow},
    )  # fmt: skip
    with running.client() as client:
        answer = client.generate(*fresh_prompts(1), **SAMPLING)
    assert answer.timings.kv_transfer.transport == request.param
    slow.write_text(str(SLOW_S))
    yield running
    running.close()


def long_prompts() -> list[list[int]]:
    """Return two prompts. Each takes a second and a half, in chunks that are written while the next ones are
    computed."""
    return [[token for part in fresh_prompts(3) for token in part] for _ in range(2)]


def wait_until_router_knows(cluster: FragileCluster) -> None:
    """Wait until the router has heard, too, that nothing is left to be computed. An audit may be answered before the
    news of the same step arrives; prompts that are sent in between go past the prefill worker."""
    with cluster.client() as client:
        wait_until(
            lambda: not any(worker.record.load.num_waiting_tokens for worker in client.status().workers),
            20, "the router knows that no prompt waits at a worker",
        )  # fmt: skip


def wait_for_receiver(cluster: FragileCluster) -> str:
    """Return a decode worker that is being written to: part of its prompt is computed, the rest is still to come."""
    found: list[str] = []

    def is_written_to(client: Client) -> bool:
        workers = {worker.record.worker_id: worker.record for worker in client.status().workers}
        if workers["prefill-1"].load.num_running:
            found.extend(n for n, w in workers.items() if w.role == pb.ROLE_DECODE and w.load.blocks.num_grant)
        return bool(found)

    with cluster.client() as client:
        wait_until(lambda: is_written_to(client), 20, "KV is written")
    return found[0]


def strike(cluster: FragileCluster, fault: Callable[[str], None]) -> tuple[list[list[int]], list[list[int]]]:
    """Call `fault` with the name of a decode worker that is being written to. Return prompts and answers."""
    prompts = long_prompts()
    wait_until_router_knows(cluster)
    with cluster.client() as client, ThreadPoolExecutor(len(prompts)) as threads:
        asked = [threads.submit(client.generate, prompt, **SAMPLING) for prompt in prompts]
        fault(wait_for_receiver(cluster))
        answers = [answer.result(60) for answer in asked]
    assert any(answer.timings.attempts > 1 for answer in answers), "the transfer was over by then"
    return prompts, [answer.token_ids for answer in answers]


def kill(cluster: FragileCluster, name: str) -> None:
    cluster.services[name].signal(signal.SIGKILL)


def check(cluster: FragileCluster, prompts: list[list[int]], answers: list[list[int]]) -> None:
    for service in cluster.services.values():
        if service.process is not None and service.process.poll() is not None:
            service.restart()
    cluster.wait_for_workers(1)
    cluster.wait_until_at_rest()
    assert answers == ask(cluster, prompts)  # now without faults


@pytest.mark.slow
def test_clients_that_leave(cluster: FragileCluster) -> None:
    with grpc.insecure_channel(cluster.services["router-1"].address) as channel:
        stub = InferenceStub(channel)
        calls = [stub.Generate(generate_request(prompt, **SAMPLING)) for prompt in long_prompts()]
        wait_for_receiver(cluster)
        for call in calls:
            assert call.is_active()
            call.cancel()
    cluster.wait_until_at_rest(SOON_S)


def stop_until_found_silent(cluster: FragileCluster, name: str) -> None:
    """Stop the worker until it is taken for dead: its requests then go elsewhere, and the blocks that it holds or
    writes may get other owners."""
    num_before = cluster.num_found_silent(name)
    cluster.services[name].signal(signal.SIGSTOP)
    try:
        cluster.wait_until_found_silent(name, num_before)
    finally:
        cluster.services[name].signal(signal.SIGCONT)


@pytest.mark.slow  # the worker is only written to, and writes nothing itself
def test_a_decode_worker_hangs_and_comes_back(cluster: FragileCluster) -> None:
    check(cluster, *strike(cluster, lambda name: stop_until_found_silent(cluster, name)))


def test_a_prefill_worker_hangs_and_comes_back(cluster: FragileCluster) -> None:
    """The worker resumes where it stopped, with writes still to make."""
    check(cluster, *strike(cluster, lambda _: stop_until_found_silent(cluster, "prefill-1")))


@pytest.mark.parametrize("role", [pytest.param("prefill", marks=pytest.mark.slow), "decode"])
def test_a_worker_dies(cluster: FragileCluster, role: str) -> None:
    prompts, answers = strike(cluster, lambda name: kill(cluster, "prefill-1" if role == "prefill" else name))
    check(cluster, prompts, answers)
