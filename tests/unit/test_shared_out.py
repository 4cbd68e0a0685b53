"""Which part of a model each of several ranks has: all parts together are the whole, and no two overlap."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from engine.engine_args import EngineArgs
from engine.layers import Linear
from engine.model_loader import create_engine_config
from engine.model_loader.eight_bit_weights import DummyEightBitWeights
from engine.model_loader.weights import DummyWeights, Weights
from engine.models import load_model_shape
from engine.models.decoder_config import DecoderConfig
from engine.models.stored_weights import StoredWeights
from engine.scaled_weight import ScaledWeight
from engine.tensor_parallel.sharded_weights import ShardedWeights, cuts_of_rank
from engine.tensor_parallel.shares import num_key_parts, share_of
from engine.tensor_parallel.sharing import VocabParallelLinear
from engine.weight import part_of

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 101, "hidden_size": 24, "intermediate_size": 36,
    "num_hidden_layers": 2, "num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
DEEPSEEK = LLAMA | {
    "architectures": ["DeepseekV2ForCausalLM"], "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "num_key_value_heads": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "moe_intermediate_size": 18, "n_group": 1,
}  # fmt: skip


def rank_of(whole: Weights, rank: int, num_ranks: int, num_key_parts: int) -> ShardedWeights:
    return ShardedWeights(whole, cuts_of_rank(rank, num_ranks, num_key_parts), has_biases=rank == 0)


def test_heads_and_the_feed_forward_are_shared_out() -> None:
    share = share_of(load_model_shape(LLAMA, "auto"), 3)
    assert isinstance(share, DecoderConfig)
    assert (share.num_heads, share.num_kv_heads, share.intermediate_size) == (4, 2, 12)
    assert (share.hidden_size, share.head_dim, share.vocab_size) == (24, 4, 101)


def test_heads_of_latents_and_every_expert_are_shared_out() -> None:
    share = share_of(load_model_shape(DEEPSEEK, "auto"), 3)
    assert isinstance(share, DecoderConfig)
    assert share.moe is not None
    assert (share.num_heads, share.intermediate_size, share.moe.intermediate_size) == (4, 12, 6)
    assert (share.num_kv_heads, share.head_dim, share.moe.num_experts) == (1, 16 + 4, 4)


def test_ranks_may_share_a_key_head() -> None:
    """Each query head uses the right one."""
    shape = load_model_shape(LLAMA | {"num_key_value_heads": 2}, "auto")
    share = share_of(shape, 6)
    assert isinstance(shape, DecoderConfig)
    assert isinstance(share, DecoderConfig)
    assert (share.num_heads, share.num_kv_heads, num_key_parts(shape, 6)) == (2, 1, 2)
    name, whole = "model.layers.0.self_attn.v_proj", DummyWeights(3, "float32", "cpu")
    heads = whole.take(f"{name}.weight", (2 * 4, 24)).view(2, 4, 24)
    biases = whole.take(f"{name}.bias", (2 * 4,)).view(2, 4)
    for rank in range(6):
        weights = rank_of(whole, rank, 6, 2)
        of_query_heads = {query // (12 // 2) for query in range(2 * rank, 2 * rank + 2)}
        assert of_query_heads == {rank // 3}
        assert torch.equal(weights.take(f"{name}.weight", (4, 24)), heads[rank // 3])
        assert torch.equal(weights.take(f"{name}.bias", (4,)), biases[rank // 3])


@pytest.mark.parametrize(
    ("change", "num_ranks", "message"),
    [
        ({}, 5, "tensor_parallel_size must divide the model's num_attention_heads=12, is 5; up to 16 these work: "),
        ({}, 4, "must divide the model's num_key_value_heads=6, or be a multiple of it, is 4"),
        ({"intermediate_size": 37}, 2, "tensor_parallel_size must divide the model's intermediate_size=37, is 2"),
        (DEEPSEEK, 4, "tensor_parallel_size must divide the model's moe_intermediate_size=18, is 4"),
        ({}, 65, r"tensor_parallel_size must be in \[1, 64\], is 65"),
        ({}, 0, r"tensor_parallel_size must be in \[1, 64\], is 0"),
        ({}, "two", "tensor_parallel_size must be a whole number, is 'two'"),
        ({}, 2.0, "tensor_parallel_size must be a whole number, is 2.0"),
        ({}, True, "tensor_parallel_size must be a whole number, is True"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(
    change: dict[str, Any], num_ranks: Any, message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | change))
    with pytest.raises(ValueError, match=message):
        create_engine_config(
            EngineArgs(model=str(tmp_path), load_format="dummy", device="cpu", tensor_parallel_size=num_ranks)
        )


def test_numbers_of_ranks_that_would_do_are_named() -> None:
    shape = load_model_shape(LLAMA | {"num_key_value_heads": 4}, "auto")
    with pytest.raises(ValueError, match=r"is 5; up to 16 these work: 1, 2, 4, 12$"):
        share_of(shape, 5)


@pytest.mark.parametrize(
    ("product", "shape", "axis"),
    [("self_attn.q_proj", (48, 24), 0), ("self_attn.k_proj", (24, 24), 0), ("self_attn.v_proj", (24, 24), 0),
     ("mlp.gate_proj", (36, 24), 0), ("mlp.up_proj", (36, 24), 0), ("self_attn.o_proj", (24, 48), 1),
     ("mlp.down_proj", (24, 36), 1), ("self_attn.q_b_proj", (48, 24), 0), ("self_attn.kv_b_proj", (48, 24), 0),
     ("mlp.experts.2.gate_proj", (36, 24), 0), ("mlp.experts.2.down_proj", (24, 36), 1),
     ("mlp.shared_experts.up_proj", (36, 24), 0)],
)  # fmt: skip
def test_parts_of_a_weight_are_the_weight(product: str, shape: tuple[int, int], axis: int) -> None:
    name = f"model.layers.0.{product}"
    whole = DummyWeights(3, "float32", "cpu")
    ranks = [rank_of(whole, rank, 3, 3) for rank in range(3)]
    part_shape = (shape[0] // 3, shape[1]) if axis == 0 else (shape[0], shape[1] // 3)
    parts = [rank.take_product(f"{name}.weight", part_shape) for rank in ranks]
    assert all(isinstance(part, torch.Tensor) and part.is_contiguous() for part in parts)
    assert torch.equal(torch.cat(parts, dim=axis), whole.take(f"{name}.weight", shape))  # type: ignore[arg-type]
    biases = [rank.take(f"{name}.bias", (shape[0] // 3 if axis == 0 else shape[0],)) for rank in ranks]
    expected = whole.take(f"{name}.bias", (shape[0],))
    assert torch.equal(torch.cat(biases) if axis == 0 else torch.stack(biases).sum(dim=0), expected)


def test_other_weights_are_whole_on_every_rank() -> None:
    whole = DummyWeights(3, "float32", "cpu")
    shapes = {
        "model.embed_tokens.weight": (101, 24), "model.layers.0.self_attn.q_norm.weight": (4,),
        "model.layers.0.self_attn.q_a_proj.weight": (16, 24), "model.layers.0.self_attn.kv_a_proj_with_mqa.bias": (20,),
        "model.layers.0.mlp.gate.weight": (4, 24), "model.layers.0.mlp.gate.e_score_correction_bias": (4,),
    }  # fmt: skip
    for name, shape in shapes.items():
        assert torch.equal(rank_of(whole, 1, 3, 3).take(name, shape), whole.take(name, shape))


@pytest.mark.parametrize("block", [None, (8, 12)], ids=["a scale for each output", "scales for groups"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_parts_of_a_weight_in_8_bits_are_the_weight(
    quantization: str, axis: int, block: tuple[int, int] | None
) -> None:
    stored = StoredWeights(quantizations=(quantization,), block=block)
    whole = DummyEightBitWeights(1, "float32", "cpu", stored).take_product("x.weight", (24, 36))
    assert isinstance(whole, ScaledWeight)
    assert whole.has_groups == (block is not None)
    size = whole.weight.shape[axis] // 3
    parts = [part_of(whole, axis, range(rank * size, (rank + 1) * size)) for rank in range(3)]
    wide = [part.dequantized() for part in parts if isinstance(part, ScaledWeight)]
    assert torch.equal(torch.cat(wide, dim=axis), whole.dequantized())
    assert all(isinstance(part, ScaledWeight) and part.weight.dtype == whole.weight.dtype for part in parts)


def test_inputs_that_share_a_scale_are_not_cut() -> None:
    stored = StoredWeights(quantizations=("int8",), block=(8, 8))
    whole = DummyEightBitWeights(1, "float32", "cpu", stored).take_product("x.weight", (24, 36))
    with pytest.raises(ValueError, match="cuts a weight at input 12, where 8 share a scale"):
        part_of(whole, 1, range(12, 24))


class Collecting:
    """Stands in for a group: collects each rank's logits, with their padding."""

    def __init__(self, rank: int, parts: list[torch.Tensor]) -> None:
        self.rank, self.num_ranks = rank, 3
        self._parts = parts

    def gather_outputs(self, y_TP: torch.Tensor, num_outputs: int) -> torch.Tensor:
        self._parts.append(y_TP)
        return torch.cat(self._parts, dim=1)[:, :num_outputs]


@pytest.mark.parametrize("vocab_size", [9, 10, 11, 7, 4])
def test_parts_of_the_vocabulary_are_the_vocabulary(vocab_size: int) -> None:
    """Also if the last ranks have fewer rows, or none."""
    weight, x = torch.randn(vocab_size, 8), torch.randn(2, 8)
    parts: list[torch.Tensor] = []
    for rank in range(3):
        linear = VocabParallelLinear(weight, Linear, Collecting(rank, parts))  # type: ignore[arg-type]
        logits = linear(x)
    assert len({part.shape for part in parts}) == 1
    torch.testing.assert_close(logits, F.linear(x, weight))
