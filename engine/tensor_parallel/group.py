"""What ranks do together in a step: sums, and the logits of all parts of the vocabulary. Over gloo on a CPU, over NCCL
between GPUs, by the same calls.

Owns the connections between ranks, on this machine's loopback or between its GPUs. Every rank makes the same calls in
the same order; a call returns on none before all have made it (on a GPU: the device waits, the host does not). Where a
rank has ended, the calls of the others raise `RuntimeError` on a CPU; on a GPU nothing does, and the device waits on,
until whoever watches the ranks aborts (rank_watch.py). Where one hangs, whoever watches the engine ends it.

A sum is made in float32 and in the order of ranks, so an element's does not depend on the batch around it, as an
all-reduce's does: that one adds up in an order which follows from where in the message the element lies. It costs no
more bytes: the two halves of an all-reduce are made one by one, every rank adding up its part of the elements.

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
"""For ranks that are still loading, or that hang: while an engine steps, its watchdog is there much sooner."""
MEETING = timedelta(minutes=1)
"""For ranks to find each other, once all have begun."""
LOOPBACK = "127.0.0.1"
SMALL_BYTES = 256 * 1024
"""Up to here every rank gets all and adds up all: one exchange instead of two. Of 8 ranks a GPU then takes in 1.8 MB, a
few microseconds by NVLink, what an exchange takes in any case."""


class RankGroup:
    """One rank's end. Used by the stepping thread alone."""

    def __init__(self, rank: int, num_ranks: int, device: str, meeting_file: Path) -> None:
        """`meeting_file`: where ranks find each other, in a folder of their own. Returns when all are there."""
        self.rank = rank
        self.num_ranks = num_ranks
        store = FileStore(str(meeting_file), num_ranks)
        store.set_timeout(MEETING)
        self._device = device
        self._group = _gloo(store, rank, num_ranks) if device == "cpu" else _nccl(store, rank, num_ranks)
        self._group._set_default_timeout(PATIENCE)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Of all ranks' `x`, rounded once to its dtype."""
        if self.num_ranks == 2 or x.nbytes <= SMALL_BYTES:
            return _added_up(self._gathered(x))
        num_padded = -x.numel() % self.num_ranks
        parts = F.pad(x.reshape(-1), (0, num_padded))
        mine = torch.empty_like(parts)
        self._wait(self._group.alltoall_base(mine, parts, [], [], _now(AllToAllOptions())))
        total = self._gathered(_added_up(mine.view(self.num_ranks, -1)))
        return total.view(-1)[: x.numel()].view(x.shape)

    def gather_outputs(self, y_TP: torch.Tensor, num_outputs: int) -> torch.Tensor:
        """Each rank's [T, part of V], parts alike, side by side: [T, num_outputs], what is beyond them left out."""
        return torch.cat(list(self._gathered(y_TP)), dim=1)[:, :num_outputs].contiguous()

    def smallest(self, number: int) -> int:
        """Of all ranks' numbers."""
        return int(self._gathered(torch.tensor([number], device=self._device)).min())

    def check_alike(self, name: str, what: str) -> None:
        """Raises `ValueError`, on every rank, where one has another `name` of `what`."""
        number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
        if self.smallest(number) != -self.smallest(-number):
            raise ValueError(f"tensor_parallel_size: {what} must be alike on all ranks; rank {self.rank} has {name}")

    def share_first(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's `x`; of the others it is overwritten."""
        self._wait(self._group.broadcast([x], _now(BroadcastOptions())))
        return x

    def abort(self) -> None:
        """On any thread. What a device waits for here ends, at once and with rubbish; no other call comes after it. On
        a CPU nothing waits, and nothing changes. Returns when nothing uses the communicator, recorded steps included:
        NCCL waits for their end before it lets go of what they use."""
        with suppress(RuntimeError):  # it has waited for PATIENCE: the device has long gone on
            self._group.abort()

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        """[R, …]"""
        gathered = torch.empty(self.num_ranks * x.numel(), dtype=x.dtype, device=x.device)
        self._wait(self._group._allgather_base(gathered, x.reshape(-1), _now(AllgatherOptions())))
        return gathered.view(self.num_ranks, *x.shape)

    def _wait(self, work: Any) -> None:
        if work is not None:  # on a GPU it is in the current stream already
            work.wait()


def _now(options: Any) -> Any:
    """In the current stream of a GPU, instead of beside it."""
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
    from torch.distributed.distributed_c10d import ProcessGroupNCCL  # builds of torch for CPUs have none

    options = ProcessGroupNCCL.Options()
    options._timeout = MEETING
    group = ProcessGroupNCCL(store, rank, num_ranks, options)
    group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
    return group
