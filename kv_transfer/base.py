"""What a transport must provide, and who calls which method when.

    prefill service                KVSender, Push (sender.py)        Link, BlockWriter (one of the transports)
    ---------------                --------------------------        ----------------------------------------
    open(grant) at its start   ->  first contact: dial, connect,     Transport.dial, Link.connect
                                   mutual check, adopt               Link.adopt
                                   a push under the grant            Link.writer, BlockWriter.start
    write(layer, …) per layer  ->  the blocks not cached there       BlockWriter.post          (never blocks)
    commit(…) after prefill    ->  all writes have landed            BlockWriter.drain
                                   digests, Commit, repairs          Link.commit, then post and drain again
                                   nothing can be written any more   BlockWriter.stop, and, unawaited, close
      or abandon() any time    ->  nothing can be written any more   BlockWriter.stop, close, Link.abandon
    close() at shutdown        ->                                    Link.close, Transport.close

    decode service                 KVReceiver (receiver.py)          Endpoint (of the transport served)
    --------------                 ------------------------          ----------------------------------
    start(kv_address), close() ->  expiry timer                      Endpoint.close
    issue, renew, revoke,      ->  GrantTable (grants.py)            Endpoint.describe at every Connect
      drop_owner                                                     Endpoint.enter_push, leave_push (one-sided)

Everything runs on one event loop's thread, except what a transport does in its own threads. A two-sided transport
("grpc") sends every write to the receiver, which checks it. One-sided transports ("ipc", "nixl") write directly into
its memory, so they attach to the grant first, and the receiver quarantines blocks that they could still write to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from protos import tandem_kv_transfer_pb2 as pb

PROTOCOL_VERSION = 1
"""Version of the messages in protos/tandem_kv_transfer.proto. Peers with different versions do not exchange KV."""
MAX_CHUNK_BYTES = 1 << 20
"""Data in one message of the "grpc" transport, unless a single block is larger."""
MAX_BYTES_IN_FLIGHT = {"DRAM": 32 << 20, "VRAM": 256 << 20}
"""Maximum bytes in flight of an "ipc" or "nixl" sender, by its memory; "grpc" leaves this to HTTP/2 flow control. The
sender polls NIXL every 100 us: with fewer bytes in flight, a GPU would wait for its host. With NIXL, one peer may take
half of this."""
MAX_AGENT_METADATA_BYTES = 1 << 20
ATTACHED = ("tandem-push", "attached")
"""Initial metadata of a Push stream by which the receiver says that a one-sided sender may begin to write."""
GONE = ("tandem-push", "gone")
"""Initial metadata by which the receiver says that it drops all further writes."""
MAX_LEASE_MS = 3_600_000


@dataclass(frozen=True, kw_only=True)
class Identity:
    """How a process identifies itself to its peers."""

    worker_id: str
    incarnation: str
    """New for every process: promises of an earlier process are void."""
    compat_digest: str
    """Digest of everything that must be equal to exchange KV."""


class BlockWriter(Protocol):
    """The data plane of one push."""

    may_still_write: bool
    """A posted write has failed and may still arrive, so the receiver must not be told that all writes have ended."""

    async def start(self) -> None:
        """Announce the push to the receiver, if the transport needs that. Raises `GrantGone`, `PeerUnreachable`."""

    def post(self, layer: int, src_block_ids: Sequence[int], dst_block_ids: Sequence[int]) -> None:
        """Queue the copying of blocks of one layer. Never blocks; the pool is read later; `drain` raises errors."""

    async def drain(self) -> None:
        """Wait until everything posted is in the receiver's memory. Raises `TransferError`. `post` may follow again."""

    async def stop(self) -> None:
        """Wait until no posted write reads from our pool any more or, unless `may_still_write`, writes to the peer's.
        Raises nothing; idempotent."""

    async def close(self) -> None:
        """After `stop`: tell the receiver, if it waits for that. Raises nothing; idempotent."""


class Link(Protocol):
    """A connection to one incarnation of one receiver. Every method raises `TransferError`s."""

    is_one_sided: bool
    is_broken: bool
    """The link cannot be used any more; the peer needs a new one."""
    num_blocks: int
    """Number of blocks of the peer's pool; known once adopted."""

    async def connect(self, request: pb.ConnectRequest, timeout_s: float) -> pb.ConnectResponse: ...

    async def adopt(self, response: pb.ConnectResponse) -> None:
        """Prepare for writes to the peer. The caller has checked its identity and layout, but not its endpoint."""

    def writer(self, grant: pb.Grant) -> BlockWriter: ...

    async def commit(self, request: pb.CommitRequest) -> pb.CommitResponse:
        """Send a commit once, and wait for the answer as long as the connection lives, since a busy receiver may be
        slow. Raises `PeerUnreachable` if there is no connection, or if it breaks."""

    async def wait_connected(self, timeout_s: float) -> None:
        """Wait until a lost connection is back. Raises `PeerUnreachable` after `timeout_s`."""

    async def lost(self) -> None:
        """Return when the connection is lost. Called once connected; may be cancelled."""

    async def abandon(self, request: pb.AbandonRequest, timeout_s: float) -> None: ...

    async def close(self) -> None: ...


class Transport(Protocol):
    """The sending side of one way to move blocks."""

    name: str

    async def dial(self, address: str) -> Link:
        """Create a link to the receiver at `address`, without sending anything."""

    async def close(self) -> None: ...


class Endpoint(ABC):
    """The receiving side of one way to move blocks, apart from the RPCs."""

    name: str
    is_one_sided: bool

    @abstractmethod
    def describe(self, response: pb.ConnectResponse) -> None:
        """Fill in `response.endpoint`."""

    def enter_push(self) -> None:  # noqa: B027 - most have nothing to do
        """A one-sided sender begins to write."""

    def leave_push(self) -> None:  # noqa: B027
        """The sender has ended its push or is gone. Called once for each `enter_push`."""

    async def close(self) -> None:  # noqa: B027
        """Release the endpoint's resources, which do not include the pool."""
