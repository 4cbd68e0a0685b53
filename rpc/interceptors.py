"""Turns what a handler raises into the status that the client gets, for all four kinds of RPC.

Handlers just raise errors (see `errors`). Requests are not logged here.

    handler returns ........................ OK
    handler raises TandemError ............. its status, details in grpc-status-details-bin
    request bytes do not parse ............. InvalidRequest naming the message type; the handler sees no such message
    handler raises anything else ........... logged here with traceback under an id; the client gets INTERNAL with the
                                             exception's class and that id, never its text
    client is gone, or context.abort() ..... passed on: gRPC itself ends those
    handler is not async def ............... UNIMPLEMENTED: such are the methods that a servicer inherits from its
                                             generated base class

A generator handler is closed inside the RPC's own task: when the client goes away while a message is being written, the
handler's `finally` runs at once, not when the garbage collector finds it. "Dropping a stream frees what it owns" relies
on this.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from rpc.errors import (
    DETAILS_KEY,
    STATUS_CODES,
    InternalError,
    InvalidRequest,
    TandemError,
    is_being_cancelled,
    to_status,
)

logger = logging.getLogger(__name__)

Behavior = Callable[[Any, Any], Any]
"""(request or request iterator, context) -> awaitable, or async generator of responses."""


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Installed by `rpc.server.Server` on every service."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # gRPC answers UNIMPLEMENTED
        return _wrap(handler, handler_call_details.method)


def _wrap(handler: grpc.RpcMethodHandler, method: str) -> grpc.RpcMethodHandler:
    """Guard the behavior of `handler`, which has one of four kinds."""
    behavior = getattr(handler, _kind_of(handler))
    return with_behavior(
        handler,
        _guard(behavior, method, is_request_stream=handler.request_streaming),
        request_deserializer=_lenient(handler.request_deserializer),
    )


def with_behavior(
    handler: grpc.RpcMethodHandler, behavior: Behavior, *, request_deserializer: Callable[[bytes], Any] | None
) -> grpc.RpcMethodHandler:
    """Make a handler of the same kind as `handler` with another behavior. `request_deserializer`: None passes bytes."""
    make = _HANDLER_KINDS[_kind_of(handler)]
    return make(behavior, request_deserializer=request_deserializer, response_serializer=handler.response_serializer)


def _kind_of(handler: grpc.RpcMethodHandler) -> str:
    return next(kind for kind in _HANDLER_KINDS if getattr(handler, kind) is not None)


_HANDLER_KINDS: dict[str, Callable[..., grpc.RpcMethodHandler]] = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """Replaces a message that does not parse, until a handler would read it."""

    why: str

    def to_error(self) -> InvalidRequest:
        return InvalidRequest([("", f"the message cannot be read: {self.why}")])


def _lenient(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Make a deserializer that returns an error instead of raising it: gRPC would answer UNKNOWN or abort the
    stream."""
    if deserialize is None:
        return None

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return _Unreadable(str(error))

    return read


class _ReadableRequests:
    """A stream of requests that raises `InvalidRequest` at the first one that does not parse. It only reads when the
    handler reads: gRPC starts a read in `aiter`, and complains if nobody awaits it."""

    def __init__(self, requests: AsyncIterable[Any]) -> None:
        self._requests = requests
        self._messages: AsyncIterator[Any] | None = None

    def __aiter__(self) -> _ReadableRequests:
        return self

    async def __anext__(self) -> Any:
        if self._messages is None:
            self._messages = aiter(self._requests)
        request = await anext(self._messages)
        if isinstance(request, _Unreadable):
            raise request.to_error()
        return request


def _guard(behavior: Behavior, method: str, *, is_request_stream: bool) -> Behavior:
    call = _draining_generator(behavior) if inspect.isasyncgenfunction(behavior) else behavior
    if not inspect.iscoroutinefunction(call):
        return _unimplemented(method)

    async def guarded(request: Any, context: Any) -> Any:
        try:
            if isinstance(request, _Unreadable):
                raise request.to_error()
            return await call(_ReadableRequests(request) if is_request_stream else request, context)
        except grpc.aio.BaseError:
            raise  # gRPC's own: an abort() by the handler, or a write to a client that has left
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                raise
            # Raised within the handler, as by a call on a closed channel: gRPC would send no status at all.
            await abort(context, log_bug(RuntimeError(f"cancelled from within: {error!r}"), method))
        except TandemError as error:
            await abort(context, error)
        except Exception as error:
            await abort(context, log_bug(error, method))

    return guarded


def _draining_generator(behavior: Behavior) -> Behavior:
    """Turn a generator handler into a coroutine that writes, and that closes the generator however the RPC ends."""

    async def write_all(request: Any, context: Any) -> None:
        async with aclosing(behavior(request, context)) as responses:
            async for response in responses:
                await context.write(response)

    return write_all


def _unimplemented(method: str) -> Behavior:
    async def refuse(request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not implemented here")

    return refuse


def log_bug(error: Exception, where: str) -> InternalError:
    """Log `error` with its traceback under a new id. The returned error has its class and the id, not its text."""
    bug_id = secrets.token_hex(6)
    logger.error("unexpected %s in %s", type(error).__name__, where, extra={"bug_id": bug_id}, exc_info=error)
    return InternalError(f"{type(error).__name__}; logged by the server with bug_id={bug_id}")


async def abort(context: Any, error: TandemError) -> None:
    """End the RPC with the status of `error`. Raises gRPC's AbortError, as `context.abort` does, or CancelledError."""
    status = to_status(error)
    try:
        await context.abort(STATUS_CODES[type(error)], status.message, ((DETAILS_KEY, status.SerializeToString()),))
    except grpc.aio.InternalError:
        # The RPC ended while the status was being sent, as when its deadline passed: there is no client to tell. gRPC
        # ignores a cancellation, but logs anything else with a traceback.
        raise asyncio.CancelledError from None
