"""How several ranks share a model that transformers' code computes. Integers only, no torch.

Most of transformers' configurations have a plan for several devices (`base_model_tp_plan`): a style for each linear
layer, and for each layer's experts. transformers_probe.py makes a `Split` of each, and
engine/tensor_parallel/transformers_share.py cuts the weights accordingly. What the plan leaves out is whole on every
rank.

    outputs            each rank computes some outputs, and what follows uses only these
    gathered outputs   each rank computes some outputs, and then has those of all
    inputs             each rank multiplies some inputs; the products are summed
    experts            each rank has a part of every expert; their outputs are summed
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine import weight_cut
from engine.models.head_shape import HeadShape
from engine.weight_cut import Cut

OUTPUTS, GATHERED, INPUTS, EXPERTS = "outputs", "gathered outputs", "inputs", "experts"
FAMILIES = frozenset({
    "afmoe", "apertus", "arcee", "cohere", "cohere2", "cohere2_moe", "cwm", "ernie4_5", "ernie4_5_moe", "exaone4",
    "exaone_moe", "flex_olmo", "gemma", "gemma2", "gemma3_text", "gemma4_text", "glm", "glm4", "glm4_moe", "gpt_neox",
    "gpt_oss", "granite", "granitemoe", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3",
    "iquestcoder", "jais2", "laguna", "llama", "mellum", "minimax_m2", "ministral", "ministral3", "mistral", "mixtral",
    "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe", "seed_oss", "smollm3", "solar_open", "starcoder2", "vaultgemma",
})  # fmt: skip
"""`model_type` of models whose ranks tests compare with the whole model (tests/unit/test_transformers_share.py). No
others are split, since a plan can be wrong without an error: that of Gemma 3n cuts numbers whose spread its code
measures."""
STYLES = {
    "colwise": OUTPUTS, "colwise_gather_output": GATHERED, "rowwise": INPUTS, "rowwise_split_input": INPUTS,
    "moe_tp_experts": EXPERTS,
}  # fmt: skip
"""How modules of transformers' styles are split."""


@dataclass(frozen=True, slots=True)
class Split:
    """How ranks share one product, or the products of a layer's experts."""

    name: str
    """Of the module."""
    how: str
    num_units: int
    """Of what is cut: heads, or numbers. A rank has a whole number of them."""
    is_shared: bool = False
    """If there are fewer units than ranks, several ranks have the same one: key heads."""

    def fits(self, num_ranks: int) -> bool:
        if self.how == GATHERED:
            return True  # whole on every rank where it cannot be cut
        return not self.num_units % num_ranks or (self.is_shared and not num_ranks % self.num_units)

    def cut(self, rank: int, num_ranks: int) -> Cut | None:
        """A rank's part of the product, or of each expert's gate. None: all of it. Only if `fits`."""
        if self.how == GATHERED and self.num_units % num_ranks:
            return None
        num_parts = min(self.num_units, num_ranks) if self.is_shared else num_ranks
        axis = weight_cut.INPUTS if self.how == INPUTS else weight_cut.OUTPUTS
        return Cut(axis, num_parts, rank * num_parts // num_ranks)


def own_heads(heads: HeadShape, num_ranks: int) -> HeadShape:
    """The heads of one of `num_ranks` ranks, which must divide them."""
    num_kv_heads = heads.num_kv_heads // min(heads.num_kv_heads, num_ranks)
    return heads._replace(num_heads=heads.num_heads // num_ranks, num_kv_heads=num_kv_heads)


def why_not_split(splits: Sequence[Split], shapes: Iterable[HeadShape], num_ranks: int) -> str:
    """The condition that `num_ranks` does not meet, as a clause; empty if the model can be split so. `shapes`: of all
    layers' heads."""
    for num_heads, num_kv_heads, _ in shapes:
        if num_heads % num_ranks:
            return f"divide the model's {num_heads} query heads"
        if num_kv_heads % num_ranks and num_ranks % num_kv_heads:
            return f"divide the model's {num_kv_heads} key heads, or be a multiple of them"
    for split in splits:
        if not split.fits(num_ranks):
            return f"divide the {split.num_units} {split.how} of {split.name}"
    return ""
