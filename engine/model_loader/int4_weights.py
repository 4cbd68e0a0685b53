"""Weights of a checkpoint that stores them in 4 bits: integers packed in 32-bit words, with scales.

    packing          integers, 8 in a word                  zero points, 8 in a word               scales
    gptq, gptq_v2    qweight [K / 8, N], of adjacent K      qzeros [G, N / 8]                      scales [G, N]
    awq              qweight [K, N / 8], of N in AWQ_ORDER  qzeros [G, N / 8], in AWQ_ORDER        scales [G, N]
    pack-quantized   weight_packed [N, K / 8]               weight_zero_point [N / 8, G], or none  weight_scale [N, G]
    tandem-int4      an `Int4Weight`: packed, scale and offset; from GGUF files (engine/model_loader/gguf_int4.py)

These names replace `weight`; a tensor named `weight` is plain. The first integer of a word is in its lowest bits. A
number is (integer - zero point) * scale. gptq stores zero points minus one; without zero points, pack-quantized uses 8.
g_idx (weight_g_idx) [K], if present, is each input's group. If a group's inputs are not adjacent (quantised in the
order of activations), or its size is no multiple of INT4_GRAIN, the weight is dequantised.

Shapes: N outputs, K inputs, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.cache_dir import report
from engine.grains import INT4_GRAIN
from engine.int4_weight import MAX_NUMBERS, Int4Weight, quantize_int4
from engine.model_loader.eight_bit_weights import NOT_NEEDED
from engine.model_loader.weights import PLAIN_DTYPES, DummyWeights, SafetensorsWeights
from engine.models.stored_weights import AS_STORED, CT_PACKED, OWN, StoredWeights
from engine.weight import Weight, dequantized

IN_WORD = 8
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of 8 adjacent columns is at each place of a word."""
MIDDLE = 8
"""The zero point of symmetric integers."""
LESS_ONE = 0x11111111
"""gptq subtracts this from a word of zero points as a single integer: a zero point of 0 borrows from the next one."""


@dataclass(frozen=True, slots=True)
class Names:
    """The names that replace `weight`."""

    integers: str
    zero_points: str
    scales: str
    groups: str = ""
    """Empty: no such tensor."""

    def all(self) -> list[str]:
        return [name for name in (self.integers, self.zero_points, self.scales, self.groups) if name]


OWN_NAMES = ("packed", "scale", "offset")
OWN_DTYPES = (torch.uint8, torch.float32, torch.float32)
GPTQ_AND_AWQ_NAMES = Names("qweight", "qzeros", "scales", "g_idx")
NAMES_OF = {
    CT_PACKED: Names("weight_packed", "weight_zero_point", "weight_scale", "weight_g_idx"),
    OWN: Names(integers="packed", zero_points="offset", scales="scale"),
}


class Int4Weights(SafetensorsWeights):
    def __init__(self, folder: Path, dtype: str, device: str, stored: StoredWeights, quantization: str) -> None:
        """`quantization`: the engine's, resolved; weights are dequantised unless it is "stored" or "int4"."""
        super().__init__(folder, dtype, device)
        self._packing, self._is_symmetric = stored.packing, stored.is_symmetric
        self._names = NAMES_OF.get(stored.packing, GPTQ_AND_AWQ_NAMES)
        self._keeps = quantization in (AS_STORED, "int4")
        self._widened: set[str] = set()  # names of dequantised weights; some are taken more than once
        for suffix in (*NOT_NEEDED, ".weight_shape"):
            super().ignore(suffix)

    def take_product(self, name: str, shape: tuple[int, int]) -> Weight:
        if super().has(name):
            return super().take(name, shape)
        weight = self._unpack(name, shape)
        if self._keeps and isinstance(weight, Int4Weight) and weight.group_size % INT4_GRAIN == 0:
            return weight
        return self._dequantized(name, weight)

    def narrow_products(self) -> dict[str, tuple[int, int]]:
        ending = f".{self._names.integers}"
        names = [name for name in self._handle_of if name.endswith(ending)]
        return {f"{name.removesuffix(ending)}.weight": self._shape_of(name) for name in names}

    def _shape_of(self, name: str) -> tuple[int, int]:
        """[N, K] of the weight whose integers a tensor holds."""
        packed = self._handle(name).get_tensor(name)
        if packed.ndim != 2:
            raise ValueError(f"{self._file_of[name]}: {name} has {packed.ndim} axes, expected two")
        rows, columns = packed.shape
        if self._packing == "awq":
            return columns * IN_WORD, rows
        if self._packing == CT_PACKED:
            return rows, columns * IN_WORD
        return (rows, 2 * columns) if self._packing == OWN else (columns, rows * IN_WORD)

    def has(self, name: str) -> bool:
        return super().has(name) or super().has(_beside(name, self._names.integers))

    def ignore(self, suffix: str) -> None:
        super().ignore(suffix)
        if suffix.endswith(".weight"):
            for ending in self._names.all():
                super().ignore(_beside(suffix, ending))

    def check_all_taken(self) -> None:
        """Ignores all-zero biases of quantised weights, which old versions of AutoGPTQ have written for every
        weight."""
        for name in [name for name in self._left if name.endswith(".bias")]:
            is_beside = super().has(name.removesuffix("bias") + self._names.integers)
            if is_beside and not self._handle_of[name].get_tensor(name).any():
                self._left.discard(name)
        super().check_all_taken()
        if self._widened:
            report(
                f"{len(self._widened)} weights in 4 bits are widened: inputs that share a scale are not neighbours "
                f"(desc_act, actorder), or no multiple of {INT4_GRAIN}, or they are of latents, or of experts that are "
                "not all alike"
            )

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if super().has(name) or not self.has(name) or len(shape) != 2:
            return super()._read(name, shape)
        return self._dequantized(name, self._unpack(name, (shape[0], shape[1])))

    def _dequantized(self, name: str, weight: Weight) -> torch.Tensor:
        if self._keeps:
            self._widened.add(name)
        return dequantized(weight)

    def _unpack(self, name: str, shape: tuple[int, int]) -> Weight:
        """Raises `ValueError` if a tensor does not fit."""
        num_outputs, num_inputs = shape
        if self._packing == OWN:
            return self._take_own(name, shape)
        if num_inputs % IN_WORD or (num_outputs % IN_WORD and self._packing != CT_PACKED):
            raise ValueError(f"{name} is in 4 bits, and its sizes {shape} are no multiples of {IN_WORD}")
        scale_NG = self._scales(name, shape)
        num_groups = scale_NG.shape[1]
        zero_NG = self._zero_points(name, num_outputs, num_groups)
        offset_NG = -zero_NG * scale_NG
        packed = self._packed(name, num_outputs, num_inputs)
        weight = Int4Weight(packed, scale_NG.contiguous(), offset_NG.contiguous(), self.dtype)
        group_of = self._groups(name, num_inputs, num_groups)
        return weight if group_of is None else _widened(weight, group_of)

    def _take_own(self, name: str, shape: tuple[int, int]) -> Int4Weight:
        packed, scale, offset = (self._read_beside(_beside(name, ending)) for ending in OWN_NAMES)
        weight = Int4Weight(packed, scale, offset, self.dtype)
        dtypes = (packed.dtype, scale.dtype, offset.dtype)
        is_whole = scale.ndim == 2 and scale.shape == offset.shape and len(scale) == shape[0] and scale.shape[1] > 0
        is_whole &= tuple(packed.shape) == (shape[0], shape[1] // 2) and dtypes == OWN_DTYPES
        if not is_whole or shape[1] % (2 * scale.shape[1]):
            raise ValueError(f"{self._folder}: {name} is in 4 bits of other sizes than {shape}; convert the file again")
        return weight

    def _packed(self, name: str, num_outputs: int, num_inputs: int) -> torch.Tensor:
        """`Int4Weight.packed`. Words of adjacent inputs have these bytes already, so that they are not unpacked."""
        name = _beside(name, self._names.integers)
        if self._packing == CT_PACKED:
            return _bytes(self._words(name, (num_outputs, num_inputs // IN_WORD)))
        if self._packing == "awq":
            return awq_packed(self._words(name, (num_inputs, num_outputs // IN_WORD)))
        return _bytes(self._words(name, (num_inputs // IN_WORD, num_outputs)).T)

    def _zero_points(self, name: str, num_outputs: int, num_groups: int) -> torch.Tensor:
        """[N, G] float32."""
        name = _beside(name, self._names.zero_points)
        if self._packing == CT_PACKED:
            if not super().has(name):
                return torch.full((num_outputs, num_groups), float(MIDDLE), device=self.device)
            num_words = -(-num_outputs // IN_WORD)
            return unpacked(self._words(name, (num_words, num_groups)).T).T[:num_outputs].float()
        words = self._words(name, (num_groups, num_outputs // IN_WORD))
        if self._packing == "awq":
            return in_awq_order(unpacked(words)).T.float()
        zero_NG = unpacked(words + LESS_ONE if self._packing == "gptq" else words).T.float()
        if self._is_symmetric and bool((zero_NG == MIDDLE + (1 if self._packing == "gptq" else -1)).all()):
            other = "gptq_v2" if self._packing == "gptq" else "gptq"
            raise ValueError(
                f"{self._file_of[name]}: {name} is one off the middle throughout, and by config.json weights are "
                f"symmetric: quantization_config.checkpoint_format must be {other}"
            )
        return zero_NG

    def _scales(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        """[N, G] float32."""
        num_outputs, num_inputs = shape
        name = _beside(name, self._names.scales)
        scale = self._read_beside(name)
        if scale.dtype not in PLAIN_DTYPES:
            raise ValueError(f"{self._file_of[name]}: {name} is in {scale.dtype}; scales must be floats")
        scale_NG = scale if self._packing == CT_PACKED else scale.T
        if scale_NG.ndim != 2 or len(scale_NG) != num_outputs or not 0 < scale_NG.shape[1] <= num_inputs:
            raise ValueError(f"{self._file_of[name]}: {name} has shape {tuple(scale.shape)}, for a weight of {shape}")
        if not bool(scale.isfinite().all()):
            raise ValueError(f"{self._file_of[name]}: {name} holds scales that are not finite")
        return scale_NG.float()

    def _groups(self, name: str, num_inputs: int, num_groups: int) -> torch.Tensor | None:
        """[K] each input's group; None if groups are adjacent inputs. Raises `ValueError` if groups are invalid."""
        at = _beside(name, self._names.groups)
        group_of = self._read_beside(at) if super().has(at) else None
        # compressed-tensors fills the tensor with -1 if it has not reordered the inputs.
        if group_of is None or (self._packing == CT_PACKED and bool((group_of == -1).any())):
            if num_inputs % num_groups or num_inputs // num_groups % 2:
                raise ValueError(f"{name} has {num_inputs} inputs, which are not {num_groups} groups of one even size")
            return None
        if tuple(group_of.shape) != (num_inputs,) or group_of.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{self._file_of[at]}: {at} must be {num_inputs} integers")
        group_of = group_of.long()
        if bool((group_of < 0).any()) or bool((group_of >= num_groups).any()):
            raise ValueError(f"{self._file_of[at]}: {at} names groups beyond {num_groups}")
        size, rest = divmod(num_inputs, num_groups)
        neighbours = torch.arange(num_inputs, device=self.device) // size
        return None if not rest and size % 2 == 0 and torch.equal(group_of, neighbours) else group_of

    def _words(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        words = self._read_beside(name)
        if tuple(words.shape) != shape or words.dtype != torch.int32:
            raise ValueError(
                f"{self._file_of[name]}: {name} is {words.dtype} {tuple(words.shape)}, expected int32 {shape}"
            )
        return words

    def _read_beside(self, name: str) -> torch.Tensor:
        handle = self._handle(name)
        self._left.discard(name)
        tensor: torch.Tensor = handle.get_tensor(name)
        return self._own(tensor).to(self.device)


class DummyInt4Weights(DummyWeights):
    """Made-up weights with all products of layers in 4 bits."""

    def __init__(self, seed: int, dtype: str, device: str, stored: StoredWeights) -> None:
        super().__init__(seed, dtype, device)
        self._group_size = stored.group_size

    def take_product(self, name: str, shape: tuple[int, int]) -> Weight:
        num_inputs = shape[1]
        size = num_inputs if self._group_size == -1 else self._group_size
        noise_NK = self._read(name, shape).to(self.dtype)
        return noise_NK if num_inputs % size or size % INT4_GRAIN else quantize_int4(noise_NK, size)


def _widened(weight: Int4Weight, group_of: torch.Tensor) -> torch.Tensor:
    """Dequantise to [N, K] in the model's dtype, for groups of inputs that are not adjacent. Done for some rows at a
    time, since it takes 12 bytes of scratch per number."""
    wide_NK = torch.empty(len(weight), weight.num_inputs, dtype=weight.dtype, device=weight.packed.device)
    num_rows = max(MAX_NUMBERS // weight.num_inputs, 1)
    for start in range(0, len(weight), num_rows):
        rows = weight.rows(range(start, start + num_rows))
        wide_NK[start : start + num_rows] = rows.integers() * rows.scale[:, group_of] + rows.offset[:, group_of]
    return wide_NK


def unpacked(words: torch.Tensor) -> torch.Tensor:
    """[rows, words] int32 -> [rows, 8 * words] uint8, 0 to 15."""
    pairs = _bytes(words)
    return torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)


def in_awq_order(packed: torch.Tensor) -> torch.Tensor:
    """[rows, N] in the order within words -> in the order of columns."""
    place_of = torch.tensor(AWQ_ORDER, device=packed.device).argsort()
    return packed.view(len(packed), -1, IN_WORD)[:, :, place_of].flatten(1)


def awq_packed(words: torch.Tensor) -> torch.Tensor:
    """[K, N / 8] int32 -> [N, K / 2] bytes, as in `Int4Weight.packed`."""
    num_inputs, num_words = words.shape
    pairs = _bytes(words).view(num_inputs, num_words, IN_WORD // 2).permute(1, 2, 0).contiguous()
    first, second = pairs[:, :, ::2], pairs[:, :, 1::2]  # of two adjacent inputs; each byte has two outputs
    packed = pairs.new_empty(num_words, IN_WORD, num_inputs // 2)
    packed[:, AWQ_ORDER[::2]] = (first & 15) | (second << 4)
    packed[:, AWQ_ORDER[1::2]] = (first >> 4) | (second & 0xF0)
    return packed.flatten(0, 1)


def _bytes(words: torch.Tensor) -> torch.Tensor:
    """[rows, words] int32 -> [rows, 4 * words] uint8, each of two integers, the first in the lower half."""
    return words.contiguous().view(torch.uint8)


def _beside(name: str, ending: str) -> str:
    return f"{name.removesuffix('weight')}{ending}"
