"""What a role (prefill or decode) is to its worker's process: the parts that it is built from, and what it offers."""

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
    """Of transfers since the process started: of prefill workers what they sent, of decode workers what came."""

    num_late_writes: int = 0
    """Blocks of a layer that came after their grant had ended: dropped."""
    num_repairs: int = 0
    """Blocks whose digest differed, pushed again."""
    num_expired_leases: int = 0
    num_grants: int = 0
    """Promises of memory that are open now."""
    num_grants_issued: int = 0


class RoleService(ABC):
    """What a prefill or a decode worker has beside its engine and its sessions."""

    @abstractmethod
    async def start(self, address: str) -> None:
        """The server listens; `address` is where others reach it."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of peers and memory."""

    @property
    @abstractmethod
    def counters(self) -> TransferCounters: ...

    def on_layer_written(self, layer: int, exports: list[BlockExport]) -> None:
        """What the engine's `on_layer_written` says, on the event loop."""
        raise AssertionError("nothing is prefilled here for another worker")

    def open_grants(self) -> dict[int, tuple[int, ...]]:
        """As of a `GrantTable`, of a role that promises memory."""
        return {}


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What a role is built from."""

    args: WorkerArgs
    identity: Identity
    engine: AsyncLLMEngine
    pool: KVPool
    host: SessionHost
    server: Server
    max_message_bytes: int
    """Of the connections that carry KV."""
    on_handed_over: Callable[[KVTransferStats], None]
    """Hears of each prompt that another worker has taken over."""


MakeService = Callable[[WorkerParts], RoleService]
