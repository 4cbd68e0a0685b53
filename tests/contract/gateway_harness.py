# ruff: noqa: N802 - gRPC's method names
"""A gateway with real connections on both sides, in front of a router whose answers are scripted and can be
anything."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2 as httpx

from gateway.args import GatewayArgs
from gateway.process import run_gateway
from protos import tandem_inference_pb2 as pb
from protos import tandem_inference_pb2_grpc
from router.policy import PolicyConfig
from router.served_model import Texts
from router.tokenizer_servicer import TokenizerServicer
from router.worker_pool import WorkerPool
from rpc.server import Server

TIMEOUT_S = 10.0
MAX_REQUEST_BYTES = 100_000
Script = Callable[[pb.GenerateRequest], AsyncIterator[pb.GenerateResponse]]


def tokens(offset: int, *token_ids: int, text: str = "") -> pb.GenerateResponse:
    return pb.GenerateResponse(request_id="r", offset=offset, token_ids=token_ids, text=text)


def failing(error: Exception, after: int = 0) -> Script:
    """Return a script that sends `after` tokens and then raises `error`."""

    async def script(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        for offset in range(after):
            yield tokens(offset, 1, text="a")
        raise error

    return script


def last(
    offset: int, num_prompt: int = 3, finish_reason: pb.FinishReason = pb.FINISH_REASON_STOP, num_thought: int = 0
) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        request_id="r",
        offset=offset,
        finish_reason=finish_reason,
        usage=pb.Usage(
            prompt_tokens=num_prompt, cached_tokens=1, completion_tokens=offset, reasoning_tokens=num_thought
        ),
        timings=pb.Timings(total_ms=5, decode_worker="d"),
    )


async def slowly(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
    """Send two tokens, each after a delay."""
    for message in (tokens(0, 1, text="one "), tokens(1, 2, text="two"), last(2)):
        await asyncio.sleep(0.08)
        yield message


class Router(tandem_inference_pb2_grpc.InferenceServicer):  # type: ignore[misc]
    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.deadlines_s: list[float | None] = []
        self.num_open = 0
        self.all_closed = asyncio.Event()
        self.script: Script = self.echo
        self.stop = asyncio.Event()
        """Stops the gateway."""

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        self.deadlines_s.append(context.time_remaining())
        self.num_open += 1
        try:
            async for response in self.script(request):
                yield response
        finally:
            self.num_open -= 1
            if not self.num_open:
                self.all_closed.set()

    async def GetModelInfo(self, request: Any, context: Any) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(model="the-model", aliases=["also"], max_model_len=64)

    async def echo(self, request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        """Answer with the prompt, one word per token."""
        words = request.text.split() or [str(token_id) for token_id in request.token_ids.ids] or ["hello", "you"]
        for offset, word in enumerate(words):
            yield tokens(offset, offset, text=word + " ")
        yield last(len(words), num_prompt=len(words))

    async def endless(self, request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        """Send one token, then nothing until cancelled. For the prompt "wait" send nothing at all."""
        if request.text != "wait":
            yield tokens(0, 1, text="once")
        await asyncio.Event().wait()


@asynccontextmanager
async def gateway(
    texts: Texts | None = None, router_keys: tuple[str, ...] = (), **args: Any
) -> AsyncIterator[tuple[Router, httpx.AsyncClient]]:
    """`texts`: gives the router a real tokenizer service; None: it has none."""
    router, server = Router(), Server("127.0.0.1:0", keys=router_keys)
    stop = router.stop
    server.add(tandem_inference_pb2_grpc.add_InferenceServicer_to_server, router, "tandem.v1.Inference")
    if texts is not None:
        pool = WorkerPool(router_id="r", policy=PolicyConfig(), on_change=lambda: None)
        tokenizer = TokenizerServicer(texts=texts, pool=pool, max_request_bytes=MAX_REQUEST_BYTES)
        server.add(tandem_inference_pb2_grpc.add_TokenizerServicer_to_server, tokenizer, "tandem.v1.Tokenizer")
    address = await server.start()
    server.set_serving("tandem.v1.Inference", True)
    announced: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(
        run_gateway(GatewayArgs(router=(address,), listen="127.0.0.1:0", **args), stop, announce=announced.set_result)
    )
    async with asyncio.timeout(3 * TIMEOUT_S):
        # Loading CA certificates would take longer than most tests.
        async with httpx.AsyncClient(
            base_url=f"http://{await announced}", timeout=TIMEOUT_S, trust_env=False, verify=False
        ) as http:
            try:
                yield router, http
            finally:  # also if the test has failed: a server that is not stopped would break the whole run
                stop.set()
                await asyncio.wait([running])
                await server.drain(0)
        assert running.result() == 0


def events_of(body: str) -> list[Any]:
    """Return the events of a stream; the last is "[DONE]" if the stream is complete."""
    datas = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]
