"""Exports traces over OTLP with OpenTelemetry's SDK, which needs the extra `tracing`.

The SDK's environment variables apply: OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER, OTEL_BSP_*
for the queue, OTEL_EXPORTER_OTLP_HEADERS, _CERTIFICATE and _TIMEOUT.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from rpc.tracing import NOTHING, OpenSpan, Span, Tracing, Value

CLOSE_S = 3.0
"""How long a leaving process waits for its remaining spans to be exported."""
OTLP_PORT = 4317
_CONTEXT = TraceContextTextMapPropagator()


class OtlpTracing(Tracing):
    """Owns the SDK's queue and thread."""

    def __init__(self, endpoint: str, service: str) -> None:
        # Otherwise each request with an invalid tracestate would be logged.
        logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)
        resource = Resource({"service.name": service}).merge(OTELResourceDetector().detect())
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._exporter = _exporter(endpoint)
        self._processor = BatchSpanProcessor(self._exporter)
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer(service)

    def begin(self, name: str, trace_headers: Mapping[str, str]) -> OpenSpan:
        return _OpenSpan(self._tracer, name, trace_headers)

    def close(self) -> None:
        closing = threading.Thread(target=self._processor.shutdown, name="tracing-close", daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        if closing.is_alive():  # the collector is unreachable, and the SDK would retry for half a minute
            self._exporter.shutdown()


class _OpenSpan(OpenSpan):
    def __init__(self, tracer: trace.Tracer, name: str, trace_headers: Mapping[str, str]) -> None:
        self._tracer = tracer
        self._offset_ns = time.time_ns() - time.monotonic_ns()
        self._span = tracer.start_span(name, _CONTEXT.extract(dict(trace_headers)), kind=trace.SpanKind.SERVER)
        carrier: dict[str, str] = {}
        _CONTEXT.inject(carrier, trace.set_span_in_context(self._span))
        self.trace_headers = carrier

    @property
    def is_recorded(self) -> bool:
        return self._span.is_recording()

    def end(self, attributes: Mapping[str, Value] = NOTHING, *, error: str = "", children: Iterable[Span] = ()) -> None:
        self._tell(self._span, children)
        self._span.set_attributes(attributes)
        _set_error(self._span, error)
        self._span.end()

    def _tell(self, parent: trace.Span, spans: Iterable[Span]) -> None:
        context = trace.set_span_in_context(parent)
        for span in spans:
            told = self._tracer.start_span(
                span.name, context, attributes=dict(span.attributes), start_time=self._ns(span.start_s)
            )
            self._tell(told, span.children)
            _set_error(told, span.error)
            told.end(self._ns(span.end_s))

    def _ns(self, monotonic_s: float) -> int:
        """Convert to the wall clock, which traces use."""
        return round(1e9 * monotonic_s) + self._offset_ns


def _set_error(span: trace.Span, error: str) -> None:
    if error:
        span.set_status(trace.Status(trace.StatusCode.ERROR, error))


def _exporter(endpoint: str) -> SpanExporter:
    """OTLP over HTTP if the endpoint has a path, else over gRPC."""
    parts = urlsplit(endpoint)
    if parts.path.strip("/"):
        return OverHttp(endpoint=endpoint)
    return OverGrpc(endpoint=grpc_target(endpoint), insecure=parts.scheme != "https")


def grpc_target(endpoint: str) -> str:
    """HOST:PORT. The default is OTLP's port; gRPC's default would be that of HTTPS."""
    parts = urlsplit(endpoint)
    return parts.netloc if parts.port else f"{parts.netloc.rstrip(':')}:{OTLP_PORT}"
