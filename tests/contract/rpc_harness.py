# ruff: noqa: N802 - gRPC's method names
"""One of our servers with handlers of all four kinds of RPC, and calls of each kind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from protos import tandem_inference_pb2 as inference_pb
from protos import tandem_inference_pb2_grpc as inference_grpc
from protos import tandem_kv_transfer_pb2 as kv_pb
from protos import tandem_kv_transfer_pb2_grpc as kv_grpc
from protos import tandem_worker_pb2 as pb
from protos import tandem_worker_pb2_grpc as worker_grpc
from rpc.channel import open_channel
from rpc.server import Server

INFERENCE = "tandem.v1.Inference"
TIMEOUT_S = 10.0


class Handlers:
    """Handlers of all four kinds of RPC. Each raises `error` if that is set; `Generate` after `num_messages`."""

    def __init__(self, error: Exception | None = None, num_messages: int = 2) -> None:
        self.error = error
        self.num_messages = num_messages
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.has_begun = asyncio.Event()
        self.is_freed = asyncio.Event()
        self.freed_by: object = None

    async def _end(self) -> None:
        self.has_begun.set()
        await self.may_end.wait()
        if self.error is not None:
            raise self.error

    async def GetModelInfo(self, request: Any, context: Any) -> inference_pb.GetModelInfoResponse:
        await self._end()
        return inference_pb.GetModelInfoResponse(model="m")

    async def Abort(self, request: Any, context: Any) -> inference_pb.AbortResponse:
        await context.abort(grpc.StatusCode.OUT_OF_RANGE, "by the handler itself")
        raise AssertionError

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[inference_pb.GenerateResponse]:
        task = asyncio.current_task()
        try:
            for offset in range(self.num_messages):
                yield inference_pb.GenerateResponse(offset=offset)
            await self._end()
        finally:
            self.freed_by = "its own task" if asyncio.current_task() is task else "the garbage collector"
            self.is_freed.set()

    async def Push(self, chunks: AsyncIterator[kv_pb.PushChunk], context: Any) -> kv_pb.PushSummary:
        num_bytes = 0
        async for chunk in chunks:
            num_bytes += len(chunk.data)
        await self._end()
        return kv_pb.PushSummary(num_bytes=num_bytes)

    async def Session(self, commands: AsyncIterator[Any], context: Any) -> AsyncIterator[pb.WorkerEvents]:
        async for _ in commands:
            yield pb.WorkerEvents()
        await self._end()


class KVHandlers(kv_grpc.KVTransferServicer):
    def __init__(self, handlers: Handlers) -> None:
        self.Push = handlers.Push


@asynccontextmanager
async def serving(handlers: Handlers, **options: Any) -> AsyncIterator[tuple[Server, grpc.aio.Channel]]:
    server = Server("127.0.0.1:0", **options)
    server.add(inference_grpc.add_InferenceServicer_to_server, handlers, INFERENCE)
    server.add(kv_grpc.add_KVTransferServicer_to_server, KVHandlers(handlers), "tandem.v1.KVTransfer")
    server.add(worker_grpc.add_DecodeServicer_to_server, handlers, "tandem.v1.Decode")
    address = await server.start()
    channel = open_channel(address)
    try:
        yield server, channel
    finally:
        await channel.close()
        await server.drain(0)


async def call(kind: str, channel: grpc.aio.Channel, *metadata: tuple[str, str]) -> list[Any]:
    """Make one RPC of `kind`; return its messages, or raise the AioRpcError."""
    inference, decode = inference_grpc.InferenceStub(channel), worker_grpc.DecodeStub(channel)
    how: dict[str, Any] = {"timeout": TIMEOUT_S, "metadata": metadata}
    if kind == "unary_unary":
        return [await inference.GetModelInfo(inference_pb.GetModelInfoRequest(), **how)]
    if kind == "unary_stream":
        return [message async for message in inference.Generate(inference_pb.GenerateRequest(), **how)]
    if kind == "stream_unary":
        chunks = iter([kv_pb.PushChunk(data=b"ab"), kv_pb.PushChunk(data=b"c")])
        return [await kv_grpc.KVTransferStub(channel).Push(chunks, **how)]
    commands = iter([pb.DecodeCommand(beat=pb.Beat())] * 2)
    return [message async for message in decode.Session(commands, **how)]


KINDS = ["unary_unary", "unary_stream", "stream_unary", "stream_stream"]


METHOD_OF_KIND = {
    "unary_unary": "/tandem.v1.Inference/GetModelInfo",
    "unary_stream": "/tandem.v1.Inference/Generate",
    "stream_unary": "/tandem.v1.KVTransfer/Push",
    "stream_stream": "/tandem.v1.Decode/Session",
}


async def call_with_bytes(kind: str, channel: grpc.aio.Channel, data: bytes) -> None:
    """Like `call`, with `data` as the request message."""
    make = getattr(channel, kind)(METHOD_OF_KIND[kind], request_serializer=bytes, response_deserializer=bytes)
    answer = make(iter([data]) if kind.startswith("stream") else data, timeout=TIMEOUT_S)
    if kind.endswith("unary"):
        await answer
    else:
        [message async for message in answer]
