"""Peers' pools in a device's memory, with a stand-in for the CUDA driver: what is checked before one is opened, and
that it is closed."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from device_peers import OFFSET, Done, OneProcess, peers_in_one_process

from kv_transfer import InvalidTransfer, PeerUnreachable, TransportMissing
from protos import tandem_kv_transfer_pb2 as pb
from worker_service.cuda_ipc import CudaDriver, DevicePeers

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
    opened.copy(np.array([[5, 0, 1], [2, 8, 4]]), lambda: math.inf).synchronize()
    assert theirs[[2, 8, 4]].equal(ours[[5, 0, 1]])
    assert theirs[[0, 1, 3, 5, 6, 7]].equal(before[[0, 1, 3, 5, 6, 7]])
    assert driver.opened == [theirs.data_ptr() - OFFSET]
    opened.close()
    assert driver.opened == []


def test_nothing_is_copied_by_a_process_that_stood_still() -> None:
    driver = OneProcess()
    peers = peers_in_one_process(driver)
    ours, theirs = rows(6, seed=1), rows(9, seed=2)
    before = theirs.clone()
    opened = peers.open(peers.export(theirs.data_ptr()), ours, 9)
    with pytest.raises(RuntimeError, match="stood still: the blocks may be somebody else's"):
        opened.copy(np.array([[5], [2]]), lambda: -math.inf)
    assert theirs.equal(before)
    opened.close()


def test_what_is_waited_for_is_recorded_on_the_stream_of_the_copies() -> None:
    said: list[str] = []

    @contextmanager
    def copying() -> Iterator[None]:
        said.append("enter")
        yield
        said.append("leave")

    def record() -> Done:
        said.append("record")
        return Done()

    peers = DevicePeers(OneProcess(), lambda *_: said.append("copy"), copying, record)
    theirs = rows(9, seed=2)
    opened = peers.open(peers.export(theirs.data_ptr()), rows(6, seed=1), 9)
    opened.copy(np.array([[5], [2]]), lambda: math.inf)
    assert said == ["enter", "copy", "record", "leave"]


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


def test_a_pool_whose_size_nobody_says_is_refused() -> None:
    driver = OneProcess()
    peers = peers_in_one_process(driver)
    memory = peers.export(rows(9, seed=2).data_ptr())
    memory.ClearField("num_bytes")
    with pytest.raises(InvalidTransfer, match="does not fit its 0 bytes"):
        peers.open(memory, rows(6, seed=1), 9)
    assert driver.opened == []


@pytest.mark.parametrize("handle", [b"", bytes(63), bytes(65)])
def test_a_handle_of_another_length_is_not_shown_to_cuda(handle: bytes) -> None:
    driver = OneProcess()
    with pytest.raises(InvalidTransfer, match="has 64 bytes"):
        peers_in_one_process(driver).open(pb.CudaMemory(handle=handle), rows(6, seed=1), 9)
    assert driver.opened == []


class Refusing(OneProcess):
    def export(self, address: int) -> tuple[bytes, int, int]:
        raise RuntimeError("cuIpcGetMemHandle: CUDA_ERROR_INVALID_VALUE")

    def open(self, handle: bytes) -> int:
        raise RuntimeError("cuIpcOpenMemHandle: CUDA_ERROR_INVALID_CONTEXT")


def test_what_cuda_refuses_is_said_with_what_to_do() -> None:
    peers = peers_in_one_process(Refusing())
    with pytest.raises(TransportMissing, match=r"CUDA_ERROR_INVALID_VALUE.*expandable_segments"):
        peers.export(4096)
    with pytest.raises(PeerUnreachable, match=r"CUDA_ERROR_INVALID_CONTEXT.*one GPU, or on two with peer access"):
        peers.open(pb.CudaMemory(handle=bytes(64), num_bytes=4096), rows(6, seed=1), 9)


class Result(Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1


class Handle:
    """As in all versions of the bindings: a block of memory, whose field the newer ones do not name."""

    def __init__(self, content: bytes = bytes(64)) -> None:
        self._memory = ctypes.create_string_buffer(content, 64)

    def getPtr(self) -> int:  # noqa: N802
        return ctypes.addressof(self._memory)

    def content(self) -> bytes:
        return self._memory.raw


class Bindings(ModuleType):
    """CUDA's bindings, with one allocation at 0x10000, which a peer that opens it sees at 0x90000. They know the size
    of their own process' memory only: the documentation promises no more."""

    CUresult = Result
    CUipcMem_flags = SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1)
    CUipcMemHandle = Handle

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self.opened: list[bytes] = []

    def cuMemGetAddressRange(self, address: int) -> tuple[Any, ...]:  # noqa: N802
        is_own = 0x10000 <= address < 0x10000 + 4096
        return (Result.CUDA_SUCCESS, 0x10000, 4096) if is_own else (Result.CUDA_ERROR_INVALID_VALUE, 0, 0)

    def cuIpcGetMemHandle(self, base: int) -> tuple[Any, ...]:  # noqa: N802
        assert base == 0x10000
        return Result.CUDA_SUCCESS, Handle(bytes(range(64)))

    def cuIpcOpenMemHandle(self, handle: Handle, flags: int) -> tuple[Any, ...]:  # noqa: N802
        assert flags == 1
        self.opened.append(handle.content())
        return Result.CUDA_SUCCESS, 0x90000

    def cuIpcCloseMemHandle(self, address: int) -> tuple[Any, ...]:  # noqa: N802
        assert address == 0x90000
        self.opened.pop()
        return (Result.CUDA_SUCCESS,)


def test_the_drivers_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = ModuleType("cuda.bindings")
    bindings.driver = calls = Bindings()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    driver = CudaDriver()
    handle, offset, num_bytes = driver.export(0x10000 + 256)
    assert (handle, offset, num_bytes) == (bytes(range(64)), 256, 4096)
    assert driver.open(handle) == 0x90000
    assert calls.opened == [handle]
    driver.close(0x90000)
    assert calls.opened == []
    with pytest.raises(RuntimeError, match="cuMemGetAddressRange: CUDA_ERROR_INVALID_VALUE"):
        driver.export(0x90000)


def test_missing_bindings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(TransportMissing, match="pip install cuda-bindings"):
        CudaDriver()
