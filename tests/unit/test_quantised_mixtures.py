"""Mixtures by our own decoder whose weights are quantised when they are loaded: the results are those of transformers
with the dequantised weights. What stays plain: logits (but not by the CPU kernels), scores of experts, and the
product that makes each head's keys and values of latents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_bench import SMALL, Bench, assert_close, engine_config, random_tokens, reference, save_model
from torch import nn

from engine.attention import Needs, why_no_graphs
from engine.kernels.build import load_cpu_kernels
from engine.kernels.cpu import KERNEL_PARTS, QUANTIZED_KERNEL_PARTS
from engine.model_loader.loading import parts_of
from engine.model_loader.weights import DummyWeights
from engine.models import load_decoder_config
from engine.models.decoder import Decoder
from engine.models.parts import PartsFactory
from engine.quantization import as_float8, as_int8
from engine.quantization_choice import check_quantization
from engine.weight import Weight, as_int4, dequantized

pytestmark = pytest.mark.usefixtures("one_thread")

WIDE = SMALL | {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32, "num_experts_per_tok": 2}
LATENTS = WIDE | {
    "head_dim": 16, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "num_key_value_heads": 6, "moe_intermediate_size": 64, "first_k_dense_replace": 1, "n_routed_experts": 8,
    "n_shared_experts": 2, "n_group": 4, "topk_group": 2,
}  # fmt: skip
CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **WIDE, num_experts=4, moe_intermediate_size=64, norm_topk_prob=True, mlp_only_layers=[0]
    ),
    "mixtral": lambda: transformers.MixtralConfig(**WIDE, num_local_experts=4),
    "deepseek": lambda: transformers.DeepseekV3Config(**LATENTS, q_lora_rank=32, pad_token_id=0),
}
QWEN = {"architectures": ["Qwen3MoeForCausalLM"], **WIDE, "num_experts": 4, "moe_intermediate_size": 64}
QUANTISED: dict[str, Callable[[Weight], Weight]] = {"int8": as_int8, "int4": as_int4}
STAY_PLAIN = ("lm_head", "kv_b_proj")


def dequantise(model: Any, quantise: Callable[[Weight], Weight]) -> None:
    """Round the weights that are quantised."""

    def rounded(weight: torch.Tensor) -> torch.Tensor:
        return dequantized(quantise(weight))

    for name, module in model.named_modules():
        if type(module) is nn.Linear and not name.endswith(STAY_PLAIN):
            module.weight.data = rounded(module.weight.data)
        elif isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):
            for weight_EX in (module.gate_up_proj.data, module.down_proj.data):
                weight_EX.copy_(torch.stack([rounded(weight) for weight in weight_EX]))


@pytest.mark.parametrize("quantization", QUANTISED)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_dequantised_weights(name: str, quantization: str, tmp_path: Path) -> None:
    model = save_model(CONFIGS[name](), tmp_path)
    tokens = random_tokens(21, seed=1)
    plain = reference(model, tokens)
    dequantise(model, QUANTISED[quantization])
    bench = Bench(engine_config(tmp_path, quantization=quantization))
    assert isinstance(bench.runner._model, Decoder)
    seq = bench.sequence(tokens)
    assert bench.logits((seq, 13)) is None
    logits = bench.logits((seq, 8))
    assert logits is not None
    assert_close(logits[0], reference(model, tokens))
    assert (logits[0] - plain).norm() > 0.001 * plain.norm(), "plain weights would have passed, too"


@pytest.mark.parametrize("quantization", QUANTISED)
@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_the_cpu_kernels_multiply_with_quantised_weights(name: str, quantization: str, tmp_path: Path) -> None:
    model = save_model(CONFIGS[name](), tmp_path / "plain")
    dequantise(model.bfloat16(), QUANTISED[quantization])
    model.save_pretrained(tmp_path / "rounded")
    tokens, found = random_tokens(21, seed=1), []
    for folder, given in (("plain", quantization), ("rounded", "none"), ("plain", "none")):
        settings = {"quantization": given, "dtype": "bfloat16", "block_size": 16, "num_kv_blocks": 64}
        bench = Bench(engine_config(tmp_path / folder, **settings))
        assert isinstance(bench.runner._model, Decoder)
        logits = bench.logits((bench.sequence(tokens), 21))
        assert logits is not None
        found.append(logits)
    quantised, rounded, plain = found
    # The rounded weights are rounded once more, to bfloat16.
    assert (quantised - rounded).norm() < min(0.1 * rounded.norm(), 0.8 * (quantised - plain).norm())


def test_experts_take_no_more_memory_than_their_bits() -> None:
    load_cpu_kernels()
    moe = load_decoder_config(QWEN).moe
    assert moe is not None
    num_bytes = {}
    for name, parts in {"none": KERNEL_PARTS, **QUANTIZED_KERNEL_PARTS}.items():
        products: Any = PartsFactory(DummyWeights(0, "bfloat16", "cpu"), parts, 1e-6).experts("experts", moe, 96)
        num_bytes[name] = products.experts.num_bytes()
    assert num_bytes["int8"] == num_bytes["none"] / 2
    assert num_bytes["int4"] == num_bytes["none"] / 16 * 5


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_parts_for_gpus_quantise_experts_one_by_one(quantization: str, tmp_path: Path) -> None:
    save_model(CONFIGS["mixtral"](), tmp_path)
    config = engine_config(tmp_path)
    weight = torch.randn(32, 64)
    found = parts_of(config, quantization).quantise_expert(weight)
    expected = (QUANTISED | {"fp8": as_float8})[quantization](weight)
    assert not isinstance(found, torch.Tensor)
    assert torch.equal(found.dequantized(), dequantized(expected))
    for plain in ("none", "stored"):
        assert parts_of(config, plain).quantise_expert(weight) is weight


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_steps_of_quantised_experts_are_recorded_on_any_gpu(quantization: str) -> None:
    model = load_decoder_config(CONFIGS["mixtral"]().to_dict() | {"architectures": ["MixtralForCausalLM"]})
    needs = Needs(
        dtype="bfloat16", device="cuda", kv_dtype="bfloat16", model=model, block_size=16, capability=(8, 9),
        quantization=quantization,
    )  # fmt: skip
    assert why_no_graphs("triton", needs) == ""


DEEPSEEK = {"architectures": ["DeepseekV3ForCausalLM"], **LATENTS, "q_lora_rank": 32}
GROUPS, SIDES = "cannot work here: inputs of products must be multiples of 32", "outputs .* must be multiples of 16"


@pytest.mark.parametrize(
    ("fields", "quantization", "why"),
    [
        (QWEN | {"moe_intermediate_size": 48}, "int4", rf"{GROUPS}, are \(96, 192, 48\)"),
        (QWEN | {"moe_intermediate_size": 48, "mlp_only_layers": [0]}, "int4", rf"{GROUPS}, are \(96, 192, 160, 48\)"),
        (QWEN | {"hidden_size": 72}, "int4", rf"{GROUPS}, are \(72, 192, 64\)"),
        (DEEPSEEK | {"q_lora_rank": 20}, "int4", rf"{GROUPS}, are \(96, 96, 20, 160, 128, 64\)"),
        (QWEN | {"hidden_size": 72}, "fp8", rf"{SIDES}, are \(72, 192, 320\)"),
        (DEEPSEEK | {"q_lora_rank": 20}, "fp8", rf"{SIDES}, are \(96, 96, 20, 60, 168, 160, 128\)"),
    ],
)
def test_sizes_that_do_not_fit(fields: dict[str, Any], quantization: str, why: str) -> None:
    with pytest.raises(ValueError, match=rf"quantization {quantization} .*{why} \(with several .*; give int8 or none"):
        check_quantization(quantization, (9, 0), "bfloat16", load_decoder_config(fields))
