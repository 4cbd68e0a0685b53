"""Where spans go, and what happens to them when there is no collector."""

from __future__ import annotations

import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from collector import Collector, running_collector
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service_pb
from ports import lasting_port

from rpc.otlp import CLOSE_S, grpc_target
from rpc.otlp_endpoint import check_endpoint, create_tracing
from rpc.tracing import Span, trace_headers_of

TRACE_ID = "ab" * 16
HEADERS = {"traceparent": f"00-{TRACE_ID}-{'cd' * 8}-01", "tracestate": "vendor=1"}


def tell_one(endpoint: str) -> None:
    tracing = create_tracing(endpoint, "tested")
    span = tracing.begin("outer", HEADERS)
    now_s = time.monotonic()
    innermost = Span(name="innermost", start_s=now_s - 1.5, end_s=now_s - 1)
    inner = Span(name="inner", start_s=now_s - 2, end_s=now_s - 1, error="it broke", children=[innermost])
    span.end({"number": 7, "yes": True}, children=[inner])
    tracing.close()


def check_told(collector: Collector) -> None:
    (outer,) = collector.trace(TRACE_ID, "outer", "inner")
    assert outer.tree() == ("outer", [("inner", ["innermost"])])
    assert outer.service == "tested"
    assert outer.attributes == {"number": 7, "yes": True}
    assert outer.proto.parent_span_id.hex() == "cd" * 8
    (inner,) = outer.children
    assert inner.error == "it broke"
    assert inner.seconds == pytest.approx(1)
    assert abs(time.time_ns() / 1e9 - inner.end_ns / 1e9) < 60


def test_over_grpc() -> None:
    with running_collector() as collector:
        tell_one(collector.endpoint)
        check_told(collector)


def test_the_environment_may_name_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "of the environment")
    with running_collector() as collector:
        tell_one(collector.endpoint)
        [outer] = collector.trace(TRACE_ID, "outer")
        assert outer.service == "of the environment"


def test_over_http() -> None:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            collector.take(service_pb.ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        tell_one(f"http://127.0.0.1:{server.server_port}/v1/traces")
        check_told(collector)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_who_is_not_there_is_not_waited_for_long() -> None:
    begun_s = time.monotonic()
    tell_one(f"http://127.0.0.1:{lasting_port()}")
    assert time.monotonic() - begun_s < CLOSE_S + 5  # by itself, the exporter tries for ten seconds or more


def test_a_trace_goes_on_where_nobody_tells_of_it() -> None:
    tracing = create_tracing("", "tested")
    span = tracing.begin("x", HEADERS)
    assert span.trace_headers == HEADERS
    assert not span.is_recorded
    span.end()
    tracing.close()


def test_what_is_no_context_is_left_out() -> None:
    items: list[tuple[str, str | bytes]] = [
        *HEADERS.items(), ("x", "y"), ("traceparent-bin", b"z"), ("tracestate", "a\nb"),
    ]  # fmt: skip
    assert trace_headers_of(items) == HEADERS
    assert trace_headers_of([("tracestate", "x" * 2000)]) == {}


@pytest.mark.parametrize(
    "endpoint",
    [
        "localhost:4317",
        "http://",
        "ftp://h:1",
        "http://h:99999",
        "x",
        "http://[::1:4317",
        "http://u:p@h:4317",
        "http://h o:4317",
        "http://h:4317?x=1",
        "grpc://h:4318/v1/traces",
    ],
)
def test_no_endpoint(endpoint: str) -> None:
    with pytest.raises(ValueError, match="otlp_traces_endpoint must be a URL such as http://localhost:4317, is"):
        check_endpoint(endpoint)


@pytest.mark.parametrize(
    ("endpoint", "target"),
    [
        ("http://localhost:9", "localhost:9"),
        ("https://collector.example/", "collector.example:4317"),
        ("grpc://[::1]", "[::1]:4317"),
        ("http://collector.example:", "collector.example:4317"),
        ("http://[::1]:7", "[::1]:7"),
    ],
)
def test_where_an_endpoint_is(endpoint: str, target: str) -> None:
    check_endpoint(endpoint)
    assert grpc_target(endpoint) == target


def test_settings_of_the_library_that_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "abc")
    with pytest.raises(
        ValueError, match=r"otlp_traces_endpoint: OpenTelemetry refuses the environment variables OTEL_…: "
    ):
        create_tracing("http://localhost:4317", "tested")


def test_packages_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "rpc.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ValueError, match=r"otlp_traces_endpoint: .*pip install"):
        create_tracing("http://localhost:4317", "tested")
