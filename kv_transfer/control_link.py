"""The control RPCs: Connect, Commit and Abandon over a gRPC channel. The links of all transports between processes use
them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc

from kv_transfer.errors import PeerUnreachable, errors_of_peer, readable
from protos import tandem_kv_transfer_pb2 as pb
from protos import tandem_kv_transfer_pb2_grpc as pb_grpc

OpenChannel = Callable[[str], grpc.aio.Channel]
"""address -> a channel, which the link closes. The channel's keepalive notices a dead peer."""


class ControlLink:
    """The common base of these links. Closes its channel."""

    is_broken = False
    num_blocks = 0

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self.stub = pb_grpc.KVTransferStub(channel)

    async def connect(self, request: pb.ConnectRequest, timeout_s: float) -> pb.ConnectResponse:
        with errors_of_peer():
            # Fails at once if nobody listens: the caller has other receivers.
            response: pb.ConnectResponse | None = await self.stub.Connect(request, timeout=timeout_s)
        return readable(response)

    async def commit(self, request: pb.CommitRequest) -> pb.CommitResponse:
        with errors_of_peer():
            response: pb.CommitResponse | None = await self.stub.Commit(request)
        return readable(response)

    async def wait_connected(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                with errors_of_peer():
                    await self._channel.channel_ready()
        except TimeoutError:
            raise PeerUnreachable(f"no connection for {timeout_s:g} s") from None

    async def lost(self) -> None:
        while (state := self._channel.get_state()) is grpc.ChannelConnectivity.READY:
            await self._channel.wait_for_state_change(state)

    async def abandon(self, request: pb.AbandonRequest, timeout_s: float) -> None:
        with errors_of_peer():
            await self.stub.Abandon(request, timeout=timeout_s, wait_for_ready=True)

    async def close(self) -> None:
        await self._channel.close()
