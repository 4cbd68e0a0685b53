"""One step as integers: everything that the model runner needs from the scheduler's decision.

    SchedulerOutput ──StepInput.of──> StepInput ──build_input_batch──> InputBatch, on the device

Owns its arrays, on the host. It is built from sequences, but keeps no reference to them: only the sampler needs
sequences, computing the model does not.

A sequence with drafts may be laid out as several, one for each of its tokens, which share its blocks. Each attends to
those before it, since a layer writes all keys and values before any token attends. So a step of drafts is a step in
which every sequence decodes, which a recording can compute.

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
_NUM_ARRAYS = 18
_HAS_ONE_AXIS = -1


@dataclass(frozen=True, slots=True)
class StepInput:
    token_ids: Integers
    """[T]; PENDING_TOKEN if the previous step samples the token, which only the device knows yet."""
    positions: Integers
    """[T] each token's position in its sequence"""
    layout: StepLayout
    sample_rows: Integers
    """[R] rows of T whose logits are sampled, in the order of `SchedulerOutput.sampled_seqs`."""
    pending_rows: Integers
    """Rows of T whose tokens are pending."""
    rows_before: Integers
    """For each of these rows, the index of its token among those that the previous step samples."""
    prompt_rows: Integers
    """[prompts that ask for logprobs, 2] the first row of a prompt whose logits are needed, and the number of rows."""
    begun_blocks: Integers
    """Blocks that this step begins to fill and leaves partly empty."""
    adapter_ids: Integers
    """[T] each token's adapter, 0 for none; shape [0] if no token has one."""
    state_slots: Integers
    """[S] each sequence's row of the recurrent states, NO_SLOT for none; shape [0] for models without such states."""
    loaded_states: Integers
    """[states to load before the step, 1 + blocks] a row, and the blocks that carry its content."""
    saved_states: Integers
    """[states to save after the step, 1 + blocks] likewise."""
    restored_states: Integers
    """[states to put back before the step, 2] a copy, and a row."""
    kept_states: Integers
    """[C] rows of which the step keeps a copy, 0 to C - 1, as they are before it."""
    feature_rows: Integers
    """[T] where the feature of the token before each is (engine/running/feature_rows.py); shape [0] if no EAGLE-3 head
    reads the step."""
    has_exports: bool
    """`on_layer_written` is called for each layer of this step."""

    @staticmethod
    def of(
        output: SchedulerOutput,
        block_size: int,
        row_of: Mapping[int, int],
        max_tokens_read_again: int = 0,
        *,
        has_states: bool = False,
    ) -> StepInput:
        """Each block table must cover its sequence's new tokens. `row_of`: by `seq_id`, the index of a pending token
        among those that the last launched step samples. `max_tokens_read_again`: each draft is laid out as a sequence
        of its own if attention then reads the keys and values of at most so many tokens more than once. `has_states`:
        the model has recurrent states, which read a sequence's tokens in order."""
        token_ids: list[int] = []
        begun_blocks: list[int] = []
        sample_rows: list[int] = []
        pending_rows: list[int] = []
        rows_before: list[int] = []
        prompt_rows: list[tuple[int, int]] = []
        firsts: list[int] = []
        query_lens: list[int] = []
        lora_ids: list[int] = []
        tables: list[list[int]] = []
        num_read_again = sum(item.end * len(item.draft_token_ids) for item in output.scheduled)
        for item in output.scheduled:
            seq, first, end = item.seq, item.first, item.end
            if asked := item.prompt_positions:
                prompt_rows.append((len(token_ids) + asked.start - first, len(asked)))
            token_ids += item.token_ids
            if token_ids[-1] == PENDING_TOKEN:
                pending_rows.append(len(token_ids) - 1)
                rows_before.append(row_of[seq.seq_id])
            is_split = item.draft_token_ids and not has_states and num_read_again <= max_tokens_read_again
            num_queries = 1 if is_split else item.num_new_tokens
            for start in range(first, end, num_queries):
                firsts.append(start)
                query_lens.append(num_queries)
                lora_ids.append(seq.lora_id)
                tables.append(seq.block_table[: -(-(start + num_queries) // block_size)])
            if first <= (begun := end // block_size) * block_size < end:
                begun_blocks.append(seq.block_table[begun])
            sample_rows += range(len(token_ids) - item.num_sampled, len(token_ids))
        saved = [[each.state_slot, *each.blocks.block_ids] for each in output.state_exports]
        saved += [[item.seq.state_slot, *item.snapshot_ids] for item in output.scheduled if item.snapshot_ids]
        loading = [item.seq for item in output.scheduled if item.seq.has_state_to_load]
        loaded = [[seq.state_slot, *seq.loaded_state_ids] for seq in loading]
        positions, layout = _lay_out(_integers(firsts), _integers(query_lens), tables, block_size)
        return StepInput(
            token_ids=_integers(token_ids),
            positions=positions,
            layout=layout,
            sample_rows=_integers(sample_rows),
            pending_rows=_integers(pending_rows),
            rows_before=_integers(rows_before),
            prompt_rows=_integers(prompt_rows).reshape(-1, 2),
            begun_blocks=_integers(begun_blocks),
            adapter_ids=np.repeat(_integers(lora_ids), query_lens) if any(lora_ids) else _integers([]),
            state_slots=_integers([item.seq.state_slot for item in output.scheduled] if has_states else []),
            loaded_states=_table(loaded),
            saved_states=_table(saved),
            restored_states=_integers([(each.copy, each.state_slot) for each in output.put_back]).reshape(-1, 2),
            kept_states=_integers(
                [item.seq.state_slot for item in output.scheduled if item.draft_token_ids] if has_states else []
            ),
            feature_rows=_integers([]),
            has_exports=bool(output.exports or output.state_exports),
        )

    @property
    def samples_all(self) -> bool:
        """Whether all rows of T are sampled."""
        return len(self.sample_rows) == len(self.token_ids)

    def to_bytes(self) -> bytes:
        """Serialize for a process that runs the same code: see `from_bytes`."""
        arrays = self._arrays()
        shapes = [array.shape if array.ndim == 2 else (len(array), _HAS_ONE_AXIS) for array in arrays]
        header = [self.layout.num_decodes, self.has_exports, *chain.from_iterable(shapes)]
        return np.concatenate([_integers(header), *map(np.ravel, arrays)]).tobytes()

    @staticmethod
    def from_bytes(data: bytes | memoryview) -> StepInput:
        """Inverse of `to_bytes`. Nothing is checked."""
        numbers = np.frombuffer(bytearray(data), dtype=np.int64)
        num_decodes, has_exports, *sizes = numbers[: 2 + 2 * _NUM_ARRAYS].tolist()
        arrays: list[Any] = []
        start = 2 + 2 * _NUM_ARRAYS
        for length, width in zip(sizes[::2], sizes[1::2], strict=True):
            shape = (length,) if width == _HAS_ONE_AXIS else (length, width)
            end = start + math.prod(shape)
            arrays.append(numbers[start:end].reshape(shape))
            start = end
        layout = StepLayout(*(*arrays[:4], num_decodes))  # see `_arrays`
        return StepInput(*(*arrays[4:6], layout, *arrays[6:], bool(has_exports)))

    def _arrays(self) -> tuple[Integers, ...]:
        """The layout's arrays, then its own, in the order of the fields."""
        layout = self.layout
        return (
            layout.query_lens, layout.context_lens, layout.block_tables, layout.slot_mapping,
            self.token_ids, self.positions, self.sample_rows, self.pending_rows, self.rows_before, self.prompt_rows,
            self.begun_blocks, self.adapter_ids, self.state_slots, self.loaded_states, self.saved_states,
            self.restored_states, self.kept_states, self.feature_rows,
        )  # fmt: skip


def _lay_out(
    firsts: Integers, query_lens: Integers, tables: Sequence[Sequence[int]], block_size: int
) -> tuple[Integers, StepLayout]:
    """Each token's position, and the layout of sequences that compute `query_lens` tokens from positions `firsts`
    on."""
    num_seqs = len(tables)
    seq_of_token = np.repeat(np.arange(num_seqs), query_lens)
    positions = np.arange(len(seq_of_token)) + (firsts - np.cumsum(query_lens) + query_lens)[seq_of_token]
    block_tables = np.empty((num_seqs, max(map(len, tables), default=0)), dtype=np.int64)
    for row, table in zip(block_tables, tables, strict=True):
        row[: len(table)] = table
        row[len(table) :] = table[0]
    slot_mapping = block_tables[seq_of_token, positions // block_size] * block_size + positions % block_size
    # A prompt's chunk of a single token is one query, too, but only the leading sequences may be batched as decodes.
    is_longer = query_lens > 1
    layout = StepLayout(
        query_lens=query_lens,
        context_lens=firsts + query_lens,
        block_tables=block_tables,
        slot_mapping=slot_mapping,
        num_decodes=int(is_longer.argmax()) if is_longer.any() else num_seqs,
    )
    return positions, layout


def _table(rows: Sequence[Sequence[int]]) -> Integers:
    """Rows of equal lengths, at least one number each; shape [0, 1] if there are none."""
    return np.array(rows, dtype=np.int64) if rows else np.empty((0, 1), dtype=np.int64)


def _integers(values: Sequence[object]) -> Integers:
    return np.array(values, dtype=np.int64)
