"""Workers that fail at named points, where their peers do not know yet what has happened. After each: the tokens of the
run without faults, one end each, balanced books, and every block free or cached."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import wait_until
from fragile_cluster import LEASE_MS, FragileCluster, ask, fresh_prompts

from rpc.failpoints import EXIT_CODE, POINTS


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, redis_server: Any, model_folder: Path
) -> Iterator[FragileCluster]:
    folder = tmp_path_factory.mktemp("chaos")
    running = FragileCluster.start(folder, redis_url=redis_server.url, model=model_folder, num_prefill=2, num_decode=2)
    yield running
    running.close()


def start_armed(cluster: FragileCluster, name: str, spec: str) -> None:
    """End worker `name`, and start it with `spec` armed."""
    service = cluster.services[name]
    assert service.process is not None
    if service.process.poll() is None:
        service.signal(signal.SIGKILL)
    service.start("--failpoints", spec)
    cluster.wait_for_workers(1)


def check(cluster: FragileCluster, prompts: list[list[int]], answers: list[list[int]]) -> None:
    cluster.wait_until_at_rest()
    assert answers == ask(cluster, prompts)  # the points are used up


@pytest.mark.parametrize("point", POINTS)
def test_a_worker_dies_at_a_point(cluster: FragileCluster, point: str) -> None:
    name = "prefill-1" if point.startswith("prefill") else "decode-1"
    start_armed(cluster, name, f"{point}=exit")
    process = cluster.services[name].process
    assert process is not None
    prompts, answers = [], []
    while process.poll() is None:  # whoever is chosen; it is reached within a few requests
        assert len(prompts) < 60, f"{point} is not reached"
        more = fresh_prompts()
        prompts += more
        answers += ask(cluster, more)
    assert process.returncode == EXIT_CODE
    cluster.services[name].start()
    cluster.wait_for_workers(1)
    check(cluster, prompts, answers)


@pytest.mark.parametrize("name", ["prefill-1", "decode-1"])
def test_every_point_fails_and_is_late_once(cluster: FragileCluster, name: str) -> None:
    """Late by more than a lease: as long as the router lives, so do the promises that it holds."""
    points = [point for point in POINTS if point.startswith(name.split("-")[0])]
    for action in ("fail", f"delay:{1.5 * LEASE_MS / 1000}"):
        start_armed(cluster, name, ",".join(f"{point}={action}" for point in points))
        log = cluster.services[name].log
        num_before = log.read_text().count(" failpoint ")
        prompts, answers = [], []
        while log.read_text().count(" failpoint ") < num_before + len(points):
            assert len(prompts) < 60, "not all points are reached"
            more = fresh_prompts()
            prompts += more
            answers += ask(cluster, more)
        wait_until(lambda: not cluster.problems(), 30, "every block free or cached", cluster.problems)
        check(cluster, prompts, answers)
