"""The gRPC service `KVTransfer`, in front of a `KVReceiver`. Owns nothing: it translates messages, errors and stream
ends.

A first chunk without blocks announces a one-sided push, the call's initial metadata acknowledges it, and a second such
chunk ends it. A stream that ends without the second chunk is broken: its sender may have writes in flight.

A two-sided push whose grant is gone is not aborted, since gRPC would then lose the answer to writes in flight. Initial
metadata tells the sender to stop instead, and later writes are dropped and counted.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NoReturn

import grpc

from kv_transfer.base import ATTACHED, GONE
from kv_transfer.errors import STATUS_OF, InvalidTransfer, TransferError
from kv_transfer.receiver import KVReceiver
from protos import tandem_kv_transfer_pb2 as pb
from protos import tandem_kv_transfer_pb2_grpc as pb_grpc


class KVTransferServicer(pb_grpc.KVTransferServicer):  # type: ignore[misc]
    """Serves `receiver`. Errors of the receiver become the statuses of `errors.STATUS_OF`."""

    def __init__(self, receiver: KVReceiver) -> None:
        self._receiver = receiver

    async def Connect(  # noqa: N802
        self, request: pb.ConnectRequest, context: grpc.aio.ServicerContext
    ) -> pb.ConnectResponse:
        try:
            return self._receiver.connect(request)
        except TransferError as error:
            await _abort(context, error)

    async def Push(  # noqa: N802
        self, chunks: AsyncIterator[pb.PushChunk], context: grpc.aio.ServicerContext
    ) -> pb.PushSummary:
        summary = pb.PushSummary()
        try:
            async for chunk in chunks:
                if not chunk.block_ids:
                    if summary.num_written or summary.num_late:
                        raise InvalidTransfer("a chunk without block ids must be the first")
                    await self._hold_one_sided_push(chunk, chunks, context)
                    break
                num_bytes = self._receiver.write(chunk)
                if num_bytes:
                    summary.num_written += len(chunk.block_ids)
                    summary.num_bytes += num_bytes
                    continue
                if not summary.num_late:
                    await context.send_initial_metadata((GONE,))
                summary.num_late += len(chunk.block_ids)
        except TransferError as error:
            await _abort(context, error)
        return summary

    async def _hold_one_sided_push(
        self, first: pb.PushChunk, chunks: AsyncIterator[pb.PushChunk], context: grpc.aio.ServicerContext
    ) -> None:
        if first.data:
            raise InvalidTransfer("data without block ids")
        attachment_id = self._receiver.attach(first)
        is_ended = False
        try:
            await context.send_initial_metadata((ATTACHED,))
            async for chunk in chunks:
                if chunk.block_ids or chunk.data:
                    raise InvalidTransfer("a one-sided push carries no data")
                is_ended = True
                break
        finally:
            if is_ended:
                self._receiver.detach(first.grant_id, attachment_id)
            else:
                self._receiver.sender_gone(first.grant_id, attachment_id)

    async def Commit(  # noqa: N802
        self, request: pb.CommitRequest, context: grpc.aio.ServicerContext
    ) -> pb.CommitResponse:
        try:
            return await self._receiver.commit(request)
        except TransferError as error:
            await _abort(context, error)

    async def Abandon(  # noqa: N802
        self, request: pb.AbandonRequest, context: grpc.aio.ServicerContext
    ) -> pb.AbandonResponse:
        self._receiver.abandon(request)
        return pb.AbandonResponse()


async def _abort(context: grpc.aio.ServicerContext, error: TransferError) -> NoReturn:
    await context.abort(STATUS_OF[type(error)], str(error))
    raise AssertionError("abort raises")
