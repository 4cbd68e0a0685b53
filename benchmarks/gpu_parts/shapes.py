"""The models and sizes to measure, on a GPU or with a toy, and their bytes and operations, counted. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.models.recurrent_shape import DeltaLayer, Mamba2Layer

LLAMA_8B: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    "hidden_act": "silu", "bos_token_id": 128000, "eos_token_id": 128001, "torch_dtype": "bfloat16",
}  # fmt: skip
"""Llama-3.1-8B without the scaling of its rotary positions, which costs nothing."""
LLAMA_1B: Mapping[str, Any] = {
    **LLAMA_8B, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
"""Llama-3.2-1B, likewise."""
TOY: Mapping[str, Any] = {
    **LLAMA_8B, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 500, "bos_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 2048,
}  # fmt: skip
A_LAYER = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
LLAMA_8B_HEAD: Mapping[str, Any] = {**LLAMA_8B, **A_LAYER, "draft_vocab_size": 32000}
"""The EAGLE-3 head that its authors have trained for Llama-3.1-8B-Instruct."""
QWEN_30B: Mapping[str, Any] = {
    **LLAMA_8B, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
    "intermediate_size": 6144, "num_hidden_layers": 12, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 151936, "rms_norm_eps": 1e-6, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True,
    "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128},
}  # fmt: skip
"""A quarter of Qwen3-30B-A3B's 48 layers."""
TOY_MIXTURE: Mapping[str, Any] = {
    **QWEN_30B, **TOY, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 16,
    "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2,
    "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32},
}  # fmt: skip
ITEM_BYTES = 2
"""bfloat16"""
INT4_BYTES = 0.5 + 4 / 32
"""Bytes of an int4 weight, quantised from bfloat16: half a byte, and its part of its group's scale and offset."""


NEMOTRON_LAYER = Mamba2Layer(name="layer", num_heads=128, head_dim=80, state_dim=128, num_groups=8, num_taps=4)
TOY_MAMBA_2_LAYER = Mamba2Layer(name="layer", num_heads=4, head_dim=16, state_dim=16, num_groups=2, num_taps=4)
QWEN3_NEXT_LAYER = DeltaLayer(
    name="layer", num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, num_taps=4
)
TOY_DELTA_LAYER = DeltaLayer(name="layer", num_key_heads=1, num_value_heads=2, key_dim=16, value_dim=16, num_taps=4)


@dataclass(frozen=True)
class ModelShape:
    """The shape of a Llama model, from its config.json."""

    config: Mapping[str, Any]
    layer_item_bytes: float = ITEM_BYTES
    """Bytes of a weight in the layers' products; the logits' product stays in bfloat16."""
    kv_item_bytes: int = ITEM_BYTES

    @property
    def head_dim(self) -> int:
        return int(self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"])

    @property
    def num_layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def num_in_layers(self) -> int:
        """The number of weights in the products of all layers."""
        layer = sum(num_outputs * num_inputs for name, num_outputs, num_inputs in self.products if name != "logits")
        return int(self.config["num_hidden_layers"]) * layer

    @property
    def num_in_logits(self) -> int:
        return int(self.config["vocab_size"] * self.config["hidden_size"])

    @property
    def num_weight_bytes(self) -> int:
        """The weight bytes that a step reads: all except the embeddings, of which it reads one row per token."""
        return int(self.layer_item_bytes * self.num_in_layers) + ITEM_BYTES * self.num_in_logits

    @property
    def products(self) -> list[tuple[str, int, int]]:
        """(name, outputs, inputs) of a layer's products and the logits', as an engine makes them."""
        c = self.config
        hidden, inner = c["hidden_size"], c["intermediate_size"]
        qkv = self.head_dim * (c["num_attention_heads"] + 2 * c["num_key_value_heads"])
        return [
            ("qkv", qkv, hidden), ("output", hidden, self.head_dim * c["num_attention_heads"]),
            ("gate and up", 2 * inner, hidden), ("down", hidden, inner), ("logits", c["vocab_size"], hidden),
        ]  # fmt: skip

    def kv_bytes(self, num_tokens: int) -> int:
        """Bytes of keys and values in all layers."""
        c = self.config
        return int(
            2 * self.kv_item_bytes * c["num_hidden_layers"] * c["num_key_value_heads"] * self.head_dim * num_tokens
        )

    def decode_bytes(self, batch: int, context: int) -> int:
        """The least bytes that a decoding step reads."""
        return self.num_weight_bytes + batch * self.kv_bytes(context)

    def prefill_flop(self, num_tokens: int) -> float:
        """Operations of one prompt: products of all its tokens, logits of one, attention of each token to those
        before."""
        c = self.config
        attention = c["num_hidden_layers"] * attention_flop(c["num_attention_heads"], self.head_dim, num_tokens)
        return float(2 * num_tokens * self.num_in_layers + 2 * self.num_in_logits + attention)


@dataclass(frozen=True)
class HeadShape(ModelShape):
    """The shape of an EAGLE-3 head: a layer whose q, k and v have twice as many inputs, and logits of fewer tokens."""

    @property
    def num_in_logits(self) -> int:
        return int(self.config["draft_vocab_size"] * self.config["hidden_size"])

    @property
    def products(self) -> list[tuple[str, int, int]]:
        wider = {"qkv": 2}
        return [(name, outputs, wider.get(name, 1) * inputs) for name, outputs, inputs in super().products]


@dataclass(frozen=True)
class MixtureShape(ModelShape):
    """The shape of a Qwen3-MoE model. `intermediate_size` is that of a token's experts together, so that a token is
    counted as in a dense model."""

    def decode_bytes(self, batch: int, context: int) -> int:
        """Includes all experts that any of `batch` tokens uses, if all are chosen equally often."""
        c = self.config
        share = c["num_experts_per_tok"] / c["num_experts"]
        num_of_token = c["num_hidden_layers"] * 3 * c["hidden_size"] * c["intermediate_size"]
        num_more = ((1 - (1 - share) ** batch) / share - 1) * num_of_token
        return super().decode_bytes(batch, context) + int(self.layer_item_bytes * num_more)


def attention_flop(num_heads: int, head_dim: int, num_tokens: int) -> int:
    """Operations of causal attention of a whole prompt in one layer: two products, of each token with itself and those
    before."""
    return 4 * num_heads * head_dim * (num_tokens * (num_tokens + 1) // 2)


def attention_bytes(num_kv_heads: int, head_dim: int, num_tokens: int, item_bytes: int = ITEM_BYTES) -> int:
    """Bytes of keys and values in one layer."""
    return 2 * item_bytes * num_kv_heads * head_dim * num_tokens


@dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """Sizes of attention to latents, and of experts, in one layer."""

    nums_heads: tuple[int, ...]
    kv_lora_rank: int
    latent_dim: int
    """Including the rotated key."""
    query_dim: int
    """Of a head's query, without the part with positions."""
    value_dim: int
    decode: tuple[int, int]
    """(sequences, context)"""
    prefill: tuple[int, int]
    """(prompts, tokens of each)"""
    num_experts: int
    hidden_size: int
    expert_size: int
    """Intermediate size of an expert, on one rank."""
    experts_per_token: int
    expert_tokens: tuple[int, ...]


def latent_flop(sizes: LatentSizes, num_heads: int) -> int:
    """Operations for a token and one that it attends to: a product with the whole row in the pool, and one with the
    latent."""
    return 2 * num_heads * (sizes.latent_dim + sizes.kv_lora_rank)


def unfolded_flop(sizes: LatentSizes, num_heads: int) -> int:
    """The same with unfolded keys and values of heads."""
    rotated_dim = sizes.latent_dim - sizes.kv_lora_rank
    return 2 * num_heads * (sizes.query_dim + rotated_dim + sizes.value_dim)


def unfolding_flop(sizes: LatentSizes, num_heads: int) -> int:
    """Operations to unfold the keys and values of a token's latent."""
    return 2 * num_heads * sizes.kv_lora_rank * (sizes.query_dim + sizes.value_dim)


def expert_numbers(sizes: LatentSizes) -> int:
    """The number of weights of all experts."""
    return 3 * sizes.num_experts * sizes.hidden_size * sizes.expert_size


def expert_flop(sizes: LatentSizes) -> int:
    """Operations per row; a token has one row for each of its experts."""
    return 6 * sizes.hidden_size * sizes.expert_size


@dataclass(frozen=True, kw_only=True)
class FourBitSizes:
    """Sizes of experts in MXFP4, or in int4, in one layer."""

    num_experts: int
    hidden_size: int
    expert_size: int
    experts_per_token: int
    nums_tokens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StateSizes:
    """A layer of each kind that keeps matrices."""

    delta: DeltaLayer
    mamba_2: Mamba2Layer
    nums_seqs: tuple[int, ...]
    """Sequences of a decoding step."""
    prompt_tokens: int


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes to measure."""

    model: ModelShape
    draft: ModelShape
    """The draft model's."""
    head: HeadShape
    copy_bytes: int
    host_bytes: int
    """Bytes copied between pinned host memory and the device."""
    matrix: int
    attention_heads: tuple[int, int, int]
    """Query heads, key heads, head size."""
    decode_attention: tuple[tuple[int, int, int], ...]
    """(sequences, context, context that the grid is for)"""
    prefill_attention: tuple[tuple[int, int], ...]
    """(prompts, tokens of each)"""
    product_rows: tuple[int, ...]
    """Rows of a decoding step's products: its sequences."""
    prompt_rows: int
    """Rows of a product with a prompt's tokens."""
    num_variants: int
    """Launch configurations tried beside the one in use."""
    digest_blocks: int
    decode_steps: tuple[tuple[int, int, float], ...]
    """(sequences, context, share of the limit aimed at)"""
    prefill_steps: tuple[tuple[int, int, float], ...]
    """(prompts, tokens of each, share of the limit aimed at)"""
    kv_cache_gib: float
    max_model_len: int
    push_mib: int
    push_layers: int
    latents: LatentSizes
    four_bits: FourBitSizes
    int4_experts: FourBitSizes
    states: StateSizes
    mixture: MixtureShape


FULL = Sizes(
    model=ModelShape(LLAMA_8B),
    draft=ModelShape(LLAMA_1B),
    head=HeadShape(LLAMA_8B_HEAD),
    copy_bytes=4 << 30,
    host_bytes=1 << 30,
    matrix=8192,
    attention_heads=(32, 8, 128),
    decode_attention=((64, 4096, 4096), (1, 8192, 8192), (64, 2100, 4096), (1, 1100, 2048)),
    prefill_attention=((1, 8192), (8, 2048)),
    product_rows=(1, 64),
    prompt_rows=2048,
    num_variants=100,
    digest_blocks=1024,
    decode_steps=((1, 1024, 0.85), (64, 2048, 0.8)),
    prefill_steps=((8, 8192, 0.6), (1, 2048, 0.5)),
    kv_cache_gib=24.0,
    max_model_len=16384,
    push_mib=1024,
    push_layers=32,
    latents=LatentSizes(
        nums_heads=(16, 128), kv_lora_rank=512, latent_dim=576, query_dim=128, value_dim=128, decode=(64, 4096),
        prefill=(1, 8192), num_experts=256, hidden_size=7168, expert_size=256, experts_per_token=8,
        expert_tokens=(64, 8192),
    ),
    four_bits=FourBitSizes(
        num_experts=128, hidden_size=2880, expert_size=2880, experts_per_token=4, nums_tokens=(1, 64, 8192)
    ),
    int4_experts=FourBitSizes(
        num_experts=128, hidden_size=2048, expert_size=768, experts_per_token=8, nums_tokens=(1, 64, 8192)
    ),
    states=StateSizes(delta=QWEN3_NEXT_LAYER, mamba_2=NEMOTRON_LAYER, nums_seqs=(1, 64), prompt_tokens=2048),
    mixture=MixtureShape(QWEN_30B, layer_item_bytes=0.5 + 4 / 128),
)  # fmt: skip
TINY = Sizes(
    model=ModelShape(TOY),
    draft=ModelShape({**TOY, "num_hidden_layers": 1}),
    head=HeadShape({**TOY, **A_LAYER, "draft_vocab_size": 300, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}),
    copy_bytes=1 << 22,
    host_bytes=1 << 20,
    matrix=256,
    attention_heads=(4, 2, 16),
    decode_attention=((2, 40, 40),),
    prefill_attention=((2, 24),),
    product_rows=(2,),
    prompt_rows=40,
    num_variants=1,
    digest_blocks=4,
    decode_steps=((1, 8, 0.85), (4, 16, 0.8)),
    prefill_steps=((2, 64, 0.6),),
    kv_cache_gib=0.01,
    max_model_len=128,
    push_mib=4,
    push_layers=4,
    latents=LatentSizes(
        nums_heads=(4,), kv_lora_rank=32, latent_dim=48, query_dim=16, value_dim=16, decode=(2, 40), prefill=(1, 24),
        num_experts=4, hidden_size=64, expert_size=32, experts_per_token=2, expert_tokens=(3,),
    ),
    four_bits=FourBitSizes(num_experts=4, hidden_size=64, expert_size=32, experts_per_token=2, nums_tokens=(3,)),
    int4_experts=FourBitSizes(num_experts=4, hidden_size=64, expert_size=32, experts_per_token=2, nums_tokens=(3,)),
    states=StateSizes(delta=TOY_DELTA_LAYER, mamba_2=TOY_MAMBA_2_LAYER, nums_seqs=(3,), prompt_tokens=20),
    mixture=MixtureShape(TOY_MIXTURE, layer_item_bytes=INT4_BYTES),
)  # fmt: skip


def write_model(folder: Path, config: Mapping[str, Any], *, with_tokenizer: bool = False) -> Path:
    """Write a model folder for dummy weights. The tokenizer has a word for each id: "t0", "t1" …"""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    if with_tokenizer:
        from tokenizers import Tokenizer, models, pre_tokenizers

        words = {f"t{token_id}": token_id for token_id in range(config["vocab_size"])}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(folder / "tokenizer.json"))
    return folder
