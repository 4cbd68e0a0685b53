"""What a one-sided push (one_sided.py) passes to the writing thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kv_transfer.errors import TransferError


@dataclass(frozen=True, kw_only=True, eq=False)
class Terms:
    """What the transfers of one push have in common."""

    remote: Any
    """The transport's object of the peer's pool."""
    is_cancelled: Callable[[], bool]
    """Called before the writes begin. True: they must not be made any more."""
    late_at_s: Callable[[], float]
    """When, by `time.monotonic`, the blocks may get another owner: nothing may be written after that. Called repeatedly
    during the writes, since the deadline moves on until it has passed."""
    on_end: Callable[[int, TransferError | None], None]
    """Called on any thread when transfers end, with their number: all is written, or nothing will be written any more.
    Each transfer is reported once."""
    patience_s: float
    """How long a transfer may take before it is given up, if the transport can give up."""

    def is_late(self) -> bool:
        return time.monotonic() > self.late_at_s()


@dataclass(slots=True, eq=False)
class Transfer:
    """Writes of blocks of one layer."""

    terms: Terms
    layer: int
    src_block_ids: Sequence[int]
    dst_block_ids: Sequence[int]
