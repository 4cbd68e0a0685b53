"""Replaces `python` in a cluster whose workers, and their ranks, each have a pretended GPU:
`PRETENDED_PYTHON [-P] -m MODULE …`.

PRETENDED_PYTHON: a program that calls this module (`write_python` writes it). The processes that it starts use it to
start others.
"""

from __future__ import annotations

import gc
import os
import runpy
import sys
from pathlib import Path

WORKERS = ("prefill_service", "decode_service", "worker_service.rank", "engine.tensor_parallel")


def write_python(path: Path, num_devices: int = 1) -> str:
    """Writes PRETENDED_PYTHON, for a machine with so many GPUs. Returns its path."""
    folders = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]
    path.write_text(
        f"#!/bin/sh\nexport PRETENDED_PYTHON='{path}' PRETENDED_GPUS={num_devices} "
        f"PYTHONPATH='{os.pathsep.join([*folders, *sys.path])}'\n"
        f"exec '{sys.executable}' -m pretend_gpu \"$@\"\n"
    )
    path.chmod(0o700)
    return str(path)


def main() -> None:
    arguments = sys.argv[1:]
    if "-m" not in arguments[:2]:
        os.execv(sys.executable, [sys.executable, *arguments])
    sys.argv = arguments[arguments.index("-m") + 1 :]
    module, sys.executable = sys.argv[0], os.environ["PRETENDED_PYTHON"]
    if module not in WORKERS:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    gc.disable()  # until the worker has imported the rest
    from pretend_gpu import pretend_gpu  # imports torch, which the other modules do not need

    with pretend_gpu(num_devices=int(os.environ["PRETENDED_GPUS"])):
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
