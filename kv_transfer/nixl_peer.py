"""A peer's pool that a NIXL agent writes to, with the interface `kv_transfer.pool.PeerPool`; for workers with several
ranks.

copy(rows) ──a Transfer──> the agent's thread ──end──> NixlCopying ──synchronize──> the waiting thread
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future

from kv_transfer.errors import PeerUnreachable, TransferError
from kv_transfer.pool import Copying, Rows
from kv_transfer.transfer import Terms, Transfer


class NixlPeerPool:
    """See `kv_transfer.pool.PeerPool`."""

    def __init__(
        self, name: str, remote: object, *, post: Callable[[Transfer], None], close: Callable[[], None]
    ) -> None:
        """`remote`: the agent's object of the pool. `post`: passes a transfer to the agent. `close`: releases the
        pool."""
        self._name = name
        self._remote = remote
        self._post = post
        self.close = close

    def copy(self, rows_2R: Rows, late_at_s: Callable[[], float]) -> Copying:
        """Begin to copy. Unlike a host's or a device's copy it may take long: it is given up once it is late."""
        copying = NixlCopying(self._name, late_at_s)
        src_rows, dst_rows = rows_2R.tolist()
        terms = Terms(
            remote=self._remote,
            is_cancelled=copying.is_late,
            late_at_s=copying.late_at_s,
            on_end=copying.end,
            patience_s=math.inf,
        )
        self._post(Transfer(terms, 0, src_rows, dst_rows))  # rows are counted from layer 0's first block on
        return copying


class NixlCopying:
    """Writes of an agent, which calls `end` on its thread; `synchronize` waits for that on another thread."""

    def __init__(self, agent_name: str, late_at_s: Callable[[], float]) -> None:
        self._agent_name = agent_name
        self._may_go_on_until_s = late_at_s
        self._is_late = False
        self._has_ended: Future[None] = Future()

    def late_at_s(self) -> float:
        if time.monotonic() > self._may_go_on_until_s():
            self._is_late = True  # permanently: writing must not resume if the deadline moves on afterwards
        return -math.inf if self._is_late else self._may_go_on_until_s()

    def is_late(self) -> bool:
        return time.monotonic() > self.late_at_s()

    def end(self, _: int, error: TransferError | None) -> None:
        if error is None and self._is_late:
            error = PeerUnreachable(f"{self._agent_name}: a write did not end in its time")
        if error is None:
            self._has_ended.set_result(None)
        else:
            self._has_ended.set_exception(error)

    def synchronize(self) -> None:
        self._has_ended.result()
