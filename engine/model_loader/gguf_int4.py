"""Keeps weights of a GGUF file in its 4 bits: Q4_0, Q4_1 and Q4_K, in each of which 32 numbers share scale and offset.

transformers reads the file, renames its tensors and reorders rows of heads. Its result is compared with the file's
tensor: if the rows are the same in any order, their blocks are kept in transformers' order, so that they stand for
exactly the numbers that transformers has read. The file's other forms (5, 6 and 8 bits) are dequantised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import xxhash

from engine.int4_weight import Int4Weight
from engine.model_loader.gguf_left_out import tensor_names
from engine.model_loader.int4_weights import OWN_NAMES

GROUP_SIZE = 32
"""Numbers that share a scale, in all 4-bit forms of GGUF."""
Blocks = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Integers 0 to 15 [rows, groups, 32], scales and offsets [rows, groups] in float32."""


def keep_int4(reader: Any, tensors: dict[str, torch.Tensor], num_layers: int) -> int:
    """Replace those of `tensors` (bfloat16, by Hugging Face names) that the file has in 4 bits by their 4-bit form.
    Returns how many."""
    kept = 0
    for name, stored in _tensors_of(reader, [*tensors], num_layers):
        wide = tensors[name]
        weight = Int4Weight.of_integers(*_as_torch(_UNPACK[stored.tensor_type.name](stored.data)), torch.bfloat16)
        if (len(weight), weight.num_inputs) != tuple(wide.shape):
            continue
        order = _order_of(wide, weight.dequantized())
        if order is None:
            continue
        del tensors[name]
        beside = (weight.packed[order], weight.scale[order], weight.offset[order])
        for ending, tensor in zip(OWN_NAMES, beside, strict=True):
            tensors[name.removesuffix("weight") + ending] = tensor.contiguous()
        kept += 1
    return kept


def _tensors_of(reader: Any, names: list[str], num_layers: int) -> Iterator[tuple[str, Any]]:
    """Yield the file's tensors in 4 bits, with their Hugging Face names."""
    of_name = {tensor.name: tensor for tensor in reader.tensors}
    map_ = tensor_names(reader, num_layers)
    if map_ is None:
        return
    for name in names:
        stem = map_.get_name(name.removesuffix(".weight")) if name.endswith("proj.weight") else None
        tensor = of_name.get(f"{stem}.weight")
        if tensor is not None and tensor.tensor_type.name in _UNPACK:
            yield name, tensor


def _order_of(wide: torch.Tensor, stored: torch.Tensor) -> torch.Tensor | None:
    """For each row of `wide`, the equal row of `stored`; None if some row has none."""
    if torch.equal(wide, stored):
        return torch.arange(len(wide))
    row_of = {digest: row for row, digest in enumerate(_digests(stored))}
    rows = [row_of.get(digest) for digest in _digests(wide)]
    order = torch.tensor([row for row in rows if row is not None])
    return order if len(order) == len(rows) and torch.equal(wide, stored[order]) else None


def _digests(weight: torch.Tensor) -> list[bytes]:
    """A digest per row. Both zeros count as equal."""
    return [xxhash.xxh3_128_digest(row) for row in (weight + 0.0).contiguous().view(torch.int16).numpy()]


def _as_torch(blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    integers, scale, offset = (torch.from_numpy(np.ascontiguousarray(each)) for each in blocks)
    return integers.flatten(1), scale, offset


def _halves(data: np.ndarray) -> np.ndarray:
    """[…, n] bytes -> […, 2 * n]: the lower halves of all bytes, then the upper ones."""
    return np.concatenate((data & 15, data >> 4), axis=-1)


def _floats(data: np.ndarray) -> np.ndarray:
    """[…, 2] bytes of a float16 -> […] float32."""
    return np.ascontiguousarray(data).view(np.float16)[..., 0].astype(np.float32)


def _q4_0(data: np.ndarray) -> Blocks:
    """A block: a scale, 16 bytes of integers; the zero point is 8."""
    blocks = data.reshape(len(data), -1, 18)
    scale = _floats(blocks[:, :, :2])
    return _halves(blocks[:, :, 2:]), scale, -8 * scale


def _q4_1(data: np.ndarray) -> Blocks:
    """A block: a scale, the smallest number, 16 bytes of integers."""
    blocks = data.reshape(len(data), -1, 20)
    return _halves(blocks[:, :, 4:]), _floats(blocks[:, :, :2]), _floats(blocks[:, :, 2:4])


def _q4_k(data: np.ndarray) -> Blocks:
    """A block of 256 numbers: a scale of the scales, a scale of the minima, 8 scales and 8 minima of 6 bits in 12
    bytes, 128 bytes of integers. The first four scales and minima have the lower 6 bits of a byte each; its upper two
    bits are the upper ones of one of the last four, whose lower four bits are halves of the last four bytes."""
    blocks = data.reshape(len(data), -1, 144)
    first, second, last = (blocks[:, :, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate((first & 63, (last & 15) | (first >> 6 << 4)), axis=-1).astype(np.float32)
    less = np.concatenate((second & 63, (last >> 4) | (second >> 6 << 4)), axis=-1).astype(np.float32)
    scale = _floats(blocks[:, :, :2])[:, :, None] * scales
    offset = -(_floats(blocks[:, :, 2:4])[:, :, None] * less)
    integers = _halves(blocks[:, :, 16:].reshape(*blocks.shape[:2], 4, 32))
    rows = len(data)
    return integers.reshape(rows, -1, GROUP_SIZE), scale.reshape(rows, -1), offset.reshape(rows, -1)


_UNPACK: dict[str, Callable[[np.ndarray], Blocks]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k}
