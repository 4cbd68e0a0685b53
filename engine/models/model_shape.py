"""What an engine has to know of a model, whoever computes it. Integers only, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from engine.models.deepseek_config import LatentConfig
from engine.models.experts_config import ExpertsConfig


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Equal for two models exactly where the same computation is meant, but for their weights."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    """In the pool: 1 with latent attention."""
    head_dim: int
    """Of a key in the pool: with latent attention, all that a token has there."""
    max_positions: int
    why_no_more_positions: str = ""
    """As a clause; empty where that is config.json's `max_position_embeddings`."""
    mla: LatentConfig | None = None
    """None: the pool holds keys and values of heads."""
    moe: ExpertsConfig | None = None

    @property
    def model_impl(self) -> str:
        """Who computes it: "tandem" or "transformers"."""
        return "tandem"

    @property
    def product_inputs(self) -> tuple[int, ...]:
        """Numbers that products of layers take in, as far as the engine computes them."""
        return ()

    @property
    def has_experts(self) -> bool:
        """That are multiplied by groups of tokens."""
        return self.moe is not None

    @property
    def has_soft_cap(self) -> bool:
        """Of scores, in any layer."""
        return False

    @property
    def has_sinks(self) -> bool:
        """Scores without values, in any layer."""
        return False
