"""Weights in 8 and 4 bits of models that transformers' own code computes: the results are those of transformers with
the dequantised weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from byte_inputs import rounds_inputs
from model_bench import SMALL, Bench, assert_close, engine_config, random_tokens, reference, save_model
from torch import nn
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
from transformers.pytorch_utils import Conv1D
from transformers_cases import GPT_OSS, GRANITE_H, LFM2, QWEN3_5, QWEN3_MOE

from engine.attention import Needs, why_no_graphs
from engine.kernels.build import load_cpu_kernels
from engine.kernels.cpu import KERNEL_PARTS
from engine.layers import Linear
from engine.models import load_model_shape
from engine.models.parts import PLAIN_PARTS
from engine.models.replaced_experts import ReplacedExperts, replace_experts
from engine.models.transformers_products import OurProducts, is_product, replace_products
from engine.quantization import quantize_int8
from engine.quantization_choice import FEWEST_OUTPUTS, check_quantization
from engine.tensor_parallel.shares import share_of
from engine.weight import Weight, as_int4

pytestmark = pytest.mark.usefixtures("one_thread")

WIDE = SMALL | {"hidden_size": 96, "intermediate_size": 160}
GPT2 = {"vocab_size": 307, "n_embd": 96, "n_layer": 2, "n_head": 6, "n_positions": 128, "eos_token_id": 2}
GRANITE = GRANITE_H | {"vocab_size": 307, "shared_intermediate_size": 160}
EXPERTS = {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2Config(**GPT2),
    "granite-h": lambda: transformers.GraniteMoeHybridConfig(**GRANITE),
    "lfm2": lambda: transformers.Lfm2Config(**LFM2 | {"vocab_size": 307, "block_ff_dim": 160}),
    "olmo2": lambda: transformers.Olmo2Config(**WIDE | {"attention_bias": True}),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**WIDE, **EXPERTS),
    "gemma4-moe": lambda: transformers.Gemma4TextConfig(
        **WIDE | {"pad_token_id": 0},
        head_dim=32,
        global_head_dim=32,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=128,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        sliding_window=8,
    ),
    "qwen3.5": lambda: transformers.Qwen3_5TextConfig(**QWEN3_5 | {"vocab_size": 307, "intermediate_size": 160}),
}


def int8(weight_NK: torch.Tensor) -> torch.Tensor:
    int8_NK, scale_N = quantize_int8(weight_NK)
    return (int8_NK * scale_N[:, None]).to(weight_NK.dtype)


DEQUANTISED = {"int8": int8, "int4": lambda weight_NK: as_int4(weight_NK).dequantized()}


def dequantise(model: Any, quantization: str) -> int:
    """Round the weights that are quantised; return how many products there are of these."""
    head, num_rounded = model.get_output_embeddings(), 0
    for module in model.modules():
        if not is_product(module) or module is head:
            continue
        weight = module.weight.data.T if type(module) is Conv1D else module.weight.data
        if len(weight) < FEWEST_OUTPUTS or (weight.shape[1] % 32 and quantization == "int4"):
            continue
        rounded = DEQUANTISED[quantization](weight.contiguous())
        module.weight.data = rounded.T.contiguous() if type(module) is Conv1D else rounded
        num_rounded += 1
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            for weight_EX in (module.gate_up_proj.data, module.down_proj.data):
                weight_EX.copy_(torch.stack([DEQUANTISED[quantization](weight) for weight in weight_EX]))
    return num_rounded


@pytest.mark.one_in(3)
@pytest.mark.parametrize("quantization", DEQUANTISED)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_dequantised_weights(name: str, quantization: str, tmp_path: Path) -> None:
    model = save_model(CONFIGS[name](), tmp_path)
    num_products = sum(type(module) in (nn.Linear, Conv1D) for module in model.modules())
    assert 0 < dequantise(model, quantization) < num_products - 1, "some stay plain beside the logits'"
    bench = Bench(engine_config(tmp_path, quantization=quantization, model_impl="transformers"))
    tokens = random_tokens(21, seed=1)
    seq = bench.sequence(tokens)
    assert bench.logits((seq, 13)) is None
    logits = bench.logits((seq, 8))
    assert logits is not None
    assert_close(logits[0], reference(model, tokens))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_cpu_kernels_multiply_with_quantised_weights(quantization: str, tmp_path: Path) -> None:
    model = save_model(CONFIGS["qwen3.5"](), tmp_path / "plain")
    dequantise(model.bfloat16(), quantization)
    model.save_pretrained(tmp_path / "rounded")
    tokens, found = random_tokens(21, seed=1), []
    for folder, given in (("plain", quantization), ("rounded", "none")):
        settings = {"quantization": given, "dtype": "bfloat16", "block_size": 16, "num_kv_blocks": 64}
        bench = Bench(engine_config(tmp_path / folder, **settings))
        seq = bench.sequence(tokens)
        found.append(bench.logits((seq, 21)))
    assert found[0] is not None
    assert found[1] is not None
    # The rounded weights are rounded once more, to bfloat16.
    assert (found[0] - found[1]).norm() < (0.15 if rounds_inputs() else 0.05) * found[1].norm()


def test_replaced_weights_are_released_one_by_one(tmp_path: Path) -> None:
    model = save_model(CONFIGS["olmo2"](), tmp_path)
    replaced = [weakref.ref(module) for module in model.modules() if is_product(module)]
    num_left: list[int] = []

    def make(weight: Weight, bias: torch.Tensor | None = None) -> Linear:
        num_left.append(sum(module() is not None for module in replaced))
        return Linear(weight, bias)

    parts = replace(PLAIN_PARTS, linear=make)
    replace_products(model, OurProducts(lambda *_size: parts, parts, make), {}, "cpu")
    assert len(num_left) == len(replaced)
    assert num_left[-1] <= 5, "those of one layer's part, at most"


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_products_in_another_dtype_than_the_models_stay(quantization: str, tmp_path: Path) -> None:
    """HunYuan computes the choice of experts in float32."""
    config = transformers.HunYuanMoEV1Config(**WIDE, head_dim=16, num_experts=4, moe_topk=2)
    model = save_model(config, tmp_path).bfloat16()
    gate = model.model.layers[0].mlp.gate.wg
    gate.float()
    if quantization == "int4":
        kept = as_int4(gate.weight.data.bfloat16())
        ours = OurProducts(lambda *_size: PLAIN_PARTS, PLAIN_PARTS, Linear)
        replace_products(model, ours, {"model.layers.0.mlp.gate.wg": kept}, "cpu")
        assert torch.equal(gate.weight, kept.dequantized().float())
        return
    bench = Bench(engine_config(tmp_path, dtype="bfloat16", block_size=16, num_kv_blocks=64))
    tokens = random_tokens(21, seed=1)
    logits = bench.logits((bench.sequence(tokens), 21))
    assert logits is not None
    expected = reference(model, tokens).float()
    assert (logits[0] - expected).norm() < 0.15 * expected.norm()


def test_a_token_may_have_fewer_experts_than_others() -> None:
    """transformers takes the number of experts for none."""
    torch.manual_seed(3)
    config = transformers.MixtralConfig(hidden_size=64, intermediate_size=32, num_local_experts=3)
    config._experts_implementation = "eager"
    experts = MixtralExperts(config)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    for weight_EX in (experts.gate_up_proj.data, experts.down_proj.data):
        weight_EX.copy_(torch.stack([int8(weight) for weight in weight_EX]))
    h_TD, weights_TA = torch.randn(5, 64), torch.rand(5, 2)
    experts_TA = torch.tensor([[0, 3], [3, 3], [2, 1], [1, 0], [3, 2]])
    with torch.no_grad():
        expected = experts(h_TD, experts_TA, weights_TA)
    model = nn.ModuleDict({"experts": experts})
    replace_experts(model, PLAIN_PARTS, "int8", {}, "cpu")
    assert isinstance(model["experts"], ReplacedExperts)
    torch.testing.assert_close(model["experts"](h_TD, experts_TA, weights_TA), expected, rtol=1e-4, atol=1e-4)


LARGE: dict[str, Any] = {"hidden_size": 2048, "num_experts_per_tok": 8, "moe_intermediate_size": 32}
ROUTERS: dict[str, Callable[[], nn.Module]] = {
    "in bfloat16": lambda: Qwen3MoeSparseMoeBlock(transformers.Qwen3MoeConfig(**LARGE, num_experts=128)),
    "widened": lambda: Glm4MoeMoE(transformers.Glm4MoeConfig(**LARGE, n_routed_experts=128)),
}


@pytest.mark.parametrize("make_block", ROUTERS.values(), ids=ROUTERS)
def test_scores_of_experts_have_the_same_bits_in_any_batch(make_block: Callable[[], Any]) -> None:
    """transformers' code multiplies by the number of rows."""
    load_cpu_kernels()
    torch.manual_seed(5)
    block = make_block().requires_grad_(False)
    for parameter in block.parameters():
        parameter.data.normal_(std=0.02)
    block.bfloat16()
    x_TD = torch.randn(500, 2048).bfloat16()
    before = block.gate(x_TD)[0]
    replace_experts(nn.ModuleDict({"block": block}), KERNEL_PARTS, "none", {}, "cpu")
    logits = block.gate(x_TD)[0]
    assert torch.equal(torch.cat([block.gate(x_TD[i : i + 1])[0] for i in range(500)]), logits)
    assert logits.dtype == before.dtype
    torch.testing.assert_close(logits.float(), before.float(), rtol=1e-2, atol=1e-2)


def test_models_of_which_nothing_would_be_quantised_are_refused(tmp_path: Path) -> None:
    save_model(transformers.Olmo2Config(**SMALL), tmp_path)
    with pytest.raises(ValueError, match=r"quantization int8 cannot work here: none of the model's products, of sizes"):
        engine_config(tmp_path, quantization="int8")


@pytest.mark.parametrize(("size", "num_ranks", "own"), [(24, 1, 24), (32, 2, 16), (32, 1, 0), (64, 2, 0)])
def test_experts_that_int4_does_not_fit_are_refused(size: int, num_ranks: int, own: int) -> None:
    """Before weights are read. Each rank has a part of every expert."""
    fields = transformers.Qwen3MoeConfig(**WIDE, **EXPERTS | {"moe_intermediate_size": size}).to_dict()
    shape = load_model_shape(fields | {"architectures": ["Qwen3MoeForCausalLM"]}, "transformers")
    model = share_of(shape, num_ranks)
    why = rf"int4 cannot work here: .* must be multiples of 32, are \(96, {own}\) \(with several .*; give int8 or none"
    with pytest.raises(ValueError, match=why) if own else nullcontext():
        check_quantization("int4", None, "bfloat16", model)


def test_experts_that_only_transformers_code_computes_are_refused() -> None:
    """Theirs have biases and a gate of their own."""
    shape = load_model_shape(GPT_OSS, "transformers")
    with pytest.raises(ValueError, match=r"int8 cannot work here: only transformers' code can compute its experts"):
        check_quantization("int8", None, "bfloat16", shape)


@pytest.mark.parametrize(("config", "why_not"), [(QWEN3_5, ""), (QWEN3_MOE, "experts are multiplied without waiting")])
def test_steps_of_experts_are_not_recorded_on_older_gpus(config: dict[str, Any], why_not: str) -> None:
    """Experts are told by their weights' dims. A convolution has as many."""
    shape = load_model_shape(config, "transformers")
    needs = Needs(model=shape, device="cuda", capability=(8, 0), dtype="bfloat16", kv_dtype="bfloat16", block_size=16)
    assert why_no_graphs("triton", needs).startswith(why_not)
    assert bool(why_no_graphs("triton", needs)) == bool(why_not)
