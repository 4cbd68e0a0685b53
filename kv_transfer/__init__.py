"""Moves KV blocks between two workers' pools. Knows no engine: callers pass a pool, block ids and a layout.

A decode service makes a `KVReceiver` and puts a `KVTransferServicer` in front of it; a prefill service makes a
`KVSender`.
`base` says who calls which method when, `grants` draws a grant's life cycle, `errors` lists the errors.
"""

from __future__ import annotations

from kv_transfer.base import PROTOCOL_VERSION, Endpoint, Identity, Transport
from kv_transfer.control_link import OpenChannel
from kv_transfer.errors import (
    STATUS_OF,
    CorruptTransfer,
    GrantGone,
    IncompatiblePeer,
    InvalidTransfer,
    PeerUnreachable,
    TransferError,
    TransportMissing,
)
from kv_transfer.grants import Grant, GrantCounters, GrantTable
from kv_transfer.grpc_transport import GrpcEndpoint, GrpcTransport
from kv_transfer.host_pool import HostPool
from kv_transfer.ipc_transport import IpcEndpoint, IpcTransport
from kv_transfer.layout import KVLayout
from kv_transfer.pool import KVPool
from kv_transfer.receiver import KVReceiver, OnCommit, OnFreed
from kv_transfer.sender import KVSender, Push
from kv_transfer.servicer import KVTransferServicer
from kv_transfer.shared_memory import SharedMemory

TRANSPORTS = ("grpc", "ipc", "nixl")

__all__ = [
    "PROTOCOL_VERSION",
    "STATUS_OF",
    "TRANSPORTS",
    "CorruptTransfer",
    "Grant",
    "GrantCounters",
    "GrantGone",
    "GrantTable",
    "HostPool",
    "Identity",
    "IncompatiblePeer",
    "InvalidTransfer",
    "KVLayout",
    "KVPool",
    "KVReceiver",
    "KVSender",
    "KVTransferServicer",
    "OnCommit",
    "OnFreed",
    "PeerUnreachable",
    "Push",
    "SharedMemory",
    "TransferError",
    "TransportMissing",
    "create_endpoint",
    "create_sender",
]


def create_sender(transport: str, *, pool: KVPool, identity: Identity, open_channel: OpenChannel) -> KVSender:
    """Create a sender of `pool`'s blocks with the named transport; the caller closes it.

    open_channel: makes gRPC channels to peers, including TLS and keepalive. Raises `ValueError` for an unknown name,
    `TransportMissing` if NIXL is not installed."""
    return KVSender(transport=_create_transport(transport, pool, identity, open_channel), pool=pool, identity=identity)


def create_endpoint(transport: str, *, pool: KVPool, identity: Identity) -> Endpoint:
    """Create the receiving side of the named transport, for a `KVReceiver`, which closes it.

    Raises `ValueError` for an unknown name, `TransportMissing` if NIXL is not installed, or if other processes cannot
    open the pool's memory ("ipc")."""
    match transport:
        case "grpc":
            return GrpcEndpoint(pool)
        case "ipc":
            return IpcEndpoint(pool)
        case "nixl":
            from kv_transfer.nixl_transport import NixlEndpoint

            return NixlEndpoint(pool, identity)
    raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}, not {transport!r}")


def _create_transport(name: str, pool: KVPool, identity: Identity, open_channel: OpenChannel) -> Transport:
    match name:
        case "grpc":
            return GrpcTransport(pool, open_channel)
        case "ipc":
            return IpcTransport(pool, open_channel)
        case "nixl":
            from kv_transfer.nixl_ranks import NixlTransportOfRanks
            from kv_transfer.nixl_transport import NixlTransport

            is_of_ranks = pool.base_address is None
            return (NixlTransportOfRanks if is_of_ranks else NixlTransport)(pool, identity, open_channel)
    raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}, not {name!r}")
