"""Assembles a decode worker's services: sessions on one side, incoming transfers on the other."""

from __future__ import annotations

from decode_service.decode import DecodeRole
from kv_transfer import KVReceiver, KVTransferServicer, create_endpoint
from protos.tandem_kv_transfer_pb2_grpc import add_KVTransferServicer_to_server
from protos.tandem_worker_pb2_grpc import DecodeServicer as DecodeServicerBase
from protos.tandem_worker_pb2_grpc import add_DecodeServicer_to_server
from worker_service.role import RoleService, TransferCounters, WorkerParts
from worker_service.sessions import SessionServicer

SERVICE_NAME = "tandem.v1.Decode"
KV_SERVICE_NAME = "tandem.v1.KVTransfer"


class DecodeServicer(SessionServicer, DecodeServicerBase):  # type: ignore[misc]
    """The service `tandem.v1.Decode`."""


class DecodeService(RoleService):
    """The role service of a decode worker. Owns the receiver."""

    def __init__(self, parts: WorkerParts) -> None:
        self._server = parts.server
        self._role = DecodeRole(host=parts.host, engine=parts.engine)
        self._receiver = KVReceiver(
            pool=parts.pool,
            identity=parts.identity,
            lease_s=parts.args.lease_ms / 1000,
            endpoint=create_endpoint(parts.args.transport, pool=parts.pool, identity=parts.identity),
            on_commit=self._role.on_commit,
            on_freed=self._role.on_freed,
        )
        self._role.receiver = self._receiver
        parts.host.role = self._role
        parts.server.add(add_DecodeServicer_to_server, DecodeServicer(parts.host), SERVICE_NAME)
        parts.server.add(add_KVTransferServicer_to_server, KVTransferServicer(self._receiver), KV_SERVICE_NAME)

    @property
    def counters(self) -> TransferCounters:
        counters = self._receiver.table.counters
        return TransferCounters(
            num_late_writes=counters.num_late_writes,
            num_repairs=counters.num_mismatched_blocks,
            num_expired_leases=counters.num_expired_leases,
            num_grants=self._receiver.table.num_grants,
            num_grants_issued=counters.num_issued,
        )

    def open_grants(self) -> dict[int, tuple[int, ...]]:
        return self._receiver.table.open_grants()

    async def start(self, address: str) -> None:
        await self._receiver.start(address)
        self._server.set_serving(SERVICE_NAME, True)
        self._server.set_serving(KV_SERVICE_NAME, True)

    async def close(self) -> None:
        await self._receiver.close()
