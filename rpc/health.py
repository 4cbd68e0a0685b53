"""grpc.health.v1: liveness under the name "", readiness under each service's full name.

    name     added       set_serving(name, b)        enter_drain()
    ""       SERVING     -                           SERVING (the process lives until it has left)
    service  NOT_SERVING SERVING / NOT_SERVING       NOT_SERVING for good
    Watch    begins      reports each change         reports it; ends with `end_watches`, before the server stops

We do not use grpcio-health-checking's servicer for two reasons. Its Watch never ends, so that a single watcher would
make every drain take its whole grace period. (During the drain a Watch must not end either: gRPC's clients would
restart it hundreds of times a second.) And it turns liveness off at drain, so that an orchestrator would kill a process
that is still handing over its streams.
"""

from __future__ import annotations

import asyncio
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from rpc.errors import NotFound

SERVICE_NAME = "grpc.health.v1.Health"


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Used only on the event loop's thread."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {"": health_pb2.HealthCheckResponse.SERVING}
        self._is_draining = False
        self._is_ending = False
        self._changed = asyncio.Event()
        """Set, and replaced by a new one, at every change."""

    def add(self, service: str) -> None:
        """Add `service`, which is NOT_SERVING until `set_serving`."""
        self._set(service, health_pb2.HealthCheckResponse.NOT_SERVING)

    def set_serving(self, service: str, is_serving: bool) -> None:
        """Set whether `service` is ready. Without effect once draining."""
        assert service in self._statuses, f"{service} was never added"
        if not self._is_draining:
            status = health_pb2.HealthCheckResponse
            self._set(service, status.SERVING if is_serving else status.NOT_SERVING)

    def is_serving(self, service: str) -> bool:
        return bool(self._statuses[service] == health_pb2.HealthCheckResponse.SERVING)

    def enter_drain(self) -> None:
        """Make every service NOT_SERVING permanently. Safe to repeat."""
        self._is_draining = True
        for service in self._statuses:
            if service:
                self._set(service, health_pb2.HealthCheckResponse.NOT_SERVING)

    def end_watches(self) -> None:
        """End running and future watches once they have reported the latest status."""
        self._is_ending = True
        self._tell()

    async def Check(  # noqa: N802 - gRPC's name
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> health_pb2.HealthCheckResponse:
        status = self._statuses.get(request.service)
        if status is None:
            raise NotFound(f"no service {request.service!r} here")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:  # noqa: N802
        last_status: int | None = None
        while True:
            changed = self._changed  # read before the status, so that no change is missed
            status = self._statuses.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != last_status:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                last_status = status
            elif self._is_ending:
                return
            else:
                await changed.wait()

    def _set(self, service: str, status: int) -> None:
        if self._statuses.get(service) != status:  # otherwise each worker's every step would wake all watchers
            self._statuses[service] = status
            self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
