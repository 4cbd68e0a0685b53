"""Which of a step's sequences attend to latents as they are, and which to keys and values unfolded from them.

    absorbed     queries go into the space of latents; a query and a token it sees: 2C + P multiplications of a head
    unfolded     latents become keys and values of heads first; a query and a token: Q + P + V, a token: C * (Q + V)

DeepSeek-AI, "DeepSeek-V2", 2024 (arXiv 2405.04434), section 2.1: both have the same result. Sequences that decode are
always absorbed. Of others it depends on how many tokens they compute in the step, that is, how many of them see a token
that is unfolded for all. Decided from a step's lengths, on the host; nothing here holds a tensor.

Shapes: T tokens and S sequences of the step; C numbers of a latent, P of a rotated key; Q numbers of a head's query
without positions, V of its value.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.attention.base import StepLayout
from engine.models.deepseek_config import LatentConfig

UNFOLDED_BYTES = 256 << 20
"""Of keys and values of heads that are there at once, unless a piece of them as small as can be has more."""


@dataclass(frozen=True, slots=True)
class Unfolding:
    """When latents are unfolded, and to what."""

    from_tokens: int
    """As many new tokens of a sequence unfold what they see."""
    query_dim: int
    """Q."""
    value_dim: int
    """V."""
    max_bytes: int = UNFOLDED_BYTES

    @staticmethod
    def of(mla: LatentConfig) -> Unfolding | None:
        """From as many tokens on as save more arithmetic than unfolding takes what they all see; None: never.

        A prompt without context would gain from its first token on, as its queries need not be absorbed then, nor its
        outputs taken out of the space of latents; but with few tokens hardly anything."""
        query_dim, value_dim = mla.qk_nope_head_dim, mla.v_head_dim
        saved = 2 * mla.kv_lora_rank - query_dim - value_dim
        if saved <= 0:
            return None
        return Unfolding(-(-mla.kv_lora_rank * (query_dim + value_dim) // saved), query_dim, value_dim)


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens that lie side by side."""

    step: slice
    """Among the step's."""
    part: slice
    """Among the part's."""


@dataclass(frozen=True, slots=True)
class Part:
    """A step's sequences of one form."""

    layout: StepLayout
    """Of these alone, as if the step had no others."""
    runs: list[Run]
    """All their tokens, in order. There are few: what is unfolded is long."""
    first_tokens: NDArray[np.int64]
    """[sequences of the part] where the tokens of each begin among the step's."""

    @property
    def num_tokens(self) -> int:
        return int(self.layout.query_lens.sum())


def unfolded_seqs(layout: StepLayout, unfolding: Unfolding | None) -> NDArray[np.bool_]:
    """[S] whether a sequence is unfolded: one that does not decode and has as many new tokens."""
    if unfolding is None:
        return np.zeros(len(layout.query_lens), dtype=np.bool_)
    is_long = layout.query_lens >= unfolding.from_tokens
    is_long[: layout.num_decodes] = False
    return is_long


def part_of(layout: StepLayout, is_in_S: NDArray[np.bool_]) -> Part | None:
    """The sequences for which it is true; None where there are none."""
    if not is_in_S.any():
        return None
    starts = np.concatenate(([0], np.cumsum(layout.query_lens)))
    runs: list[Run] = []
    # Where a run of sequences begins, and where the next others do.
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
