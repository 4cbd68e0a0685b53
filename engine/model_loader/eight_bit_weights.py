"""Weights of a checkpoint that stores them in 8 bits, with scales: a weight is `weight * scale`.

They are either dequantised to the engine's dtype while they are read, one tensor at a time (computed in float32, then
rounded), so that every model family can use them like plain ones. Or they are kept (`ScaledWeight`): with quantization
"stored", all of them; with a quantization in 8 bits given by name, those of that type with one scale per output (or per
tensor), but not those with a scale per block of inputs.

    name             in 8 bits: int8 or float8_e4m3fn [N, K]; in any other type: a plain weight, without a scale
    name_scale       or name_scale_inv, with the same meaning: one number, [N], [N, 1], or [blocks of N, blocks of K]

Shapes: N outputs, K inputs.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812

from engine.model_loader.weights import PLAIN_DTYPES, DummyWeights, SafetensorsWeights
from engine.models.stored_weights import AS_STORED, StoredWeights
from engine.scaled_weight import ScaledWeight
from engine.weight import Weight

DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
SCALE_ENDINGS = ("_scale", "_scale_inv")
NOT_NEEDED = (
    ".input_scale", ".activation_scale", ".input_zero_point", ".q_scale", ".k_scale", ".v_scale", ".kv_scale",
    ".k_proj.output_scale", ".v_proj.output_scale",
)  # fmt: skip
"""Scales of activations, which the engine computes at run time, and of keys and values, which a pool in 8 bits does not
use: neither changes a weight."""
FLOAT8_NAN = 0x7F
"""The bits of float8_e4m3fn's only NaN, without the sign."""


class EightBitWeights(SafetensorsWeights):
    def __init__(self, folder: Path, dtype: str, device: str, stored: StoredWeights, quantization: str) -> None:
        """`quantization`: the engine's resolved quantization; weights in another form are dequantised."""
        super().__init__(folder, dtype, device)
        self._block = stored.block
        self._dtypes = [DTYPES[each] for each in stored.quantizations]
        self._quantization = quantization
        for suffix in NOT_NEEDED:
            super().ignore(suffix)

    def take_product(self, name: str, shape: tuple[int, int]) -> Weight:
        weight = self._weight_of(name, self._read_stored(name, shape))
        if isinstance(weight, torch.Tensor):
            return weight.to(self.dtype).contiguous()
        return weight if self._is_kept(weight) else weight.dequantized()

    def narrow_products(self) -> dict[str, tuple[int, int]]:
        tensors = {name: handle.get_tensor(name) for name, handle in self._handle_of.items()}
        return {
            name: (tensor.shape[0], tensor.shape[1])
            for name, tensor in tensors.items()
            if tensor.dtype in self._dtypes and tensor.ndim == 2
        }

    def ignore(self, suffix: str) -> None:
        for ending in ("", *SCALE_ENDINGS):
            super().ignore(suffix + ending)

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        weight = self._weight_of(name, self._read_stored(name, shape))
        return weight if isinstance(weight, torch.Tensor) else weight.dequantized()

    def _is_kept(self, weight: ScaledWeight) -> bool:
        if self._quantization == AS_STORED:
            return True
        return weight.weight.dtype == DTYPES.get(self._quantization) and not weight.has_groups

    def _weight_of(self, name: str, stored: torch.Tensor) -> torch.Tensor | ScaledWeight:
        if stored.dtype in PLAIN_DTYPES:
            return stored
        if stored.dtype not in self._dtypes or stored.ndim != 2:
            named = " or ".join(str(dtype) for dtype in self._dtypes)
            raise ValueError(
                f"{self._file_of[name]}: {name} is in {stored.dtype} with {stored.ndim} axes; by config.json weights "
                f"are in {named}, with two"
            )
        scale = self._scale_of(name, stored)
        num_outputs, num_inputs = stored.shape
        group_size = self._block[1] if self._block is not None and scale.shape[1] > 1 else num_inputs
        return ScaledWeight(stored.contiguous(), scale.expand(num_outputs, -1).contiguous(), group_size, self.dtype)

    def _scale_of(self, name: str, stored_NK: torch.Tensor) -> torch.Tensor:
        """The scale in float32: per output or for all outputs, and per block of inputs or for all inputs. Raises
        `ValueError` if scales or weights are not valid numbers."""
        scale_name, scale = self._read_scale(name)
        where = f"{self._file_of[scale_name]}: {scale_name}"
        if scale.dtype not in (*PLAIN_DTYPES, torch.float8_e8m0fnu):
            raise ValueError(f"{where} is in {scale.dtype}; scales must be floats")
        scale = scale.float()
        if not bool((scale.isfinite() & (scale >= 0)).all()):
            raise ValueError(f"{where} holds scales that are not finite, or negative")
        if stored_NK.dtype == torch.float8_e4m3fn and _has_nan(stored_NK):
            raise ValueError(f"{self._file_of[name]}: {name} holds numbers that are not finite (NaN)")
        num_outputs, num_inputs = stored_NK.shape
        if scale.numel() == 1:
            return scale.view(1, 1)
        if scale.shape in ((num_outputs,), (num_outputs, 1)):
            return scale.view(-1, 1)
        expected = f"1, {(num_outputs,)} or {(num_outputs, 1)}"
        if self._block is not None:
            blocks = -(-num_outputs // self._block[0]), -(-num_inputs // self._block[1])
            if scale.shape == blocks:
                return scale.repeat_interleave(self._block[0], dim=0)[:num_outputs]
            expected += " or {}, of blocks of {}x{}".format(blocks, *self._block)
        raise ValueError(f"{where} has shape {tuple(scale.shape)}, expected {expected}")

    def _read_scale(self, name: str) -> tuple[str, torch.Tensor]:
        names = [name + ending for ending in SCALE_ENDINGS if name + ending in self._handle_of]
        if len(names) != 1:
            found = "both" if names else "neither"
            raise ValueError(
                f"{self._file_of[name]}: {name} is in 8 bits, and the files have {found} of {name}_scale and "
                f"{name}_scale_inv"
            )
        scale: torch.Tensor = self._handle_of[names[0]].get_tensor(names[0])
        self._left.discard(names[0])
        return names[0], self._own(scale)


class DummyEightBitWeights(DummyWeights):
    """Made-up weights with all products of layers in 8 bits, in the first form that config.json names."""

    def __init__(self, seed: int, dtype: str, device: str, stored: StoredWeights) -> None:
        super().__init__(seed, dtype, device)
        self._stored_dtype = DTYPES[stored.quantizations[0]]
        self._block = stored.block

    def take_product(self, name: str, shape: tuple[int, int]) -> Weight:
        noise_NK = self._read(name, shape)
        num_outputs, num_inputs = shape
        group_size = num_inputs if self._block is None else min(self._block[1], num_inputs)
        whole = F.pad(noise_NK, (0, -num_inputs % group_size)).view(num_outputs, -1, group_size)
        scale_NG = whole.abs().amax(dim=2) / LARGEST[self._stored_dtype]
        quotient_NK = (whole / scale_NG[:, :, None]).view(num_outputs, -1)[:, :num_inputs]
        stored_NK = quotient_NK.round() if self._stored_dtype == torch.int8 else quotient_NK
        return ScaledWeight(stored_NK.to(self._stored_dtype).contiguous(), scale_NG, group_size, self.dtype)


def _has_nan(float8: torch.Tensor) -> bool:
    return bool((float8.view(torch.uint8) & FLOAT8_NAN == FLOAT8_NAN).any())
