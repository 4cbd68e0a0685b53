"""The receiving side of KV transfers: expires grants, checks writes, verifies commits. Does no networking itself.

Owns the grant table, the timer that expires leases, and the verifying thread. Does not own the pool or its blocks: the
decode service takes blocks from its free ones, `issue`s them, and gets them back in exactly one way.

    issue ──> … ──> on_commit(grant, …)   the blocks hold verified KV and are the service's from this call on
               └──> on_freed([grant, …])  the grant ended otherwise and nothing can write to its blocks any more

`servicer.py` puts it behind gRPC. All methods run on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np

from kv_transfer.base import MAX_LEASE_MS, PROTOCOL_VERSION, Endpoint, Identity
from kv_transfer.errors import GrantGone, IncompatiblePeer, InvalidTransfer
from kv_transfer.grants import CommitResult, CommitStart, Grant, GrantTable, Verdict
from kv_transfer.pool import Digests, KVPool
from prefix_hash.compat import compat_difference
from protos import tandem_kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)

OnCommit: TypeAlias = Callable[[Grant, int, int], Awaitable[bool]]
"""(grant, first_token_id, num_prompt_tokens) -> whether the request still needs the blocks. From the call on, the
blocks belong to the callee, whatever it returns or raises. It raises `InvalidTransfer` for arguments that no correct
sender gives."""
OnFreed: TypeAlias = Callable[[list[Grant]], None]
"""Nothing can write to these grants' blocks any more. Must not raise."""


class KVReceiver:
    """Grants writes into `pool` and passes on the blocks that have arrived.

    endpoint: of the served transport. lease_s: how long grants outlive their owner's last sign of life.
    `on_commit` is awaited on the event loop, `on_freed` called there, also from inside `revoke` and `drop_owner`.
    Others may read `table`.
    Raises `ValueError` for a lease out of bounds.
    """

    def __init__(
        self,
        *,
        pool: KVPool,
        identity: Identity,
        lease_s: float,
        endpoint: Endpoint,
        on_commit: OnCommit,
        on_freed: OnFreed,
    ) -> None:
        if not 0.001 <= lease_s <= MAX_LEASE_MS / 1000:
            raise ValueError(f"lease_s must be between 0.001 and {MAX_LEASE_MS // 1000}, not {lease_s}")
        self.pool = pool
        self.identity = identity
        self.lease_s = lease_s
        self._endpoint = endpoint
        self._on_commit = on_commit
        self._on_freed = on_freed
        self.table = GrantTable(
            incarnation=identity.incarnation,
            num_layers=pool.layout.num_layers,
            num_blocks=pool.layout.num_blocks,
            block_bytes=pool.layout.block_bytes,
            lease_s=lease_s,
        )
        self._commits: dict[int, tuple[bytes, asyncio.Task[pb.CommitResponse]]] = {}
        self._kv_address = ""
        self._has_deadline = asyncio.Event()
        self._timer: asyncio.Task[None] | None = None
        self._verifier = ThreadPoolExecutor(1, thread_name_prefix="kv-verify")

    async def start(self, kv_address: str) -> None:
        """Start to expire leases. kv_address: "host:port" where senders reach this receiver; put into grants."""
        assert self._timer is None, "started twice"
        self._kv_address = kv_address
        self._timer = asyncio.create_task(self._expire_leases(), name="kv-lease-expiry")
        self._timer.add_done_callback(_report_death)

    async def close(self) -> None:
        """End timer, commits and endpoint. No callback is called any more: open grants end with the pool."""
        tasks: list[asyncio.Task[Any]] = [task for _, task in self._commits.values()]
        if self._timer is not None:
            tasks.append(self._timer)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._endpoint.close()
        self._verifier.shutdown()

    # -- the decode service --

    def issue(
        self, owner: Hashable, block_ids: Sequence[int], num_cached_blocks: int, prompt_digest: bytes = b""
    ) -> pb.Grant:
        """Promise `block_ids` (of the whole prompt, in order; the first `num_cached_blocks` hold its KV already) to
        `owner`, until one lease after its last sign of life. `prompt_digest`: identifies the prompt of their KV."""
        grant = self.table.issue(owner, block_ids, num_cached_blocks, self._now_s())
        self._has_deadline.set()
        return pb.Grant(
            worker_id=self.identity.worker_id,
            incarnation=self.identity.incarnation,
            kv_address=self._kv_address,
            grant_id=grant.grant_id,
            epoch=grant.epoch,
            block_ids=grant.block_ids,
            num_cached_blocks=num_cached_blocks,
            lease_ms=round(self.lease_s * 1000),
            prompt_digest=prompt_digest,
        )

    def renew(self, owner: Hashable) -> None:
        """Record a sign of life of `owner`."""
        self.table.renew(owner, self._now_s())

    def revoke(self, grant_id: int) -> None:
        """End a grant; `on_freed` gets it once its blocks can be used, often before this returns. Does nothing if the
        grant has ended: a committed grant's blocks belong to the service."""
        self._free(self.table.revoke(grant_id))

    def drop_owner(self, owner: Hashable) -> None:
        """`owner`'s session is gone: end all its grants."""
        self._free(self.table.drop_owner(owner))

    # -- senders, through a servicer or a local transport --

    def connect(self, request: pb.ConnectRequest) -> pb.ConnectResponse:
        """Answer a Connect. Raises `IncompatiblePeer` naming all differences."""
        problems = self._differences(request)
        if problems:
            raise IncompatiblePeer(f"worker {self.identity.worker_id} cannot take KV: {'; '.join(problems)}")
        response = pb.ConnectResponse(
            worker_id=self.identity.worker_id,
            incarnation=self.identity.incarnation,
            compat_digest=self.identity.compat_digest,
            layout=self.pool.layout.to_proto(),
        )
        self._endpoint.describe(response)
        return response

    def write(self, chunk: pb.PushChunk) -> int:
        """Check a chunk and copy it into the pool without a break, so that its grant cannot end in between.

        Returns the number of bytes; 0 if the grant is gone: its blocks are then dropped and counted. Raises
        `InvalidTransfer` for a chunk that no correct sender makes, including one without blocks."""
        data = chunk.data  # protobuf copies it at every access
        check = self.table.check_write(
            chunk.grant_id, chunk.epoch, chunk.incarnation, chunk.layer, chunk.block_ids, len(data)
        )
        if check.verdict is Verdict.MALFORMED:
            raise InvalidTransfer(check.reason)
        if check.verdict is Verdict.LATE:
            return 0
        self.pool.write(chunk.layer, chunk.block_ids, data)
        return len(data)

    def attach(self, chunk: pb.PushChunk) -> int:
        """Attach a one-sided sender that is about to write. Returns its attachment id. Raises `GrantGone`,
        `InvalidTransfer`."""
        if not self._endpoint.is_one_sided:
            raise InvalidTransfer("no one-sided transport is served here")
        check, attachment_id = self.table.attach(chunk.grant_id, chunk.epoch, chunk.incarnation)
        if check.verdict is not Verdict.ACCEPTED:
            raise GrantGone(check.reason)
        self._endpoint.enter_push()
        return attachment_id

    def detach(self, grant_id: int, attachment_id: int) -> None:
        """The attached sender has said that it will write no more."""
        self._endpoint.leave_push()
        self._free(self.table.detach(grant_id, attachment_id))

    def sender_gone(self, grant_id: int, attachment_id: int) -> None:
        """The attached sender's stream broke before it said so. Its writes in flight may still arrive: the blocks are
        freed, and the endpoint leaves the push, one lease from now."""
        asyncio.get_running_loop().call_later(self.lease_s, self._endpoint.leave_push)
        self.table.sender_gone(grant_id, attachment_id, self._now_s())
        self._has_deadline.set()

    def abandon(self, request: pb.AbandonRequest) -> None:
        """A sender will write no more under a grant. Unknown grants are ignored."""
        self._free(self.table.abandon(request.grant_id, request.epoch, request.incarnation))

    async def commit(self, request: pb.CommitRequest) -> pb.CommitResponse:
        """Verify a grant's blocks and hand them to `on_commit`. Raises `InvalidTransfer`.

        Repeats of a commit in progress share its answer; a different commit of the same grant waits for it."""
        body = request.SerializeToString(deterministic=True)
        while request.grant_id in self._commits:
            running_body, running = self._commits[request.grant_id]
            if running_body == body:
                return await asyncio.shield(running)
            await asyncio.wait([running])
        # Its own task: a sender that disconnects and asks again must find the same commit, not half of one.
        task = asyncio.create_task(self._commit(request), name=f"kv-commit-{request.grant_id}")
        self._commits[request.grant_id] = (body, task)
        task.add_done_callback(lambda _: self._commits.pop(request.grant_id))
        return await asyncio.shield(task)

    async def _commit(self, request: pb.CommitRequest) -> pb.CommitResponse:
        grant = self.table.grant(request.grant_id)
        # A malformed message must change nothing, so it is checked before the grant changes its state.
        wanted = None if grant is None or grant.epoch != request.epoch else self._wanted_digests(request, grant)
        start = self.table.begin_commit(request.grant_id, request.epoch, request.incarnation)
        if start is CommitStart.COMMITTED:
            return pb.CommitResponse(outcome=pb.CommitResponse.COMMITTED)
        if start is CommitStart.GONE:
            return pb.CommitResponse(outcome=pb.CommitResponse.GRANT_GONE)
        assert grant is not None
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._verifier, self.pool.digests, grant.writable_block_ids)
        differs = (found != wanted).any(axis=0)
        mismatched = [block_id for block_id, is_bad in zip(grant.writable_block_ids, differs, strict=True) if is_bad]
        # The grant may have ended while the thread was reading: then the blocks may have another owner.
        result = self.table.finish_commit(grant.grant_id, grant.epoch, len(mismatched), self._now_s())
        if result is CommitResult.GONE:
            return pb.CommitResponse(outcome=pb.CommitResponse.GRANT_GONE)
        if result is CommitResult.MISMATCH:
            logger.warning("grant %d: %d blocks differ from what was sent", grant.grant_id, len(mismatched))
            return pb.CommitResponse(outcome=pb.CommitResponse.MISMATCH, mismatched_blocks=mismatched)
        is_wanted = False
        try:
            is_wanted = await self._on_commit(grant, request.first_token_id, request.num_prompt_tokens)
        finally:
            if not is_wanted:
                self.table.forget_commit(grant.grant_id)
        outcome = pb.CommitResponse.COMMITTED if is_wanted else pb.CommitResponse.GRANT_GONE
        return pb.CommitResponse(outcome=outcome)

    def _wanted_digests(self, request: pb.CommitRequest, grant: Grant) -> Digests:
        layout = self.pool.layout
        num_tokens, num_blocks = request.num_prompt_tokens, len(grant.block_ids)
        if not 1 <= num_tokens <= num_blocks * layout.block_size:
            raise InvalidTransfer(f"{num_tokens} prompt tokens do not fit {num_blocks} blocks of {layout.block_size}")
        shape = (layout.num_layers, len(grant.writable_block_ids))
        num_bytes = layout.digest_bytes(shape[1] * layout.block_size)
        if len(request.digests) != num_bytes:
            raise InvalidTransfer(f"digests of {shape} blocks are {num_bytes} bytes, not {len(request.digests)}")
        return np.frombuffer(request.digests, dtype="<u8").reshape(shape)

    def _differences(self, request: pb.ConnectRequest) -> list[str]:
        problems = []
        if request.protocol_version != PROTOCOL_VERSION:
            problems.append(f"protocol_version: {PROTOCOL_VERSION} != {request.protocol_version}")
        if difference := compat_difference(self.identity.compat_digest, request.compat_digest):
            problems.append(difference)
        problems += self.pool.layout.differences_from_peer(request.layout)
        if request.transport != self._endpoint.name:
            problems.append(f"transport: {self._endpoint.name} is served, not {request.transport[:40]!r}")
        return problems

    def _free(self, grants: list[Grant]) -> None:
        if grants:
            self._on_freed(grants)

    async def _expire_leases(self) -> None:
        # No event sets a deadline earlier than existing ones, so that sleeping until the next one misses none.
        while True:
            next_s = self.table.next_expiry_s()
            if next_s is None:
                self._has_deadline.clear()
                await self._has_deadline.wait()
                continue
            await asyncio.sleep(next_s - self._now_s())
            self._free(self.table.expire(self._now_s()))

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


def _report_death(timer: asyncio.Task[None]) -> None:
    if not timer.cancelled():
        logger.critical("the timer of leases died: leases no longer expire", exc_info=timer.exception())
