"""Makes checkpoints with weights in 4 bits from plain ones, as quantisers write them; and the exact values that the
weights stand for."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from quantized_checkpoints import PRODUCTS, compressed


@dataclass(frozen=True, kw_only=True)
class Int4Form:
    """One of the formats in which checkpoints store weights in 4 bits."""

    quantization_config: dict[str, Any]
    packing: str
    """gptq, gptq_v2, awq or pack-quantized."""
    group_size: int
    """-1: one group of all inputs."""
    is_symmetric: bool = False
    by_activations: bool = False
    """Whether a group's inputs need not be neighbours."""
    names_groups: bool = True
    scale_dtype: torch.dtype = torch.float16

    def quantize(self, weight_NK: torch.Tensor, seed: int = 0) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return the stored tensors, by the ending that replaces `weight` in the name, and the values that they stand
        for, [N, K] float64."""
        num_outputs, num_inputs = weight_NK.shape
        size = num_inputs if self.group_size == -1 else self.group_size
        group_of = torch.arange(num_inputs) // size
        if self.by_activations:
            group_of = group_of[torch.randperm(num_inputs, generator=torch.Generator().manual_seed(seed))]
        num_groups = num_inputs // size
        scale, zero = torch.empty(num_outputs, num_groups), torch.empty(num_outputs, num_groups, dtype=torch.int64)
        for g in range(num_groups):
            own = weight_NK[:, group_of == g]
            low, high = own.amin(1).clamp_max(0), own.amax(1).clamp_min(0)
            if self.is_symmetric:
                scale[:, g], zero[:, g] = torch.maximum(-low, high) / 7.5, 8
            else:
                scale[:, g] = (high - low) / 15
                zero[:, g] = (-low / scale[:, g]).round().clamp(1 if self.packing == "gptq" else 0, 15).long()
        scale = scale.to(self.scale_dtype)
        wide = scale.double()[:, group_of]
        integers = (weight_NK.double() / wide + zero[:, group_of]).round().clamp(0, 15).long()
        return self._tensors(integers, zero, scale, group_of), (integers - zero[:, group_of]) * wide

    def _tensors(
        self, integers: torch.Tensor, zero: torch.Tensor, scale: torch.Tensor, group_of: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        groups = {"g_idx": group_of.int()} if self.names_groups else {}
        if self.packing == "pack-quantized":
            tensors = {
                "weight_packed": words(integers), "weight_scale": scale,
                "weight_shape": torch.tensor(integers.shape),
            }  # fmt: skip
            if not self.is_symmetric:
                tensors["weight_zero_point"] = words(zero.T).T
            return tensors | ({"weight_g_idx": group_of.int()} if self.by_activations else {})
        if self.packing == "awq":
            return {"qweight": words(awq(integers.T)), "qzeros": words(awq(zero.T)), "scales": scale.T}
        stored_zero = zero - int(self.packing == "gptq")
        return {"qweight": words(integers).T, "qzeros": words(stored_zero.T), "scales": scale.T} | groups


def words(integers: torch.Tensor) -> torch.Tensor:
    """[rows, n] -> [rows, n / 8] int32, the first of eight integers in the lowest bits; padded with zeros."""
    rows, n = integers.shape
    whole = torch.zeros(rows, -(-n // 8) * 8, dtype=torch.int64)
    whole[:, :n] = integers
    shifted = whole.view(rows, -1, 8) << torch.arange(0, 32, 4)
    return shifted.sum(2).to(torch.uint32).view(torch.int32)


def awq(columns: torch.Tensor) -> torch.Tensor:
    """[rows, n] with the columns in the order in which AutoAWQ packs them into words."""
    return columns.reshape(len(columns), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1)


def gptq(**settings: Any) -> dict[str, Any]:
    return {
        "bits": 4, "checkpoint_format": "gptq", "damp_percent": 0.01, "desc_act": False, "group_size": 32,
        "lm_head": False, "meta": {"quantizer": "gptqmodel:1.4.0"}, "quant_method": "gptq", "sym": True,
        "true_sequential": True,
    } | settings  # fmt: skip


def packed(**weights: Any) -> dict[str, Any]:
    config = compressed("pack-quantized", "int", "group", num_bits=4, group_size=32)
    config = copy.deepcopy(config)
    group = config["config_groups"]["group_0"]
    group["input_activations"] = None
    group["weights"] |= weights
    return config


AWQ = {
    "bits": 4, "group_size": 32, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm",
    "zero_point": True,
}  # fmt: skip
BFLOAT16 = torch.bfloat16
INT4_FORMS = {
    "gptq": Int4Form(quantization_config=gptq(), packing="gptq", group_size=32, is_symmetric=True),
    "gptq, zero points": Int4Form(quantization_config=gptq(sym=False, group_size=64), packing="gptq", group_size=64),
    "gptq, v2": Int4Form(
        quantization_config=gptq(checkpoint_format="gptq_v2", sym=False), packing="gptq_v2", group_size=32,
        names_groups=False,
    ),
    "gptq, by activations": Int4Form(
        quantization_config=gptq(desc_act=True), packing="gptq", group_size=32, by_activations=True
    ),
    "gptq, no groups": Int4Form(quantization_config=gptq(group_size=-1), packing="gptq", group_size=-1),
    "awq": Int4Form(quantization_config=AWQ, packing="awq", group_size=32),
    "packed": Int4Form(
        quantization_config=packed(), packing="pack-quantized", group_size=32, is_symmetric=True, scale_dtype=BFLOAT16
    ),
    "packed, zero points": Int4Form(
        quantization_config=packed(symmetric=False), packing="pack-quantized", group_size=32, scale_dtype=BFLOAT16
    ),
    "packed, channels": Int4Form(
        quantization_config=packed(strategy="channel", group_size=None), packing="pack-quantized", group_size=-1,
        is_symmetric=True, scale_dtype=torch.float32,
    ),
    "packed, by activations": Int4Form(
        quantization_config=packed(symmetric=False, actorder="group"), packing="pack-quantized", group_size=32,
        by_activations=True, scale_dtype=BFLOAT16,
    ),
    "packed, small groups": Int4Form(
        quantization_config=packed(group_size=16), packing="pack-quantized", group_size=16, is_symmetric=True
    ),
}  # fmt: skip
WIDENED = ("gptq, by activations", "packed, by activations", "packed, small groups")
"""The forms whose weights must be widened, since no product takes them as they are stored."""


Tensors = dict[str, torch.Tensor]


def in_int4(tensors: Tensors, form: Int4Form) -> tuple[Tensors, Tensors]:
    """Return the checkpoint's tensors, and the same unquantized: what they stand for, rounded to float32."""
    stored: Tensors = {}
    plain: Tensors = {}
    for seed, (name, tensor) in enumerate(tensors.items()):
        if not name.endswith(PRODUCTS):
            stored[name] = plain[name] = tensor
            continue
        beside, exact = form.quantize(tensor.float(), seed)
        stored |= {name.removesuffix("weight") + ending: each for ending, each in beside.items()}
        plain[name] = exact.float()
    return stored, plain
