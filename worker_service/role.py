"""What a role (prefill or decode) is to its worker's process: the parts that it is built from, and what it offers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.async_llm_engine import AsyncLLMEngine
from engine.scheduling.sequence import BlockExport
from kv_transfer import Identity, KVPool
from protos.tandem_inference_pb2 import KVTransferStats
from rpc.server import Server
from worker_service.args import WorkerArgs
from worker_service.servicer import TransferCounters
from worker_service.sessions import SessionHost


class RoleService(Protocol):
    """What a prefill or a decode worker has beside its engine and its sessions."""

    async def start(self, address: str) -> None:
        """The server listens; `address` is where others reach it."""

    def on_layer_written(self, layer: int, exports: list[BlockExport]) -> None:
        """What the engine's `on_layer_written` says, on the event loop."""

    async def close(self) -> None:
        """Let go of peers and memory."""

    @property
    def counters(self) -> TransferCounters: ...

    def open_grants(self) -> dict[int, tuple[int, ...]]:
        """The blocks that peers have been promised and may write to, by grant id."""


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
