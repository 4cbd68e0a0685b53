"""Keys by which a server knows those who may call it, and by which its clients show that they may.

    client: keyed(channel, key) ── metadata "authorization: Bearer KEY" ──> KeyInterceptor: one of its keys? ── yes ──>
                                                                            │ no                               handler
                                                                            v
                                             Unauthenticated; the request is not even parsed

A key says who may call, and TLS that nobody else reads it: without, it travels as it is.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

import grpc

from rpc.errors import Unauthenticated
from rpc.interceptors import with_behavior

KEY_METADATA = "authorization"
HOW_TO_GIVE = "the API key is missing or wrong: it is metadata, authorization: Bearer KEY"


def check_keys(name: str, keys: Sequence[str]) -> None:
    """Of the flag `name`. Raises `ValueError`."""
    if not all(keys):  # a variable that is not set, in some script
        raise ValueError(f"{name} must not be empty, or anybody could send requests; leave it out if that is intended")
    if not all(re.fullmatch(r"[\x21-\x7e]+", key) for key in keys):
        raise ValueError(f"{name} must be of visible ASCII characters: headers carry no others safely")


def first_key(name: str, keys: str) -> str:
    """Of the setting `name`: which of several, with spaces between, a client brings. It may be a server's own, which
    takes any of them, and be given so while one key replaces another. Empty: none. Raises `ValueError`."""
    if not keys:
        return ""
    key = next(iter(keys.split()), "")
    check_keys(name, [key])
    return key


def bearer_of(value: str) -> str:
    """The key in the value of an authorization header; empty if it is of another scheme."""
    scheme, _, key = value.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def is_one_of(given: Sequence[str], keys: Sequence[str]) -> bool:
    """Whether one of those given is a key. All are compared with all: how long it takes tells nobody which."""
    same = [hmac.compare_digest(each.encode(), key.encode()) for each in given for key in keys]
    return any(same)


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls that bring none of `keys`, but those of `open_services` ("grpc.health.v1.Health")."""

    def __init__(self, keys: Sequence[str], *, open_services: Collection[str]) -> None:
        self._keys = keys
        self._open_services = frozenset(open_services)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.split("/")[1] in self._open_services:
            return handler
        given = [bearer_of(value) for key, value in handler_call_details.invocation_metadata if key == KEY_METADATA]
        if is_one_of(given, self._keys):
            return handler
        return with_behavior(handler, _refuse, request_deserializer=None)


async def _refuse(request: object, context: Any) -> None:
    raise Unauthenticated(HOW_TO_GIVE)


class KeyedChannel:
    """Of `channel`, which its owner closes: what stubs call over, each call with `key`."""

    def __init__(self, channel: Any, key: str) -> None:
        self._channel = channel
        self._metadata = ((KEY_METADATA, f"Bearer {key}"),)

    def unary_unary(self, *described: Any, **further: Any) -> Any:
        """As of gRPC's channels, of which stubs are made."""
        return self._with_key(self._channel.unary_unary(*described, **further))

    def unary_stream(self, *described: Any, **further: Any) -> Any:
        """As of gRPC's channels."""
        return self._with_key(self._channel.unary_stream(*described, **further))

    def _with_key(self, method: Callable[..., Any]) -> Any:
        def call(*request: Any, metadata: Sequence[tuple[str, str]] = (), **how: Any) -> Any:
            return method(*request, metadata=(*metadata, *self._metadata), **how)

        return call


def keyed(channel: Any, key: str) -> Any:
    """What to make stubs of: calls bring `key`, if there is one."""
    return KeyedChannel(channel, key) if key else channel
