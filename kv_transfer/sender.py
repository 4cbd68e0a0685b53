"""The sending side of KV transfers: connections to receivers, and pushes from open to commit. Common to all transports,
which differ behind `base.Link` and `base.BlockWriter`.

    open(grant) ──> OPEN ──commit──> COMMITTED                           the receiver has it all, verified
                     │  └──commit raises──┐
                     └──abandon───────────┴──> ENDED                     no write can happen any more

Does not own the pool or its blocks. **The caller keeps the source blocks of a push until `commit` has returned or
raised a `TransferError`, or `abandon` has returned**: until then they may be read at any moment. (A `commit` that was
cancelled has not ended the push; call `abandon`.)
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor

from kv_transfer.base import MAX_LEASE_MS, PROTOCOL_VERSION, BlockWriter, Identity, Link, Transport
from kv_transfer.errors import (
    CorruptTransfer,
    GrantGone,
    IncompatiblePeer,
    InvalidTransfer,
    PeerUnreachable,
    TransferError,
)
from kv_transfer.links import KeptLink, Links
from kv_transfer.pool import Digests, KVPool
from prefix_hash.compat import compat_difference
from protos import tandem_inference_pb2 as inference_pb
from protos import tandem_kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
MAX_REPAIRS = 2
"""How often blocks with differing digests are pushed again before the transfer is given up."""
MAX_COMMIT_TRIES = 3
MAX_ADDRESS_LENGTH = 512
_ADDRESS = re.compile(r"(\[[^\s/\[\]\0]+\]|[^\s/:\[\]\0]+):(?P<port>[0-9]{1,5})")
"""Only host and port: a grant must not make the sender connect to a socket file or the like."""


class KVSender:
    """Pushes blocks of `pool` to receivers. One per process and pool; made by `create_sender`, closed by its owner."""

    def __init__(self, *, transport: Transport, pool: KVPool, identity: Identity) -> None:
        self.transport = transport.name
        self.pool = pool
        self.identity = identity
        self.num_repaired_blocks = 0
        """Blocks pushed again after a digest mismatch."""
        self._transport = transport
        self.links = Links(self._connect)
        self._background: set[asyncio.Task[None]] = set()
        self._digester = ThreadPoolExecutor(1, thread_name_prefix="kv-digest")

    async def open(self, grant: pb.Grant) -> Push:
        """Open a push under `grant`, connecting to the receiver that made it at first contact.

        Raises `InvalidTransfer` (a grant that no receiver of this layout makes), `IncompatiblePeer`,
        `PeerUnreachable`, `GrantGone` (its maker has restarted, or it was revoked already)."""
        check_grant(grant)
        kept = await self.links.get(grant)
        try:
            if any(block_id >= kept.link.num_blocks for block_id in grant.block_ids):
                raise InvalidTransfer(
                    f"the grant has blocks beyond the {kept.link.num_blocks} of worker {grant.worker_id}"
                )
            writer = kept.link.writer(grant)
        except BaseException:
            self.links.give_back(kept)
            raise
        try:
            await writer.start()
        except BaseException:
            # Nothing was posted, so the caller need not wait; as a task, ending cannot be cancelled with the caller.
            self.spawn(self.end(writer, kept))
            raise
        return Push(self, kept, writer, grant)

    async def end(self, writer: BlockWriter, kept: KeptLink) -> None:
        """End a push that the receiver has committed or does not know, so that there is nothing to abandon."""
        try:
            await writer.stop()
            await writer.close()
        finally:
            self.links.give_back(kept)

    async def close(self) -> None:
        """Close all connections. The caller has ended all pushes."""
        if self._background:
            await asyncio.wait(self._background)
        await self.links.close()
        await self._transport.close()
        self._digester.shutdown()

    async def _connect(self, grant: pb.Grant) -> Link:
        link = await self._transport.dial(grant.kv_address)
        try:
            request = pb.ConnectRequest(
                protocol_version=PROTOCOL_VERSION,
                worker_id=self.identity.worker_id,
                incarnation=self.identity.incarnation,
                compat_digest=self.identity.compat_digest,
                layout=self.pool.layout.to_proto(),
                transport=self.transport,
            )
            response = await link.connect(request, CONNECT_TIMEOUT_S)
            self._check_peer(grant, response)
            await link.adopt(response)
        except BaseException:
            await link.close()
            raise
        return link

    def _check_peer(self, grant: pb.Grant, response: pb.ConnectResponse) -> None:
        if (response.worker_id, response.incarnation) != (grant.worker_id, grant.incarnation):
            raise GrantGone(
                f"{grant.kv_address} is now worker {response.worker_id[:80]!r}, incarnation "
                f"{response.incarnation[:80]!r}, not {grant.worker_id!r}, {grant.incarnation!r}"
            )
        problems = []
        if difference := compat_difference(self.identity.compat_digest, response.compat_digest):
            problems.append(difference)
        problems += self.pool.layout.differences_from_peer(response.layout)
        if problems:
            raise IncompatiblePeer(f"worker {grant.worker_id} at {grant.kv_address}: {'; '.join(problems)}")

    async def digests(self, block_ids: Sequence[int]) -> Digests:
        """Compute digests of blocks of the pool, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._digester, self.pool.digests, block_ids)

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        """Let `work` end in the background; `close` waits for it."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


class Push:
    """The writes of one request under one grant. Made by `KVSender.open`; ended by `commit` or `abandon`.

    Blocks are named by their position in the prompt: position i is the sender's own block `src_block_ids[...]` and the
    receiver's `grant.block_ids[i]`. Positions that the receiver has cached are skipped automatically.
    """

    def __init__(self, sender: KVSender, kept: KeptLink, writer: BlockWriter, grant: pb.Grant) -> None:
        self.grant = grant
        self._sender = sender
        self._kept = kept
        self._link = kept.link
        self._writer = writer
        self._dst_block_ids = list(grant.block_ids)
        self._lease_s = grant.lease_ms / 1000
        self._is_open = True
        self._has_link = True
        """True until the receiver has been told, or need not be told, how the push ended; then the link is given
        back."""
        self._last_written: tuple[int, Sequence[int]] = (0, ())
        """First block and source blocks of the last `write`."""
        self._last_blocks: tuple[Sequence[int], Sequence[int]] = ((), ())
        """The block ids that it sent, ours and the peer's. All layers of a prompt share the same objects, so that
        comparing them is fast."""
        self._num_posted = 0
        """Number of posted blocks, each of one layer."""
        self._started_s: float | None = None

    def write(self, layer: int, first_block: int, src_block_ids: Sequence[int]) -> None:
        """Send blocks `first_block .. first_block + len(src_block_ids) - 1` of the prompt, of one layer.

        Never blocks, and reads the pool later, so the blocks' bytes must be final. Calls may come in any order, but
        only once per block and layer, or the statistics are wrong; they are ignored once the push has ended. `commit`
        raises transfer errors. Raises `ValueError` if the positions are not the grant's or the layer is not the
        pool's."""
        if not 0 <= layer < self._sender.pool.layout.num_layers:
            raise ValueError(f"layer {layer} is not below {self._sender.pool.layout.num_layers}")
        written = first_block, tuple(src_block_ids)  # engines pass one tuple for all layers: no copy
        if written != self._last_written:
            self._last_blocks = self._blocks_to_send(*written)
            self._last_written = written
        if self._is_open and self._last_blocks[0]:
            self._post(layer, *self._last_blocks)

    def _blocks_to_send(self, first_block: int, src_block_ids: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """Our and the peer's block ids of those blocks that the peer has not cached."""
        last_block = first_block + len(src_block_ids)
        if not 0 <= first_block <= last_block <= len(self._dst_block_ids):
            raise ValueError(f"blocks {first_block}..{last_block - 1} are not among {len(self._dst_block_ids)}")
        num_skipped = min(max(self.grant.num_cached_blocks - first_block, 0), len(src_block_ids))
        return src_block_ids[num_skipped:], self._dst_block_ids[first_block + num_skipped : last_block]

    async def commit(
        self, num_prompt_tokens: int, first_token_id: int, src_block_ids: Sequence[int]
    ) -> inference_pb.KVTransferStats:
        """Call this once all blocks of all layers are written: waits until the receiver has verified and taken them.

        src_block_ids: our blocks of the whole prompt, as many as the grant has. Blocks whose digests differ are pushed
        again, twice at most; then this raises `CorruptTransfer`. Also raises `GrantGone`, `PeerUnreachable`,
        `InvalidTransfer`. Once this has returned or raised one of these, the source blocks may be released."""
        if len(src_block_ids) != len(self._dst_block_ids):
            raise ValueError(f"{len(src_block_ids)} source blocks for a grant of {len(self._dst_block_ids)}")
        assert self._is_open, "commit or abandon ends a push once"
        computed_s = asyncio.get_running_loop().time()
        try:
            await self._push_until_committed(num_prompt_tokens, first_token_id, src_block_ids)
        except TransferError:
            self._is_open = False
            await self._writer.stop()
            await self._writer.close()
            # The receiver waits for this message to free its blocks; our blocks need not wait for its delivery.
            self._has_link = False
            self._sender.spawn(self._send_abandon())
            raise
        self._is_open = self._has_link = False
        try:
            await self._writer.stop()
        finally:
            # The receiver has all blocks: ours need not wait for its answer.
            self._sender.spawn(self._sender.end(self._writer, self._kept))
        return self._stats(computed_s)

    def _stats(self, computed_s: float) -> inference_pb.KVTransferStats:
        """Statistics of a push that was just committed. `computed_s`: when all its blocks were written."""
        num_cached = self.grant.num_cached_blocks
        committed_s = asyncio.get_running_loop().time()
        started_s = computed_s if self._started_s is None else self._started_s
        return inference_pb.KVTransferStats(
            transport=self._sender.transport,
            num_bytes=self._num_posted * self._sender.pool.layout.block_bytes,
            num_blocks=len(self._dst_block_ids) - num_cached,
            num_cached_blocks=num_cached,
            push_ms=(committed_s - started_s) * 1000,
            commit_ms=(committed_s - computed_s) * 1000,
        )

    async def abandon(self) -> None:
        """Stop writing. Returns once no write can happen any more and the receiver knows that, or one lease has passed
        without reaching it. Harmless after `commit` and when repeated."""
        self._is_open = False
        await self._writer.stop()
        await self._writer.close()
        if self._has_link:  # also after a commit that was cancelled while it stopped the writer
            self._has_link = False
            await self._send_abandon()

    async def _push_until_committed(
        self, num_prompt_tokens: int, first_token_id: int, src_block_ids: Sequence[int]
    ) -> None:
        num_cached = self.grant.num_cached_blocks
        source_of = dict(zip(self._dst_block_ids[num_cached:], src_block_ids[num_cached:], strict=True))
        for num_repairs in range(MAX_REPAIRS + 1):
            # Digests are of the source's current content, not of what was sent, so that a layer sent too early shows.
            _, digests = await asyncio.gather(self._writer.drain(), self._sender.digests(tuple(source_of.values())))
            response = await self._send_commit(num_prompt_tokens, first_token_id, digests)
            if response.outcome == pb.CommitResponse.COMMITTED:
                return
            if response.outcome == pb.CommitResponse.GRANT_GONE:
                raise GrantGone(f"grant {self.grant.grant_id} of worker {self.grant.worker_id} is gone")
            mismatched = list(response.mismatched_blocks)
            if (
                response.outcome != pb.CommitResponse.MISMATCH
                or not mismatched
                or not source_of.keys() >= set(mismatched)
            ):
                raise InvalidTransfer(f"worker {self.grant.worker_id} answered a commit with {response!s:.200}")
            if num_repairs < MAX_REPAIRS:
                self._sender.num_repaired_blocks += len(mismatched)
                for layer in range(self._sender.pool.layout.num_layers):
                    self._post(layer, [source_of[block_id] for block_id in mismatched], mismatched)
        raise CorruptTransfer(f"{len(mismatched)} blocks still differ after {MAX_REPAIRS} repairs")

    async def _send_commit(self, num_prompt_tokens: int, first_token_id: int, digests: Digests) -> pb.CommitResponse:
        request = pb.CommitRequest(
            grant_id=self.grant.grant_id,
            epoch=self.grant.epoch,
            incarnation=self.grant.incarnation,
            num_prompt_tokens=num_prompt_tokens,
            digests=digests.astype("<u8").tobytes(),
            first_token_id=first_token_id,
        )
        for num_tries in range(1, MAX_COMMIT_TRIES + 1):
            try:
                return await self._link.commit(request)
            except PeerUnreachable as error:
                if num_tries == MAX_COMMIT_TRIES:
                    raise
                logger.info("asking again whether grant %d was committed: %s", self.grant.grant_id, error)
            # A lost answer leaves open whether the receiver has committed. Asking again is harmless. If the receiver
            # cannot be reached for one lease, the grant is gone either way.
            await self._link.wait_connected(self._lease_s)
        raise AssertionError("the last try returns or raises")

    async def _send_abandon(self) -> None:
        if not self._link.is_one_sided or self._writer.may_still_write:
            self._sender.links.give_back(self._kept)
            return  # two-sided: the receiver waits for no message; may_still_write: it must wait for one lease
        request = pb.AbandonRequest(
            grant_id=self.grant.grant_id, epoch=self.grant.epoch, incarnation=self.grant.incarnation
        )
        try:
            await self._link.abandon(request, self._lease_s)
        except TransferError as error:
            # The receiver then frees the blocks one lease after our connection is lost.
            told = self.grant.worker_id, self.grant.grant_id
            logger.info("worker %s was not told that grant %d is abandoned: %s", *told, error)
        finally:
            self._sender.links.give_back(self._kept)

    def _post(self, layer: int, src_block_ids: Sequence[int], dst_block_ids: Sequence[int]) -> None:
        if self._started_s is None:
            self._started_s = asyncio.get_running_loop().time()
        self._num_posted += len(src_block_ids)
        self._writer.post(layer, src_block_ids, dst_block_ids)


def check_grant(grant: pb.Grant) -> None:
    """Raise `InvalidTransfer` for a grant that no correct receiver makes."""
    if not 0 < len(grant.worker_id) <= 256 or not 0 < len(grant.incarnation) <= 256:
        raise InvalidTransfer("a grant names a worker and an incarnation, of at most 256 characters each")
    address = _ADDRESS.fullmatch(grant.kv_address[: MAX_ADDRESS_LENGTH + 1])
    if address is None or len(grant.kv_address) > MAX_ADDRESS_LENGTH or int(address["port"]) > 65535:
        raise InvalidTransfer(
            f"kv_address must be HOST:PORT of at most {MAX_ADDRESS_LENGTH} characters, not {grant.kv_address[:80]!r}"
        )
    if grant.num_cached_blocks > len(grant.block_ids):
        raise InvalidTransfer(f"{grant.num_cached_blocks} of {len(grant.block_ids)} blocks cannot be cached")
    if len(set(grant.block_ids)) != len(grant.block_ids):
        raise InvalidTransfer("a grant has each block once")
    if not 0 < grant.lease_ms <= MAX_LEASE_MS:
        raise InvalidTransfer(f"lease_ms must be between 1 and {MAX_LEASE_MS}, not {grant.lease_ms}")
