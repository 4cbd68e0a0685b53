"""What opens peers' pools in a device's memory, where the device is a CPU and both pools are in this process."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext

import torch

from kv_transfer.pool import Rows
from worker_service.cuda_ipc import DevicePeers

OFFSET = 64
"""Of an address in the allocation that is said to hold it."""


class OneProcess:
    """A driver whose handles are addresses. It remembers what was opened and not closed."""

    def __init__(self, allocation_bytes: int = 1 << 20) -> None:
        self.allocation_bytes = allocation_bytes
        self.opened: list[int] = []

    def export(self, address: int) -> tuple[bytes, int, int]:
        return (address - OFFSET).to_bytes(64, "little"), OFFSET, self.allocation_bytes

    def open(self, handle: bytes) -> int:
        self.opened.append(int.from_bytes(handle, "little"))
        return self.opened[-1]

    def close(self, address: int) -> None:
        self.opened.remove(address)


class Done:
    def synchronize(self) -> None:
        return


def copy_rows_of_host(source: torch.Tensor, address: int, src_rows: Rows, dst_rows: Rows) -> None:
    row_bytes = source.shape[1] * source.itemsize
    for src, dst in zip(src_rows, dst_rows, strict=True):
        ctypes.memmove(address + int(dst) * row_bytes, source.data_ptr() + int(src) * row_bytes, row_bytes)


def peers_in_one_process(driver: OneProcess | None = None) -> DevicePeers:
    return DevicePeers(driver or OneProcess(), copy_rows_of_host, nullcontext, Done)
