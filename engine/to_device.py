"""Copies a step's arrays from the host to the device without waiting.

A copy from pageable memory waits until the device has finished all earlier work; a copy from pinned memory is queued,
and the host continues. torch keeps the pinned memory until the copy is done, and then reuses it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def to_device(array: NDArray[Any], device: str | torch.device) -> torch.Tensor:
    """On a CPU, share the array's memory; on another device, copy it in stream order. Strides are kept."""
    tensor = torch.from_numpy(array)
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def fill(tensor: torch.Tensor, array: NDArray[Any]) -> None:
    """Copy an array into an existing tensor of the same shape, in stream order."""
    if tensor.device.type == "cpu":
        tensor.copy_(torch.from_numpy(array))
    else:
        tensor.copy_(torch.from_numpy(array).pin_memory(), non_blocking=True)


def integers(values: Seq[int], device: str | torch.device) -> torch.Tensor:
    """[len(values)] int64"""
    return to_device(np.array(values, dtype=np.int64), device)
