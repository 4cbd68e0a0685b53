"""Fixtures of unit tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available() and "TRITON_ON_CPU" not in os.environ:
    # Triton asks when its own modules are imported, which some of torch's do.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For toys: their tensors are so small that threads would mostly wait for each other, on a busy machine long."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
