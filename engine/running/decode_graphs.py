"""CUDA graphs of steps in which every sequence decodes: recorded once per size, then replayed. Launching a whole model
kernel by kernel takes the CPU longer than the GPU needs to compute it; a replay is a single launch.

Owns the recordings, their inputs at fixed addresses (token ids, positions, an attention plan, and each row's adapter),
and the memory that all of them write their logits to. A recording is made for a number of sequences and a context
length (a rung of each ladder), with adapters or without. A step uses the smallest recording that it fits; rows beyond
its sequences write nothing, and nobody reads what they compute. Drafts are sequences of their own here
(`engine.step_input`).

    at start ── record_all ──> Recordings ── each step that fits one: refill, replay ──> logits of its first rows

Nothing is recorded while requests run, since recording waits for the device.

Attention gives a sequence the same bits on every rung: see `engine.attention.triton_backend`. The library's matrix
products depend on the number of rows; `batch_invariant` uses our own instead.

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
from engine.step_input import Integers, StepInput

Replay = Callable[[], None]
Rung = tuple[int, int, bool]
"""Sequences, context length, and whether any sequence uses an adapter."""

RECORDING_BYTES = 8 << 20
"""Driver memory per recording with some hundreds of launches. Taken from others' reports, not measured by us."""


class PlanKeeper(Protocol):
    """An attention backend whose plans can be refilled at fixed addresses."""

    def reserve_decode_plan(self, num_seqs: int, max_context_len: int) -> Any: ...

    def refill(self, plan: Any, layout: StepLayout) -> None: ...


class AdapterKeeper(Protocol):
    """Adapters whose row assignments can be refilled at fixed addresses (`engine.kernels.gpu.adapters`)."""

    def assign(self, adapter_ids: Integers) -> None: ...

    def reserve_decodes(self, num_rows: int) -> Any: ...

    def refill(self, reserved: Any, adapter_ids: Integers) -> None: ...


class StateKeeper(Protocol):
    """Recurrent states whose sequences can be refilled at fixed addresses (`engine.models.recurrent_states`)."""

    def reserve_decodes(self, num_seqs: int) -> Any: ...

    def refill(self, reserved: Any, context_lens: Integers, slots: Integers) -> None: ...


class Recorder(Protocol):
    def record(self, launch: Callable[[], None]) -> Replay:
        """Return a function that repeats all launches of `launch`, on the same tensors."""


class CudaRecorder:
    """Records CUDA graphs that share one memory pool, which is safe since they run one after the other."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()
        # cuBLAS keeps its workspace for a stream in the memory of the first graph recorded on that stream, and torch
        # frees it with any graph of the stream. With the default recording stream, several engines of one process would
        # free each other's workspace.
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(self, launch: Callable[[], None]) -> Replay:
        launch()  # compiles kernels and chooses algorithms, which cannot be captured
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # KV transfers in other threads may allocate meanwhile; "thread_local" keeps that from failing this capture.
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
    """Each row's adapter; None: the recording launches no adapter."""
    states: Any
    """Each row's recurrent state; None: the model has none."""
    replay: Replay


def batch_ladder(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then multiples of 8, up to `max_num_seqs`: a few unused rows cost little."""
    rungs = [size for size in (1, 2, 4) if size < max_num_seqs]
    return [*rungs, *range(8, max_num_seqs, 8), max_num_seqs]


def context_ladder(max_context_len: int) -> list[int]:
    """1,024, then doubled up to `max_context_len`, which decides the length of a row of block ids and into how many
    pieces attention may cut a context."""
    rungs = [min(1024, max_context_len)]
    while rungs[-1] < max_context_len:
        rungs.append(min(2 * rungs[-1], max_context_len))
    return rungs


class DecodeGraphs:
    """Used only by the stepping thread, under `torch.inference_mode`."""

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
        states: StateKeeper | None = None,
    ) -> None:
        """`forward` maps token ids, positions and a plan to logits [S, V], with the same launches for equal shapes.
        `adapters`: the engine's adapters, which `forward` applies; None if it has none. `states`: likewise."""
        self._forward = forward
        self._backend = backend
        self._recorder = recorder
        self._device = device
        self._adapters = adapters
        self._states = states
        self._batch_sizes = batch_ladder(max_num_seqs)
        self._context_lens = context_ladder(max_context_len)
        # Record with and without adapters: adapter launches would slow down steps that use no adapter.
        self._kinds = [True, False] if adapters is not None else [False]
        self._recordings: dict[Rung, Recording] = {}
        # Free the recordings before everything else that ends with this object or the process: when NCCL destroys a
        # group of ranks, which the model holds, it waits for the recordings of its exchanges.
        weakref.finalize(self, self._recordings.clear)
        self._logits_SV: torch.Tensor | None = None
        """The logits of the last replay. The next replay, of any size, overwrites them."""

    @property
    def num_recordings(self) -> int:
        return len(self._recordings)

    def can_run(self, step: StepInput) -> bool:
        """Whether every sequence of the step decodes and is sampled, and a recording exists that the step fits."""
        context_lens = step.layout.context_lens
        return (
            bool(self._recordings)
            and step.samples_all
            and (not len(step.adapter_ids) or self._adapters is not None)
            and step.layout.num_decodes == len(context_lens) <= self._batch_sizes[-1]
            and int(context_lens.max()) <= self._context_lens[-1]
        )

    def record_all(self, on_recorded: Callable[[int, int], None]) -> None:
        """Record every batch size for every context length, with and without adapters if there are any. Calls
        `on_recorded(number recorded, number of all)`."""
        rungs = self._rungs()
        for rung in rungs:
            self._recordings[rung] = self._record(*rung)
            on_recorded(self.num_recordings, len(rungs))
        # The first replay of a recording takes longer, and so does the first host array of each size, which needs new
        # pinned memory. Do both now, after the last recording, since each recording begins by freeing pinned memory.
        for (num_seqs, _, _), recording in self._recordings.items():
            self._backend.refill(recording.plan, empty_decodes(num_seqs, 1))
            recording.replay()

    def record_largest(self) -> int:
        """Record the largest rung, whose memory all other recordings reuse. Returns the number of all rungs."""
        rungs = self._rungs()
        self._recordings[rungs[0]] = self._record(*rungs[0])
        return len(rungs)

    def _rungs(self) -> list[Rung]:
        """All rungs, the largest first."""
        return [
            (size, length, has_adapters)
            for length in reversed(self._context_lens)
            for size in reversed(self._batch_sizes)
            for has_adapters in self._kinds
        ]

    def run(self, step: StepInput, batch: InputBatch) -> torch.Tensor:
        """Compute the logits [S, V] of a step for which `can_run` is true. They are valid until the next call."""
        num_seqs = len(step.layout.query_lens)
        longest = int(step.layout.context_lens.max())
        size, length = _rung(self._batch_sizes, num_seqs), _rung(self._context_lens, longest)
        recording = self._recordings[size, length, len(step.adapter_ids) > 0]
        recording.token_ids[:num_seqs].copy_(batch.token_ids, non_blocking=True)
        recording.positions[:num_seqs].copy_(batch.positions, non_blocking=True)
        self._backend.refill(recording.plan, step.layout)
        if self._adapters is not None and recording.adapters is not None:
            self._adapters.refill(recording.adapters, step.adapter_ids)
        if self._states is not None:
            self._states.refill(recording.states, step.layout.context_lens, step.state_slots)
        recording.replay()
        assert self._logits_SV is not None
        return self._logits_SV[:num_seqs]

    def _record(self, num_seqs: int, max_context_len: int, has_adapters: bool) -> Recording:
        """Record with rows that have no sequence, so that the recorded launches write nothing into the pool."""
        token_ids = torch.zeros(num_seqs, dtype=torch.int64, device=self._device)
        positions = torch.zeros(num_seqs, dtype=torch.int64, device=self._device)
        plan = self._backend.reserve_decode_plan(num_seqs, max_context_len)
        adapters = None
        if self._adapters is not None and has_adapters:
            adapters = self._adapters.reserve_decodes(num_seqs)
        elif self._adapters is not None:
            self._adapters.assign(np.zeros(0, dtype=np.int64))
        states = None if self._states is None else self._states.reserve_decodes(num_seqs)

        def launch() -> None:
            logits_SV = self._forward(token_ids, positions, plan)
            if self._logits_SV is None:
                self._logits_SV = logits_SV.new_empty(self._batch_sizes[-1], logits_SV.shape[1])
            # Copied, so that all recordings can share their working memory; this takes 0.2 % of a step.
            self._logits_SV[:num_seqs].copy_(logits_SV)

        return Recording(token_ids, positions, plan, adapters, states, self._recorder.record(launch))


def _rung(ladder: list[int], wanted: int) -> int:
    return ladder[bisect_left(ladder, wanted)]
