"""`tandem.v1.Cluster`, for operators. It gathers every answer from the workers when asked, never from a cache."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import TypeVar

import grpc

from protos import tandem_worker_pb2 as pb
from protos.tandem_worker_pb2_grpc import ClusterServicer as ClusterServicerBase
from protos.tandem_worker_pb2_grpc import WorkerStub
from router.audit import find_ownerless
from router.open_requests import OpenRequests
from router.parts import RouterParts
from router.worker_handle import WorkerHandle
from rpc.errors import InternalError, NotFound, TandemError, rpc_errors_as_tandem_errors
from rpc.version import tandem_version

_T = TypeVar("_T")

WORKER_TIMEOUT_S = 5.0
"""A worker that does not answer within this time is listed as unreachable."""

PROFILE_READ_S = 60.0
"""The time that a worker may take, after profiling, to evaluate the profile."""
MAX_ID_CHARS = 128

TURNS_S = 0.01
"""Wait between the two looks of an audit, in case no worker has to be waited for: some turns of the event loop."""


class ClusterServicer(ClusterServicerBase):  # type: ignore[misc]
    def __init__(
        self,
        *,
        router_id: str,
        parts: RouterParts,
        open_requests: OpenRequests,
        unused: Callable[[], list[str]],
    ) -> None:
        self._router_id = router_id
        self._parts = parts
        self._open_requests = open_requests
        self._unused = unused

    async def GetStatus(  # noqa: N802
        self, request: pb.GetClusterStatusRequest, context: grpc.aio.ServicerContext
    ) -> pb.ClusterStatus:
        workers, unreachable = await self._ask_all(
            lambda stub: stub.GetStatus(pb.GetWorkerStatusRequest(), timeout=WORKER_TIMEOUT_S)
        )
        return pb.ClusterStatus(
            router_id=self._router_id,
            num_queued_requests=len(self._parts.queue),
            num_queued_tokens=self._parts.queue.num_tokens,
            num_running_requests=len(self._open_requests),
            is_registry_reachable=self._parts.pool.is_registry_reachable(),
            workers=workers,
            unreachable=unreachable,
            unused=self._unused(),
            version=tandem_version(),
            ejected=self._parts.pool.ejected,
            of_another_kind=self._parts.pool.of_another_kind,
            not_connected=self._parts.pool.not_connected,
            apart=[
                pb.WorkerPair(prefill_worker=pair.prefill.worker_id, decode_worker=pair.decode.worker_id)
                for pair in self._parts.pool.apart
            ],
        )

    async def Audit(self, request: pb.AuditRequest, context: grpc.aio.ServicerContext) -> pb.ClusterAudit:  # noqa: N802
        before = self._ownerless()
        workers, unreachable = await self._ask_all(lambda stub: stub.Audit(pb.AuditRequest(), timeout=WORKER_TIMEOUT_S))
        await asyncio.sleep(TURNS_S)
        problems = [sentence for what, sentence in self._ownerless().items() if what in before]
        return pb.ClusterAudit(workers=workers, unreachable=unreachable, router_id=self._router_id, problems=problems)

    async def Profile(self, request: pb.ProfileRequest, context: grpc.aio.ServicerContext) -> pb.WorkerProfile:  # noqa: N802
        handles = {handle.record.worker_id: handle for handle in self._parts.pool.handles}
        handle = handles.get(request.worker_id)
        if handle is None:
            known = ", ".join(sorted(handles)) or "none"
            raise NotFound(f"no worker {request.worker_id[:MAX_ID_CHARS]!r}; there are: {known}")
        timeout_s = request.timeout_ms / 1e3 + PROFILE_READ_S
        with rpc_errors_as_tandem_errors():
            profile: pb.WorkerProfile | None = await WorkerStub(handle.channel).Profile(request, timeout=timeout_s)
        if profile is None:
            raise InternalError(f"worker {request.worker_id} sent an answer that cannot be parsed")
        return profile

    def _ownerless(self) -> dict[Hashable, str]:
        return find_ownerless(self._parts.pool, self._parts.queue, self._open_requests.lifecycles)

    async def _ask_all(self, ask: Callable[[WorkerStub], Awaitable[_T]]) -> tuple[list[_T], list[str]]:
        """The answers of all known workers, and for each worker that did not answer a text with its id and the
        reason."""

        async def ask_one(handle: WorkerHandle) -> _T | str:
            who = f"{handle.record.worker_id} ({handle.record.address})"
            try:
                with rpc_errors_as_tandem_errors():
                    answer: _T | None = await ask(WorkerStub(handle.channel))
            except TandemError as error:
                return f"{who}: {error.message}"
            return f"{who}: its answer cannot be parsed" if answer is None else answer

        answers = await asyncio.gather(*(ask_one(handle) for handle in self._parts.pool.handles))
        return (
            [answer for answer in answers if not isinstance(answer, str)],
            [answer for answer in answers if isinstance(answer, str)],
        )
