"""Assembles a prefill worker's services: sessions on one side, transfers on the other."""

from __future__ import annotations

from functools import partial

from engine.scheduling.sequence import BlockExport
from kv_transfer import create_sender
from prefill_service.prefill import PrefillRole
from protos.tandem_worker_pb2_grpc import PrefillServicer as PrefillServicerBase
from protos.tandem_worker_pb2_grpc import add_PrefillServicer_to_server
from rpc.channel import open_kv_channel
from worker_service.role import RoleService, TransferCounters, WorkerParts
from worker_service.sessions import SessionServicer

SERVICE_NAME = "tandem.v1.Prefill"


class PrefillServicer(SessionServicer, PrefillServicerBase):  # type: ignore[misc]
    """The service `tandem.v1.Prefill`."""


class PrefillService(RoleService):
    """The role service of a prefill worker. Owns the sender."""

    def __init__(self, parts: WorkerParts) -> None:
        self._server = parts.server
        self._sender = create_sender(
            parts.args.transport,
            pool=parts.pool,
            identity=parts.identity,
            open_channel=partial(open_kv_channel, max_message_bytes=parts.max_message_bytes, tls=parts.args.client_tls),
        )
        self._role = PrefillRole(
            host=parts.host,
            engine=parts.engine,
            sender=self._sender,
            num_blocks=parts.pool.layout.num_blocks,
            on_handed_over=parts.on_handed_over,
        )
        parts.host.role = self._role
        parts.server.add(add_PrefillServicer_to_server, PrefillServicer(parts.host), SERVICE_NAME)

    @property
    def counters(self) -> TransferCounters:
        return TransferCounters(num_repairs=self._sender.num_repaired_blocks)

    def on_layer_written(self, layer: int, exports: list[BlockExport]) -> None:
        self._role.on_layer_written(layer, exports)

    async def start(self, address: str) -> None:
        self._server.set_serving(SERVICE_NAME, True)

    async def close(self) -> None:
        await self._sender.close()
