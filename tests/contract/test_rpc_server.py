"""The server over a real loopback port: errors, health, reflection, busy port, drain, TLS, sessions."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import grpc
import pytest
from certificates import Signer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from rpc_harness import INFERENCE, KINDS, TIMEOUT_S, Handlers, call, call_with_bytes, serving

from protos import tandem_inference_pb2 as inference_pb
from protos import tandem_inference_pb2_grpc as inference_grpc
from protos import tandem_worker_pb2 as pb
from protos import tandem_worker_pb2_grpc as worker_grpc
from rpc.channel import open_channel
from rpc.errors import (
    Draining,
    InternalError,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unreachable,
    from_rpc_error,
    rpc_errors_as_tandem_errors,
)
from rpc.health import HealthServicer
from rpc.server import CannotListen, Server
from rpc.tls import SslArgs

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize("kind", KINDS)
async def test_answers_pass_unchanged(kind: str) -> None:
    async with serving(Handlers()) as (_, channel):
        messages = await call(kind, channel)
    assert len(messages) == (1 if kind.endswith("unary") else 2)
    if kind == "stream_unary":
        assert messages[0].num_bytes == 3


@pytest.mark.parametrize("kind", KINDS)
async def test_tandem_error_arrives_as_itself(kind: str) -> None:
    raised = InvalidRequest([("prompt", "is empty"), ("seed", "is late")], retry_after_s=0.5)
    async with serving(Handlers(raised)) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(kind, channel)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    error = from_rpc_error(caught.value)
    assert isinstance(error, InvalidRequest)
    assert error.violations == raised.violations
    assert error.retry_after_s == 0.5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("data", [b"\xff" * 40, b"\x0a\xff\xff\xff"], ids=["no message", "cut off"])
async def test_bytes_that_are_no_message_are_refused_as_such(
    kind: str, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The client learns that its message is at fault, and the log does not fill up with tracebacks."""
    async with serving(Handlers()) as (_, channel):
        with pytest.raises(InvalidRequest, match="cannot be read"), rpc_errors_as_tandem_errors():
            await call_with_bytes(kind, channel, data)
    # asyncio's records are about an event loop that an earlier test closed and that gRPC's poller still called.
    assert not [record for record in caplog.records if record.name != "asyncio"]


@pytest.mark.parametrize("kind", KINDS)
async def test_bug_is_logged_under_the_id_that_the_client_gets(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(Handlers(KeyError("the secret prompt"))) as (_, channel):
        with caplog.at_level(logging.ERROR), pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(kind, channel)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    error = from_rpc_error(caught.value)
    assert isinstance(error, InternalError)
    assert "KeyError" in error.message
    assert "secret" not in error.message
    assert "secret" not in str(caught.value)
    (record,) = [record for record in caplog.records if hasattr(record, "bug_id")]
    assert record.bug_id in error.message
    assert record.exc_info is not None
    assert "secret" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cancellation_from_within_is_a_bug_and_not_silence(kind: str) -> None:
    """A handler's own call raises it when its channel is closed. gRPC itself would let the client wait for ever."""
    async with serving(Handlers(asyncio.CancelledError())) as (_, channel):  # type: ignore[arg-type]
        with pytest.raises(InternalError, match="bug_id"), rpc_errors_as_tandem_errors():
            await call(kind, channel)


async def test_stream_keeps_what_came_before_the_error() -> None:
    async with serving(Handlers(Overloaded("full", retry_after_s=2), num_messages=3)) as (_, channel):
        offsets = []

        async def read() -> None:
            with rpc_errors_as_tandem_errors():
                async for message in inference_grpc.InferenceStub(channel).Generate(inference_pb.GenerateRequest()):
                    offsets.append(message.offset)

        with pytest.raises(Overloaded) as caught:
            await read()
    assert offsets == [0, 1, 2]
    assert caught.value.retry_after_s == 2


async def test_own_abort_of_a_handler_passes(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(Handlers()) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await inference_grpc.InferenceStub(channel).Abort(inference_pb.AbortRequest())
    assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE
    assert caught.value.details() == "by the handler itself"
    assert not [record for record in caplog.records if hasattr(record, "bug_id")]


@pytest.mark.parametrize("num_messages", [1, 1_000_000])
async def test_client_that_leaves_frees_at_once(num_messages: int, caplog: pytest.LogCaptureFixture) -> None:
    """Whether the handler waits (one message) or writes (held by flow control), it runs its `finally`, and no bug is
    logged."""
    handlers = Handlers(num_messages=num_messages)
    handlers.may_end.clear()
    async with serving(handlers) as (_, channel):
        with caplog.at_level(logging.INFO):
            stream = inference_grpc.InferenceStub(channel).Generate(inference_pb.GenerateRequest())
            await stream.read()
            stream.cancel()
            await asyncio.wait_for(handlers.is_freed.wait(), TIMEOUT_S)
    assert handlers.freed_by == "its own task"
    # gRPC's poller serves all event loops of a process, and may call one of an earlier test, which asyncio logs.
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING and r.name != "asyncio"]


async def test_health_and_readiness() -> None:
    async with serving(Handlers()) as (server, channel):
        health = health_pb2_grpc.HealthStub(channel)

        async def check(service: str) -> int:
            return int((await health.Check(health_pb2.HealthCheckRequest(service=service))).status)

        assert await check("") == SERVING
        assert await check(INFERENCE) == NOT_SERVING
        server.set_serving(INFERENCE, True)
        assert await check(INFERENCE) == SERVING
        assert await check("tandem.v1.Decode") == NOT_SERVING
        server.set_serving(INFERENCE, False)
        assert await check(INFERENCE) == NOT_SERVING
        with pytest.raises(NotFound), rpc_errors_as_tandem_errors():
            await check("tandem.v1.Nothing")
        server.set_serving(INFERENCE, True)
        server.enter_drain()
        server.set_serving(INFERENCE, True)  # too late
        assert await check(INFERENCE) == NOT_SERVING
        assert await check("") == SERVING


async def test_watchers_see_every_change_and_do_not_hold_up_a_drain() -> None:
    async with serving(Handlers()) as (server, channel):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=INFERENCE))
        assert (await watch.read()).status == NOT_SERVING
        server.set_serving(INFERENCE, True)
        assert (await watch.read()).status == SERVING
        async with asyncio.timeout(TIMEOUT_S):
            drain = asyncio.create_task(server.drain(grace_s=600))
            assert (await watch.read()).status == NOT_SERVING
            assert await watch.read() is grpc.aio.EOF
            assert await watch.code() is grpc.StatusCode.OK
            await drain


async def test_nor_do_watchers_of_what_a_drain_does_not_change() -> None:
    async with serving(Handlers()) as (server, channel):
        watches = [
            health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service))
            for service in ("", INFERENCE)
        ]
        assert [(await watch.read()).status for watch in watches] == [SERVING, NOT_SERVING]
        async with asyncio.timeout(TIMEOUT_S):
            await server.drain(grace_s=600)
            assert [await watch.read() for watch in watches] == [grpc.aio.EOF] * 2


async def test_watchers_sleep_while_nothing_changes() -> None:
    """A router reports that it serves at each step of a worker, and may have hundreds of watchers."""
    health = HealthServicer()
    health.add(INFERENCE)
    told: list[int] = []

    class Context:
        async def write(self, response: health_pb2.HealthCheckResponse) -> None:
            told.append(response.status)

    watching = asyncio.create_task(health.Watch(health_pb2.HealthCheckRequest(service=INFERENCE), Context()))
    await asyncio.sleep(0)
    asleep = health._changed
    health.set_serving(INFERENCE, False)
    assert not asleep.is_set()
    health.set_serving(INFERENCE, True)
    assert asleep.is_set()
    health.end_watches()
    await watching
    assert told == [NOT_SERVING, SERVING]


async def test_reflection_lists_what_is_served() -> None:
    async with serving(Handlers()) as (_, channel):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        async for response in stub.ServerReflectionInfo(iter([request])):
            names = {service.name for service in response.list_services_response.service}
        assert {INFERENCE, "tandem.v1.KVTransfer", "tandem.v1.Decode", "grpc.health.v1.Health"} <= names
        symbol = reflection_pb2.ServerReflectionRequest(file_containing_symbol=INFERENCE)
        async for response in stub.ServerReflectionInfo(iter([symbol])):
            assert response.file_descriptor_response.file_descriptor_proto


async def test_busy_port_is_said_in_a_sentence() -> None:
    first = Server("127.0.0.1:0")
    address = await first.start()
    port = address.rpartition(":")[2]
    second = Server(address)
    with pytest.raises(
        CannotListen, match=f"cannot listen on {address}: .*in use.* Stop what uses .* --listen"
    ) as caught:
        await second.start()
    assert port in str(caught.value)
    await first.drain(0)
    third = Server(address)  # following the error's advice helps
    assert await third.start() == address
    await third.drain(0)


@pytest.mark.parametrize("listen", ["256.1.2.3:0", "192.0.2.1:0"])
async def test_address_that_is_not_ours_is_said_too(listen: str) -> None:
    with pytest.raises(CannotListen, match=r"cannot listen on .*: .+\. Choose another"):
        await Server(listen).start()


@pytest.mark.parametrize("listen", ["", "localhost", ":1", "h:", "h:x", "h:65536", "h:-1", "::1:5", "h:\u0662"])
async def test_address_must_be_host_and_port(listen: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT|brackets"):
        Server(listen)


async def test_method_that_the_servicer_lacks_is_unimplemented() -> None:
    class Lacking(worker_grpc.WorkerServicer):
        pass

    server = Server("127.0.0.1:0")
    server.add(worker_grpc.add_WorkerServicer_to_server, Lacking(), "tandem.v1.Worker")
    channel = open_channel(await server.start())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker_grpc.WorkerStub(channel).Audit(pb.AuditRequest(), timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await channel.close()
    await server.drain(0)


async def test_a_proxy_of_the_environment_is_not_for_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with serving(Handlers()) as (_, channel):
        assert await call("unary_unary", channel)


async def test_very_long_errors_arrive() -> None:
    raised = InvalidRequest([(f"field_{i}", "é" * 1000) for i in range(100)], "\n" * 10_000, retry_after_s=1)
    async with serving(Handlers(raised)) as (_, channel):
        with pytest.raises(InvalidRequest) as caught, rpc_errors_as_tandem_errors():
            await call("unary_unary", channel)
    assert len(caught.value.violations) > 3
    assert caught.value.retry_after_s == 1


async def test_drain_lets_running_rpcs_end_and_refuses_new_ones() -> None:
    handlers = Handlers()
    handlers.may_end.clear()
    async with serving(handlers) as (server, channel):
        running = asyncio.ensure_future(call("unary_stream", channel))
        await handlers.has_begun.wait()
        handlers.has_begun.clear()
        drain = asyncio.create_task(server.drain(grace_s=TIMEOUT_S))
        with pytest.raises(Unreachable), rpc_errors_as_tandem_errors():
            await call("unary_unary", channel)
        assert not handlers.has_begun.is_set()
        assert not drain.done()
        assert not running.done()
        handlers.may_end.set()
        assert len(await running) == 2
        await asyncio.wait_for(drain, TIMEOUT_S)


async def test_drain_cuts_what_outlives_the_grace() -> None:
    handlers = Handlers()
    handlers.may_end.clear()
    async with serving(handlers) as (server, channel):
        running = asyncio.ensure_future(call("unary_stream", channel))
        await handlers.has_begun.wait()
        await asyncio.wait_for(server.drain(grace_s=0.05), TIMEOUT_S)
        with pytest.raises(Unreachable), rpc_errors_as_tandem_errors():
            await running
        await asyncio.wait_for(handlers.is_freed.wait(), TIMEOUT_S)


async def test_draining_error_keeps_its_class_beside_other_unavailables() -> None:
    async with serving(Handlers(Draining("leaving", retry_after_s=1))) as (_, channel):
        with pytest.raises(Draining), rpc_errors_as_tandem_errors():
            await call("unary_unary", channel)
    gone = open_channel("127.0.0.1:1")
    with pytest.raises(Unreachable), rpc_errors_as_tandem_errors():
        await call("unary_unary", gone)
    await gone.close()


async def test_message_beyond_the_bound_is_refused() -> None:
    async with serving(Handlers(), max_message_bytes=64 * 1024) as (_, channel):
        stub = inference_grpc.InferenceStub(channel)
        with pytest.raises(InvalidRequest, match="larger than max"), rpc_errors_as_tandem_errors():
            await stub.GetModelInfo(inference_pb.GenerateRequest(text="x" * 70_000), timeout=TIMEOUT_S)


async def test_tls(tmp_path: Path) -> None:
    ours, another = (Signer(tmp_path / name).sign("server") for name in ("ours", "another"))
    args = SslArgs(ssl_certfile=str(ours.cert), ssl_keyfile=str(ours.key), ssl_ca_certs=str(ours.ca))
    server = Server("127.0.0.1:0", tls=args.server_tls(asks_callers=True))
    server.add(inference_grpc.add_InferenceServicer_to_server, Handlers(), INFERENCE)
    address = await server.start()
    trusted = open_channel(address, tls=ours.client)
    await asyncio.wait_for(trusted.channel_ready(), TIMEOUT_S)
    assert await call("unary_unary", trusted)
    await trusted.close()
    for stranger in (None, ours.trusting, another.client):
        channel = open_channel(address, tls=stranger)
        with pytest.raises(Unreachable), rpc_errors_as_tandem_errors():
            await call("unary_unary", channel)
        await channel.close()
    await server.drain(0)


async def test_what_is_wrong_with_a_connection_over_tls_is_said(tmp_path: Path) -> None:
    """The caller's error names each case: an expired certificate, one for another address, one of another signer, and
    no TLS at all."""
    ours, others = Signer(tmp_path / "ours"), Signer(tmp_path / "others")
    cases = {
        "has expired": ours.sign("expired", days=-1),
        "does not contain the address": ours.sign("elsewhere", address="IP:127.0.0.2"),
        "or was not signed by the CA of --ssl-ca-certs": others.sign("foreign"),
        "does not use TLS": None,
    }
    caller = ours.sign("caller").client
    for advice, shown in cases.items():
        args = SslArgs(ssl_certfile=str(shown.cert), ssl_keyfile=str(shown.key)) if shown else SslArgs()
        server = Server("127.0.0.1:0", tls=args.server_tls())
        server.add(inference_grpc.add_InferenceServicer_to_server, Handlers(), INFERENCE)
        channel = open_channel(await server.start(), tls=caller)
        with pytest.raises(Unreachable, match=advice), rpc_errors_as_tandem_errors():
            await call("unary_unary", channel)
        await channel.close()
        await server.drain(0)
