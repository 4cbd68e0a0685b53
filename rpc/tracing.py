"""Traces of requests in OpenTelemetry's form: a process adds its spans to the caller's trace.

    caller's traceparent ──> begin(name) ── trace_headers ──> the next service called, whose spans are children
                               └─ end(children) ──> a queue ──> a thread of its own ──OTLP──> collector

Nothing waits for the collector: while it cannot be reached, two thousand spans are kept, and further ones dropped.
`rpc.otlp` owns the thread, and is the only module that imports OpenTelemetry. Without an endpoint (`rpc.otlp_endpoint`)
no spans are made, and the caller's context is passed on unchanged.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

TRACE_HEADERS = ("traceparent", "tracestate")
"""The headers of W3C Trace Context, in HTTP and in gRPC's metadata."""
_VALUE = re.compile(r"[\x20-\x7e]{1,1024}")
"""Longer values are ignored: the standard requires passing on a tracestate of up to 512 bytes."""

Value: TypeAlias = str | int | float | bool
NOTHING: Mapping[str, Value] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """An operation that has ended. Times are seconds of this process' monotonic clock."""

    name: str
    start_s: float
    end_s: float
    attributes: Mapping[str, Value] = field(default_factory=dict)
    error: str = ""
    """Why the operation failed; empty if it did not."""
    children: Sequence[Span] = ()


class OpenSpan(ABC):
    """A request that this process answers. If it is recorded, it must be ended once."""

    trace_headers: Mapping[str, str]
    """For the next service called."""

    @abstractmethod
    def end(
        self, attributes: Mapping[str, Value] = NOTHING, *, error: str = "", children: Iterable[Span] = ()
    ) -> None: ...

    @property
    @abstractmethod
    def is_recorded(self) -> bool:
        """False: the arguments of `end` are ignored."""


class Tracing(ABC):
    """Receives the spans of a process. Its owner closes it."""

    @abstractmethod
    def begin(self, name: str, trace_headers: Mapping[str, str]) -> OpenSpan:
        """Begin a span. `trace_headers`: the caller's; may be empty."""

    @abstractmethod
    def close(self) -> None:
        """Export the remaining spans. Blocks for some seconds at most."""


def trace_headers_of(items: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    """The caller's trace context from headers or metadata, whose names must be in lower case."""
    return {
        name: value
        for name, value in items
        if name in TRACE_HEADERS and isinstance(value, str) and _VALUE.fullmatch(value)
    }


class Untraced(Tracing):
    """Tracing is off."""

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
