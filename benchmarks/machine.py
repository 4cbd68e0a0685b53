"""What numbers depend on, beside the code."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import torch


def machine() -> dict[str, object]:
    """What the numbers depend on, beside the code."""
    return {
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}",
        "machine": platform.machine(),
    }


def commit() -> str | None:
    """None where this is no clone, or there is no git."""
    if shutil.which("git") is None:
        return None
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def cpu_name() -> str:
    """With its family and model where the system says them: virtual machines give many kinds the same name."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    found = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    kind = " ".join(f"{name.removeprefix('cpu ')} {found[name]}" for name in ("cpu family", "model") if name in found)
    return " ".join(part for part in (found.get("model name") or platform.processor(), kind and f"({kind})") if part)
