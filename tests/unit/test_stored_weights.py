"""What a config.json says of weights in 8 bits: real ones, and those that are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from quantized_checkpoints import FORMS, compressed

from engine.models.stored_weights import StoredWeights

DEEPSEEK_V3 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
MINISTRAL = {
    "activation_scheme": "static", "dequantize": False, "quant_method": "fp8", "weight_block_size": None,
    "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
}  # fmt: skip
FP8_DYNAMIC = compressed("float-quantized", "float", "channel")
W8A8 = compressed("int-quantized", "int", "channel")
KV_SCHEME = {"dynamic": False, "num_bits": 8, "strategy": "tensor", "symmetric": True, "type": "float"}


def both_groups() -> dict[str, Any]:
    """Of a checkpoint in which layers differ: each group has a format of its own."""
    config = compressed("mixed-precision", "float", "block", block_structure=[128, 128])
    config["config_groups"]["group_0"]["format"] = "float-quantized"
    config["config_groups"]["group_1"] = W8A8["config_groups"]["group_0"] | {"format": "int-quantized"}
    return config


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (None, "plain"),
        ({}, "plain"),
        (DEEPSEEK_V3, "fp8 in blocks of 128x128"),
        (DEEPSEEK_V3 | {"scale_fmt": "ue8m0", "weight_block_size": [64, 32]}, "fp8 in blocks of 64x32"),
        (MINISTRAL, "fp8"),
        (FP8_DYNAMIC, "fp8"),
        (FP8_DYNAMIC | {"kv_cache_scheme": KV_SCHEME}, "fp8"),
        (compressed("float-quantized", "float", "tensor"), "fp8"),
        (compressed("float-quantized", "float", "block", block_structure=[128, 128]), "fp8 in blocks of 128x128"),
        (W8A8, "int8"),
        (compressed("naive-quantized", "int", "tensor"), "int8"),
        (both_groups(), "fp8 and int8 in blocks of 128x128"),
        *[(form.quantization_config, None) for form in FORMS.values()],
    ],
)
def test_known_forms(config: dict[str, Any] | None, name: str | None) -> None:
    stored = StoredWeights.from_hf({"quantization_config": config})
    assert name is None or stored.name == name
    assert StoredWeights.from_hf({"compression_config": config}) == stored


def test_a_config_without_the_field_is_plain() -> None:
    assert StoredWeights.from_hf({}) == StoredWeights(quantizations=(), block=None)


def changed(config: dict[str, Any], **weights: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    config["config_groups"]["group_0"]["weights"] |= weights
    return config


def two_blocks() -> dict[str, Any]:
    config, other = (compressed("float-quantized", "float", "block", block_structure=[64 * i, 128]) for i in (1, 2))
    config["config_groups"]["group_1"] = other["config_groups"]["group_0"]
    return config


AT = "config_groups.group_0.weights"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("fp8", "quantization_config must be an object, is 'fp8'"),
        ({"bits": 4}, "quant_method None is not supported"),
        *[
            ({"quant_method": method}, f"quant_method '{method}' is not supported")
            for method in ("gptq", "awq", "bitsandbytes", "mxfp4", "fbgemm_fp8", "modelopt", "torchao")
        ],
        (DEEPSEEK_V3 | {"fmt": "e5m2"}, "fmt 'e5m2' is not supported"),
        (DEEPSEEK_V3 | {"scale_fmt": "int"}, "scale_fmt 'int' is not supported"),
        (DEEPSEEK_V3 | {"expert_dtype": "fp4"}, "expert_dtype 'fp4' is not supported"),
        *[
            (DEEPSEEK_V3 | {"weight_block_size": sizes}, "weight_block_size must be two integers of at least 1, is")
            for sizes in ([128], [128, 0], [128, "128"], [True, 1], 128, {})
        ],
        (FP8_DYNAMIC | {"format": "pack-quantized"}, "format 'pack-quantized' is not supported"),
        (FP8_DYNAMIC | {"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized' is not supported"),
        (FP8_DYNAMIC | {"format": None}, "format None is not supported"),
        (FP8_DYNAMIC | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config .*R1.* is not supported"),
        (FP8_DYNAMIC | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format 'sparse-24"),
        (FP8_DYNAMIC | {"config_groups": {}}, "config_groups {} is not supported"),
        (FP8_DYNAMIC | {"config_groups": None}, "config_groups None is not supported"),
        (FP8_DYNAMIC | {"config_groups": {"FP8": ["Linear"]}}, "config_groups.FP8.weights None is not supported"),
        (FP8_DYNAMIC | {"config_groups": {"g": {"weights": None}}}, "config_groups.g.weights None is not supported"),
        (changed(W8A8, num_bits=4), f"{AT}.num_bits 4 is not supported"),
        (changed(W8A8, num_bits=True), f"{AT}.num_bits True is not supported"),
        (changed(W8A8, type="uint"), f"{AT}.type 'uint' is not supported"),
        (changed(W8A8, symmetric=False), f"{AT}.symmetric False is not supported"),
        (changed(W8A8, dynamic=True), f"{AT}.dynamic True is not supported"),
        (changed(W8A8, strategy="group", group_size=128), f"{AT}.strategy 'group' is not supported"),
        (changed(W8A8, strategy="block"), f"{AT}.block_structure None is not supported"),
        (changed(W8A8, strategy="block", block_structure=[0, 1]), "block_structure must be two integers of at least 1"),
        (two_blocks(), r"block_structure \[\(64, 128\), \(128, 128\)\] is not supported"),
    ],
)
def test_other_forms_are_refused(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r"^config\.json: quantization_config") as error:
        StoredWeights.from_hf({"quantization_config": config})
    error.match(message)
    assert "must be" in message or "; known are fp8 (float8_e4m3fn" in str(error.value)
    assert "\n" not in str(error.value)
