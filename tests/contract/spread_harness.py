# ruff: noqa: N802 - gRPC's method names
"""Routers with scripted answers, for tests with several behind one address."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from gateway_harness import last, tokens

from protos import tandem_inference_pb2 as pb
from protos import tandem_inference_pb2_grpc
from rpc.errors import TandemError
from rpc.metadata import ACCEPTED_KEY
from rpc.server import Server
from rpc.tls import ServerTLS
from tandem.client import AsyncClient

SERVICE = "tandem.v1.Inference"


class Router(tandem_inference_pb2_grpc.InferenceServicer):  # type: ignore[misc]
    """Answers "one two", and between the two words waits for `may_go_on`."""

    def __init__(self, listen: str = "127.0.0.1:0", tls: ServerTLS | None = None) -> None:
        self.server = Server(listen, tls=tls)
        self.server.add(tandem_inference_pb2_grpc.add_InferenceServicer_to_server, self, SERVICE)
        self.requests: list[pb.GenerateRequest] = []
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.refusal: TandemError | None = None
        self.peers: set[str] = set()
        """Peers that have asked for the model info."""
        self.may_tell = asyncio.Event()
        """Set: the router answers requests for its model info."""
        self.may_tell.set()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        if self.refusal is not None:
            raise self.refusal
        await context.send_initial_metadata(((ACCEPTED_KEY, "1"),))
        if not request.output_token_ids:
            yield pb.GenerateResponse(request_id="r", token_ids=[1], text="one ", worker_kind="k")
        await self.may_go_on.wait()
        yield tokens(1, 2, text="two")
        yield last(2)

    async def GetModelInfo(self, request: Any, context: Any) -> pb.GetModelInfoResponse:
        self.peers.add(context.peer())
        await self.may_tell.wait()
        return pb.GetModelInfoResponse(model="m")


async def until_asked(client: AsyncClient, *routers: Router) -> None:
    """Send requests until the client has used every router; then clear the routers' lists of requests."""
    while not all(router.requests for router in routers):
        await client.generate("a")
    for router in routers:
        router.requests.clear()
