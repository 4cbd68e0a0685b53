"""One step's arrays, built from what the scheduler decided.

Owns the step's tensors: made by `build_input_batch`, read by the model and the attention backend, dropped at the end of
the step. Reads sequences and never changes them.

Shapes: T tokens, S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.attention import StepLayout
from engine.sampled_tokens import SampledTokens
from engine.sequence import PENDING_TOKEN, SchedulerOutput, Sequence
from engine.to_device import to_device


@dataclass(frozen=True, slots=True)
class InputBatch:
    token_ids: torch.Tensor
    """[T] int64"""
    positions: torch.Tensor
    """[T] int64, each token's place in its own sequence"""
    layout: StepLayout
    sample_rows: torch.Tensor | None
    """Rows of T whose logits are sampled, in the order of `sampling_seqs`; None: all, in order."""
    sampling_seqs: list[Sequence]
    begun_blocks: list[int]
    """Blocks that this step begins to fill and leaves partly empty."""

    @property
    def last_token_ids(self) -> torch.Tensor:
        """[sampling sequences] each one's last token, which it may be that only the device knows."""
        return self.token_ids if self.sample_rows is None else self.token_ids[self.sample_rows]


def build_input_batch(
    output: SchedulerOutput, block_size: int, device: str, before: SampledTokens | None = None
) -> InputBatch:
    """`output.scheduled` must not be empty, and each block table must cover its sequence's new tokens.

    `before`: of the step launched last, which samples the tokens that are still pending.
    """
    scheduled = output.scheduled
    token_ids: list[int] = []
    begun_blocks: list[int] = []
    sampling_seqs: list[Sequence] = []
    sample_rows: list[int] = []
    pending_rows: list[int] = []
    rows_before: list[int] = []
    num_seqs = len(scheduled)
    computed = np.empty(num_seqs, dtype=np.int64)
    query_lens = np.empty(num_seqs, dtype=np.int64)
    tables: list[list[int]] = []
    for i, item in enumerate(scheduled):
        seq, first, end = item.seq, item.first, item.end
        computed[i], query_lens[i] = first, item.num_new_tokens
        token_ids += item.token_ids
        if token_ids[-1] == PENDING_TOKEN:
            assert before is not None
            pending_rows.append(len(token_ids) - 1)
            rows_before.append(before.row_of[seq.seq_id])
        tables.append(seq.block_table[: -(-end // block_size)])
        if end % block_size and first <= end - end % block_size:
            begun_blocks.append(seq.block_table[end // block_size])
        sampling_seqs += item.sampled_seqs
        sample_rows += range(len(token_ids) - item.num_sampled, len(token_ids))

    num_tokens = len(token_ids)
    seq_of_token = np.repeat(np.arange(num_seqs), query_lens)
    positions = np.arange(num_tokens) + (computed - np.cumsum(query_lens) + query_lens)[seq_of_token]
    block_tables = np.empty((num_seqs, max(map(len, tables))), dtype=np.int64)
    for row, table in zip(block_tables, tables, strict=True):
        row[: len(table)] = table
        row[len(table) :] = table[0]
    slot_mapping = block_tables[seq_of_token, positions // block_size] * block_size + positions % block_size
    # A prefilling sequence's single-token chunk is one query too, but only the leading run may be batched as decodes.
    is_longer = query_lens > 1
    layout = StepLayout(
        query_lens=query_lens,
        context_lens=computed + query_lens,
        block_tables=block_tables,
        slot_mapping=slot_mapping,
        num_decodes=int(is_longer.argmax()) if is_longer.any() else num_seqs,
    )
    # As one array: each copy to a device takes its time there.
    parts = [np.asarray(p, dtype=np.int64) for p in (token_ids, positions, sample_rows, pending_rows, rows_before)]
    on_device = torch.split(to_device(np.concatenate(parts), device), [len(part) for part in parts])
    ids_T, positions_T, sample_rows_S, pending_rows_P, rows_before_P = on_device
    if pending_rows:
        assert before is not None
        assert before.on_device is not None
        # A sequence whose token turns out to be none fails, whatever is computed for it here: any id will do.
        ids_T.index_copy_(0, pending_rows_P, before.on_device[rows_before_P].clamp_min(0))
    return InputBatch(
        token_ids=ids_T,
        positions=positions_T,
        layout=layout,
        sample_rows=None if len(sample_rows) == num_tokens else sample_rows_S,
        sampling_seqs=sampling_seqs,
        begun_blocks=begun_blocks,
    )
