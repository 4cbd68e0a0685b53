"""The interface of attention backends: write a step's keys and values into the pool, attend to what is there.

A backend owns what it derives from one step's layout (its plan) and its scratch memory. It owns neither the pool nor
the block tables.

    once a step     plan = backend.prepare(layout)
    every layer     q = backend.project(qkv, kv, plan, heads, cos_sin); o = backend.attend(q, kv, plan, scores, sinks)
    with latents    o = backend.attend(q, latent, kv, plan, heads, cos_sin, scale)

Shapes: T tokens of the step, S sequences of the step, N query heads, K key/value heads, H head dim; a layer of the pool
is `kv`: [block, 2, K, slot, H]. With latents, C numbers of one, P of a rotated key, R = C + P: [block, 1, 1, slot, R];
Q numbers of a head's query without positions, V of its value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from engine.layers import HeadProjection, LatentProjection
from engine.models.model_shape import ModelShape
from engine.models.scores import Scores

Plan = TypeVar("Plan")


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a backend has to serve."""

    model: ModelShape
    device: str
    capability: tuple[int, int] | None
    """The GPU's, None without one."""
    dtype: str
    kv_dtype: str
    """Of the pool."""
    block_size: int
    quantization: str = "none"
    has_float8_products: bool = False
    """Of layers, some of them, with a scale for each output: by torch, where there are more than a few rows."""
    batch_invariant: bool = False

    @property
    def num_groups(self) -> int:
        """Query heads per key head."""
        return self.model.num_heads // self.model.num_kv_heads


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Which tokens a step computes. Tokens lie flat, sequence after sequence, decoding sequences first."""

    query_lens: NDArray[np.int64]
    """[S] tokens that each sequence computes in this step."""
    context_lens: NDArray[np.int64]
    """[S] tokens that each sequence has in the pool once this step has written its own."""
    block_tables: NDArray[np.int64]
    """[S, blocks of the longest]. Entries beyond a sequence's end repeat its first block: they are read and masked."""
    slot_mapping: NDArray[np.int64]
    """[T] where each token's KV is written: block id * block_size + slot."""
    num_decodes: int
    """The first so many sequences compute one token each."""


class PagedBackend(ABC, Generic[Plan]):
    """What backends for keys and values and those for latents have in common. Made once per engine. Used by the
    stepping thread alone."""

    @abstractmethod
    def prepare(self, layout: StepLayout) -> Plan:
        """What all layers of a step share: index tensors and masks. Valid until the next `prepare`."""

    def keep_scratch(self, num_seqs: int, max_context_len: int) -> None:
        """Have from now on what memory steps take in which so many sequences decode, none longer. Only where that
        follows from these; else a step takes its own."""
        del num_seqs, max_context_len


class AttentionBackend(PagedBackend[Plan]):
    """Of models whose pool holds keys and values of heads."""

    @abstractmethod
    def project(
        self,
        qkv_TX: torch.Tensor,
        kv: torch.Tensor,
        plan: Plan,
        heads: HeadProjection,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """What `heads` makes of the step's [T, (N + 2K) * H]: keys and values go into one layer of the pool, the
        queries [T, N, H] are returned."""

    @abstractmethod
    def attend(
        self,
        q_TNH: torch.Tensor,
        kv: torch.Tensor,
        plan: Plan,
        scores: Scores,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of every token to its own sequence's tokens up to itself, this step's included: [T, N * H].

        Query heads N * i / K .. share key head i. `sinks_N`: float32, of each query head a score that takes part in
        every softmax and has no value, so that weights sum up to less than one (gpt-oss); for models that have them
        (`ModelShape.has_sinks`).
        Reads whole blocks: slots of a sequence's last block beyond its end must hold finite numbers.
        """


class LatentBackend(PagedBackend[Plan]):
    """Of models whose pool holds latents, from which a head's keys and values follow by products."""

    @abstractmethod
    def attend(
        self,
        q_TX: torch.Tensor,
        latent_TR: torch.Tensor,
        kv: torch.Tensor,
        plan: Plan,
        heads: LatentProjection,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        scale: float,
    ) -> torch.Tensor:
        """What `heads` makes of the step's latents and keys [T, R] goes into one layer of the pool. Then attention of
        every token, by its heads' queries [T, N * (Q + P)], to its own sequence's tokens up to itself, this step's
        included: [T, N, V].

        `scale`: what products of queries and keys are multiplied with. Reads whole blocks, as `AttentionBackend` does.
        """
