"""What ranks do together in a step: sums, and the logits of all parts of the vocabulary. Over gloo on a CPU, over NCCL
between GPUs.

Owns the connections between ranks, on this machine's loopback or between its GPUs. Every rank makes the same calls in
the same order; a call returns on none before all have made it (on a GPU: the device waits, the host does not). Where a
rank has ended, the calls of the others raise `RuntimeError`; where it hangs, whoever watches the engine ends it.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import ProcessGroupGloo, Store

PATIENCE = timedelta(minutes=30)
"""For ranks that are still loading, or that hang: while an engine steps, its watchdog is there much sooner."""
MEETING = timedelta(minutes=1)
"""For ranks to find each other, once all have begun."""
LOOPBACK = "127.0.0.1"


class RankGroup:
    """One rank's end. Used by the stepping thread alone."""

    def __init__(self, rank: int, num_ranks: int, device: str, meeting_file: Path) -> None:
        """`meeting_file`: where ranks find each other, in a folder of their own. Returns when all are there."""
        self.rank = rank
        self.num_ranks = num_ranks
        store = FileStore(str(meeting_file), num_ranks)
        store.set_timeout(MEETING)
        self._group = _gloo(store, rank, num_ranks) if device == "cpu" else _nccl(store, rank, num_ranks)
        self._is_gloo = device == "cpu"

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Of all ranks' `x`, which may be overwritten. On a CPU in float32 and in the order of ranks, whatever else is
        in `x`: an element's sum does not depend on the batch."""
        if not self._is_gloo:
            self._group.allreduce([x]).wait()
            return x
        first, *others = self._gathered(x)
        total = first.float()
        for other in others:
            total += other
        return total.to(x.dtype)

    def gather_outputs(self, y_TP: torch.Tensor, num_outputs: int) -> torch.Tensor:
        """Each rank's [T, part of V], parts alike, side by side: [T, num_outputs], what is beyond them left out."""
        return torch.cat(self._gathered(y_TP), dim=1)[:, :num_outputs].contiguous()

    def smallest(self, number: int) -> int:
        """Of all ranks' numbers."""
        device = "cpu" if self._is_gloo else "cuda"
        return min(int(each) for each in self._gathered(torch.tensor([number], device=device)))

    def share_first(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's `x`; of the others it is overwritten."""
        self._group.broadcast(x, 0).wait()
        return x

    def _gathered(self, x: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.num_ranks)]
        self._group.allgather([gathered], [x.contiguous()]).wait()
        return gathered


def _gloo(store: Store, rank: int, num_ranks: int) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = PATIENCE
    options._devices = [ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    return ProcessGroupGloo(store, rank, num_ranks, options)


def _nccl(store: Store, rank: int, num_ranks: int) -> Any:
    from torch.distributed.distributed_c10d import ProcessGroupNCCL  # builds of torch for CPUs have none

    options = ProcessGroupNCCL.Options()
    options._timeout = PATIENCE
    group = ProcessGroupNCCL(store, rank, num_ranks, options)
    group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
    return group
