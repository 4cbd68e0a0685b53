"""What config.json says of weights in 8 and 4 bits: real ones, and ones that are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from int4_checkpoints import AWQ, INT4_FORMS, gptq, packed
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


def auto_round(**settings: Any) -> dict[str, Any]:
    return {
        "autoround_version": "0.5.1", "bits": 4, "data_type": "int", "extra_config": {"lm_head": {"bits": 16}},
        "group_size": 128, "packing_format": "auto_round:auto_gptq", "quant_method": "auto-round", "sym": True,
    } | settings  # fmt: skip


def both_groups() -> dict[str, Any]:
    """The config of a checkpoint whose layers differ: each group has a format of its own."""
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
        (gptq(group_size=128), "int4"),
        (AWQ, "int4"),
        (AWQ | {"version": "GEMM", "backend": "autoawq"}, "int4"),
        (AWQ | {"backend": "auto", "format": "gemm", "sym": False, "desc_act": False}, "int4"),
        (AWQ | {"checkpoint_format": "gemm", "zero_point": False}, "int4"),
        (gptq(dynamic={"+:.*down_proj": {"bits": 4, "group_size": 32}, "-:.*gate$": {}, "lm_head": {}}), "int4"),
        (gptq(dynamic=None, backend="auto", checkpoint_format=None, format="gptq"), "int4"),
        (packed(strategy="channel", group_size=None, actorder="static"), "int4"),
        (auto_round(), "int4"),
        *[(form.quantization_config, None) for form in (*FORMS.values(), *INT4_FORMS.values())],
    ],
)
def test_known_forms(config: dict[str, Any] | None, name: str | None) -> None:
    stored = StoredWeights.from_hf({"quantization_config": config})
    assert name is None or stored.name == name
    assert StoredWeights.from_hf({"compression_config": config}) == stored


@pytest.mark.parametrize(
    ("fields", "packing"),
    [
        (auto_round(), "gptq"),
        (auto_round(packing_format="auto_round:auto_awq"), "awq"),
        ({"checkpoint_format": "gptq_v2"}, "gptq_v2"),
        ({"checkpoint_format": None, "format": "gptq_v2"}, "gptq_v2"),
        ({"checkpoint_format": "gptq", "format": "gptq_v2"}, "gptq"),
        ({"checkpoint_format": ""}, "gptq"),
    ],
)
def test_how_4_bits_are_packed(fields: dict[str, Any], packing: str) -> None:
    assert StoredWeights.from_hf({"quantization_config": gptq(**fields)}).packing == packing


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


def int4_beside_int8() -> dict[str, Any]:
    config = packed()
    config["config_groups"]["group_1"] = W8A8["config_groups"]["group_0"] | {"format": "int-quantized"}
    return config


AT = "config_groups.group_0.weights"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("fp8", "quantization_config must be an object, is 'fp8'"),
        ({"bits": 4}, "quant_method None is not supported"),
        *[
            ({"quant_method": method}, f"quant_method '{method}' is not supported")
            for method in ("gguf", "bitsandbytes", "mxfp4", "fbgemm_fp8", "modelopt", "torchao")
        ],
        (DEEPSEEK_V3 | {"fmt": "e5m2"}, "fmt 'e5m2' is not supported"),
        (DEEPSEEK_V3 | {"scale_fmt": "int"}, "scale_fmt 'int' is not supported"),
        (DEEPSEEK_V3 | {"expert_dtype": "fp4"}, "expert_dtype 'fp4' is not supported"),
        *[
            (DEEPSEEK_V3 | {"weight_block_size": sizes}, "weight_block_size must be two integers of at least 1, is")
            for sizes in ([128], [128, 0], [128, "128"], [True, 1], 128, {})
        ],
        (FP8_DYNAMIC | {"format": "marlin-24"}, "format 'marlin-24' is not supported"),
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
        (gptq(bits=8), "bits 8 is not supported"),
        (gptq(bits=True), "bits True is not supported"),
        (gptq(checkpoint_format="marlin"), "checkpoint_format 'marlin' is not supported"),
        (gptq(pack_dtype="int16"), "pack_dtype 'int16' is not supported"),
        *[(gptq(group_size=size), "group_size must be at least 1, or -1, is") for size in (0, -2, None, "32", 32.0)],
        (gptq(checkpoint_format=None, format="marlin"), "format 'marlin' is not supported"),
        (gptq(dynamic={"-:.*gate$": {}, r".*\.1\..*": {"bits": 8}}), r"dynamic\..*1.*\.bits 8 is not supported"),
        (gptq(dynamic=["lm_head"]), r"dynamic \['lm_head'\] is not supported"),
        (auto_round(bits=2), "bits 2 is not supported"),
        (auto_round(data_type="mx_fp"), "data_type 'mx_fp' is not supported"),
        (auto_round(packing_format=None), "packing_format None is not supported"),
        (auto_round(packing_format="auto_round:fp8"), "packing_format 'auto_round:fp8' is not supported"),
        (auto_round(extra_config={"lm_head": {"bits": 8}}), "extra_config.lm_head.bits 8 is not supported"),
        (AWQ | {"format": "gemv_fast"}, "format 'gemv_fast' is not supported"),
        (AWQ | {"checkpoint_format": "llm-awq"}, "checkpoint_format 'llm-awq' is not supported"),
        (AWQ | {"bits": 3}, "bits 3 is not supported"),
        (AWQ | {"version": "gemv"}, "version 'gemv' is not supported"),
        (AWQ | {"backend": "llm-awq"}, "backend 'llm-awq' is not supported"),
        (packed(num_bits=8), f"{AT}.num_bits 8 is not supported"),
        (packed(type="float"), f"{AT}.type 'float' is not supported"),
        (packed(strategy="tensor"), f"{AT}.strategy 'tensor' is not supported"),
        (packed(actorder="random"), f"{AT}.actorder 'random' is not supported"),
        (packed(group_size=None), f"{AT}.group_size must be at least 1, or -1, is None"),
        (int4_beside_int8(), "config_groups 'int4 and int8' is not supported"),
        (two_blocks(), r"block_structure \[\(64, 128\), \(128, 128\)\] is not supported"),
    ],
)
def test_other_forms_are_refused(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r"^config\.json: quantization_config") as error:
        StoredWeights.from_hf({"quantization_config": config})
    error.match(message)
    assert "must be" in message or "; known are fp8 (float8_e4m3fn" in str(error.value)
    assert "\n" not in str(error.value)
