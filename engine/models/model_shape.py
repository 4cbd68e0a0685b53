"""What an engine must know about a model, whichever implementation computes it. Integers only, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from engine.models.deepseek_config import LatentConfig
from engine.models.experts_config import ExpertsConfig
from engine.models.head_shape import HeadShape
from engine.models.recurrent_shape import RecurrentLayer


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Two models have equal shapes exactly if they differ only in their weights."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    """Key heads in the pool: 1 with latent attention."""
    head_dim: int
    """Dim of a key in the pool; with latent attention, of everything that a token has there."""
    max_positions: int
    why_no_more_positions: str = ""
    """Why `max_positions` is less than config.json's `max_position_embeddings`, as a clause; empty if it is not."""
    mla: LatentConfig | None = None
    """None: the pool holds keys and values of heads."""
    moe: ExpertsConfig | None = None

    head_shapes: tuple[HeadShape, ...] = ()
    """Of each module that attends, if they differ; the fields above then describe the pool
    (engine/models/head_shape.py)."""
    recurrent_layers: tuple[RecurrentLayer, ...] = ()
    """Layers that keep a state in place of keys and values. They are not among the `num_layers` of the pool."""

    @property
    def model_impl(self) -> str:
        """Which implementation computes the model: "tandem" or "transformers"."""
        return "tandem"

    @property
    def num_decoder_layers(self) -> int:
        """Layers of the model, which may share layers of the pool."""
        return self.num_layers

    @property
    def product_inputs(self) -> tuple[int, ...]:
        """Input sizes of the layers' products, if our own decoder computes them."""
        return ()

    @property
    def has_experts(self) -> bool:
        """Whether any layer has experts, whose products are grouped."""
        return self.moe is not None

    @property
    def has_soft_cap(self) -> bool:
        """Whether any layer caps its scores."""
        return False

    @property
    def has_sinks(self) -> bool:
        """Whether any layer has attention sinks: scores without values."""
        return False
