"""What numbers depend on, beside the code."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import torch


def machine() -> dict[str, object]:
    """What the numbers depend on, beside the code."""
    here = Path(__file__).parent
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=False
    )
    return {
        "commit": commit.stdout.strip() or None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
    }
