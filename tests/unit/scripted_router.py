"""A real gRPC server on a loopback port, with scripted answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc

from protos import tandem_inference_pb2 as pb
from protos import tandem_inference_pb2_grpc

STOP = pb.FINISH_REASON_STOP


def tokens(offset: int, *token_ids: int, text: str = "") -> pb.GenerateResponse:
    return pb.GenerateResponse(request_id="r", offset=offset, token_ids=token_ids, text=text)


def last(offset: int, num_tokens: int, text: str = "", finish_reason: pb.FinishReason = STOP) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        request_id="r",
        offset=offset,
        text=text,
        finish_reason=finish_reason,
        usage=pb.Usage(prompt_tokens=3, completion_tokens=num_tokens),
        timings=pb.Timings(total_ms=5),
    )


EXACT = [tokens(0, 10, text="a"), tokens(1, 11, 12, text="bc"), last(3, 3, text="d")]


def breaking(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
    """A script: send the next message of EXACT, then fail as a router that is gone."""
    message = pb.GenerateResponse()
    message.CopyFrom(EXACT[min(len(request.output_token_ids), 2)])
    if message.HasField("usage"):
        yield message
        return
    message.worker_kind = "k"
    yield message
    context.abort(grpc.StatusCode.UNAVAILABLE, "gone")


class Scripted(tandem_inference_pb2_grpc.InferenceServicer):
    """Plays `script` for each request."""

    def __init__(self) -> None:
        self.script: Callable[[pb.GenerateRequest, grpc.ServicerContext], Iterator[pb.GenerateResponse]]
        self.was_cancelled = threading.Event()

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext):  # noqa: N802
        return self.script(request, context)

    def GetModelInfo(  # noqa: N802
        self, request: pb.GetModelInfoRequest, context: grpc.ServicerContext
    ) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(model="m", vocab_size=32_000)

    def endless(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        """Send one token, then nothing until the client goes away."""
        context.add_callback(self.was_cancelled.set)
        yield tokens(0, 1, text="a")
        self.was_cancelled.wait(20)


@contextmanager
def scripted_router() -> Iterator[tuple[str, Scripted]]:
    """Run the server. Yields its address and the servicer, whose `script` the test sets."""
    grpc_server = grpc.server(ThreadPoolExecutor(4))
    scripted = Scripted()
    tandem_inference_pb2_grpc.add_InferenceServicer_to_server(scripted, grpc_server)
    port = grpc_server.add_insecure_port("127.0.0.1:0")
    grpc_server.start()
    yield f"127.0.0.1:{port}", scripted
    grpc_server.stop(0).wait()
