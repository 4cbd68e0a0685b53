"""Our attention in transformers' code: over the paged pool, within each sequence of a step.

    PagedStep.begin ──> module's forward ──(q, k, v)──> PagedAttention.attend ──> o, back in transformers' code ──> end

Shapes: T tokens, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from engine.attention import AttentionBackend
from engine.layers import CosSin, HeadProjection
from engine.models.layer import OnLayer
from engine.models.rotations import cos_sin_of, in_halves
from engine.models.scores import Rotation, Scores
from engine.models.share import Share
from engine.models.transformers_probe import SINKS

PAGED = "tandem_paged"
"""The name of our attention in transformers. No mask is registered under this name, so that none is built."""


class _Attention(Protocol):
    """The type of `tandem_attention`, an attribute of modules that attend."""

    def attend(
        self, q_1NTH: torch.Tensor, k_1KTH: torch.Tensor, v_1KTH: torch.Tensor, sinks_N: torch.Tensor | None
    ) -> torch.Tensor:
        """[1, T, N, H]"""


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None = None,
    **arguments: object,
) -> tuple[torch.Tensor, None]:
    del attention_mask  # the probe has checked it, and all other arguments
    attention: _Attention = module.tandem_attention
    sinks: Any = arguments.get(SINKS)
    return attention.attend(query, key, value, sinks), None


AttentionInterface.register(PAGED, _attend)


@dataclass(slots=True)
class PagedStep:
    """What the layers of a step share."""

    plan: Any = None
    kv_pool: torch.Tensor | None = None
    on_layer: OnLayer | None = None
    num_attended: int = 0
    written: int | None = None
    """The layer that was written last and not told of yet: with several ranks, it may be told of once an exchange among
    these follows its writes, as those of its heads, projection and feed-forward do."""
    to_rotate: tuple[torch.Tensor, ...] = ()
    """Queries and keys of the next attention, and the tables by which transformers' code would have rotated them."""
    cos_sin: dict[tuple[Rotation, int, int], tuple[CosSin, torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """By the tables' ids, which are kept, too, so that no others have these ids."""

    def begin(self, plan: Any, kv_pool: torch.Tensor, on_layer: OnLayer | None) -> None:
        self.plan, self.kv_pool, self.on_layer, self.num_attended = plan, kv_pool, on_layer, 0
        self.written = None

    def tell_written(self) -> None:
        """The next layer begins, or the last one has ended."""
        if self.on_layer is not None and self.written is not None:
            self.on_layer(self.written)
        self.written = None

    def end(self) -> None:
        self.tell_written()
        self.plan = self.kv_pool = self.on_layer = None
        self.cos_sin.clear()

    def rotate_later(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **_named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """In place of transformers' function that rotates."""
        self.to_rotate = (q, k, cos, sin)
        return q, k

    def tables_for(self, rotation: Rotation, q: torch.Tensor, k: torch.Tensor) -> tuple[CosSin, int]:
        """By which to rotate what a module attends with, and the size of transformers' tables."""
        q_before, k_before, cos, sin = self.to_rotate
        is_same = q is q_before and k is k_before
        assert is_same, "transformers' code took another way than it was seen to take"
        key = (rotation, id(cos), id(sin))
        if key not in self.cos_sin:
            self.cos_sin[key] = (cos_sin_of(rotation, cos, sin), cos, sin)
        self.to_rotate = ()
        return self.cos_sin[key][0], cos.shape[-1]


@dataclass(frozen=True, slots=True)
class PagedAttention:
    number: int
    """Among the modules that attend."""
    layer: int
    """Of the pool."""
    has_own_keys: bool
    """Otherwise an earlier module of the step has written the layer."""
    scores: Scores
    rotation: Rotation | None
    """Of queries and keys that come unrotated."""
    backend: AttentionBackend[Any]
    heads: HeadProjection
    step: PagedStep
    share: Share | None

    def attend(
        self, q_1NTH: torch.Tensor, k_1KTH: torch.Tensor, v_1KTH: torch.Tensor, sinks_N: torch.Tensor | None
    ) -> torch.Tensor:
        step = self.step
        assert step.kv_pool is not None
        assert step.num_attended == self.number, "transformers' code took another way than it was seen to take"
        step.tell_written()
        kv = step.kv_pool[self.layer]
        _, num_heads, num_tokens, head_dim = q_1NTH.shape
        if self.rotation is not None:
            cos_sin, table_size = step.tables_for(self.rotation, q_1NTH, k_1KTH)
            q_1NTH, k_1KTH = (in_halves(self.rotation, x, table_size) for x in (q_1NTH, k_1KTH))
        else:
            none_T10 = q_1NTH.new_empty(num_tokens, 1, 0)
            cos_sin = (none_T10, none_T10)
        if self.share is not None:
            q_1NTH = self.share.own_heads(q_1NTH, self.heads.num_heads)
            k_1KTH, v_1KTH = (self.share.own_heads(x, self.heads.num_kv_heads) for x in (k_1KTH, v_1KTH))
            if sinks_N is not None:
                sinks_N = self.share.own_heads(sinks_N[None], self.heads.num_heads)[0]
        if self.has_own_keys:
            qkv_1TXH = torch.cat([x.transpose(1, 2) for x in (q_1NTH, k_1KTH, v_1KTH)], dim=2)
            q_TNH = self.backend.project(qkv_1TXH.reshape(num_tokens, -1), kv, step.plan, self.heads, cos_sin)
        else:
            q_TNH = q_1NTH[0].transpose(0, 1).contiguous()
        sinks_N = None if sinks_N is None else sinks_N.float()
        o_TX = self.backend.attend(q_TNH, kv, step.plan, self.scores, sinks_N)
        step.num_attended += 1
        step.written = self.layer if self.has_own_keys else None
        if self.share is not None and num_heads > self.heads.num_heads:
            o_TX = self.share.all_heads(o_TX, num_heads * head_dim)
        return o_TX.view(1, num_tokens, num_heads, head_dim)


class ToItself:
    """Lets no token see another. The result also depends on queries and keys, so that wrong positions show."""

    def attend(
        self, q_1NTH: torch.Tensor, k_1KTH: torch.Tensor, v_1KTH: torch.Tensor, sinks_N: torch.Tensor | None
    ) -> torch.Tensor:
        del sinks_N
        num_groups = q_1NTH.shape[1] // k_1KTH.shape[1]
        return (q_1NTH + (k_1KTH + v_1KTH).repeat_interleave(num_groups, dim=1)).transpose(1, 2)
