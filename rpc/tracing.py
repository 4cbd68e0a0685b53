"""Traces of requests: what one process has to tell of them, as parts of the caller's trace. In OpenTelemetry's form.

    caller's traceparent ──> begin(name) ── trace_headers ──> whoever is asked next, whose spans are children
                               └─ end(children) ──> a queue ──> a thread of its own ──OTLP──> collector

Nobody waits for the collector: while it cannot be reached spans are kept, two thousand of them, and then left out. Owns
that thread (`rpc.otlp`, which alone imports OpenTelemetry). Without an endpoint (`rpc.otlp_endpoint`) nothing is made,
and the caller's context goes on as it came.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

TRACE_HEADERS = ("traceparent", "tracestate")
"""W3C Trace Context's, in HTTP and in gRPC's metadata."""
_VALUE = re.compile(r"[\x20-\x7e]{1,1024}")
"""Longer ones are no context: a tracestate must be passed on up to 512 bytes."""

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
