"""What adapters cost: measures the engine alone, without and with adapters, in turn.

    python benchmarks/adapters.py
    python benchmarks/adapters.py --rank 64 --num-adapters 8 --batch-sizes 1,64 --num-steps 200

One process holds an engine for each case, and each engine uses all threads. One engine has no adapters. The others have
the requested number of random adapters on all seven projections; in one of them no request uses an adapter, in one all
requests use the same, and in one each request uses the next. The engines compute one step each in turn, so that other
load on the machine affects all equally. Reports medians over the steps, and ratios of the fastest steps, which nothing
interrupted. The last line is one JSON object.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import save_file

if __name__ == "__main__":
    # When run as a file, this folder comes first on the path, and its `engine.py` would hide the package `engine`.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.engine import check_batch
from benchmarks.flags import COUNT, Numbers, wrong_usage
from benchmarks.machine import machine
from benchmarks.stepping import new_prompt, timed_step
from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.model_loader import create_engine_config, resolve_model
from engine.sampling_params import SamplingParams
from rpc.entrypoint import build

_ids = count()
CASES = ("without", "none asked for", "all ask for one", "spread")


def write_adapter(folder: Path, model: dict[str, Any], rank: int, seed: int) -> None:
    """Write an adapter of all projections of a dense model of the Llama family."""
    hidden, ff, heads = model["hidden_size"], model["intermediate_size"], model["num_attention_heads"]
    head_dim = model.get("head_dim") or hidden // heads
    q, kv = heads * head_dim, model.get("num_key_value_heads", heads) * head_dim
    shapes = {
        "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (ff, hidden), "mlp.up_proj": (ff, hidden),
        "mlp.down_proj": (hidden, ff),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(model["num_hidden_layers"]):
        for name, (outputs, inputs) in shapes.items():
            at = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * 0.02
            tensors[f"{at}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * 0.02
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", default=EngineArgs.model, show_default=True, help="Model folder, GGUF file or name.")
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--num-threads", default=0, show_default=True, help="Compute threads. 0: torch's default.")
@click.option("--num-adapters", default=4, type=COUNT, show_default=True)
@click.option("--rank", default=16, type=COUNT, show_default=True)
@click.option(
    "--batch-sizes", default="1,8,32", type=Numbers(), show_default=True, help="Decode batch sizes, comma-separated."
)
@click.option(
    "--prompt-tokens",
    default="32,512",
    type=Numbers(),
    show_default=True,
    help="Prompt lengths for prefill, comma-separated.",
)
@click.option("--context-tokens", default=32, type=COUNT, show_default=True, help="Prompt length before decoding.")
@click.option(
    "--num-steps",
    default=120,
    type=COUNT,
    show_default=True,
    help="Decode steps per case and batch size.",
)
@click.option("--num-prompts", default=15, type=COUNT, show_default=True, help="Prompts per case and length.")
@click.option("--kv-cache-gib", default=0.25, show_default=True, help="Size of each engine's KV pool, in GiB.")
def main(
    model: str,
    dtype: str,
    num_threads: int,
    num_adapters: int,
    rank: int,
    batch_sizes: tuple[int, ...],
    prompt_tokens: tuple[int, ...],
    context_tokens: int,
    num_steps: int,
    num_prompts: int,
    kv_cache_gib: float,
) -> None:
    """Measure tokens per second with and without adapters."""
    names = [f"a{number}" for number in range(num_adapters)]

    def engine_with(modules: str) -> LLMEngine:
        flags = {"model": model, "dtype": dtype, "num_threads": num_threads, "kv_cache_gib": kv_cache_gib}
        args = build(EngineArgs, flags | {"lora_modules": modules, "max_itl_ms": 0})
        return LLMEngine(create_engine_config(args))

    with tempfile.TemporaryDirectory() as scratch, wrong_usage():
        hf_config = json.loads((resolve_model(model) / "config.json").read_text())
        for seed, name in enumerate(names):
            write_adapter(Path(scratch) / name, hf_config, rank, seed)
        modules = ",".join(f"{name}={scratch}/{name}" for name in names)
        engines = {case: engine_with("" if case == "without" else modules) for case in CASES}
    asked = dict(zip(CASES, ([""], [""], names[:1], names), strict=True))
    rows = []
    click.echo(f"{'':<12}" + "".join(f"{case:>24}" for case in CASES))

    def note(phase: str, number: int, seconds: dict[str, list[float]]) -> None:
        rows.append(row := _row(phase, number, seconds))
        cells = (f"{row['tokens_per_s'][case]:>17.0f} ({row['ratio'][case]:.2f})" for case in CASES)
        click.echo(f"{phase:<8}{number:>4}" + "".join(cells))

    for length in prompt_tokens:
        note("prefill", length, time_prompts(engines, asked, length, num_prompts))
    for batch_size in batch_sizes:
        note("decode", batch_size, time_decoding(engines, asked, batch_size, context_tokens, num_steps))
    served = engines["without"].config.model.served_model_name
    summary = {"benchmark": "adapters", "model": served, "dtype": dtype, "rank": rank, "num_adapters": num_adapters}
    click.echo(json.dumps(summary | machine() | {"results": rows}))


Seconds = dict[str, list[float]]
"""Seconds of the steps, by case."""


def time_prompts(
    engines: dict[str, LLMEngine], asked: dict[str, list[str]], num_tokens: int, num_prompts: int
) -> Seconds:
    seconds: Seconds = {case: [] for case in CASES}
    for number in range(num_prompts + 1):
        for case in CASES:
            engine = engines[case]
            ask(engine, num_tokens, 1, asked[case][number % len(asked[case])])
            elapsed = 0.0
            while engine.has_unfinished_requests():
                elapsed += timed_step(engine)
            seconds[case].append(elapsed)
    return {case: each[1:] for case, each in seconds.items()}


def time_decoding(
    engines: dict[str, LLMEngine], asked: dict[str, list[str]], batch_size: int, context_tokens: int, num_steps: int
) -> Seconds:
    for case, engine in engines.items():
        for lora_name in islice(cycle(asked[case]), batch_size):
            ask(engine, context_tokens, num_steps + batch_size + 4, lora_name)
        while engine.load().num_waiting_tokens:
            engine.step()
        engine.step()
    seconds: Seconds = {case: [] for case in CASES}
    for _ in range(num_steps):
        for case, engine in engines.items():
            seconds[case].append(timed_step(engine))
    for engine in engines.values():
        check_batch(engine, batch_size)
        while engine.has_unfinished_requests():
            engine.step()
    return seconds


def ask(engine: LLMEngine, prompt_tokens: int, max_tokens: int, lora_name: str) -> None:
    prompt = new_prompt(prompt_tokens, engine.config.model.vocab_size)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    with wrong_usage():  # longer than the model's context
        engine.add_request(f"r{next(_ids)}", prompt, params, lora_name=lora_name)


def _row(phase: str, number: int, seconds: Seconds) -> dict[str, Any]:
    """`number`: tokens per step. Ratios of the fastest tenth of the steps, and of medians."""
    fastest = {case: statistics.mean(sorted(each)[: max(1, len(each) // 10)]) for case, each in seconds.items()}
    medians = {case: statistics.median(each) for case, each in seconds.items()}
    return {
        "phase": phase,
        "number": number,
        "tokens_per_s": {case: round(number / medians[case], 1) for case in CASES},
        "best_tokens_per_s": {case: round(number / fastest[case], 1) for case in CASES},
        "ratio_of_medians": {case: round(medians["without"] / medians[case], 3) for case in CASES},
        "ratio": {case: round(fastest["without"] / fastest[case], 3) for case in CASES},
    }


if __name__ == "__main__":
    main()
