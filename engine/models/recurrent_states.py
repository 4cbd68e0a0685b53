"""The states of layers that keep something other than keys and values, one row for each running sequence.

Owns the rows. The scheduler says which sequence has which row (its `state_slot`); the layers read and change it in
place, whatever was there before if it is the sequence's first step.

    running sequence ── its row ── save ──> blocks of the pool ── transfer ──> blocks of another pool ── load ──> a row

A prompt's state is handed over in blocks of the KV pool, which belong to the prompt like its other blocks: so what
protects KV on its way (grants, epochs, digests, leases) protects states, too. `save` fills these blocks after the
prompt's last step; `load` reads them before the first step elsewhere. Blocks are only bytes for both.

A step with guesses changes a row as if all were right. So it keeps a copy, from which the next step can put the row
back (engine/scheduling/drafting.py).

Shapes: S sequences of a step, R rows, C channels, N value heads, K and V dims of keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.kv_cache import rows_of_blocks
from engine.models.recurrent_shape import RecurrentLayer
from engine.to_device import to_device

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RecurrentStep:
    """A step's sequences, as the layers need them. On the device, except `lengths_on_host`."""

    firsts: torch.Tensor
    """[S] int64: each sequence's first token among the step's."""
    lengths: torch.Tensor
    """[S] int64: how many tokens it computes."""
    slots: torch.Tensor
    """[S] int64: its row of the states."""
    is_new: torch.Tensor
    """[S] bool: its row holds nothing yet."""
    lengths_on_host: Integers

    @property
    def longest(self) -> int:
        """The largest of `lengths`."""
        return int(self.lengths_on_host.max(initial=0))


class RecurrentStates:
    """Used only by the stepping thread. `assign` must come before each use of the layers."""

    def __init__(
        self,
        layers: Sequence[RecurrentLayer],
        num_slots: int,
        row_bytes: int,
        dtype: torch.dtype,
        device: str,
        num_copies: int = 0,
    ) -> None:
        """`row_bytes`: of a state in the blocks that carry it, at least `recurrent_bytes`. `num_copies`: of rows, that
        a step keeps at most."""
        # One more row, for what belongs to no sequence: rows of a recorded step that are left over, and tests of a
        # model. Not cleared: a row's content is never read before it is written.
        self._rows = torch.empty(num_slots + 1 + num_copies, row_bytes, dtype=torch.uint8, device=device)
        self._num_slots = num_slots
        self._device = device
        self.inputs: list[torch.Tensor] = []
        """By layer: [R, num_taps - 1, C] in the model's dtype: the last inputs of the convolution."""
        self.matrices: list[torch.Tensor] = []
        """By layer: [R, N, K, V] float32; empty for layers without matrices."""
        start = 0
        for layer in layers:
            self.matrices.append(self._part(start, torch.float32, layer.matrices_shape))
            start += layer.matrices_bytes
            self.inputs.append(self._part(start, dtype, (layer.num_taps - 1, layer.num_channels)))
            start += layer.inputs_bytes(dtype.itemsize)
        assert start <= row_bytes
        self.step: RecurrentStep
        """The step that was assigned last."""

    def _part(self, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        part = self._rows[:, start : start + num_bytes].view(dtype)
        strides = [part.stride(0), *(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))]
        return part.as_strided((len(part), *shape), strides)

    def assign(self, query_lens: Integers, context_lens: Integers, slots: Integers) -> None:
        """Set the step's sequences. `slots`: each one's row; -1 for what belongs to no sequence."""
        firsts = np.cumsum(query_lens) - query_lens
        is_new = context_lens == query_lens
        sent = to_device(np.stack([firsts, query_lens, self._rows_of(slots), is_new]), self._device)
        self.step = RecurrentStep(sent[0], sent[1], sent[2], sent[3].bool(), query_lens)

    def reserve_decodes(self, num_seqs: int) -> RecurrentStep:
        """Return a step of `num_seqs` sequences of one token each, at fixed addresses, for a recording; until
        `refill`, none of them belongs to a sequence. It is assigned."""
        firsts = torch.arange(num_seqs, device=self._device)
        slots = torch.full_like(firsts, self._num_slots)
        is_new = torch.ones(num_seqs, dtype=torch.bool, device=self._device)
        self.step = RecurrentStep(firsts, torch.ones_like(firsts), slots, is_new, np.ones(num_seqs, dtype=np.int64))
        return self.step

    def refill(self, reserved: RecurrentStep, context_lens: Integers, slots: Integers) -> None:
        """Set the sequences of a recorded step. Those left over belong to none."""
        sent = to_device(np.stack([self._rows_of(slots), context_lens == 1]), self._device)
        num_seqs = len(slots)
        reserved.slots[:num_seqs].copy_(sent[0])
        reserved.slots[num_seqs:].fill_(self._num_slots)
        reserved.is_new[:num_seqs].copy_(sent[1])

    def _rows_of(self, slots: Integers) -> Integers:
        return np.where(slots < 0, self._num_slots, slots)

    def keep(self, slots: Integers) -> None:
        """Copy rows to the copies from 0 on."""
        for copy, slot in enumerate(slots.tolist()):
            self._copy_row(copy).copy_(self._rows[slot])

    def put_back(self, pairs: Integers) -> None:
        """Copy copies back to rows. `pairs`: [rows, 2] which copy, which row."""
        for copy, slot in pairs.tolist():
            assert slot >= 0
            self._rows[slot].copy_(self._copy_row(copy))

    def _copy_row(self, copy: int) -> torch.Tensor:
        # One at a time: of several, torch would make another copy meanwhile, of a gigabyte.
        return self._rows[self._num_slots + 1 + copy]

    def save(self, kv_pool: torch.Tensor, slot: int, block_ids: Sequence[int]) -> None:
        """Copy a row to blocks of the pool."""
        pool, rows = rows_of_blocks(kv_pool, block_ids)
        pool.view(torch.uint8).index_copy_(0, rows, self._rows[slot].view(len(rows), -1))

    def load(self, kv_pool: torch.Tensor, slot: int, block_ids: Sequence[int]) -> None:
        """Copy to a row what `save` has written."""
        pool, rows = rows_of_blocks(kv_pool, block_ids)
        torch.index_select(pool.view(torch.uint8), 0, rows, out=self._rows[slot].view(len(rows), -1))
