"""Makes checkpoints with weights in 8 bits from plain ones; and the exact values that the weights stand for, computed
in float64."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

PRODUCTS = ("proj.weight", "proj_with_mqa.weight")
"""Endings of the names of weights that quantisers quantize; experts' routers, norms, embeddings and logits stay
plain."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """One of the formats in which checkpoints store weights in 8 bits."""

    quantization_config: dict[str, Any]
    dtype: torch.dtype = torch.float8_e4m3fn
    block: tuple[int, int] | None = None
    """How many outputs and inputs share a scale. None: all, unless `per_output`."""
    per_output: bool = False
    scale_shape: tuple[int, ...] | None = None
    """Shape of the stored scale, where one scale serves the whole tensor."""
    scale_ending: str = "_scale"
    scale_dtype: torch.dtype = torch.float32
    beside: dict[str, torch.Tensor] = field(default_factory=dict)
    """Further tensors of each product, by the ending that replaces `weight` in the name."""

    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the 8-bit weights, the scales, and the values that they stand for, in float64. The scales leave part
        of the 8-bit range unused, and differ from those that other quantisers would choose."""
        num_outputs, num_inputs = weight.shape
        size = (1, num_inputs) if self.per_output else self.block or (num_outputs, num_inputs)
        rows, columns = (torch.arange(n) // s for n, s in zip(weight.shape, size, strict=True))
        grid = (int(rows[-1]) + 1, int(columns[-1]) + 1)
        largest = 300.0 if self.dtype.is_floating_point else 117.0
        scale = torch.empty(grid)
        for i in range(grid[0]):
            for j in range(grid[1]):
                scale[i, j] = weight[rows == i][:, columns == j].abs().max() / largest
        scale = scale.to(self.scale_dtype)
        whole = scale.double()[rows][:, columns]
        quotient = weight.double() / whole
        limit = largest + 8
        clamped = quotient.clamp(-limit, limit)
        stored = (clamped if self.dtype.is_floating_point else clamped.round()).float().to(self.dtype)
        if grid == (1, 1) and self.scale_shape is not None:
            scale = scale.reshape(self.scale_shape)
        return stored, scale, stored.double() * whole


def compressed(format_: str, type_: str, strategy: str, **weights: Any) -> dict[str, Any]:
    """`quantization_config` as llm-compressor writes it."""
    arguments = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8,
        "observer": "minmax", "observer_kwargs": {}, "symmetric": True,
    }  # fmt: skip
    activations = arguments | {"dynamic": True, "observer": None, "strategy": "token", "type": type_}
    group = {
        "input_activations": activations, "output_activations": None, "targets": ["Linear"],
        "weights": arguments | {"strategy": strategy, "type": type_} | weights,
    }  # fmt: skip
    return {
        "config_groups": {"group_0": group}, "format": format_, "global_compression_ratio": None,
        "ignore": ["lm_head", "re:.*mlp.gate$"], "kv_cache_scheme": None, "quant_method": "compressed-tensors",
        "quantization_status": "compressed", "sparsity_config": {}, "transform_config": {}, "version": "0.12.2",
    }  # fmt: skip


BFLOAT16 = torch.bfloat16
FORMS = {
    # DeepSeek-V3, Qwen3-FP8; with blocks that divide none of the sizes used here.
    "fp8 blocks": Form(
        quantization_config={
            "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [10, 12],
        },
        block=(10, 12), scale_ending="_scale_inv",
    ),
    # DeepSeek-V3.1: scales that are powers of two, here stored as bytes.
    "fp8 blocks, powers of two": Form(
        quantization_config={"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [16, 16]},
        block=(16, 16), scale_ending="_scale_inv", scale_dtype=torch.float8_e8m0fnu,
    ),
    # AutoFP8
    "fp8 tensor": Form(
        quantization_config={
            "quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"],
            "kv_cache_scheme": "static",
        },
        scale_shape=(), beside={"input_scale": torch.tensor(0.02)},
    ),
    # Mistral
    "fp8 tensor, inv": Form(
        quantization_config={
            "quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "dequantize": False,
            "modules_to_not_convert": ["model.vision_tower", "lm_head"],
        },
        scale_shape=(), scale_ending="_scale_inv", scale_dtype=BFLOAT16,
        beside={"activation_scale": torch.tensor(0.02, dtype=BFLOAT16)},
    ),
    "float channel": Form(
        quantization_config=compressed("float-quantized", "float", "channel"), per_output=True, scale_dtype=BFLOAT16
    ),
    "float tensor": Form(
        quantization_config=compressed("float-quantized", "float", "tensor"), scale_shape=(1,),
        beside={"input_scale": torch.tensor([0.02])},
    ),
    "float block": Form(
        quantization_config=compressed("float-quantized", "float", "block", block_structure=[8, 20]), block=(8, 20)
    ),
    "int channel": Form(
        quantization_config=compressed("int-quantized", "int", "channel"), dtype=torch.int8, per_output=True,
        scale_dtype=BFLOAT16,
    ),
    "int tensor": Form(
        quantization_config=compressed("naive-quantized", "int", "tensor"), dtype=torch.int8, scale_shape=(1, 1)
    ),
}  # fmt: skip


def quantized(tensors: dict[str, torch.Tensor], form: Form) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the checkpoint's tensors, and the same unquantized: what they stand for, rounded to float32."""
    stored, plain = {}, {}
    for name, tensor in tensors.items():
        stored[name] = plain[name] = tensor
        if not name.endswith(PRODUCTS):
            continue
        stored[name], stored[name + form.scale_ending], exact = form.quantize(tensor.float())
        plain[name] = exact.float()
        beside = {name.removesuffix("weight") + ending: each.clone() for ending, each in form.beside.items()}
        stored |= beside
    return stored, plain


def llama_tensors(hf_config: dict[str, Any], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random weights of a Llama without biases."""
    D, I = hf_config["hidden_size"], hf_config["intermediate_size"]  # noqa: E741
    kv_size = D // hf_config["num_attention_heads"] * hf_config["num_key_value_heads"]
    ends = {"model.embed_tokens": (hf_config["vocab_size"], D), "lm_head": (hf_config["vocab_size"], D)}
    shapes: dict[str, tuple[int, ...]] = {**ends, "model.norm": (D,)}
    for layer in range(hf_config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name, size in (("q", D), ("k", kv_size), ("v", kv_size), ("o", D)):
            shapes[f"{at}.self_attn.{name}_proj"] = (size, D)
        shapes |= {f"{at}.mlp.gate_proj": (I, D), f"{at}.mlp.up_proj": (I, D), f"{at}.mlp.down_proj": (D, I)}
        shapes |= {f"{at}.input_layernorm": (D,), f"{at}.post_attention_layernorm": (D,)}
    return _random(shapes, dtype)


def deepseek_tensors(hf_config: dict[str, Any], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random weights of a DeepSeek-V3 without biases, except the bias of the experts' choice."""
    D, N, E = (hf_config[name] for name in ("hidden_size", "num_attention_heads", "n_routed_experts"))
    latent, query = hf_config["kv_lora_rank"], hf_config["q_lora_rank"]
    nope, rotated, value = (hf_config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    ends = {"model.embed_tokens": (hf_config["vocab_size"], D), "lm_head": (hf_config["vocab_size"], D)}
    shapes: dict[str, tuple[int, ...]] = {**ends, "model.norm": (D,)}
    for layer in range(hf_config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.input_layernorm": (D,), f"{at}.post_attention_layernorm": (D,)}
        shapes |= {
            f"{at}.self_attn.{name}": shape
            for name, shape in {
                "q_a_proj": (query, D), "q_a_layernorm": (query,), "q_b_proj": (N * (nope + rotated), query),
                "kv_a_proj_with_mqa": (latent + rotated, D), "kv_a_layernorm": (latent,),
                "kv_b_proj": (N * (nope + value), latent), "o_proj": (D, N * value),
            }.items()
        }  # fmt: skip
        if layer < hf_config["first_k_dense_replace"]:
            feed_forwards = {"mlp": hf_config["intermediate_size"]}
        else:
            names = ["shared_experts", *(f"experts.{e}" for e in range(E))]
            feed_forwards = dict.fromkeys([f"mlp.{name}" for name in names], hf_config["moe_intermediate_size"])
            shapes[f"{at}.mlp.gate"] = (E, D)
        for name, size in feed_forwards.items():
            products = {"gate_proj": (size, D), "up_proj": (size, D), "down_proj": (D, size)}
            shapes |= {f"{at}.{name}.{product}": shape for product, shape in products.items()}
    tensors = _random(shapes, dtype)
    for name in [name for name in tensors if name.endswith("mlp.gate.weight")]:
        tensors[name.replace(".weight", ".e_score_correction_bias")] = tensors[name][:, 0].float() / 100
    return tensors


def _random(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return {
        f"{name}.weight": (torch.randn(shape, generator=generator) * shape[-1] ** -0.5 + (len(shape) == 1)).to(dtype)
        for name, shape in shapes.items()
    }


def save_checkpoint(folder: Path, hf_config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder
