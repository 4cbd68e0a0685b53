"""Device pools whose device is a CPU, in one process: peers that open each other's pool memory, and pools of several
ranks, each reached over its own connection as if it were in another process."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing.connection import Pipe

import torch

from engine.running.executor import RankLost
from kv_transfer import HostPool, KVPool
from kv_transfer.pool import Digests, Rows
from worker_service.cuda_ipc import DevicePeers
from worker_service.device_pool import DevicePool
from worker_service.pool_of_ranks import PoolOfRanks
from worker_service.rank_pool import PoolServer, RankPool

OFFSET = 64
"""Offset of an exported address in the allocation that `OneProcess` claims to contain it."""


class OneProcess:
    """A driver whose handles are addresses. It records which addresses are open."""

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


def copy_rows_of_host(source: torch.Tensor, address: int, rows_2R: Rows) -> None:
    assert rows_2R.flags.c_contiguous  # as the kernel does
    row_bytes = source.shape[1] * source.itemsize
    for src, dst in rows_2R.T.tolist():
        ctypes.memmove(address + dst * row_bytes, source.data_ptr() + src * row_bytes, row_bytes)


def peers_in_one_process(driver: OneProcess | None = None) -> DevicePeers:
    return DevicePeers(driver or OneProcess(), copy_rows_of_host, nullcontext, Done)


def on_a_device(host: HostPool, driver: OneProcess | None = None) -> DevicePool:
    """Return a device pool over the same bytes; the device is the CPU."""
    numbers = torch.from_numpy(host.array).view(getattr(torch, host.layout.dtype))

    def digest_blocks(tensor: torch.Tensor, block_ids: Sequence[int]) -> Digests:
        assert tensor is numbers
        return host.digests(block_ids)

    return DevicePool(host.layout, numbers, digest_blocks, make_peers=lambda: peers_in_one_process(driver))


def parts_of(host: HostPool, num_ranks: int) -> list[HostPool]:
    """Split the same bytes among the ranks, by layers."""
    layout = replace(host.layout, num_layers=host.layout.num_layers // num_ranks)
    firsts = range(0, host.layout.num_layers, layout.num_layers)
    return [HostPool(layout, host.array[first : first + layout.num_layers]) for first in firsts]


def served(pool: KVPool, rank: int = 1, on_lost: Callable[[RankLost], None] = lambda error: None) -> RankPool:
    """Serve `pool` over a connection, as if it were in another process."""
    ours, theirs = Pipe()
    PoolServer(pool, theirs).start()
    return RankPool(rank, ours, on_lost)


def on_devices(host: HostPool, num_ranks: int = 3, driver: OneProcess | None = None) -> PoolOfRanks:
    """Return the same bytes as a pool of `num_ranks` devices."""
    own, *others = (on_a_device(part, driver) for part in parts_of(host, num_ranks))
    return PoolOfRanks([own, *(served(pool, rank) for rank, pool in enumerate(others, start=1))])
