"""API keys: a server accepts calls that carry one of its keys, and clients send theirs.

    client: keyed(channel, key) ── metadata "authorization: Bearer KEY" ──> KeyInterceptor: one of its keys? ── yes ──>
                                                                            │ no                               handler
                                                                            v
                                             Unauthenticated; the request is not even parsed

Keys say who may call. Without TLS a key is sent in plain text.
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
HOW_TO_GIVE = "the API key is missing or wrong: give it as gRPC metadata, authorization: Bearer KEY"


def check_keys(name: str, keys: Sequence[str]) -> None:
    """Check the keys of the flag `name`. Raises `ValueError`."""
    if not all(keys):  # such as an unset variable in a script
        raise ValueError(f"{name} must not be empty; leave it out to accept requests without a key")
    if not all(re.fullmatch(r"[\x21-\x7e]+", key) for key in keys):
        raise ValueError(
            f"{name} must consist of visible ASCII characters without spaces: headers carry no others safely"
        )


def first_key(name: str, keys: str) -> str:
    """The key that a client sends: the first of several, separated by spaces, in the setting `name`. The setting may be
    shared with a server, which accepts all of them while one key replaces another. Empty: none. Raises `ValueError`."""
    if not keys:
        return ""
    key = next(iter(keys.split()), "")
    check_keys(name, [key])
    return key


def bearer_of(value: str) -> str:
    """The key in the value of an authorization header; empty if it has another scheme."""
    scheme, _, key = value.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def is_one_of(given: Sequence[str], keys: Sequence[str]) -> bool:
    """Whether one of `given` is a key. Compares all with all, so that the time does not reveal which."""
    same = [hmac.compare_digest(each.encode(), key.encode()) for each in given for key in keys]
    return any(same)


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without one of `keys`, except those of `open_services` ("grpc.health.v1.Health")."""

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
    """Wraps `channel`, which its owner closes, for stubs: adds `key` to each call."""

    def __init__(self, channel: Any, key: str) -> None:
        self._channel = channel
        self._metadata = ((KEY_METADATA, f"Bearer {key}"),)

    def unary_unary(self, *described: Any, **further: Any) -> Any:
        """The interface of gRPC's channels, which stubs use."""
        return self._with_key(self._channel.unary_unary(*described, **further))

    def unary_stream(self, *described: Any, **further: Any) -> Any:
        """The interface of gRPC's channels."""
        return self._with_key(self._channel.unary_stream(*described, **further))

    def _with_key(self, method: Callable[..., Any]) -> Any:
        def call(*request: Any, metadata: Sequence[tuple[str, str]] = (), **how: Any) -> Any:
            return method(*request, metadata=(*metadata, *self._metadata), **how)

        return call


def keyed(channel: Any, key: str) -> Any:
    """A channel for stubs whose calls carry `key`, if there is one."""
    return KeyedChannel(channel, key) if key else channel
