"""The interface between a role (prefill or decode) and its worker's process: the parts it is built from, and what it
offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from engine.async_llm_engine import AsyncLLMEngine
from engine.scheduling.sequence import BlockExport
from kv_transfer import Identity, KVPool
from protos.tandem_inference_pb2 import KVTransferStats
from rpc.server import Server
from worker_service.args import WorkerArgs
from worker_service.sessions import SessionHost


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferCounters:
    """Counts transfers since the process started: sent by a prefill worker, received by a decode worker."""

    num_late_writes: int = 0
    """Blocks (of one layer each) that arrived after their grant had ended, and were dropped."""
    num_repairs: int = 0
    """Blocks that were pushed again because their digest differed."""
    num_expired_leases: int = 0
    num_grants: int = 0
    """Grants that are open now."""
    num_grants_issued: int = 0


class RoleService(ABC):
    """The part of a worker that is specific to prefill or decode, besides its engine and its sessions."""

    @abstractmethod
    async def start(self, address: str) -> None:
        """Called when the server listens; `address` is where others reach it."""

    @abstractmethod
    async def close(self) -> None:
        """Release peers and memory."""

    @property
    @abstractmethod
    def counters(self) -> TransferCounters: ...

    def on_layer_written(self, layer: int, exports: list[BlockExport]) -> None:
        """The engine's `on_layer_written`, called on the event loop."""
        raise AssertionError("nothing is prefilled here for another worker")

    def open_grants(self) -> dict[int, tuple[int, ...]]:
        """`GrantTable.open_grants`, for a role that promises memory."""
        return {}


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """The parts that a role is built from."""

    args: WorkerArgs
    identity: Identity
    engine: AsyncLLMEngine
    pool: KVPool
    host: SessionHost
    server: Server
    max_message_bytes: int
    """Message size limit of connections that carry KV."""
    on_handed_over: Callable[[KVTransferStats], None]
    """Called for each prompt that another worker has taken over."""


MakeService = Callable[[WorkerParts], RoleService]
