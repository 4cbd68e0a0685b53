"""Describes what the numbers of benchmarks depend on, beside the code."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import torch


def machine() -> dict[str, object]:
    """The software and hardware that the numbers depend on, beside the code."""
    return {
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}",
        "machine": platform.machine(),
    }


def compilers() -> dict[str, str]:
    """The compilers of GPU code: Triton, and the two assemblers that it uses, depending on the GPU's compute
    capability. Names the path of an assembler only if it is not Triton's own."""
    if find_spec("triton") is None:
        return {"triton": "not installed"}
    import triton
    from triton import knobs

    found = {"triton": triton.__version__}
    for name, since in (("ptxas", ""), ("ptxas_blackwell", " (from 10.0 on)")):
        try:
            tool = getattr(knobs.nvidia, name)
        except RuntimeError as error:
            found[name] = str(error)
            continue
        is_own = Path(triton.__file__).parent in Path(tool.path).parents
        found[name] = f"{tool.version}{'' if is_own else f' of {tool.path}'}{since}"
    return found


def commit() -> str | None:
    """The commit of this clone; None if this is not a clone, or git is missing."""
    if shutil.which("git") is None:
        return None
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def cpu_name() -> str:
    """The CPU's name, with its family and model if the system reports them: virtual machines give many kinds the same
    name."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    found = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    kind = " ".join(f"{name.removeprefix('cpu ')} {found[name]}" for name in ("cpu family", "model") if name in found)
    return " ".join(part for part in (found.get("model name") or platform.processor(), kind and f"({kind})") if part)
