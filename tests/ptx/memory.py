"""Memory as a kernel sees it: its tensor arguments, by their addresses, and a block's own memory."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Addresses = NDArray[np.int64]
Bytes = NDArray[np.uint8]
RUBBISH = 0xFF


class WrongAccess(Exception):  # noqa: N818
    """An access for which a GPU would end the kernel, or go on with arbitrary data."""


@dataclass(frozen=True, slots=True)
class Region:
    begin: int
    data: Bytes

    @property
    def end(self) -> int:
        return self.begin + len(self.data)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Region:
        """The memory that a tensor spans, and no more."""
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        num_bytes = span * tensor.itemsize if tensor.numel() else 0
        data = np.frombuffer((ctypes.c_uint8 * num_bytes).from_address(tensor.data_ptr()), dtype=np.uint8)
        return cls(tensor.data_ptr(), data)


class Memory:
    """The memory of `regions`, or a block's shared memory, which begins at 0."""

    def __init__(self, name: str, regions: list[Region]) -> None:
        self.name = name
        self._regions = regions

    @classmethod
    def shared(cls, num_bytes: int) -> Memory:
        return cls("shared", [Region(0, np.full(num_bytes, RUBBISH, dtype=np.uint8))])

    def load(self, addresses: Addresses, num_bytes: int) -> NDArray[Any]:
        """[address, num_bytes] uint8"""
        loaded = np.empty((len(addresses), num_bytes), dtype=np.uint8)
        for inside, data, places in self._places(addresses, num_bytes):
            loaded[inside] = data[places]
        return loaded

    def store(self, addresses: Addresses, values: NDArray[Any]) -> None:
        """`values`: [address, bytes] uint8. If several store to one place, the last one stays."""
        for inside, data, places in self._places(addresses, values.shape[1]):
            data[places] = values[inside]

    def _places(self, addresses: Addresses, num_bytes: int) -> list[tuple[Any, Bytes, NDArray[np.int64]]]:
        """For each region that is accessed: which of the accesses do so, its data, and the offsets in it."""
        if (addresses % num_bytes).any():
            wrong = int(addresses[(addresses % num_bytes) != 0][0])
            raise WrongAccess(f"{num_bytes} bytes of {self.name} memory at {wrong % num_bytes} beside what is aligned")
        found, left, offsets = [], len(addresses), np.arange(num_bytes)
        for region in self._regions:
            inside = (addresses >= region.begin) & (addresses <= region.end - num_bytes)
            num_inside = int(inside.sum())
            if num_inside:
                found.append((inside, region.data, addresses[inside, None] - region.begin + offsets))
                left -= num_inside
                if not left:
                    return found
        if left > 0:
            is_known = np.zeros(len(addresses), dtype=bool)
            for inside, _, _ in found:
                is_known |= inside
            if not is_known.all():
                wrong = int(addresses[~is_known][0])
                near = min(self._regions, key=lambda each: max(each.begin - wrong, wrong - each.end), default=None)
                where = "" if near is None else f", {wrong - near.end:+} of an argument's end"
                raise WrongAccess(f"{num_bytes} bytes of {self.name} memory at {wrong:#x}{where}")
        return found
