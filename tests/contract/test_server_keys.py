"""A server that asks for a key refuses calls without one of its keys before it reads them."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from rpc_harness import INFERENCE, KINDS, TIMEOUT_S, Handlers, call, call_with_bytes, serving

from protos import tandem_inference_pb2_grpc as inference_grpc
from rpc.errors import Unauthenticated, from_rpc_error
from rpc.keys import check_keys, first_key, keyed
from rpc.server import Server

SERVING = health_pb2.HealthCheckResponse.SERVING

WRONG_KEYS = {
    "none": [],
    "another": [("authorization", "Bearer old")],
    "both at once": [("authorization", "Bearer older newer")],
    "not a bearer's": [("authorization", "Basic older")],
    "no scheme": [("authorization", "older")],
    "elsewhere": [("x-api-key", "older")],
}


# The kinds that routers have; calls of the others may fail while they write.
@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])
@pytest.mark.parametrize("metadata", WRONG_KEYS.values(), ids=WRONG_KEYS)
async def test_without_a_key_of_the_servers_nothing_is_done(kind: str, metadata: list[tuple[str, str]]) -> None:
    handlers = Handlers()
    async with serving(handlers, keys=("older", "newer")) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(kind, channel, *metadata)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    error = from_rpc_error(caught.value)
    assert isinstance(error, Unauthenticated)
    assert "authorization: Bearer KEY" in error.message
    assert not handlers.has_begun.is_set()


@pytest.mark.parametrize("kind", KINDS)
async def test_any_of_several_keys(kind: str) -> None:
    async with serving(Handlers(), keys=("older", "newer")) as (_, channel):
        for value in ("Bearer older", "bearer newer", "Bearer  older "):
            assert await call(kind, channel, ("authorization", value))


async def test_a_request_without_a_key_is_not_even_parsed() -> None:
    async with serving(Handlers(), keys=("k",)) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call_with_bytes("unary_unary", channel, b"\xff" * 40)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def status_of_call(address: str, authorization: bytes) -> bytes:
    """Status of a call with metadata that no gRPC client sends: the call is written as bytes of HTTP/2."""

    def field(name: bytes, value: bytes) -> bytes:
        return b"\x00" + b"".join(bytes([len(text)]) + text for text in (name, value))  # neither indexed nor compressed

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload

    head = {
        b":method": b"POST", b":scheme": b"http", b":path": f"/{INFERENCE}/GetModelInfo".encode(), b":authority": b"a",
        b"te": b"trailers", b"content-type": b"application/grpc", b"authorization": authorization,
    }  # fmt: skip
    headers = frame(1, 0x4, 1, b"".join(field(*item) for item in head.items()))
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"") + headers + frame(0, 0x1, 1, bytes(5)))
    async with asyncio.timeout(TIMEOUT_S):
        await reader.readuntil(b"grpc-status")
        answer = await reader.readexactly(3)
    writer.close()
    return answer[1 : 1 + answer[0]]


async def test_a_key_that_is_no_text_is_refused_and_nobody_reads_it_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Server("127.0.0.1:0", keys=("older",))
    server.add(inference_grpc.add_InferenceServicer_to_server, Handlers(), INFERENCE)
    address = await server.start()
    try:
        refused = await status_of_call(address, b"Bearer older\xe9")
        taken = await status_of_call(address, b"Bearer older")
    finally:
        await server.drain(0)
    assert (refused, taken) == (b"16", b"0")
    assert caplog.records == []


async def test_a_method_that_is_not_there_is_said_to_be_missing_with_a_key_and_without() -> None:
    async with serving(Handlers(), keys=("k",)) as (_, channel):
        for metadata in ((), (("authorization", "Bearer k"),)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(f"/{INFERENCE}/Missing")(b"", timeout=TIMEOUT_S, metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_key_is_sent_beside_other_metadata() -> None:
    class Channel:
        def unary_unary(self, method: str) -> Any:
            return lambda request, metadata: metadata

    call_with_key = keyed(Channel(), "k").unary_unary("/method")
    assert call_with_key(b"") == (("authorization", "Bearer k"),)
    assert call_with_key(b"", metadata=(("a", "b"),)) == (("a", "b"), ("authorization", "Bearer k"))


@pytest.mark.parametrize("key", ["two words", "é", "new\nline", "\x7f"])
def test_a_key_that_no_header_carries_is_refused(key: str) -> None:
    check_keys("api_key", ["~!a"])
    with pytest.raises(ValueError, match="api_key must consist of visible ASCII characters without spaces"):
        check_keys("api_key", ["a", key])


def test_a_client_sends_the_first_of_the_keys_in_its_setting() -> None:
    assert first_key("api_key", "") == ""
    for keys in ("newer", " newer older\n", "newer\tolder"):
        assert first_key("api_key", keys) == "newer"
    with pytest.raises(ValueError, match="api_key must not be empty"):
        first_key("api_key", " ")


async def test_health_and_reflection_ask_for_no_key() -> None:
    async with serving(Handlers(), keys=("k",)) as (server, channel):
        server.set_serving(INFERENCE, True)
        asked = health_pb2.HealthCheckRequest(service=INFERENCE)
        assert (await health_pb2_grpc.HealthStub(channel).Check(asked)).status == SERVING
        listed = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        names = [service.name async for answer in listed for service in answer.list_services_response.service]
    assert INFERENCE in names
