"""How much memory this process may use: the machine's, or the device's, or what its container allows. And how bounds of
it are said."""

from __future__ import annotations

import os
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from pathlib import Path

import torch

from engine.config import GIB

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_bytes(device: str) -> int:
    """Of `device` ("cpu" or "cuda"), all of it: what others use of it is not counted."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[1])
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_container_limits()])


def _container_limits() -> list[int]:
    """As control groups, version 2 and 1, say. Empty where there are none."""
    texts = [Path(path).read_text().strip() for path in _CGROUP_LIMITS if Path(path).is_file()]
    return [int(text) for text in texts if text.isdecimal()]


def least_gib(num_bytes: int) -> str:
    """Three digits, for a message that asks for no less: whoever gives them gives enough."""
    return _gib(num_bytes, ROUND_CEILING)


def most_gib(num_bytes: int) -> str:
    """Three digits, for a message that asks for no more."""
    return _gib(num_bytes, ROUND_FLOOR)


def _gib(num_bytes: int, rounding: str) -> str:
    return f"{float(Context(prec=3, rounding=rounding).divide(Decimal(num_bytes), Decimal(GIB))):g}"
