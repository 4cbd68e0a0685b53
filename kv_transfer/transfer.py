"""What a one-sided push (one_sided.py) hands to the writing thread."""

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
    """A peer's pool, as the transport knows it."""
    is_cancelled: Callable[[], bool]
    """Asked before the writes begin; true: nobody wants them any more, and they must not be made."""
    late_at_s: Callable[[], float]
    """When, by `time.monotonic`, the blocks may become somebody else's: nothing may be written after that. Asked while
    the writes are made, since it moves on as long as it has not passed."""
    on_end: Callable[[int, TransferError | None], None]
    """To be called on any thread, of each transfer once, of so many together: all is written, or nothing will be any
    more."""
    patience_s: float
    """How long one may be under way before it is given up, by a transport that can."""

    def is_late(self) -> bool:
        return time.monotonic() > self.late_at_s()


@dataclass(slots=True, eq=False)
class Transfer:
    """Writes of blocks of one layer."""

    terms: Terms
    layer: int
    src_block_ids: Sequence[int]
    dst_block_ids: Sequence[int]
