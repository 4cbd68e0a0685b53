"""Peers that answer with nonsense, such as bytes that are no message: the caller raises its own error and stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from kv_harness import DEADLINE_S, running_cluster

from kv_transfer import InvalidTransfer
from protos import tandem_kv_transfer_pb2 as kv_pb
from protos import tandem_worker_pb2 as pb
from protos.tandem_inference_pb2 import GetModelInfoResponse
from router.cluster_servicer import ClusterServicer
from router.open_requests import OpenRequests
from router.request_events import Event, WorkerKey, WorkerLost
from router.worker_handle import WorkerHandle
from router.worker_session import WorkerSession
from rpc.channel import open_channel
from rpc.errors import InternalError

GARBAGE = b"\xff\xff\xff\xff junk"


async def say_garbage(_: Any, context: Any) -> bytes:
    return GARBAGE


async def serving(service: str, **methods: grpc.RpcMethodHandler) -> tuple[Any, str]:
    """A server whose methods answer raw bytes, and its address."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


def of_tokens(**tokens: Any) -> bytes:
    return pb.WorkerEvents(events=[pb.WorkerEvent(request_id="a", tokens=pb.Tokens(**tokens))]).SerializeToString()


@pytest.mark.parametrize(
    ("nonsense", "complaint"),
    [
        (GARBAGE, "bytes that cannot be parsed"),
        (of_tokens(token_ids=[5, 100, 7]), "token id 100, outside the vocabulary of 100"),
        (of_tokens(token_ids=[5], finish_reason=99), "finish reason 99, which is unknown"),
    ],
    ids=["garbage", "token", "finish reason"],
)
@pytest.mark.parametrize("role", [pb.ROLE_PREFILL, pb.ROLE_DECODE], ids=["prefill", "decode"])
async def test_a_session_with_a_worker_that_talks_nonsense_is_lost(
    role: pb.Role, nonsense: bytes, complaint: str
) -> None:
    has_ended = asyncio.Event()

    async def talk(commands: AsyncIterator[bytes], context: Any) -> None:
        try:  # the router may end the session before the write has ended
            await context.write(pb.WorkerEvents().SerializeToString())
            await context.write(nonsense)
            await asyncio.sleep(DEADLINE_S)
        finally:
            has_ended.set()

    service = "tandem.v1.Prefill" if role == pb.ROLE_PREFILL else "tandem.v1.Decode"
    server, address = await serving(service, Session=grpc.stream_stream_rpc_method_handler(talk))
    model = GetModelInfoResponse(vocab_size=100)
    record = pb.WorkerRecord(worker_id="w", incarnation="i", role=role, lease_ms=10_000, model=model)
    heard: list[Event] = []
    is_lost = asyncio.Event()
    async with asyncio.timeout(DEADLINE_S), open_channel(address) as channel:
        session = WorkerSession(
            record=record,
            router_id="r",
            channel=channel,
            on_load=lambda _: None,
            on_open=lambda: None,
            on_lost=is_lost.set,
        )
        session.attach("a", heard.append)
        await is_lost.wait()
        assert heard == [WorkerLost(WorkerKey("w", "i"))]
        assert session.lost_why == f"the worker sent {complaint}"
        await has_ended.wait()  # the worker is told
        await session.close()
    await server.stop(0)


async def test_a_bug_in_taking_in_what_a_worker_says_ends_the_session_at_both_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Otherwise the worker would keep running requests for a router that does not listen, and nobody would learn
    why."""
    has_ended = asyncio.Event()

    async def talk(commands: AsyncIterator[bytes], context: Any) -> None:
        try:
            await context.write(pb.WorkerEvents().SerializeToString())
            await asyncio.sleep(DEADLINE_S)
        finally:
            has_ended.set()

    def fail(_: pb.WorkerLoad) -> None:
        raise ZeroDivisionError

    server, address = await serving("tandem.v1.Decode", Session=grpc.stream_stream_rpc_method_handler(talk))
    record = pb.WorkerRecord(worker_id="w", incarnation="i", role=pb.ROLE_DECODE, lease_ms=10_000)
    heard: list[Event] = []
    async with asyncio.timeout(DEADLINE_S), open_channel(address) as channel:
        session = WorkerSession(
            record=record, router_id="r", channel=channel, on_load=fail, on_open=lambda: None, on_lost=lambda: None
        )
        session.attach("a", heard.append)
        await has_ended.wait()
        await session.close()
    assert heard == [WorkerLost(WorkerKey("w", "i"))]
    assert session.lost_why.startswith("ZeroDivisionError; logged by the server with bug_id=")
    assert "unexpected ZeroDivisionError in the session with w" in caplog.messages
    await server.stop(0)


async def test_a_worker_that_talks_nonsense_is_unreachable_for_operators() -> None:
    garbage = grpc.unary_unary_rpc_method_handler(say_garbage)
    server, address = await serving("tandem.v1.Worker", GetStatus=garbage, Audit=garbage, Profile=garbage)
    async with open_channel(address) as channel:
        handle = WorkerHandle(pb.WorkerRecord(worker_id="w", address="a"), channel)
        pool = SimpleNamespace(
            handles=[handle],
            rooms=set(),
            ejected=[],
            apart=[],
            of_another_kind=[],
            not_connected=[],
            is_registry_reachable=lambda: True,
        )
        parts: Any = SimpleNamespace(pool=pool, queue=_EmptyQueue())
        servicer = ClusterServicer(
            router_id="r",
            parts=parts,
            open_requests=OpenRequests(),
            unused=list,
        )
        context: Any = None
        for answer in (
            await servicer.Audit(pb.AuditRequest(), context),
            await servicer.GetStatus(pb.GetClusterStatusRequest(), context),
        ):
            assert list(answer.workers) == []
            assert list(answer.unreachable) == ["w (a): its answer cannot be parsed"]
        with pytest.raises(InternalError, match="worker w sent an answer that cannot be parsed"):
            await servicer.Profile(pb.ProfileRequest(worker_id="w", num_steps=1, timeout_ms=1), context)
    await server.stop(0)


class _EmptyQueue:
    num_tokens = num_clients = 0

    def __len__(self) -> int:
        return 0


@pytest.mark.parametrize("method", ["Connect", "Push", "Commit"])
async def test_a_receiver_that_talks_nonsense_ends_the_transfer(method: str) -> None:
    """The grants come from a real receiver, but a server that answers with nonsense is at its address."""

    async def describe(data: bytes, context: Any) -> bytes:
        return receiving.receiver.connect(kv_pb.ConnectRequest.FromString(data)).SerializeToString()

    async def swallow(chunks: AsyncIterator[bytes], context: Any) -> bytes:
        async for _ in chunks:
            pass
        return GARBAGE if method == "Push" else b""

    unary: Callable[..., grpc.RpcMethodHandler] = grpc.unary_unary_rpc_method_handler
    server, address = await serving(
        "tandem.v1.KVTransfer",
        Connect=unary(say_garbage if method == "Connect" else describe),
        Push=grpc.stream_unary_rpc_method_handler(swallow),
        Commit=unary(say_garbage),
    )
    async with running_cluster("grpc") as cluster:
        receiving = await cluster.add_receiving()
        grant = receiving.receiver.issue("router", [6], 0)
        grant.kv_address = address
        with pytest.raises(InvalidTransfer, match="the peer's answer cannot be parsed"):
            await cluster.push_and_commit(grant, [5])
    await server.stop(0)
