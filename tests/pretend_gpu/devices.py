"""Which of a machine's pretended GPUs a thread uses, and a check that a process uses only one.

As in CUDA, every thread begins with the first GPU, and everything that names no other GPU is made there, contexts and
pinned memory included. It is an error here if a rank's process touches another rank's GPU; on a real one it would
only take memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Current(threading.local):
    """The current device of each thread."""

    index = 0


class _Used:
    """The device that the process uses."""

    device: torch.device | None = None
    num_devices = 1


_current, _used = _Current(), _Used()


@contextmanager
def so_many(num_devices: int) -> Iterator[None]:
    """Pretends so many GPUs, one of which this process will use."""
    before, _current.index = _current.index, 0
    _used.device, _used.num_devices = None, num_devices
    try:
        yield
    finally:
        _used.device, _used.num_devices = None, 1
        _current.index = before  # for this thread only: others have ended by now


def device_count() -> int:
    return _used.num_devices


def current_index() -> int:
    return _current.index


def set_device(device: object) -> None:
    _current.index = _index_of(device)


@contextmanager
def current(device: torch.device) -> Iterator[None]:
    before, _current.index = _current.index, _index_of(device)
    try:
        yield
    finally:
        _current.index = before


def used(device: object = None) -> torch.device:
    """The device that `device` means, for making or doing something there. Raises `RuntimeError` if this process uses
    another one."""
    meant = torch.device("cuda", _index_of(device))
    if _used.device is None:
        _used.device = meant
    if meant != _used.device:
        raise RuntimeError(f"{meant} is another process', this one uses {_used.device}")
    return meant


def of_process() -> torch.device:
    """The device on which this process' tensors lie."""
    return _used.device or used()


def _index_of(device: object) -> int:
    if isinstance(device, int):
        index = device
    else:
        named = None if device is None else torch.device(str(device))
        index = _current.index if named is None or named.index is None else named.index
    if not 0 <= index < _used.num_devices:
        raise RuntimeError(f"CUDA error: invalid device ordinal {index} of {_used.num_devices}")
    return index
