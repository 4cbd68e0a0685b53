"""What the event loop passes to a thread that writes: calls, and the transfers of one-sided pushes (one_sided.py)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from kv_transfer.errors import TransferError

Result = TypeVar("Result")


def queue_call(work: Callable[[], Result], put: Callable[[Callable[[], None]], object]) -> Future[Result]:
    """Queue `work`, by `put`, for a thread that calls what it is given. The future gets what `work` returns or
    raises."""
    future: Future[Result] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    put(run)
    return future


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
