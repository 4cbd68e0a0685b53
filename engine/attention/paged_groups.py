"""Groups sequences for plain torch's attention calls, and gathers a copy of the KV that each group attends to.

Owns the copy, which has the queries' dtype, whatever the pool's dtype is. Sequences of similar length form a group;
each group is one scaled-dot-product call over padded tensors. Padding at most doubles the work: sequences are sorted by
length, and one joins a group only while the group's padded area stays within `MAX_PADDING` times its useful area.

Shapes: T tokens, P parts of the pool (keys and values, or only latents), K key heads, H head dim; B sequences of a
group, L its longest query, C the slots of its gathered blocks. A layer of the pool: [block, P, K, slot, H].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.base import StepLayout
from engine.kv_cache import as_movable, rounded_for_pool
from engine.to_device import to_device

MAX_PADDING = 2.0


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences of one scaled-dot-product call."""

    num_seqs: int
    query_len: int
    """L: the longest query."""
    num_slots: int
    """C: slots gathered per sequence."""
    kv_rows: torch.Tensor
    """[P * B * K * blocks] rows of the layer viewed as [block * P * K, slot * H]."""
    token_rows: slice | torch.Tensor
    """The group's tokens among T."""
    padded_rows: torch.Tensor | None
    """[B * L] the token of each padded query (for padding, its sequence's last token); None: B = 1 or L = 1."""
    valid_rows: torch.Tensor | None
    """Which of [B * L] are tokens, in the order of `token_rows`; None: B = 1 or L = 1."""
    mask: torch.Tensor | None
    """[B, 1, L, C], added to the scores; None: causal from the first token."""

    def queries(self, q_TNH: torch.Tensor) -> torch.Tensor:
        """[T, N, H] -> [B, N, L, H]: the group's, padded."""
        rows = self.token_rows if self.padded_rows is None else self.padded_rows
        return q_TNH[rows].view(self.num_seqs, self.query_len, *q_TNH.shape[1:]).transpose(1, 2)

    def results(self, o_BNLH: torch.Tensor) -> torch.Tensor:
        """[B, N, L, H] -> [tokens of the group, N, H]: without the padding."""
        o = o_BNLH.transpose(1, 2).flatten(0, 1)
        return o if self.valid_rows is None else o[self.valid_rows]


@dataclass(slots=True)
class TorchPlan:
    layout: StepLayout
    kv_write_rows: torch.Tensor
    """[P, T * K] rows of the layer viewed as [block * P * K * slot, H]."""
    groups: dict[int, list[Group]] = field(default_factory=dict)
    """By sliding window, built at first use."""


@dataclass(frozen=True, slots=True)
class _Spans:
    """Three [S] arrays about a step's sequences."""

    first_tokens: NDArray[np.int64]
    """Where the sequence's tokens begin among T."""
    first_blocks: NDArray[np.int64]
    """The first block of the sequence's block table that its queries see."""
    num_blocks: NDArray[np.int64]
    """How many blocks its queries see."""

    @staticmethod
    def of(layout: StepLayout, window: int, block_size: int) -> _Spans:
        # The first token that the sequence's first query still sees.
        first_seen = np.maximum(layout.context_lens - layout.query_lens + 1 - window, 0) * (window > 0)
        first_blocks = first_seen // block_size
        return _Spans(
            first_tokens=np.cumsum(layout.query_lens) - layout.query_lens,
            first_blocks=first_blocks,
            num_blocks=-(-layout.context_lens // block_size) - first_blocks,
        )


class PagedGroups:
    """One per backend."""

    def __init__(self, *, num_parts: int, num_kv_heads: int, head_dim: int, block_size: int, device: str) -> None:
        self._num_parts = num_parts
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._block_size = block_size
        self._device = device
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        if torch.device(device).type == "cuda":
            # On newer GPUs torch prefers cuDNN, which builds and keeps a plan for each new shape, for some tenths of a
            # second; our shapes differ in each step. Switched off for the whole process: torch has no smaller scope,
            # since its context managers set the same global switch, which affects other threads.
            torch.backends.cuda.enable_cudnn_sdp(False)

    def prepare(self, layout: StepLayout) -> TorchPlan:
        slots = layout.slot_mapping
        block_ids, offsets = slots // self._block_size, slots % self._block_size
        parts, heads = np.arange(self._num_parts)[:, None, None], np.arange(self._num_kv_heads)
        # Row of (block, part, head, slot).
        head_rows = (block_ids[:, None] * self._num_parts + parts) * self._num_kv_heads + heads
        rows = head_rows * self._block_size + offsets[:, None]
        return TorchPlan(layout, self._tensor(rows.reshape(self._num_parts, -1)))

    def write(self, kv: torch.Tensor, parts_TKH: tuple[torch.Tensor, ...], plan: TorchPlan) -> None:
        """Write the step's tokens into a layer of the pool."""
        rows = as_movable(kv).view(-1, self._head_dim)
        for row_ids, x_TKH in zip(plan.kv_write_rows, parts_TKH, strict=True):
            rows.index_copy_(0, row_ids, as_movable(rounded_for_pool(x_TKH.reshape(-1, self._head_dim), kv.dtype)))

    def of(self, plan: TorchPlan, window: int, dtype: torch.dtype) -> list[Group]:
        """All groups of a step, for layers with sliding window `window` and queries of `dtype`."""
        if window not in plan.groups:
            plan.groups[window] = self._make_groups(plan.layout, window, dtype)
        return plan.groups[window]

    def gather(self, kv: torch.Tensor, group: Group, dtype: torch.dtype) -> torch.Tensor:
        """Gather the group's KV: [P, B, K, C, H], valid until the next call."""
        gathered = self._gather_rows(kv, group, dtype)
        return gathered.view(self._num_parts, group.num_seqs, self._num_kv_heads, group.num_slots, self._head_dim)

    def _gather_rows(self, kv: torch.Tensor, group: Group, dtype: torch.dtype) -> torch.Tensor:
        row_size = self._block_size * self._head_dim
        rows = as_movable(kv).view(-1, row_size)
        gathered = self._scratch_of(rows.dtype, group.kv_rows.numel() * row_size).view(-1, row_size)
        torch.index_select(rows, 0, group.kv_rows, out=gathered)
        if kv.dtype == dtype:
            return gathered
        return self._scratch_of(dtype, gathered.numel()).view(-1, row_size).copy_(gathered.view(kv.dtype))

    def _scratch_of(self, dtype: torch.dtype, num_values: int) -> torch.Tensor:
        # Allocating some megabytes anew for each layer would cost more in page faults than the copy itself.
        scratch = self._scratch.get(dtype)
        if scratch is None or scratch.numel() < num_values:
            scratch = self._scratch[dtype] = torch.empty(num_values, dtype=dtype, device=self._device)
        return scratch[:num_values]

    def _make_groups(self, layout: StepLayout, window: int, dtype: torch.dtype) -> list[Group]:
        spans = _Spans.of(layout, window, self._block_size)
        decodes = np.arange(layout.num_decodes)
        prefills = np.arange(layout.num_decodes, len(layout.query_lens))
        return [
            self._make_group(layout, np.sort(members), spans, window, dtype)
            for candidates in (decodes, prefills)
            for members in split_by_padding(candidates, layout.query_lens, spans.num_blocks)
        ]

    def _make_group(
        self, layout: StepLayout, members: NDArray[np.int64], spans: _Spans, window: int, dtype: torch.dtype
    ) -> Group:
        query_lens, context_lens = layout.query_lens[members], layout.context_lens[members]
        first_blocks, max_blocks = spans.first_blocks[members], int(spans.num_blocks[members].max())
        B, L, C = len(members), int(query_lens.max()), max_blocks * self._block_size
        steps_BL = np.minimum(np.arange(L), query_lens[:, None] - 1)  # a padded query repeats the last one
        is_token_BL = np.arange(L) < query_lens[:, None]
        rows_BL = spans.first_tokens[members][:, None] + steps_BL
        are_neighbours = members[-1] - members[0] + 1 == B
        needs_padding = B > 1 and L > 1
        mask = None
        is_whole_prompts = bool((query_lens == context_lens).all()) and (not window or context_lens.max() <= window)
        if L == 1 or not is_whole_prompts:
            positions_BL = (context_lens - query_lens)[:, None] + steps_BL
            slot_positions_BC = first_blocks[:, None] * self._block_size + np.arange(C)
            mask = self._mask(positions_BL, slot_positions_BC, window, dtype)
        return Group(
            num_seqs=B,
            query_len=L,
            num_slots=C,
            kv_rows=self._tensor(self._kv_rows(layout.block_tables[members], first_blocks, max_blocks)),
            token_rows=slice(rows_BL[0, 0], rows_BL[-1, -1] + 1)
            if are_neighbours
            else self._tensor(rows_BL[is_token_BL]),
            padded_rows=self._tensor(rows_BL.reshape(-1)) if needs_padding else None,
            valid_rows=self._tensor(np.flatnonzero(is_token_BL)) if needs_padding else None,
            mask=mask,
        )

    def _kv_rows(
        self, block_tables: NDArray[np.int64], first_blocks: NDArray[np.int64], max_blocks: int
    ) -> NDArray[np.int64]:
        """See `Group.kv_rows`. Beyond a shorter sequence's end, its own blocks repeat (see `StepLayout`): they are
        finite and masked."""
        columns = np.minimum(first_blocks[:, None] + np.arange(max_blocks), block_tables.shape[1] - 1)
        blocks = np.take_along_axis(block_tables, columns, axis=1)[:, None]
        heads = np.arange(self._num_kv_heads)[:, None]
        parts = range(self._num_parts)
        return np.stack([(blocks * self._num_parts + part) * self._num_kv_heads + heads for part in parts]).reshape(-1)

    def _mask(
        self,
        positions_BL: NDArray[np.int64],
        slot_positions_BC: NDArray[np.int64],
        window: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        # Compare instead of subtracting: distances would take 8 bytes for each pair of a long context.
        last_BL1, slot_B1C = self._tensor(positions_BL)[:, :, None], self._tensor(slot_positions_BC)[:, None, :]
        is_hidden = slot_B1C > last_BL1
        if window:
            is_hidden |= slot_B1C <= last_BL1 - window
        mask = torch.zeros(is_hidden.shape, dtype=dtype, device=self._device)
        return mask.masked_fill_(is_hidden, float("-inf")).unsqueeze(1)

    def _tensor(self, array: NDArray[np.int64]) -> torch.Tensor:
        return to_device(np.ascontiguousarray(array), self._device)


def in_token_order(groups: list[Group], num_tokens: int, compute: Callable[[Group], torch.Tensor]) -> torch.Tensor:
    """Assemble [T, ...] from the groups' results: `compute` returns [tokens of the group, ...]."""
    if len(groups) == 1 and isinstance(groups[0].token_rows, slice):
        return compute(groups[0])
    o: torch.Tensor | None = None
    for group in groups:
        of_group = compute(group)
        o = of_group.new_empty(num_tokens, *of_group.shape[1:]) if o is None else o
        o[group.token_rows] = of_group
    assert o is not None
    return o


def split_by_padding(
    candidates: NDArray[np.int64], query_lens: NDArray[np.int64], num_blocks: NDArray[np.int64]
) -> list[NDArray[np.int64]]:
    """Split `candidates` (indices of sequences) into groups with at most `MAX_PADDING` times the useful work.

    Work is queries times blocks; a group pads every member to its longest query and its most blocks.
    """
    groups: list[NDArray[np.int64]] = []
    order = candidates[np.lexsort((query_lens[candidates], num_blocks[candidates]))[::-1]]
    first, useful, max_query, max_blocks = 0, 0, 0, 0
    for i, member in enumerate(order):
        query, blocks = int(query_lens[member]), int(num_blocks[member])
        useful += query * blocks
        max_query, max_blocks = max(max_query, query), max(max_blocks, blocks)
        if max_query * max_blocks * (i - first + 1) > MAX_PADDING * useful:
            groups.append(order[first:i])
            first, useful, max_query, max_blocks = i, query * blocks, query, blocks
    if len(order):
        groups.append(order[first:])
    return groups
