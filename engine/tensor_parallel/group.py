"""Collective operations of the ranks in a step: sums, and gathering the logits of all parts of the vocabulary. Uses
gloo on a CPU and NCCL between GPUs, with the same calls.

Owns the connections between ranks, on this machine's loopback or between its GPUs. Every rank must make the same calls
in the same order; a call returns on no rank before all ranks have made it (on a GPU: the device waits, the host does
not). If a rank has ended, the calls of the others raise `RuntimeError` on a CPU. On a GPU nothing raises: the device
waits until `RankWatch` aborts the group (rank_watch.py). If a rank hangs, the engine's watchdog ends the process.

A sum is computed in float32 and in the order of ranks, so that an element's sum does not depend on the batch. In an
all-reduce, the order of adding up depends on the element's place in the message. Our sum transfers no more bytes: it
does the two halves of an all-reduce one after the other, and every rank adds up its part of the elements.

Shapes: T tokens, R ranks, V vocabulary.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllToAllOptions,
    BroadcastOptions,
    ProcessGroupGloo,
    Store,
)

PATIENCE = timedelta(minutes=30)
"""Timeout for ranks that are still loading, or that hang; while an engine steps, its watchdog acts much sooner."""
MEETING = timedelta(minutes=1)
"""Timeout for ranks to find each other, once all have started."""
LOOPBACK = "127.0.0.1"
SMALL_BYTES = 256 * 1024
"""Up to this size every rank receives and adds up everything: one exchange instead of two. With 8 ranks a GPU then
receives 1.8 MB, which takes a few microseconds by NVLink, like any exchange."""


class RankGroup:
    """One rank's end. Used only by the stepping thread."""

    def __init__(self, rank: int, num_ranks: int, device: str, meeting_file: Path) -> None:
        """`meeting_file`: by which ranks find each other, in its own folder. Returns when all ranks are connected."""
        self.rank = rank
        self.num_ranks = num_ranks
        store = FileStore(str(meeting_file), num_ranks)
        store.set_timeout(MEETING)
        self.device = device
        self._group = _gloo(store, rank, num_ranks) if device == "cpu" else _nccl(store, rank, num_ranks)
        self._group._set_default_timeout(PATIENCE)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum all ranks' `x`, rounded once to its dtype."""
        if self.num_ranks == 2 or x.nbytes <= SMALL_BYTES:
            return _added_up(self._gathered(x))
        num_padded = -x.numel() % self.num_ranks
        parts = F.pad(x.reshape(-1), (0, num_padded))
        mine = torch.empty_like(parts)
        self._wait(self._group.alltoall_base(mine, parts, [], [], _now(AllToAllOptions())))
        total = self._gathered(_added_up(mine.view(self.num_ranks, -1)))
        return total.view(-1)[: x.numel()].view(x.shape)

    def gather_outputs(self, y_TP: torch.Tensor, num_outputs: int) -> torch.Tensor:
        """Concatenate the ranks' equally large parts [T, part of V] and cut off the padding: [T, num_outputs]."""
        return torch.cat(list(self._gathered(y_TP)), dim=1)[:, :num_outputs].contiguous()

    def smallest(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        return int(self._gathered(torch.tensor([number], device=self.device)).min())

    def check_alike(self, name: str, what: str) -> None:
        """Raise `ValueError` on every rank unless all ranks have the same `name`. `what`: describes it in the error."""
        number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
        if self.smallest(number) != -self.smallest(-number):
            raise ValueError(f"tensor_parallel_size: {what} must be alike on all ranks; rank {self.rank} has {name}")

    def share_first(self, x: torch.Tensor) -> torch.Tensor:
        """Broadcast rank 0's `x` into the other ranks' `x`, and return it."""
        self._wait(self._group.broadcast([x], _now(BroadcastOptions())))
        return x

    def abort(self) -> None:
        """End what a device waits for in this group at once, with invalid results. May be called on any thread; no
        other call may follow. Without effect on a CPU, where nothing waits. Returns once nothing uses the communicator
        any more, including recorded steps: NCCL waits for these to be freed."""
        with suppress(RuntimeError):  # a timeout after PATIENCE: the device has long continued
            self._group.abort()

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        """[R, …]"""
        gathered = torch.empty(self.num_ranks * x.numel(), dtype=x.dtype, device=x.device)
        self._wait(self._group._allgather_base(gathered, x.reshape(-1), _now(AllgatherOptions())))
        return gathered.view(self.num_ranks, *x.shape)

    def _wait(self, work: Any) -> None:
        if work is not None:  # on a GPU the operation is already in the current stream
            work.wait()


def _now(options: Any) -> Any:
    """Run the operation in a GPU's current stream, not in one of its own."""
    options.asyncOp = False
    return options


def _added_up(x: torch.Tensor) -> torch.Tensor:
    """[R, …] -> […]"""
    total = x[0].float()
    for other in x[1:]:
        total = total + other
    return total.to(x.dtype)


def _gloo(store: Store, rank: int, num_ranks: int) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = MEETING
    options._devices = [ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    return ProcessGroupGloo(store, rank, num_ranks, options)


def _nccl(store: Store, rank: int, num_ranks: int) -> Any:
    from torch.distributed.distributed_c10d import ProcessGroupNCCL  # torch's CPU builds lack it

    options = ProcessGroupNCCL.Options()
    options._timeout = MEETING
    group = ProcessGroupNCCL(store, rank, num_ranks, options)
    group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
    return group
