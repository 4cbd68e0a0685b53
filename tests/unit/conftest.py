"""Fixtures of unit tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from benchmarks.gpu_parts.runner import Setting

if not torch.cuda.is_available() and "TRITON_ON_CPU" not in os.environ:
    # Triton reads this when its own modules are imported, and some of torch's modules import them.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For toy models: their tensors are so small that threads would mostly wait for each other, for long on a busy
    machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(params=[1, 2], ids=["one-thread", "two-threads"])
def cpu_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test of the CPU kernels with one thread and with two."""
    from engine.kernels.build import load_cpu_kernels

    load_cpu_kernels()
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    """The setting for the parts of benchmarks/gpu.py: toy sizes, on a CPU."""
    from benchmarks.gpu_parts.runner import Setting

    return Setting(device="cpu", is_tiny=True, results=tmp_path)
