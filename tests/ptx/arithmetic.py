"""The arithmetic of instructions, on arrays with one number per thread. Bits in registers are unsigned integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Numbers = NDArray[Any]

DTYPES: dict[str, Any] = {
    "pred": np.bool_, "b8": np.uint8, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64, "u8": np.uint8,
    "u16": np.uint16, "u32": np.uint32, "u64": np.uint64, "s8": np.int8, "s16": np.int16, "s32": np.int32,
    "s64": np.int64, "f16": np.float16, "f32": np.float32, "f64": np.float64, "bf16": np.uint16, "f16x2": np.uint32,
    "bf16x2": np.uint32, "e4m3x2": np.uint16,
}  # fmt: skip
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
LARGEST_FLOAT8 = 448.0


def widened(bits: Numbers) -> Numbers:
    """bfloat16 to float32"""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(x: Numbers) -> Numbers:
    """Rounds to nearest, ties to even."""
    return (
        torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32)).bfloat16().view(torch.int16).numpy().view(np.uint16)
    )


def cut_to_half(x: Numbers) -> Numbers:
    """float16, rounded towards zero."""
    nearest = x.astype(np.float16)
    return np.where(np.abs(nearest) > np.abs(x), np.nextafter(nearest, np.float16(0)), nearest)


def to_float8(x: Numbers) -> Numbers:
    """e4m3, saturating."""
    clipped = torch.from_numpy(np.ascontiguousarray(np.clip(x, -LARGEST_FLOAT8, LARGEST_FLOAT8), dtype=np.float32))
    return clipped.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def from_float8(bits: Numbers) -> Numbers:
    return torch.from_numpy(np.ascontiguousarray(bits)).view(torch.float8_e4m3fn).float().numpy()


def halves(x: Numbers) -> tuple[Numbers, Numbers]:
    """The lower and the upper half of 32 bits."""
    return (x & 0xFFFF).astype(np.uint16), (x >> 16).astype(np.uint16)


def joined(low: Numbers, high: Numbers) -> Numbers:
    return low.astype(np.uint32) | (high.astype(np.uint32) << 16)


def flushed(x: Numbers) -> Numbers:
    """Numbers too small for an exponent (subnormal) become zero."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x).astype(np.float32)


def packed(low: Numbers, high: Numbers, kind: str) -> Numbers:
    """Two numbers in one register."""
    if kind == "e4m3x2":
        return to_float8(low).astype(np.uint16) | (to_float8(high).astype(np.uint16) << 8)
    narrow = {"bf16x2": to_bfloat16, "f16x2": lambda x: x.astype(np.float16).view(np.uint16)}[kind]
    return joined(narrow(low), narrow(high))


def unpacked(bits: Numbers, kind: str) -> tuple[Numbers, Numbers]:
    """The lower and the upper number."""
    if kind == "e4m3x2":
        return from_float8((bits & 0xFF).astype(np.uint8)), from_float8((bits >> 8).astype(np.uint8))
    low, high = halves(bits)
    if kind == "bf16x2":
        return widened(low), widened(high)
    return low.view(np.float16).astype(np.float32), high.view(np.float16).astype(np.float32)


ROUNDINGS = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}


def converted(x: Numbers, kind: str, modifiers: tuple[str, ...]) -> Numbers:
    """Converts one number per register to another type. Integers too large for it are truncated, floats clamped."""
    dtype = DTYPES[kind]
    if kind == "bf16":
        return to_bfloat16(x)
    if kind == "f16" and "rz" in modifiers:
        return cut_to_half(x)
    if x.dtype.kind != "f" or np.dtype(dtype).kind == "f":
        return x.astype(dtype)
    [rounding] = [ROUNDINGS[each] for each in modifiers if each in ROUNDINGS]
    limits = np.iinfo(dtype)
    whole = np.where(np.isnan(x), 0, rounding(x.astype(np.float64)))
    within = np.clip(whole, limits.min, limits.max).astype(dtype)
    return np.where(whole >= limits.max, limits.max, within).astype(dtype)


def fused(a: Numbers, b: Numbers, c: Numbers) -> Numbers:
    """a * b + c, rounded once; the last bit may differ now and then."""
    wide = np.float64 if a.dtype == np.float32 else np.longdouble
    return (a.astype(wide) * b.astype(wide) + c.astype(wide)).astype(a.dtype)


def shifted(x: Numbers, by: Numbers, *, left: bool) -> Numbers:
    """Shifts; by as many bits as there are or more, nothing but the sign is left."""
    num_bits = 8 * x.dtype.itemsize
    within = np.minimum(by, num_bits - 1).astype(x.dtype)
    if left:
        return np.where(by < num_bits, x << within, 0).astype(x.dtype)
    if x.dtype.kind == "i":
        return x >> within
    return np.where(by < num_bits, x >> within, 0).astype(x.dtype)


def high_half(a: Numbers, b: Numbers) -> Numbers:
    if a.dtype.itemsize < 8:
        wide = np.int64 if a.dtype.kind == "i" else np.uint64
        return ((a.astype(wide) * b.astype(wide)) >> wide(8 * a.dtype.itemsize)).astype(a.dtype)
    return np.array([int(x) * int(y) >> 64 for x, y in zip(a, b, strict=True)], dtype=a.dtype)


def bits_from(x: Numbers, position: Numbers, length: Numbers) -> Numbers:
    """`length` bits of `x` from `position` on, signed if `x` is."""
    wide = x.astype(np.int64) >> np.minimum(position, 63).astype(np.int64)
    num_bits = np.minimum(length, 32).astype(np.int64)
    taken = wide & ((np.int64(1) << num_bits) - 1)
    if x.dtype.kind == "i":
        sign = (taken >> np.maximum(num_bits - 1, 0)) & 1
        taken = np.where((num_bits > 0) & (sign == 1), taken - (np.int64(1) << num_bits), taken)
    return taken.astype(x.dtype)


def permuted(a: Numbers, b: Numbers, selector: Numbers) -> Numbers:
    """Four of eight bytes, each chosen by four bits; the highest of these asks for the byte's sign instead."""
    eight = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    result = np.zeros(len(eight), dtype=np.uint32)
    for place in range(4):
        chosen = (selector >> (4 * place)) & 0xF
        byte = ((eight >> (8 * (chosen & 7)).astype(np.uint64)) & np.uint64(0xFF)).astype(np.uint32)
        sign = np.where(byte & 0x80, 0xFF, 0).astype(np.uint32)
        result |= np.where(chosen & 8, sign, byte).astype(np.uint32) << np.uint32(8 * place)
    return result


def quotient(a: Numbers, b: Numbers) -> Numbers:
    """The quotient of integers, truncated."""
    safe = np.where(b == 0, 1, b).astype(a.dtype)
    return (
        (np.sign(a) * np.sign(safe) * (np.abs(a) // np.abs(safe))).astype(a.dtype) if a.dtype.kind == "i" else a // safe
    )


def _unordered(a: Numbers, b: Numbers) -> Numbers:
    if a.dtype.kind != "f":
        return np.zeros(np.broadcast(a, b).shape, dtype=bool)
    return np.isnan(a) | np.isnan(b)


def divided(a: Numbers, b: Numbers) -> Numbers:
    return a / b if a.dtype.kind == "f" else quotient(a, b)


OPERATIONS: dict[str, Callable[..., Numbers]] = {
    "add": np.add, "sub": np.subtract, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "not": np.invert, "neg": np.negative, "abs": np.abs, "fma": fused, "div": divided,
    "rem": lambda a, b: a - quotient(a, b) * b, "min": np.fmin, "max": np.fmax, "ex2": np.exp2, "lg2": np.log2,
    "rcp": lambda x: 1 / x, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "tanh": np.tanh,
}  # fmt: skip
"""By an instruction's name; on numbers of one type. The minimum or maximum of a number and NaN is the number."""
OF_NAN = {"min": np.minimum, "max": np.maximum}
"""The same for instructions where it is NaN."""
COMPARE: dict[str, Callable[[Numbers, Numbers], Numbers]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: (a != b) & ~_unordered(a, b), "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    "equ": lambda a, b: (a == b) | _unordered(a, b), "neu": lambda a, b: a != b,
    "ltu": lambda a, b: ~(a >= b), "leu": lambda a, b: ~(a > b), "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b), "num": lambda a, b: ~_unordered(a, b), "nan": _unordered,
}  # fmt: skip


def product_of_tiles(
    a: list[Numbers], b: list[Numbers], c: list[Numbers], widen: Callable[[Numbers], Numbers]
) -> list[Numbers]:
    """mma.m16n8k16 of one or more warps. Each lane's registers: 4 of two numbers in `a`, 2 of two in `b`, 4 of one in
    `c`."""
    num_warps = len(c[0]) // 32
    lane = np.arange(32)
    row, column = lane // 4, 2 * (lane % 4)
    tile_a, tile_b = np.zeros((num_warps, 16, 16)), np.zeros((num_warps, 16, 8))
    tile_c = np.zeros((num_warps, 16, 8))
    for index, register in enumerate(a):
        for half, numbers in enumerate(halves(register)):
            tile_a[:, row + 8 * (index % 2), column + 8 * (index // 2) + half] = widen(numbers).reshape(num_warps, 32)
    for index, register in enumerate(b):
        for half, numbers in enumerate(halves(register)):
            tile_b[:, column + 8 * index + half, row] = widen(numbers).reshape(num_warps, 32)
    for index, register in enumerate(c):
        tile_c[:, row + 8 * (index // 2), column + index % 2] = register.reshape(num_warps, 32)
    product = (tile_a @ tile_b + tile_c).astype(np.float32)
    return [product[:, row + 8 * (index // 2), column + index % 2].reshape(-1) for index in range(4)]
