"""Steps in which every sequence decodes, recorded once for each size and replayed after: the launches of a whole model
cost a CPU more than they cost a GPU, and a replay is one.

Owns the recordings, what their launches read (token ids, positions, an attention plan and whose adapter each row asks
for, at addresses that stay), and the memory that all of them leave their logits in. A recording is for so many
sequences of at most so long a context (a rung of each ladder), with adapters or without; a step takes the smallest that
it fits, and rows beyond its sequences compute nothing that anybody reads, and write nothing.

    at start ── record_all ──> Recordings ── each step that fits one: refill, replay ──> logits of its first rows

Nothing is recorded while requests run, as recording waits for the device.

A sequence gets the same bits from any rung: see `engine.attention.triton_backend`. The library's products choose by the
number of rows; with `batch_invariant` they are our own.

Shapes: S sequences, V vocabulary.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from engine.attention import StepLayout
from engine.attention.step_arrays import empty_decodes
from engine.running.input_batch import InputBatch
from engine.step_input import Integers

Replay = Callable[[], None]
Rung = tuple[int, int, bool]
"""Sequences, context length, and whether adapters are asked for."""

RECORDING_BYTES = 8 << 20
"""What the driver keeps of one with some hundreds of launches: by what others report, no GPU of ours has shown it."""


class PlanKeeper(Protocol):
    """An attention backend whose plans can keep their addresses."""

    def reserve_decode_plan(self, num_seqs: int, max_context_len: int) -> Any: ...

    def refill(self, plan: Any, layout: StepLayout) -> None: ...


class AdapterKeeper(Protocol):
    """Adapters that can keep the addresses of whose rows are whose (`engine.kernels.gpu.adapters`)."""

    def assign(self, adapter_ids: Integers) -> None: ...

    def reserve_decodes(self, num_rows: int) -> Any: ...

    def refill(self, reserved: Any, adapter_ids: Integers) -> None: ...


class Recorder(Protocol):
    def record(self, launch: Callable[[], None]) -> Replay:
        """What does again, on the same tensors, all that `launch` does."""


class CudaRecorder:
    """CUDA graphs in one pool of memory: they run one after the other, and so may use the same."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()
        # cuBLAS has scratch for each stream, in the memory of the first graph recorded on it, and torch lets it go with
        # any graph of the stream. On the one that graphs are recorded on by default, engines of one process would take
        # it from each other.
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(self, launch: Callable[[], None]) -> Replay:
        launch()  # compiles kernels and chooses algorithms, which cannot be captured
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Transfers go on in other threads meanwhile, and allocate: that is no fault of this thread's capture.
        with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
            launch()
        return graph.replay


@dataclass(frozen=True, slots=True)
class Recording:
    token_ids: torch.Tensor
    """[S] int64"""
    positions: torch.Tensor
    """[S] int64"""
    plan: Any
    adapters: Any
    """Whose rows are whose; None: nobody's, and no adapter is launched."""
    replay: Replay


def batch_ladder(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then every eighth: a step with few rows too many costs little more than one that fits."""
    rungs = [size for size in (1, 2, 4) if size < max_num_seqs]
    return [*rungs, *range(8, max_num_seqs, 8), max_num_seqs]


def context_ladder(max_context_len: int) -> list[int]:
    """1,024, doubled until it is enough: a context's length says how far a row of block ids goes, and into how
    many pieces attention may cut."""
    rungs = [min(1024, max_context_len)]
    while rungs[-1] < max_context_len:
        rungs.append(min(2 * rungs[-1], max_context_len))
    return rungs


class DecodeGraphs:
    """Used by the stepping thread alone, under `torch.inference_mode`."""

    def __init__(
        self,
        *,
        forward: Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor],
        backend: PlanKeeper,
        recorder: Recorder,
        max_num_seqs: int,
        max_context_len: int,
        device: str,
        adapters: AdapterKeeper | None = None,
    ) -> None:
        """`forward`: token ids, positions and a plan to logits [S, V], launching the same for equal shapes.
        `adapters`: what changes it, where the engine has some."""
        self._forward = forward
        self._backend = backend
        self._recorder = recorder
        self._device = device
        self._adapters = adapters
        self._batch_sizes = batch_ladder(max_num_seqs)
        self._context_lens = context_ladder(max_context_len)
        # With adapters and without: launches for rows of nobody would cost steps in which nobody asks for one.
        self._kinds = [True, False] if adapters is not None else [False]
        self._recordings: dict[Rung, Recording] = {}
        # First of all that ends with this object, or with the process: NCCL waits for the recordings of its exchanges
        # where a group of ranks ends, which the model holds.
        weakref.finalize(self, self._recordings.clear)
        self._logits_SV: torch.Tensor | None = None
        """Of the last replay. The next one, of whatever size, writes over it."""

    @property
    def num_recordings(self) -> int:
        return len(self._recordings)

    def can_run(self, batch: InputBatch) -> bool:
        """Whether every sequence decodes, by the model alone, and is sampled, and there is a recording that the step
        fits."""
        context_lens = batch.layout.context_lens
        return (
            bool(self._recordings)
            and batch.sample_rows is None
            and (not len(batch.adapter_ids) or True in self._kinds)
            and batch.layout.num_decodes == len(context_lens) <= self._batch_sizes[-1]
            and int(context_lens.max()) <= self._context_lens[-1]
        )

    def record_all(self, on_recorded: Callable[[int, int], None]) -> None:
        """Every batch size, over every length of contexts; with adapters, too, where there are some. `on_recorded`: so
        many, of so many."""
        rungs = self._rungs()
        for rung in rungs:
            self._recordings[rung] = self._record(*rung)
            on_recorded(self.num_recordings, len(rungs))
        # A recording's first replay takes longer, and so does the first array of each size, for want of pinned memory:
        # after the last one, as each begins by giving such memory back.
        for (num_seqs, _, _), recording in self._recordings.items():
            self._backend.refill(recording.plan, empty_decodes(num_seqs, 1))
            recording.replay()

    def record_largest(self) -> int:
        """Whose memory all others use, too. Returns how many there would be."""
        rungs = self._rungs()
        self._recordings[rungs[0]] = self._record(*rungs[0])
        return len(rungs)

    def _rungs(self) -> list[Rung]:
        """The largest first."""
        return [
            (size, length, has_adapters)
            for length in reversed(self._context_lens)
            for size in reversed(self._batch_sizes)
            for has_adapters in self._kinds
        ]

    def run(self, batch: InputBatch) -> torch.Tensor:
        """Logits [S, V] of a step that `can_run`. Valid until the next call."""
        num_seqs = len(batch.layout.query_lens)
        longest = int(batch.layout.context_lens.max())
        size, length = _rung(self._batch_sizes, num_seqs), _rung(self._context_lens, longest)
        recording = self._recordings[size, length, len(batch.adapter_ids) > 0]
        recording.token_ids[:num_seqs].copy_(batch.token_ids, non_blocking=True)
        recording.positions[:num_seqs].copy_(batch.positions, non_blocking=True)
        self._backend.refill(recording.plan, batch.layout)
        if self._adapters is not None and recording.adapters is not None:
            self._adapters.refill(recording.adapters, batch.adapter_ids)
        recording.replay()
        assert self._logits_SV is not None
        return self._logits_SV[:num_seqs]

    def _record(self, num_seqs: int, max_context_len: int, has_adapters: bool) -> Recording:
        """Over rows without a sequence: what is launched to record them writes nothing into the pool."""
        token_ids = torch.zeros(num_seqs, dtype=torch.int64, device=self._device)
        positions = torch.zeros(num_seqs, dtype=torch.int64, device=self._device)
        plan = self._backend.reserve_decode_plan(num_seqs, max_context_len)
        adapters = None
        if self._adapters is not None and has_adapters:
            adapters = self._adapters.reserve_decodes(num_seqs)
        elif self._adapters is not None:
            self._adapters.assign(np.zeros(0, dtype=np.int64))

        def launch() -> None:
            logits_SV = self._forward(token_ids, positions, plan)
            if self._logits_SV is None:
                self._logits_SV = logits_SV.new_empty(self._batch_sizes[-1], logits_SV.shape[1])
            # Copied, so that the next recording may use the same memory for its own: 0.2 % of a step.
            self._logits_SV[:num_seqs].copy_(logits_SV)

        return Recording(token_ids, positions, plan, adapters, self._recorder.record(launch))


def _rung(ladder: list[int], wanted: int) -> int:
    return ladder[bisect_left(ladder, wanted)]
