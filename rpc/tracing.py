"""Traces of requests: what one process has to tell of them, as parts of the caller's trace. In OpenTelemetry's form.

    caller's traceparent ──> begin(name) ── trace_headers ──> whoever is asked next, whose spans are children
                               └─ end(children) ──> a queue ──> a thread of its own ──OTLP──> collector

Nobody waits for the collector: while it cannot be reached spans are kept, two thousand of them, and then left out. Owns
that thread (`rpc.otlp`, which alone imports OpenTelemetry). Without an endpoint nothing is made, and the caller's
context goes on as it came.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias
from urllib.parse import urlsplit

NEEDED = "pip install opentelemetry-sdk opentelemetry-exporter-otlp"
TRACE_HEADERS = ("traceparent", "tracestate")
"""W3C Trace Context's, in HTTP and in gRPC's metadata."""
_VALUE = re.compile(r"[\x20-\x7e]{1,1024}")
"""Longer ones are no context: a tracestate must be passed on up to 512 bytes."""
ENDPOINT_HELP = (
    "Where traces of requests go: an OTLP collector, http://HOST:4317 over gRPC, http://HOST:4318/v1/traces over HTTP. "
    "Default: nowhere."
)

Value: TypeAlias = str | int | float | bool
NOTHING: Mapping[str, Value] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that took time, and has ended. Seconds on this process' monotonic clock."""

    name: str
    start_s: float
    end_s: float
    attributes: Mapping[str, Value] = field(default_factory=dict)
    error: str = ""
    """Why it failed, if it did."""
    children: Sequence[Span] = ()


class OpenSpan(ABC):
    """A request that this process answers. Ended once, where it is recorded."""

    trace_headers: Mapping[str, str]
    """For whoever is asked next."""

    @abstractmethod
    def end(
        self, attributes: Mapping[str, Value] = NOTHING, *, error: str = "", children: Iterable[Span] = ()
    ) -> None: ...

    @property
    @abstractmethod
    def is_recorded(self) -> bool:
        """False: nobody will read what it ends with."""


class Tracing(ABC):
    """Where the spans of a process go. Its owner closes it."""

    @abstractmethod
    def begin(self, name: str, trace_headers: Mapping[str, str]) -> OpenSpan:
        """`trace_headers`: the caller's, or none."""

    @abstractmethod
    def close(self) -> None:
        """Tell what is left, for some seconds at most. Blocks."""


def create_tracing(endpoint: str, service: str) -> Tracing:
    """`endpoint` as `check_endpoint` has it; empty: nobody is told. Raises `ValueError` without the packages."""
    if not endpoint:
        return Untraced()
    try:
        from rpc.otlp import OtlpTracing
    except ModuleNotFoundError as error:
        raise ValueError(f"otlp_traces_endpoint: {error}; install what it needs: {NEEDED}") from error
    try:
        return OtlpTracing(endpoint, service)
    except Exception as error:  # of many kinds: the SDK reads its variables in many places
        raise ValueError(f"otlp_traces_endpoint: OpenTelemetry refuses its settings (OTEL_…): {error}") from error


def check_endpoint(endpoint: str) -> None:
    """Raises `ValueError` naming the field."""
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https", "grpc") and bool(parts.hostname) and parts.port != 0
        is_url = is_url and not (parts.query or parts.fragment or "@" in parts.netloc or " " in endpoint)
        is_url = is_url and not (parts.scheme == "grpc" and parts.path.strip("/"))
    except ValueError:
        is_url = False
    if endpoint and not is_url:
        raise ValueError(f"otlp_traces_endpoint must be a URL such as http://localhost:4317, is {endpoint!r:.200}")


def trace_headers_of(items: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    """The caller's context among headers or metadata, whose names are in lower case."""
    return {
        name: value
        for name, value in items
        if name in TRACE_HEADERS and isinstance(value, str) and _VALUE.fullmatch(value)
    }


class Untraced(Tracing):
    """Nobody is told."""

    def begin(self, name: str, trace_headers: Mapping[str, str]) -> OpenSpan:
        return _PassedOn(trace_headers)

    def close(self) -> None:
        pass


class _PassedOn(OpenSpan):
    is_recorded = False

    def __init__(self, trace_headers: Mapping[str, str]) -> None:
        self.trace_headers = trace_headers

    def end(self, attributes: Mapping[str, Value] = NOTHING, *, error: str = "", children: Iterable[Span] = ()) -> None:
        pass
