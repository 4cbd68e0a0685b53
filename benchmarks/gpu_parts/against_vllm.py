"""Measures Tandem's engine and, if it is installed, vLLM's in turn: the same prompts, the same steps, the same method
(offline_engine.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.gpu_parts.offline_engine import MARK
from benchmarks.gpu_parts.rows import Row
from benchmarks.gpu_parts.runner import Setting, require
from benchmarks.gpu_parts.shapes import write_model

SCRIPT = Path(__file__).with_name("offline_engine.py")
LOG = "gpu-vllm.log"
NUM_ROUNDS = 2
"""A round of both takes half a minute."""


@dataclass(frozen=True, slots=True)
class Time:
    engine: str
    """Its name and version."""
    what: str
    ms: float


def measure(setting: Setting) -> Iterator[Row]:
    require("vllm")
    theirs: dict[str, float] = {}
    with TemporaryDirectory() as name:
        folder = write_model(Path(name), setting.sizes.model.config)
        for found in times(setting, "vllm", folder):
            theirs[found.what] = found.ms
            yield Row(what=f"{found.what}, {found.engine}", value=found.ms, unit="ms", group=found.what)
        for found in times(setting, "tandem", folder):
            ratio = theirs[found.what] / found.ms
            yield Row(
                what=f"{found.what}, {found.engine}", value=found.ms, unit="ms", group=found.what,
                note=f"vLLM takes {ratio:.2f} times as long",
            )  # fmt: skip


def times(setting: Setting, engine: str, folder: Path) -> Iterator[Time]:
    """Times as they are measured. The engine's output goes into a log, and its end into the error if the engine
    fails."""
    case = {
        "model": str(folder), "device": setting.device, "max_model_len": setting.sizes.max_model_len,
        "kv_cache_gib": setting.sizes.kv_cache_gib, "num_rounds": NUM_ROUNDS,
        "answers": (4, 12) if setting.is_tiny else (32, 128),
        "decode": [step[:2] for step in setting.sizes.decode_steps],
        "prefill": [step[:2] for step in setting.sizes.prefill_steps],
    }  # fmt: skip
    said = setting.results / LOG
    with said.open("a") as log:
        running = subprocess.Popen(
            [sys.executable, SCRIPT, engine, json.dumps(case)], stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            assert running.stdout is not None
            for line in running.stdout:
                if not line.startswith(MARK):
                    log.write(line)
                    continue
                row = json.loads(line.removeprefix(MARK))
                num, length = row["size"]
                yield Time(row["engine"], f"{row['phase']} {num} x {length}", row["ms"])
            exit_code = running.wait()
        finally:
            running.kill()
            running.wait()
    if exit_code != 0:
        raise RuntimeError(f"{engine} ended with {exit_code}: {' '.join(said.read_text().split())[-300:]}")
