"""An OTLP collector over gRPC, which receives the spans of requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from clusters import wait_until
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service_grpc
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass
class ToldSpan:
    service: str
    proto: trace_pb2.Span
    children: list[ToldSpan] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.proto.name

    @property
    def attributes(self) -> dict[str, Any]:
        return {each.key: getattr(each.value, str(each.value.WhichOneof("value"))) for each in self.proto.attributes}

    @property
    def start_ns(self) -> int:
        return self.proto.start_time_unix_nano

    @property
    def end_ns(self) -> int:
        return self.proto.end_time_unix_nano

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def error(self) -> str:
        return self.proto.status.message if self.proto.status.code == trace_pb2.Status.STATUS_CODE_ERROR else ""

    def tree(self) -> Any:
        """Return only the names of this span and its descendants, ordered by start time."""
        return (self.name, [child.tree() for child in self.children]) if self.children else self.name


class Collector(service_grpc.TraceServiceServicer):  # type: ignore[misc]
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: dict[bytes, list[ToldSpan]] = {}
        """By trace ID."""
        self.endpoint = ""

    def Export(self, request: service_pb.ExportTraceServiceRequest, context: Any) -> Any:  # noqa: N802
        self.take(request)
        return service_pb.ExportTraceServiceResponse()

    def take(self, request: service_pb.ExportTraceServiceRequest) -> None:
        with self._lock:
            for of_one in request.resource_spans:
                named = {each.key: each.value.string_value for each in of_one.resource.attributes}
                for scope in of_one.scope_spans:
                    for span in scope.spans:
                        self._spans.setdefault(span.trace_id, []).append(ToldSpan(named["service.name"], span))

    def trace(self, trace_id: str, *roots: str) -> list[ToldSpan]:
        """Wait until the spans `roots` of this trace have arrived; return its spans whose parents have not, in order of
        start. A span's children arrive before it does."""

        def spans() -> list[ToldSpan]:
            with self._lock:
                return list(self._spans.get(bytes.fromhex(trace_id), []))

        wait_until(lambda: {span.name for span in spans()} >= set(roots), 20, f"spans {roots}", spans)
        found = sorted(spans(), key=lambda span: (span.start_ns, -span.end_ns))
        by_id = {span.proto.span_id: span for span in found}
        for span in found:
            span.children.clear()
        tops = []
        for span in found:
            parent = by_id.get(span.proto.parent_span_id)
            (tops if parent is None else parent.children).append(span)
        return tops


@contextmanager
def running_collector() -> Iterator[Collector]:
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(2))
    service_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0).wait()
