"""Measures other engines on this machine in the same way as ours: each in a separate process, one at a time.

Their files are expected in a folder, PEERS_DIR (default ~/.cache/tandem-peers):

    vllm/bin/python, vllm                                       a venv with vLLM's CPU build
    llama/vendor/llama.cpp/build/bin/llama-batched-bench, llama-server       llama.cpp, built for this machine
    smollm2/, smollm2-bf16.gguf                                 the same bfloat16 weights for either
    smollm2-q8_0.gguf, smollm2-q4_1.gguf                        the same in 8 bits, beside int8; in 4, beside int4
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

PEER_TIMEOUT_S = 900.0
GGUF_OF = {"none": "smollm2-bf16.gguf", "int8": "smollm2-q8_0.gguf", "int4": "smollm2-q4_1.gguf"}


class PeerMissing(Exception):  # noqa: N818
    """The message names the missing file."""


@dataclass(frozen=True)
class Case:
    """The measurements to make of each engine."""

    prompt_tokens: tuple[int, ...]
    """Lengths of single prompts, for prefill."""
    batch_sizes: tuple[int, ...]
    """Batch sizes of decode."""
    context_tokens: int
    """Prompt length before decoding."""
    num_steps: int
    """Decode steps."""
    num_prompts: int
    """Samples per prompt length."""
    num_threads: int
    quantization: str = "none"
    shape: str = ""
    """Name of the model; empty: the default one."""
    folder: str = ""
    gguf: str = ""
    """Its files, if it is not the default one: without a tokenizer."""


Rates = dict[tuple[str, int, int], float]
"""(phase, batch size, prompt tokens) -> tokens/s."""


def peers_dir() -> Path:
    return Path(os.environ.get("PEERS_DIR", "~/.cache/tandem-peers")).expanduser()


def existing(name: str) -> Path:
    """The path of a peer's file. Raises `PeerMissing`."""
    path = peers_dir() / name
    if not path.exists():
        raise PeerMissing(f"{path} is not there: install the peer, or set PEERS_DIR")
    return path


def vllm_files(case: Case) -> tuple[Path, Path]:
    """Paths of Python and the model. Raises `PeerMissing`, `ValueError`."""
    if case.quantization != "none":
        raise ValueError("vLLM takes weights in fewer bits on a CPU from checkpoints that have them; leave it out")
    return existing("vllm/bin/python"), Path(case.folder) if case.folder else existing("smollm2")


def measure_vllm(case: Case) -> Rates:
    """Raises `RuntimeError`, and the errors of `vllm_files`."""
    python, model = vllm_files(case)
    arguments = asdict(case) | {"model": str(model)}
    script = Path(__file__).with_name("vllm_engine.py")
    # -I keeps this repository's folders off vLLM's path.
    output = _run([str(python), "-I", str(script), json.dumps(arguments)], {"VLLM_CPU_KVCACHE_SPACE": "2"})
    line = next(line for line in output.splitlines() if line.startswith("RATES "))
    rows = json.loads(line.removeprefix("RATES "))
    return {(row["phase"], row["batch_size"], row["prompt_tokens"]): row["tokens_per_s"] for row in rows}


def llama_files(case: Case) -> tuple[Path, Path]:
    """Paths of the program and the model. Raises `PeerMissing`, `ValueError`."""
    if case.quantization not in GGUF_OF:
        raise ValueError(f"llama.cpp has no weights for --quantization {case.quantization} here")
    model = Path(case.gguf) if case.gguf else existing(GGUF_OF[case.quantization])
    return existing("llama/vendor/llama.cpp/build/bin/llama-batched-bench"), model


def measure_llama(case: Case) -> Rates:
    """Run llama.cpp's own batched bench. Raises `RuntimeError`, and the errors of `llama_files`."""
    bench, model = map(str, llama_files(case))
    threads = str(case.num_threads)

    def run(prompts: tuple[int, ...], num_new: int, batches: tuple[int, ...]) -> list[dict[str, float]]:
        context = max(batches) * (max(prompts) + num_new)
        output = _run(
            [bench, "-m", model, "-c", str(context), "-b", "2048", "-ub", "512", "-t", threads, "-tb", threads,
             "-npp", ",".join(map(str, prompts)), "-ntg", str(num_new), "-npl", ",".join(map(str, batches)),
             "--output-format", "jsonl"],
            {},
        )  # fmt: skip
        return [json.loads(line) for line in output.splitlines() if line.startswith("{")]

    rates: Rates = {}
    for row in run(case.prompt_tokens, 1, (1,)):
        rates["prefill", 1, int(row["pp"])] = row["speed_pp"]
    for row in run((case.context_tokens,), case.num_steps, case.batch_sizes):
        rates["decode", int(row["pl"]), case.context_tokens] = row["speed_tg"]
    return rates


@dataclass(frozen=True)
class Peer:
    files: Callable[[Case], tuple[Path, ...]]
    """The files that it needs. Raises `PeerMissing`, `ValueError`."""
    measure: Callable[[Case], Rates]
    """Raises `RuntimeError`, and the errors of `files`."""


PEERS = {"vllm": Peer(vllm_files, measure_vllm), "llama": Peer(llama_files, measure_llama)}


def _run(command: list[str], env: dict[str, str]) -> str:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PEER_TIMEOUT_S, check=False, env=kept | env)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout
