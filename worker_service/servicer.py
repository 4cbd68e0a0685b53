"""The service `tandem.v1.Worker`: calls that operators and routers make to any worker."""

from __future__ import annotations

import time
from collections.abc import Callable

import grpc

from engine.async_llm_engine import AsyncLLMEngine, ProfilingError
from protos import tandem_worker_pb2 as pb
from protos.tandem_worker_pb2_grpc import WorkerServicer as WorkerServicerBase
from rpc.errors import Incompatible, InvalidRequest
from worker_service.messages import ledger_message
from worker_service.role import RoleService
from worker_service.sessions import SessionHost

MAX_PROFILE_MS = 600_000
MAX_OPS, MAX_OP_CHARS = 200, 256
MAX_TRACE_BYTES = 12 << 20
"""Limit of a trace's size; a message may have 16 MiB."""


class WorkerServicer(WorkerServicerBase):  # type: ignore[misc]
    """Answers from the state of one worker process."""

    def __init__(
        self,
        *,
        record: Callable[[], pb.WorkerRecord],
        engine: AsyncLLMEngine,
        host: SessionHost,
        service: RoleService,
        begin_drain: Callable[[], None],
    ) -> None:
        self._record = record
        self._engine = engine
        self._host = host
        self._service = service
        self._begin_drain = begin_drain
        self._started_s = time.monotonic()

    async def GetStatus(  # noqa: N802
        self, request: pb.GetWorkerStatusRequest, context: grpc.aio.ServicerContext
    ) -> pb.WorkerStatus:
        stats, counters = self._engine.stats, self._service.counters  # works even if the engine hangs
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
            num_loaded_tokens=stats.num_loaded_tokens,
        )

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext) -> pb.DrainResponse:  # noqa: N802
        self._begin_drain()
        return pb.DrainResponse()

    async def Audit(self, request: pb.AuditRequest, context: grpc.aio.ServicerContext) -> pb.WorkerAudit:  # noqa: N802
        self._require_going()
        before = self._service.open_grants()
        (ledger, problems), reserved = await self._engine.call(
            lambda engine: (engine.audit(), engine.granted_block_ids())
        )
        problems = [*problems, *stale_grants(before, self._service.open_grants(), reserved)]
        record = self._record()
        return pb.WorkerAudit(
            worker_id=record.worker_id,
            address=record.address,
            role=record.role,
            blocks=ledger_message(ledger),
            problems=problems,
        )

    async def Profile(self, request: pb.ProfileRequest, context: grpc.aio.ServicerContext) -> pb.WorkerProfile:  # noqa: N802
        if not 1 <= request.timeout_ms <= MAX_PROFILE_MS:
            raise InvalidRequest([("timeout_ms", f"must be in [1, {MAX_PROFILE_MS}], is {request.timeout_ms}")])
        self._require_going()
        try:
            profile = await self._engine.profile(
                request.num_steps, timeout_s=request.timeout_ms / 1e3, with_trace=request.with_trace
            )
        except ValueError as error:
            raise InvalidRequest([("num_steps", str(error).removeprefix("num_steps "))]) from error
        except ProfilingError as error:
            raise Incompatible(f"{error} of this worker; try again when it is done") from error
        if len(profile.trace_gz) > MAX_TRACE_BYTES:
            why = f"must be lower: the trace of {request.num_steps} steps has {len(profile.trace_gz)} bytes"
            raise InvalidRequest([("num_steps", f"{why}, the maximum is {MAX_TRACE_BYTES}")])
        return pb.WorkerProfile(
            worker_id=self._record().worker_id,
            num_steps=profile.num_steps,
            step_ms=profile.step_ms,
            ops=[
                pb.OpTime(
                    name=op.name[:MAX_OP_CHARS], num_calls=op.num_calls, host_ms=op.host_ms, device_ms=op.device_ms
                )
                for op in profile.ops[:MAX_OPS]
            ],
            trace_gz=profile.trace_gz,
        )

    def _require_going(self) -> None:
        """Raise `Incompatible` if the engine stands still, since it would never answer."""
        if self._record().load.is_stalled:
            raise Incompatible("the engine is stuck in a step; try again when it has recovered")


def stale_grants(
    before: dict[int, tuple[int, ...]], after: dict[int, tuple[int, ...]], reserved: set[int]
) -> list[str]:
    """Find grants whose blocks are not reserved: peers could write to blocks with another owner.

    `before`, `after`: the grants before and after the engine was asked for `reserved`. Grants that are not in both do
    not count.
    """
    return [
        f"grant {grant_id} names blocks that are not reserved for it: {missing[:8]}"
        for grant_id in sorted(before.keys() & after.keys())
        if (missing := sorted(set(before[grant_id]) - reserved))
    ]
