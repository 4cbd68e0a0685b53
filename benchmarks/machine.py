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
        "cpu": f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}",
        "machine": platform.machine(),
    }


def cpu_name() -> str:
    """With its family and model where the system says them: virtual machines give many kinds the same name."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    found = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    kind = " ".join(f"{name.removeprefix('cpu ')} {found[name]}" for name in ("cpu family", "model") if name in found)
    return " ".join(part for part in (found.get("model name") or platform.processor(), kind and f"({kind})") if part)
