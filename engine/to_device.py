"""A step's arrays, from the host to where it is computed, without waiting for anything.

A copy from ordinary memory waits until the device has done all that was launched before: from pinned memory it takes
its place in the queue, and the host goes on. torch keeps pinned memory until the copy is done, and then for the next.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def to_device(array: NDArray[Any], device: str | torch.device) -> torch.Tensor:
    """On a CPU the same memory; on another device a copy, in stream order. Strides stay what they are."""
    tensor = torch.from_numpy(array)
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def fill(tensor: torch.Tensor, array: NDArray[Any]) -> None:
    """Puts an array of its shape into a tensor that is there, in stream order."""
    if tensor.device.type == "cpu":
        tensor.copy_(torch.from_numpy(array))
    else:
        tensor.copy_(torch.from_numpy(array).pin_memory(), non_blocking=True)


def integers(values: Seq[int], device: str | torch.device) -> torch.Tensor:
    """[len(values)] int64"""
    return to_device(np.array(values, dtype=np.int64), device)
