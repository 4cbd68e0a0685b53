"""An engine that hangs within a step, in a process that beats on as if nothing were: its streams go on elsewhere
after a lease, nothing new goes there until it goes on, and one that never does ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from clusters import wait_until
from fragile_cluster import LEASE_MS, FragileCluster, Service, ask, fresh_prompts

TIMEOUT_S = 2.0


class Hanging:
    """A cluster whose first decode worker hangs while a file exists."""

    def __init__(self, cluster: FragileCluster, file: Path) -> None:
        self.cluster = cluster
        self.file = file
        self.service: Service = cluster.services["decode-1"]
        module = self.service.command.index("decode_service")
        script = [str(Path(__file__).with_name("hanging_worker.py")), str(file)]
        self.service.command[module - 1 : module] = script  # in the place of -m

    def restart(self, *flags: str) -> None:
        assert self.service.process is not None
        self.service.process.kill()
        self.service.process.wait()
        self.service.start(*flags)
        self.cluster.wait_for_workers(1)

    def hang_when_it_works(self) -> None:
        wait_until(lambda: self.load().num_running > 0, 20, "decode-1 works")
        self.file.touch()

    def load(self) -> Any:
        return self.cluster.workers()["decode-1"].record.load


@pytest.fixture
def hanging(tmp_path: Path, redis_server: Any, model_folder: Path) -> Iterator[Hanging]:
    cluster = FragileCluster.start(tmp_path, redis_url=redis_server.url, model=model_folder, num_decode=2)
    try:
        yield Hanging(cluster, tmp_path / "hangs")
    finally:
        cluster.close()


def test_streams_leave_an_engine_that_hangs_and_it_is_used_again_or_ends(hanging: Hanging) -> None:
    cluster, prompts, others = hanging.cluster, fresh_prompts(), fresh_prompts()
    hanging.restart()
    assert hanging.service.process is not None
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(ask, cluster, prompts)
        hanging.hang_when_it_works()
        before_s = time.monotonic()
        answers = asked.result(60)
        assert time.monotonic() - before_s > 0.8 * LEASE_MS / 1000
        assert hanging.load().is_stalled
        answers += ask(cluster, others)  # which do not wait for it
        assert any("decode-1" in problem and "stands still" in problem for problem in cluster.problems())
        assert hanging.load().num_running > 0, "it has not gone on"
    hanging.file.unlink()
    wait_until(lambda: not hanging.load().is_stalled, 10, "decode-1 goes on")
    cluster.wait_until_at_rest()
    assert "the engine stands still" in hanging.service.log.read_text()
    assert hanging.service.process.poll() is None

    hanging.restart("--engine-iteration-timeout-s", str(TIMEOUT_S))
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(ask, cluster, prompts)
        hanging.hang_when_it_works()
        before_s = time.monotonic()
        assert hanging.service.process.wait(10 * TIMEOUT_S) == 1
        assert time.monotonic() - before_s > 0.8 * TIMEOUT_S
        assert asked.result(100) == answers[: len(prompts)]
    assert "hanging_step" in hanging.service.log.read_text(), "no word of where it hangs"
    hanging.file.unlink()
    hanging.service.start()
    cluster.wait_for_workers(1)
    cluster.wait_until_at_rest()
    assert ask(cluster, prompts) + ask(cluster, others) == answers  # now without faults
