"""The requests that a soak makes up, and sends again."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from protos import tandem_inference_pb2 as pb
from protos import tandem_inference_pb2_grpc as pb_grpc
from protos.tandem_inference_pb2 import GetModelInfoResponse
from rpc.errors import Overloaded
from rpc.interceptors import abort
from tandem.chaos.asked import Asked, Way
from tandem.chaos.load import BURST_PROMPT_TOKENS, LONG_ANSWER, Load, again
from tandem.client import AsyncClient


@pytest.mark.parametrize(("max_model_len", "has_long"), [(1100, False), (2048, True)])
async def test_every_request_fits_into_the_context(max_model_len: int, has_long: bool) -> None:
    """One that does not is refused, which a soak takes for a fault of the cluster."""
    load = Load("127.0.0.1:1", "", 3, GetModelInfoResponse(max_model_len=max_model_len, vocab_size=1000))
    made = [load._invent(max_prompt_tokens=BURST_PROMPT_TOKENS) for _ in range(2000)]
    await load.close()
    assert all(asked.way is not Way.CHATS for asked in made)
    assert max(len(asked.prompt) + asked.sampling["max_tokens"] for asked in made) <= max_model_len
    assert any(asked.sampling["max_tokens"] >= LONG_ANSWER[0] for asked in made) == has_long


class FullAtFirst(pb_grpc.InferenceServicer):
    """Its queue is full for two requests."""

    def __init__(self) -> None:
        self.num_requests = 0

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> Any:  # noqa: N802
        self.num_requests += 1
        if self.num_requests <= 2:
            await abort(context, Overloaded("the queue is full", retry_after_s=0.01))
        usage = pb.Usage(prompt_tokens=2, completion_tokens=1)
        yield pb.GenerateResponse(token_ids=[5], text="a", finish_reason=pb.FINISH_REASON_LENGTH, usage=usage)


async def test_an_answer_is_compared_although_the_queue_was_full() -> None:
    server, servicer = grpc.aio.server(), FullAtFirst()
    pb_grpc.add_InferenceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            [heard] = await again(client, Asked(0, [1, 2], {"max_tokens": 1}, 1, Way.GRPC, ""), "")
    finally:
        await server.stop(0)
    assert heard.token_ids == [5]
    assert servicer.num_requests == 3
