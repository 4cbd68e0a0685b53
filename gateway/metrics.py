"""The gateway's Prometheus metrics. The router and the workers have metrics of their own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from rpc.http import tell_of_process

STREAMING = ("completions", "chat", "responses", "messages")
"""Routes that can stream."""
SERVER_ERRORS = (500, 503, 504)
"""Errors with which a stream can end. Their counters exist from the start, so that the first error shows as a rise."""
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


@dataclass(slots=True)
class Outcome:
    status: int = 500


class Metrics:
    """One per process. `registry` is what the metrics endpoint serves."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        tell_of_process(self.registry)
        self._requests = Counter(
            "tandem:gateway_requests", "HTTP requests answered, by route and status.", ["route", "status"],
            registry=self.registry,
        )  # fmt: skip
        self._stream_errors = Counter(
            "tandem:gateway_stream_errors",
            "Streams that failed once they had begun, by route and the status that would have said so. Among the "
            "requests they have status 200.", ["route", "status"],
            registry=self.registry,
        )  # fmt: skip
        for route in STREAMING:
            self._requests.labels(route, "200")
            for status in SERVER_ERRORS:
                self._stream_errors.labels(route, str(status))
        self._in_flight = Gauge(
            "tandem:gateway_requests_in_flight", "HTTP requests whose status is not sent yet.", ["route"],
            registry=self.registry,
        )  # fmt: skip
        self._seconds = Histogram(
            "tandem:gateway_seconds_to_status",
            "Until the status is sent; of a stream, with its first token or sign of life.", ["route"],
            buckets=SECONDS, registry=self.registry,
        )  # fmt: skip

    @contextmanager
    def counted(self, route: str) -> Iterator[Outcome]:
        """Count one request. Its handler sets the outcome's status."""
        outcome, before_s = Outcome(), time.monotonic()
        with self._in_flight.labels(route).track_inprogress():
            yield outcome
        self._requests.labels(route, str(outcome.status)).inc()
        self._seconds.labels(route).observe(time.monotonic() - before_s)

    def stream_failed(self, route: str, status: int) -> None:
        """`status`: what the client would have got if the stream had not begun."""
        self._stream_errors.labels(route, str(status)).inc()

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)
