"""One step in integers: all that a device needs to know of what the scheduler decided.

    SchedulerOutput ──StepInput.of──> StepInput ──build_input_batch──> InputBatch, on the device

Owns its arrays, on the host. Made from sequences, which it only reads, and knows none of them after: whoever computes
the model needs no sequence, only whoever samples does.

Shapes: T tokens, S sequences, R rows that are sampled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.attention import StepLayout
from engine.scheduling.sequence import PENDING_TOKEN, SchedulerOutput

Integers = NDArray[np.int64]
_NUM_ARRAYS = 12
_HAS_ONE_AXIS = -1


@dataclass(frozen=True, slots=True)
class StepInput:
    token_ids: Integers
    """[T] PENDING_TOKEN where the step before samples it, and only the device knows."""
    positions: Integers
    """[T] each token's place in its own sequence"""
    layout: StepLayout
    sample_rows: Integers
    """[R] rows of T whose logits are sampled, in the order of `SchedulerOutput.sampled_seqs`."""
    pending_rows: Integers
    """Rows of T whose tokens are pending."""
    rows_before: Integers
    """For each of them, where its token stands among those that the step before samples."""
    prompt_rows: Integers
    """[prompts that ask, 2] the first of a prompt's rows whose logits are looked at, and how many these are."""
    begun_blocks: Integers
    """Blocks that this step begins to fill and leaves partly empty."""
    adapter_ids: Integers
    """[T] the adapter that computes each, 0 where none does; [0] where none computes any."""
    has_exports: bool
    """Somebody is told of each layer as it is written."""

    @staticmethod
    def of(output: SchedulerOutput, block_size: int, row_of: Mapping[int, int]) -> StepInput:
        """Each block table must cover its sequence's new tokens. `row_of`: of the step launched last, which samples the
        tokens that are still pending: by `seq_id`, where."""
        token_ids: list[int] = []
        begun_blocks: list[int] = []
        sample_rows: list[int] = []
        pending_rows: list[int] = []
        rows_before: list[int] = []
        prompt_rows: list[tuple[int, int]] = []
        tables: list[list[int]] = []
        for item in output.scheduled:
            seq, first, end = item.seq, item.first, item.end
            if asked := item.prompt_positions:
                prompt_rows.append((len(token_ids) + asked.start - first, len(asked)))
            token_ids += item.token_ids
            if token_ids[-1] == PENDING_TOKEN:
                pending_rows.append(len(token_ids) - 1)
                rows_before.append(row_of[seq.seq_id])
            tables.append(seq.block_table[: -(-end // block_size)])
            if first <= (begun := end // block_size) * block_size < end:
                begun_blocks.append(seq.block_table[begun])
            sample_rows += range(len(token_ids) - item.num_sampled, len(token_ids))
        firsts = _integers([item.first for item in output.scheduled])
        query_lens = _integers([item.num_new_tokens for item in output.scheduled])
        lora_ids = _integers([item.seq.lora_id for item in output.scheduled])
        positions, layout = _lay_out(firsts, query_lens, tables, block_size)
        return StepInput(
            token_ids=_integers(token_ids),
            positions=positions,
            layout=layout,
            sample_rows=_integers(sample_rows),
            pending_rows=_integers(pending_rows),
            rows_before=_integers(rows_before),
            prompt_rows=_integers(prompt_rows).reshape(-1, 2),
            begun_blocks=_integers(begun_blocks),
            adapter_ids=np.repeat(lora_ids, query_lens) if lora_ids.any() else lora_ids[:0],
            has_exports=bool(output.exports),
        )

    def to_bytes(self) -> bytes:
        """For a process that runs the same code: see `from_bytes`."""
        arrays = self._arrays()
        shapes = [array.shape if array.ndim == 2 else (len(array), _HAS_ONE_AXIS) for array in arrays]
        header = [self.layout.num_decodes, self.has_exports, *chain.from_iterable(shapes)]
        return np.concatenate([_integers(header), *map(np.ravel, arrays)]).tobytes()

    @staticmethod
    def from_bytes(data: bytes | memoryview) -> StepInput:
        """What `to_bytes` was called on. Nothing is checked."""
        numbers = np.frombuffer(bytearray(data), dtype=np.int64)
        num_decodes, has_exports, *sizes = numbers[: 2 + 2 * _NUM_ARRAYS].tolist()
        arrays: list[Any] = []
        start = 2 + 2 * _NUM_ARRAYS
        for length, width in zip(sizes[::2], sizes[1::2], strict=True):
            shape = (length,) if width == _HAS_ONE_AXIS else (length, width)
            end = start + math.prod(shape)
            arrays.append(numbers[start:end].reshape(shape))
            start = end
        query_lens, context_lens, tables, slots, token_ids, positions, *lists = arrays
        layout = StepLayout(query_lens, context_lens, tables, slots, num_decodes)
        sampled, pending, before, prompts, begun, adapters = lists
        return StepInput(
            token_ids, positions, layout, sampled, pending, before, prompts, begun, adapters, bool(has_exports)
        )

    def _arrays(self) -> tuple[Integers, ...]:
        """The layout's and its own, each in the order of the fields."""
        layout = self.layout
        return (
            layout.query_lens, layout.context_lens, layout.block_tables, layout.slot_mapping,
            self.token_ids, self.positions, self.sample_rows, self.pending_rows, self.rows_before, self.prompt_rows,
            self.begun_blocks, self.adapter_ids,
        )  # fmt: skip


def _lay_out(
    firsts: Integers, query_lens: Integers, tables: Sequence[Sequence[int]], block_size: int
) -> tuple[Integers, StepLayout]:
    """Each token's position, and where sequences lie that compute so many tokens from those positions on."""
    num_seqs = len(tables)
    seq_of_token = np.repeat(np.arange(num_seqs), query_lens)
    positions = np.arange(len(seq_of_token)) + (firsts - np.cumsum(query_lens) + query_lens)[seq_of_token]
    block_tables = np.empty((num_seqs, max(map(len, tables), default=0)), dtype=np.int64)
    for row, table in zip(block_tables, tables, strict=True):
        row[: len(table)] = table
        row[len(table) :] = table[0]
    slot_mapping = block_tables[seq_of_token, positions // block_size] * block_size + positions % block_size
    # A prefilling sequence's single-token chunk is one query too, but only the leading run may be batched as decodes.
    is_longer = query_lens > 1
    layout = StepLayout(
        query_lens=query_lens,
        context_lens=firsts + query_lens,
        block_tables=block_tables,
        slot_mapping=slot_mapping,
        num_decodes=int(is_longer.argmax()) if is_longer.any() else num_seqs,
    )
    return positions, layout


def _integers(values: Sequence[object]) -> Integers:
    return np.array(values, dtype=np.int64)
