"""`tandem.v1.Worker`: what operators and routers ask of any worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from engine.async_llm_engine import AsyncLLMEngine
from protos import tandem_worker_pb2 as pb
from protos.tandem_worker_pb2_grpc import WorkerServicer as WorkerServicerBase
from worker_service.messages import ledger_message
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
    num_transfers: int = 0
    """Prompts whose KV another worker has taken over."""
    num_transferred_bytes: int = 0
    seconds_in_transfers: float = 0.0
    """From a prompt's first push to its acknowledged commit, hidden by computation or not."""


class WorkerServicer(WorkerServicerBase):  # type: ignore[misc]
    """Answers from the books of one worker process."""

    def __init__(
        self,
        *,
        record: Callable[[], pb.WorkerRecord],
        engine: AsyncLLMEngine,
        host: SessionHost,
        counters: Callable[[], TransferCounters],
        open_grants: Callable[[], dict[int, tuple[int, ...]]],
        begin_drain: Callable[[], None],
    ) -> None:
        self._record = record
        self._engine = engine
        self._host = host
        self._counters = counters
        self._open_grants = open_grants
        self._begin_drain = begin_drain
        self._started_s = time.monotonic()

    async def GetStatus(  # noqa: N802
        self, request: pb.GetWorkerStatusRequest, context: grpc.aio.ServicerContext
    ) -> pb.WorkerStatus:
        stats = await self._engine.call(lambda engine: engine.stats)
        counters = self._counters()
        return pb.WorkerStatus(
            record=self._record(),
            uptime_s=time.monotonic() - self._started_s,
            num_prefix_queries_tokens=stats.num_prefix_queries_tokens,
            num_prefix_hits_tokens=stats.num_prefix_hits_tokens,
            num_preemptions=stats.num_preemptions,
            num_late_writes=counters.num_late_writes,
            num_repairs=counters.num_repairs,
            num_expired_leases=counters.num_expired_leases,
            num_sessions=self._host.num_sessions,
            num_prompt_tokens=stats.num_prompt_tokens,
            num_generation_tokens=stats.num_generation_tokens,
        )

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext) -> pb.DrainResponse:  # noqa: N802
        self._begin_drain()
        return pb.DrainResponse()

    async def Audit(self, request: pb.AuditRequest, context: grpc.aio.ServicerContext) -> pb.WorkerAudit:  # noqa: N802
        before = self._open_grants()
        (ledger, problems), reserved = await self._engine.call(
            lambda engine: (engine.audit(), engine.granted_block_ids())
        )
        problems = [*problems, *stale_grants(before, self._open_grants(), reserved)]
        record = self._record()
        return pb.WorkerAudit(
            worker_id=record.worker_id,
            address=record.address,
            role=record.role,
            blocks=ledger_message(ledger),
            problems=problems,
        )


def stale_grants(
    before: dict[int, tuple[int, ...]], after: dict[int, tuple[int, ...]], reserved: set[int]
) -> list[str]:
    """Promises of memory that is reserved for nobody: peers could write to what has another owner.

    `before` and `after` the engine was asked what is `reserved`: a grant that came or went meanwhile says nothing.
    """
    return [
        f"grant {grant_id} names blocks that are not reserved for it: {missing[:8]}"
        for grant_id in sorted(before.keys() & after.keys())
        if (missing := sorted(set(before[grant_id]) - reserved))
    ]
