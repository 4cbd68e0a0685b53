"""How much memory this process may use: the machine's, its container's limit, or the device's. And the format of such
bounds in messages."""

from __future__ import annotations

import os
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from pathlib import Path

from engine.config import GIB

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_bytes(device: str) -> int:
    """The total memory of `device` ("cpu" or "cuda"), including what other processes use."""
    if device == "cuda":
        import torch  # only here: the settings of an engine on a CPU are checked without it

        return int(torch.cuda.mem_get_info()[1])
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_container_limits()])


def _container_limits() -> list[int]:
    """The limits of control groups, version 2 and 1; empty if there are none."""
    texts = [Path(path).read_text().strip() for path in _CGROUP_LIMITS if Path(path).is_file()]
    return [int(text) for text in texts if text.isdecimal()]


def least_gib(num_bytes: int) -> str:
    """Three digits, rounded up, for a lower bound in a message: a user who gives this number gives enough."""
    return _gib(num_bytes, ROUND_CEILING)


def most_gib(num_bytes: int) -> str:
    """Three digits, rounded down, for an upper bound in a message."""
    return _gib(num_bytes, ROUND_FLOOR)


def _gib(num_bytes: int, rounding: str) -> str:
    return f"{float(Context(prec=3, rounding=rounding).divide(Decimal(num_bytes), Decimal(GIB))):g}"
