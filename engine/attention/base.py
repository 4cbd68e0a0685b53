"""The interface of attention backends: write a step's keys and values into the pool, and attend to the pool.

A backend owns its scratch memory and its plan, which it derives from a step's layout. It owns neither the pool nor the
block tables.

    once a step     plan = backend.prepare(layout)
    every layer     q = backend.project(qkv, kv, plan, heads, cos_sin); o = backend.attend(q, kv, plan, scores, sinks)
    with latents    o = backend.attend(q, latent, kv, plan, heads, cos_sin, scale), which writes, too

Shapes: T tokens of the step, S sequences of the step, N query heads, K key/value heads, H head dim; a layer of the pool
is `kv`: [block, 2, K, slot, H]. With latents: C latent dim, P rotated key dim, R = C + P, a layer is
[block, 1, 1, slot, R]; Q dim of a head's query without positions, V dim of its value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from engine.layers import CosSin, HeadProjection, LatentProjection
from engine.models.model_shape import ModelShape
from engine.models.scores import Scores

Plan = TypeVar("Plan")


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a backend must serve."""

    model: ModelShape
    device: str
    capability: tuple[int, int] | None
    """The GPU's compute capability; None without a GPU."""
    dtype: str
    kv_dtype: str
    """The pool's dtype."""
    block_size: int
    quantization: str = "none"
    has_float8_products: bool = False
    """Some layers have float8 weights with a scale per output, which torch multiplies if there are more than a few
    rows."""
    batch_invariant: bool = False

    @property
    def num_groups(self) -> int:
        """Query heads per key head."""
        return self.model.num_heads // self.model.num_kv_heads

    def of_each_shape(self) -> list[Needs]:
        """What a backend must serve for the layers of each shape of heads."""
        shapes = dict.fromkeys(self.model.head_shapes)
        return [replace(self, model=replace(self.model, **each._asdict(), head_shapes=())) for each in shapes] or [self]


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Which tokens a step computes. Tokens are flattened, sequence after sequence, decoding sequences first."""

    query_lens: NDArray[np.int64]
    """[S] tokens that each sequence computes in this step."""
    context_lens: NDArray[np.int64]
    """[S] tokens that each sequence has in the pool after this step has written its own."""
    block_tables: NDArray[np.int64]
    """[S, blocks of the longest]. Entries beyond a sequence's end repeat its first block; they are read and masked."""
    slot_mapping: NDArray[np.int64]
    """[T] where each token's KV is written: block id * block_size + slot."""
    num_decodes: int
    """The first `num_decodes` sequences compute one token each."""


class PagedBackend(ABC, Generic[Plan]):
    """The common base of backends for keys and values and of those for latents. One per engine, used only by the
    stepping thread."""

    @abstractmethod
    def prepare(self, layout: StepLayout) -> Plan:
        """Build what all layers of a step share: index tensors and masks. Valid until the next `prepare`."""

    def keep_scratch(self, num_seqs: int, max_context_len: int) -> None:
        """Allocate the scratch memory of steps in which up to `num_seqs` sequences of up to `max_context_len` tokens
        decode, and keep it. Backends whose scratch memory depends on more than that do nothing."""
        del num_seqs, max_context_len


class AttentionBackend(PagedBackend[Plan]):
    """A backend for models whose pool holds the keys and values of heads."""

    @abstractmethod
    def project(
        self,
        qkv_TX: torch.Tensor,
        kv: torch.Tensor,
        plan: Plan,
        heads: HeadProjection,
        cos_sin: CosSin,
    ) -> torch.Tensor:
        """Apply `heads` to the step's [T, (N + 2K) * H]. Writes keys and values into one layer of the pool, and returns
        the queries [T, N, H]."""

    @abstractmethod
    def attend(
        self,
        q_TNH: torch.Tensor,
        kv: torch.Tensor,
        plan: Plan,
        scores: Scores,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Let every token attend to its own sequence's tokens up to itself, including this step's: [T, N * H].

        Query heads N * i / K .. share key head i. `sinks_N`: float32, one score per query head that takes part in every
        softmax without a value, so that weights sum up to less than one (gpt-oss); for models that have sinks
        (`ModelShape.has_sinks`).
        Reads whole blocks: the slots of a sequence's last block beyond its end must hold finite numbers.
        """


class LatentBackend(PagedBackend[Plan]):
    """A backend for models whose pool holds latents, from which products compute each head's keys and values."""

    @abstractmethod
    def write(
        self, latent_TR: torch.Tensor, kv: torch.Tensor, plan: Plan, heads: LatentProjection, cos_sin: CosSin
    ) -> None:
        """Apply `heads` to the step's latents and keys [T, R] and write them into one layer of the pool."""

    @abstractmethod
    def attend(
        self,
        q_TX: torch.Tensor,
        latent_TR: torch.Tensor,
        kv: torch.Tensor,
        plan: Plan,
        heads: LatentProjection,
        cos_sin: CosSin,
        scale: float,
    ) -> torch.Tensor:
        """`write`, and then let every token, with queries [T, N * (Q + P)], attend to its own sequence's tokens up to
        itself, including this step's: [T, N, V].

        `scale`: factor of the products of queries and keys. Reads whole blocks, as `AttentionBackend` does.
        """
