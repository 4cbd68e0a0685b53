"""The connections of one sender: made at first contact, shared by pushes, and closed when they no longer work.

    none ──get──> connecting ──> kept, for any number of pushes ──broken, lost, or another peer is at its address──┐
                      │                                                                                            v
                      └─ fails: the next `get` tries again   closed <──its last user gives it back── retired: no push
                                                                                                     gets it any more
Owns the links, and for each a task that notices when its connection is lost: a link may hold resources of its peer,
such as a mapping of all its memory, which would otherwise not be freed until the next push.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TypeAlias

from kv_transfer.base import Link
from protos import tandem_kv_transfer_pb2 as pb

Key: TypeAlias = tuple[str, str, str]
"""(address, worker, incarnation)"""


class KeptLink:
    """A link, or the task that connects it, and its number of users."""

    def __init__(self, connecting: asyncio.Task[Link]) -> None:
        self.connecting = connecting
        self.num_users = 0
        self.is_retired = False
        self.is_closed = False

    @property
    def link(self) -> Link:
        return self.connecting.result()

    @property
    def is_connected(self) -> bool:
        return self.connecting.done() and not self.connecting.cancelled() and self.connecting.exception() is None

    @property
    def is_useless(self) -> bool:
        return self.connecting.done() and (not self.is_connected or self.link.is_broken)


class Links:
    """connect: connects to the receiver that made a grant, or raises. `close` must be called."""

    def __init__(self, connect: Callable[[pb.Grant], Coroutine[object, object, Link]]) -> None:
        self._connect = connect
        self._kept: dict[Key, KeptLink] = {}
        self._open: set[KeptLink] = set()
        """Kept links, and retired ones that some push still uses."""
        self._watches: dict[KeptLink, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def get(self, grant: pb.Grant) -> KeptLink:
        """Return a connected link to the maker of `grant`, to be given back once. Raises what `connect` raises."""
        key = (grant.kv_address, grant.worker_id, grant.incarnation)
        kept = self._kept.get(key)
        if kept is not None and kept.is_useless:
            self._retire(key)
            kept = None
        if kept is None:
            connecting = asyncio.create_task(self._connect(grant), name=f"kv-connect-{key[0]}")
            kept = self._kept[key] = KeptLink(connecting)
            self._open.add(kept)
            self._watches[kept] = asyncio.create_task(self._retire_when_lost(key, kept), name=f"kv-watch-{key[0]}")
        kept.num_users += 1
        try:
            # Shielded: others may be waiting for the same connection.
            await asyncio.shield(kept.connecting)
        except BaseException:
            self.give_back(kept)
            raise
        for other in [other for other in self._kept if other[0] == key[0] and other != key]:
            # The peer has proven its incarnation: an earlier process at this address has ended.
            self._retire(other)
        return kept

    def give_back(self, kept: KeptLink) -> None:
        """The caller of `get` no longer uses the link."""
        kept.num_users -= 1
        self._close_if_unused(kept)

    async def close(self) -> None:
        """Close all links, even those in use."""
        self._kept.clear()
        for kept in list(self._open):
            kept.connecting.cancel()
            kept.is_retired, kept.num_users = True, 0
            self._close_if_unused(kept)
        while self._closing:
            await asyncio.wait(self._closing)

    def _retire(self, key: Key) -> None:
        kept = self._kept.pop(key)
        kept.is_retired = True
        self._close_if_unused(kept)

    def _close_if_unused(self, kept: KeptLink) -> None:
        if not kept.is_retired or kept.is_closed or kept.num_users > 0:
            return
        kept.is_closed = True
        self._open.discard(kept)
        if (watch := self._watches.pop(kept, None)) is not None:
            watch.cancel()
        closing = asyncio.create_task(_close(kept))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _retire_when_lost(self, key: Key, kept: KeptLink) -> None:
        """Runs as its own task, since the caller of `get` may have been cancelled."""
        await asyncio.wait([kept.connecting])
        if kept.is_connected:
            await kept.link.lost()
        if self._kept.get(key) is kept:
            self._retire(key)


async def _close(kept: KeptLink) -> None:
    await asyncio.wait([kept.connecting])
    if kept.is_connected:
        await kept.link.close()
