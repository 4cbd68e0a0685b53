"""Peers' pools in a device's memory, by a driver of ours: what is checked before one is opened, and what is closed."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from device_peers import OFFSET, OneProcess, peers_in_one_process

from kv_transfer import InvalidTransfer, PeerUnreachable, TransportMissing
from protos import tandem_kv_transfer_pb2 as pb
from worker_service.cuda_ipc import CudaDriver

ROW_BYTES = 32


def rows(num_rows: int, seed: int) -> torch.Tensor:
    """int64 [row, word]"""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 2**60, (num_rows, ROW_BYTES // 8), dtype=np.int64))


def test_rows_are_copied_where_the_peer_says_its_pool_is() -> None:
    driver = OneProcess()
    peers = peers_in_one_process(driver)
    ours, theirs = rows(6, seed=1), rows(9, seed=2)
    before = theirs.clone()
    memory = peers.export(theirs.data_ptr())
    assert memory.offset == OFFSET
    opened = peers.open(memory, ours, 9)
    opened.copy(np.array([5, 0, 1]), np.array([2, 8, 4]), lambda: False).synchronize()
    assert theirs[[2, 8, 4]].equal(ours[[5, 0, 1]])
    assert theirs[[0, 1, 3, 5, 6, 7]].equal(before[[0, 1, 3, 5, 6, 7]])
    assert driver.opened == [theirs.data_ptr() - OFFSET]
    opened.close()
    assert driver.opened == []


@pytest.mark.parametrize(
    ("allocation_bytes", "fits"),
    [(OFFSET + 9 * ROW_BYTES, True), (OFFSET + 9 * ROW_BYTES - 1, False), (0, False)],
)
def test_a_pool_that_is_larger_than_its_allocation_is_refused(allocation_bytes: int, fits: bool) -> None:
    driver = OneProcess(allocation_bytes)
    peers = peers_in_one_process(driver)
    theirs = rows(9, seed=2)
    memory = peers.export(theirs.data_ptr())
    if fits:
        peers.open(memory, rows(6, seed=1), 9)
        return
    with pytest.raises(InvalidTransfer, match="a pool of 9 rows at 64 does not fit"):
        peers.open(memory, rows(6, seed=1), 9)
    assert driver.opened == []


@pytest.mark.parametrize("handle", [b"", bytes(63), bytes(65)])
def test_a_handle_of_another_length_is_not_shown_to_cuda(handle: bytes) -> None:
    driver = OneProcess()
    with pytest.raises(InvalidTransfer, match="has 64 bytes"):
        peers_in_one_process(driver).open(pb.CudaMemory(handle=handle), rows(6, seed=1), 9)
    assert driver.opened == []


class Refusing(OneProcess):
    def export(self, address: int) -> tuple[bytes, int]:
        raise RuntimeError("cuIpcGetMemHandle: CUDA_ERROR_INVALID_VALUE")

    def open(self, handle: bytes) -> tuple[int, int]:
        raise RuntimeError("cuIpcOpenMemHandle: CUDA_ERROR_INVALID_CONTEXT")


def test_what_cuda_refuses_is_said_with_what_to_do() -> None:
    peers = peers_in_one_process(Refusing())
    with pytest.raises(TransportMissing, match=r"CUDA_ERROR_INVALID_VALUE.*expandable_segments"):
        peers.export(4096)
    with pytest.raises(PeerUnreachable, match=r"CUDA_ERROR_INVALID_CONTEXT.*one GPU, or on two with peer access"):
        peers.open(pb.CudaMemory(handle=bytes(64)), rows(6, seed=1), 9)


def test_missing_bindings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(TransportMissing, match="pip install cuda-bindings"):
        CudaDriver()
