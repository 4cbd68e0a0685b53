"""What a one-sided push (one_sided.py) hands to the thread that writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kv_transfer.errors import TransferError


@dataclass(slots=True, eq=False)
class Transfer:
    """Writes of blocks of one layer."""

    remote: Any
    """A peer's pool, as the transport knows it."""
    layer: int
    src_block_ids: Sequence[int]
    dst_block_ids: Sequence[int]
    is_cancelled: Callable[[], bool]
    """Asked before the writes begin; true: nobody wants them any more, and they must not be made."""
    late_at_s: Callable[[], float]
    """When, by `time.monotonic`, the blocks may become somebody else's: nothing may be written after that. Asked while
    the writes are made, since it moves on as long as it has not passed."""
    on_end: Callable[[TransferError | None], None]
    """To be called once, on any thread, when all is written, or nothing will be any more."""
    patience_s: float
    """How long it may be under way before it is given up, by a transport that can."""

    def is_late(self) -> bool:
        return time.monotonic() > self.late_at_s()
