"""Which of a machine's pretended GPUs a thread uses, and that a process uses one alone.

As CUDA has it: every thread begins with the first, and what names no other one is made there, contexts and pinned
memory included. That a rank's process touches another rank's GPU is an error here; a real one would take memory of it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Current(threading.local):
    """Of each thread."""

    index = 0


class _Used:
    """Of the process."""

    device: torch.device | None = None
    num_devices = 1


_current, _used = _Current(), _Used()


@contextmanager
def so_many(num_devices: int) -> Iterator[None]:
    """Of which this process will use one."""
    before, _current.index = _current.index, 0
    _used.device, _used.num_devices = None, num_devices
    try:
        yield
    finally:
        _used.device, _used.num_devices = None, 1
        _current.index = before  # of this thread: others end with what they are for


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
    """The one that is meant, as something is made or done there. Raises `RuntimeError` where this process uses another
    one."""
    meant = torch.device("cuda", _index_of(device))
    if _used.device is None:
        _used.device = meant
    if meant != _used.device:
        raise RuntimeError(f"{meant} is another process', this one uses {_used.device}")
    return meant


def of_process() -> torch.device:
    """Where what it has lies."""
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
