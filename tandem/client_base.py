"""What both clients of `tandem.client` share: argument checks, stubs, and the errors of calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Unpack

import grpc
from grpc_health.v1 import health_pb2_grpc

from protos import tandem_inference_pb2 as pb
from protos import tandem_inference_pb2_grpc, tandem_worker_pb2_grpc
from rpc.errors import DeadlinePassed, Unreachable, from_rpc_error, is_being_cancelled
from rpc.keys import check_keys, keyed
from rpc.targets import addresses_of, check_target
from rpc.tracing import TRACE_HEADERS, trace_headers_of
from tandem.checks import check_text, is_number
from tandem.requests import Prompt, Sampling, generate_request
from tandem.resume import OnBroken, ResumableStream

NO_HEADERS: Mapping[str, str] = MappingProxyType({})
INFERENCE_SERVICE = "tandem.v1.Inference"
MAX_TIMEOUT_S = 1e8
"""Three years: gRPC treats much longer timeouts as none."""


class ClientClosed(Exception):  # noqa: N818 - named as the errors of `rpc.errors` are
    """The client was closed before the call, or while it ran. What the router has done of the call is unknown."""

    def __init__(self) -> None:
        super().__init__("the client is closed")


def checked_address(address: str, *, has_tls: bool = False) -> str:
    """`address`, checked; it may be a list of addresses, see `rpc.targets`. Raises `ValueError` for one that gRPC would
    misread or could not use, and `TypeError` if it is not a text. `has_tls`: one channel to it will use TLS."""
    if not isinstance(address, str):
        raise TypeError(f"address: must be a text, is {address!r}")
    try:
        check_target(address, has_tls=has_tls)
    except ValueError as error:
        raise ValueError(f"address: {error}") from error
    return address


class ClientBase:
    """Opens no channel: the subclass opens one and passes it to `_use`."""

    def __init__(
        self, address: str, *, api_key: str, resume_s: float, on_broken: OnBroken, is_spread: bool | None = None
    ) -> None:
        """`is_spread`: whether there may be several routers behind `address`; None: if it lists several."""
        if not is_number(resume_s) or not resume_s >= 0:
            raise ValueError(f"resume_s: must be at least 0, is {resume_s!r:.80}")
        if api_key:
            check_keys("api_key", [api_key])
        self._api_key = api_key
        self._resume_s = resume_s
        self._on_broken = on_broken
        self._address = checked_address(address)
        self._is_spread = len(addresses_of(address)) > 1 if is_spread is None else is_spread
        self._closed = threading.Event()

    def _use(self, channel: Any) -> None:
        self._channel = channel
        with_key = keyed(channel, self._api_key)
        self._inference = tandem_inference_pb2_grpc.InferenceStub(with_key)
        self._tokenizer = tandem_inference_pb2_grpc.TokenizerStub(with_key)
        self._cluster = tandem_worker_pb2_grpc.ClusterStub(with_key)
        self._health = health_pb2_grpc.HealthStub(channel)

    def _abort_request(self, request_id: str) -> pb.AbortRequest:
        if self._is_spread:
            raise RuntimeError(
                "abort: with several routers, the one asked may not run the request; close the stream instead"
            )
        check_text("request_id", request_id)
        return pb.AbortRequest(request_id=request_id)

    @staticmethod
    def _check_one_answer(sampling: Mapping[str, object]) -> None:
        if "n" in sampling:
            raise ValueError("n: generate has one answer; generate_n(prompt, n) has several")

    def _begin(
        self,
        prompt: Prompt,
        *,
        request_id: str = "",
        model: str = "",
        timeout_s: float | None = None,
        n: int = 1,
        trace_headers: Mapping[str, str] = NO_HEADERS,
        **sampling: Unpack[Sampling],
    ) -> ResumableStream:
        if trace_headers != trace_headers_of(trace_headers.items()):
            raise ValueError(f"trace_headers: must be {' and '.join(TRACE_HEADERS)}, is {trace_headers!r:.200}")
        return ResumableStream(
            generate_request(prompt, request_id=request_id, model=model, n=n, **sampling),
            timeout_s=_timeout(timeout_s),
            resume_s=self._resume_s,
            has_others=self._is_spread,
            metadata=tuple(trace_headers.items()),
            on_broken=self._on_broken,
        )

    @contextmanager
    def _asking(self) -> Generator[None]:
        """Wrap a call whose timeout is ours, not the caller's: if it passes, the router hangs or is gone, so raises
        `Unreachable`."""
        try:
            with self._errors_of_ours():
                yield
        except DeadlinePassed as error:
            raise Unreachable("the router does not answer") from error

    @contextmanager
    def _errors_of_ours(self) -> Generator[None]:
        """Wrap a call: turn gRPC's errors into those of `rpc.errors`, or into `ClientClosed` once the client is
        closed."""
        if self._closed.is_set():
            raise ClientClosed
        try:
            yield
        except grpc.RpcError as error:
            if self._closed.is_set() and error.code() is grpc.StatusCode.CANCELLED:
                raise ClientClosed from error
            raise from_rpc_error(error) from error
        except (ValueError, grpc.aio.UsageError) as error:  # what gRPC raises for a closed channel
            if self._closed.is_set():
                raise ClientClosed from error
            raise
        except asyncio.CancelledError as error:  # closing a channel cancels the tasks that await its calls
            if self._closed.is_set() and not is_being_cancelled():
                raise ClientClosed from error
            raise


def _timeout(timeout_s: float | None) -> float | None:
    """The timeout as gRPC takes it; None: forever. Raises `ValueError` for anything but a number above 0."""
    if timeout_s is None or timeout_s == float("inf"):
        return None
    if not is_number(timeout_s) or not timeout_s > 0:  # NaN, too
        raise ValueError(f"timeout_s: must be more than 0 (seconds), is {timeout_s!r:.80}")
    return float(min(timeout_s, MAX_TIMEOUT_S))
