"""Decides which of a step's sequences attend to latents directly (absorbed), and which to keys and values that are
computed from them first (unfolded).

    absorbed     queries are mapped to the latent space; multiplications per head: 2C + P for a query and a seen token
    unfolded     latents become keys and values of heads first; Q + P + V for a query and a token, C * (Q + V) for a
    token

DeepSeek-AI, "DeepSeek-V2", 2024 (arXiv 2405.04434), section 2.1: both give the same result. Decoding sequences are
always absorbed. Other sequences are unfolded if they compute enough tokens in the step, since all of these share the
unfolded context. Decided on the host from a step's lengths; nothing here holds a tensor.

Shapes: T tokens and S sequences of the step; C latent dim, P rotated key dim; Q dim of a head's query without
positions, V dim of its value.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.attention.base import StepLayout
from engine.models.deepseek_config import LatentConfig

UNFOLDED_BYTES = 256 << 20
"""Memory limit of unfolded keys and values at any time, unless the smallest possible piece is larger."""


@dataclass(frozen=True, slots=True)
class Unfolding:
    """When latents are unfolded, and the dimensions of the result."""

    from_tokens: int
    """A sequence is unfolded if it computes at least this many tokens in the step."""
    query_dim: int
    """Q."""
    value_dim: int
    """V."""
    max_bytes: int = UNFOLDED_BYTES

    @staticmethod
    def of(mla: LatentConfig) -> Unfolding | None:
        """Unfold from the number of tokens on that saves more arithmetic than unfolding their context costs; None:
        never.

        A prompt without earlier context would gain from its first token on, since it also saves mapping queries to the
        latent space and outputs back; but with few tokens it gains hardly anything."""
        query_dim, value_dim = mla.qk_nope_head_dim, mla.v_head_dim
        saved = 2 * mla.kv_lora_rank - query_dim - value_dim
        if saved <= 0:
            return None
        return Unfolding(-(-mla.kv_lora_rank * (query_dim + value_dim) // saved), query_dim, value_dim)


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tokens."""

    step: slice
    """Their indices among the step's tokens."""
    part: slice
    """Their indices among the part's tokens."""


@dataclass(frozen=True, slots=True)
class Part:
    """A step's absorbed sequences, or its unfolded ones."""

    layout: StepLayout
    """The layout of these sequences, as if the step had no others."""
    runs: list[Run]
    """All tokens of the part, in order. There are few runs, since unfolded sequences compute many tokens."""
    first_tokens: NDArray[np.int64]
    """[sequences of the part] where each sequence's tokens begin among the step's."""

    @property
    def num_tokens(self) -> int:
        return int(self.layout.query_lens.sum())


def unfolded_seqs(layout: StepLayout, unfolding: Unfolding | None) -> NDArray[np.bool_]:
    """[S] whether each sequence is unfolded: it does not decode and has at least `from_tokens` new tokens."""
    if unfolding is None:
        return np.zeros(len(layout.query_lens), dtype=np.bool_)
    is_long = layout.query_lens >= unfolding.from_tokens
    is_long[: layout.num_decodes] = False
    return is_long


def part_of(layout: StepLayout, is_in_S: NDArray[np.bool_]) -> Part | None:
    """The sequences for which `is_in_S` is true; None if there are none."""
    if not is_in_S.any():
        return None
    starts = np.concatenate(([0], np.cumsum(layout.query_lens)))
    runs: list[Run] = []
    # Alternately: where a run of the part's sequences begins, and where it ends.
    edges = np.flatnonzero(np.diff(is_in_S.astype(np.int8), prepend=0, append=0)).tolist()
    for first, end in zip(edges[::2], edges[1::2], strict=True):
        step = slice(int(starts[first]), int(starts[end]))
        begin = runs[-1].part.stop if runs else 0
        runs.append(Run(step, slice(begin, begin + step.stop - step.start)))
    of_part = StepLayout(
        query_lens=layout.query_lens[is_in_S],
        context_lens=layout.context_lens[is_in_S],
        block_tables=layout.block_tables[is_in_S],
        slot_mapping=np.concatenate([layout.slot_mapping[run.step] for run in runs]),
        num_decodes=int(is_in_S[: layout.num_decodes].sum()),
    )
    return Part(of_part, runs, starts[:-1][is_in_S])
