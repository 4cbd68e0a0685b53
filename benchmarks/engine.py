"""Measures tokens per second of the engine alone, without router, transfer or network.

    python benchmarks/engine.py                                  # the default model, bfloat16
    python benchmarks/engine.py --batch-sizes 1,32 --dtype float32 --json
    python benchmarks/engine.py --against vllm,llama             # in turn with them, with ratios and a plot

Prefill: prompts of one length, one after another, each computed whole; no token is in the prefix cache. Decode: a batch
of requests whose prompts are computed, stepped together, with the time taken for each step. Reports medians, since an
interrupted step says nothing about the engine; in comparisons the mean over all steps, as the other engines measure it.
The last line is one JSON object.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import click
import torch

if __name__ == "__main__":
    # When run as a file, this folder comes first on the path, and this very file would hide the package `engine`.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.flags import COUNT, Numbers, wrong_usage
from benchmarks.machine import machine
from benchmarks.peers import PEERS, Case, Rates
from benchmarks.report import save
from benchmarks.stepping import new_prompt, timed_step
from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.model_loader import create_engine_config
from engine.sampling_params import SamplingParams
from rpc.entrypoint import build

_ids = count()


@dataclass(frozen=True)
class Result:
    """One row. `tokens_per_s` is of the median step, `best_tokens_per_s` of the fastest, `mean_tokens_per_s` of all."""

    phase: str
    batch_size: int
    prompt_tokens: int
    median_ms: float
    tokens_per_s: float
    best_tokens_per_s: float
    mean_tokens_per_s: float
    num_samples: int


def add_request(engine: LLMEngine, prompt_tokens: int, max_tokens: int) -> None:
    prompt = new_prompt(prompt_tokens, engine.config.model.vocab_size)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    with wrong_usage():  # longer than the model's context
        engine.add_request(f"r{next(_ids)}", prompt, params)


def measure_prefill(engine: LLMEngine, prompt_tokens: int, num_samples: int) -> Result:
    seconds = []
    for _ in range(num_samples + 1):
        add_request(engine, prompt_tokens, max_tokens=1)
        elapsed = 0.0
        while engine.has_unfinished_requests():
            elapsed += timed_step(engine)
        seconds.append(elapsed)
    return _result("prefill", 1, prompt_tokens, seconds[1:], prompt_tokens)


def measure_decode(engine: LLMEngine, batch_size: int, prompt_tokens: int, num_steps: int) -> Result:
    for _ in range(batch_size):
        add_request(engine, prompt_tokens, max_tokens=num_steps + batch_size + 4)
    while engine.load().num_waiting_tokens:
        engine.step()
    engine.step()
    seconds = [timed_step(engine) for _ in range(num_steps)]
    check_batch(engine, batch_size)
    while engine.has_unfinished_requests():
        engine.step()
    return _result("decode", batch_size, prompt_tokens, seconds, batch_size)


def check_batch(engine: LLMEngine, batch_size: int) -> None:
    """Raises `click.UsageError` unless `batch_size` requests run together."""
    most = engine.config.scheduler.max_num_seqs
    if batch_size > most:
        raise click.UsageError(f"--batch-sizes must be at most {most}, is {batch_size}")
    if engine.load().num_running != batch_size:
        raise click.UsageError(f"--batch-sizes: {batch_size} have no room in the pool: raise --kv-cache-gib")


def _result(phase: str, batch_size: int, prompt_tokens: int, seconds: list[float], num_tokens: int) -> Result:
    median_s = statistics.median(seconds)
    return Result(
        phase=phase,
        batch_size=batch_size,
        prompt_tokens=prompt_tokens,
        median_ms=round(1e3 * median_s, 3),
        tokens_per_s=round(num_tokens / median_s, 1),
        best_tokens_per_s=round(num_tokens / min(seconds), 1),
        mean_tokens_per_s=round(num_tokens * len(seconds) / sum(seconds), 1),
        num_samples=len(seconds),
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", default=EngineArgs.model, show_default=True, help="Model folder, GGUF file or name.")
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option(
    "--quantization",
    default="none",
    show_default=True,
    help="none, int8 or int4; for llama.cpp, Q8_0 or Q4_1.",
)
@click.option("--load-format", default="auto", show_default=True, help="Format of the weights; dummy needs none.")
@click.option(
    "--model-impl",
    default=EngineArgs.model_impl,
    show_default=True,
    help="Model implementation: auto, tandem or transformers.",
)
@click.option("--attention-backend", default=EngineArgs.attention_backend, show_default=True)
@click.option("--num-threads", default=0, show_default=True, help="Compute threads. 0: torch's default.")
@click.option(
    "--batch-sizes", default="1,8,32,64", type=Numbers(), show_default=True, help="Decode batch sizes, comma-separated."
)
@click.option(
    "--prompt-tokens",
    default="128,1024",
    type=Numbers(),
    show_default=True,
    help="Prompt lengths for prefill, comma-separated.",
)
@click.option("--context-tokens", default=160, type=COUNT, show_default=True, help="Prompt length before decoding.")
@click.option("--num-steps", default=32, type=COUNT, show_default=True, help="Decode steps measured per batch size.")
@click.option("--num-prompts", default=5, type=COUNT, show_default=True, help="Prompts measured per length.")
@click.option("--kv-cache-gib", default=2.0, show_default=True)
@click.option("--against", default="", help="Peers to measure in turn, comma-separated: vllm, llama (see peers.py).")
@click.option("--rounds", default=2, type=COUNT, show_default=True, help="Times to measure each one, with --against.")
@click.option("--json", "only_json", is_flag=True, help="Print only the JSON line.")
def main(
    model: str,
    dtype: str,
    quantization: str,
    load_format: str,
    model_impl: str,
    attention_backend: str,
    num_threads: int,
    batch_sizes: tuple[int, ...],
    prompt_tokens: tuple[int, ...],
    context_tokens: int,
    num_steps: int,
    num_prompts: int,
    kv_cache_gib: float,
    against: str,
    rounds: int,
    only_json: bool,
) -> None:
    """Measure prefill and decode tokens per second of one engine."""
    if against:
        case = Case(
            prompt_tokens=prompt_tokens,
            batch_sizes=batch_sizes,
            context_tokens=context_tokens,
            num_steps=num_steps,
            num_prompts=num_prompts,
            num_threads=num_threads or torch.get_num_threads(),
            quantization=quantization,
        )
        flags = ["--model", model, "--dtype", dtype, "--quantization", quantization]
        compare(case, [name.strip() for name in against.split(",")], rounds, flags)
        return
    args = build(
        EngineArgs,
        {
            "model": model, "dtype": dtype, "quantization": quantization, "load_format": load_format,
            "model_impl": model_impl, "attention_backend": attention_backend, "num_threads": num_threads,
            "kv_cache_gib": kv_cache_gib,
            "max_itl_ms": 0,  # prefill or decode, never both
        },
    )  # fmt: skip
    with wrong_usage():
        engine = LLMEngine(create_engine_config(args))
    results = []

    def note(result: Result) -> None:
        results.append(result)
        if not only_json:
            click.echo(
                f"{result.phase:<8} {result.batch_size:>5} {result.prompt_tokens:>8} {result.median_ms:>11.1f} "
                f"{result.tokens_per_s:>10.1f} {result.best_tokens_per_s:>10.1f}"
            )
            sys.stdout.flush()

    if not only_json:
        click.echo(f"{'phase':<8} {'batch':>5} {'prompt':>8} {'median ms':>11} {'tokens/s':>10} {'best':>10}")
    for length in prompt_tokens:
        note(measure_prefill(engine, length, num_prompts))
    for batch_size in batch_sizes:
        note(measure_decode(engine, batch_size, context_tokens, num_steps))
    summary = {"benchmark": "engine", "model": engine.config.model.served_model_name, "dtype": dtype}
    summary["quantization"] = quantization
    click.echo(json.dumps(summary | machine() | {"results": [asdict(result) for result in results]}))


# -- against others -------------------------------------------------------------------------------------------------


def compare(case: Case, names: list[str], rounds: int, flags: list[str]) -> None:
    """Measure Tandem and its peers in turn. Prints a table of medians, and of the medians of ratios taken round by
    round."""
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise click.UsageError(f"--against: no such peer {', '.join(unknown)}; there are {', '.join(PEERS)}")
    for name in names:
        with wrong_usage(f"--against {name}"):
            PEERS[name].files(case)  # before other engines are measured for minutes
    measure: dict[str, Callable[[Case], Rates]] = {"tandem": lambda case: measure_tandem(case, flags)}
    measure |= {name: PEERS[name].measure for name in names}
    rates: dict[str, list[Rates]] = {name: [] for name in measure}
    for number in range(rounds):
        for name, measure_one in measure.items():
            click.echo(f"round {number + 1} of {rounds}: {name}", err=True)
            try:
                rates[name].append(measure_one(case))
            except RuntimeError as error:
                raise click.ClickException(f"{name}: {error}") from error
    rows = [_row(key, rates, names) for key in rates["tandem"][0]]
    click.echo(
        f"{'phase':<8} {'batch':>5} {'prompt':>6} {'tandem':>8}" + "".join(f" {n:>8} {'ratio':>6}" for n in names)
    )
    for row in rows:
        cells = "".join(f" {row[name]:>8.0f} {row[f'against_{name}']:>6.2f}" for name in names)
        click.echo(f"{row['phase']:<8} {row['batch_size']:>5} {row['prompt_tokens']:>6} {row['tandem']:>8.0f}{cells}")
    described = {name: value for name, value in asdict(case).items() if name not in ("folder", "gguf")}
    summary = {"benchmark": "engine", "against": names, "rounds": rounds, "case": described} | machine()
    save("engine", summary | {"results": rows}, lambda figure: plot(figure.add_subplot(), rows, ["tandem", *names]))


def measure_tandem(case: Case, flags: list[str]) -> Rates:
    """Run this file in a separate process, as the peers are."""
    command = [
        sys.executable, __file__, "--json", *flags,
        "--num-threads", str(case.num_threads),
        "--prompt-tokens", ",".join(map(str, case.prompt_tokens)),
        "--batch-sizes", ",".join(map(str, case.batch_sizes)),
        "--context-tokens", str(case.context_tokens),
        "--num-steps", str(case.num_steps),
        "--num-prompts", str(case.num_prompts),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    rows = json.loads(done.stdout.splitlines()[-1])["results"]
    rate = {"prefill": "tokens_per_s", "decode": "mean_tokens_per_s"}
    return {(row["phase"], row["batch_size"], row["prompt_tokens"]): row[rate[row["phase"]]] for row in rows}


def _row(key: tuple[str, int, int], rates: dict[str, list[Rates]], names: list[str]) -> dict[str, Any]:
    row: dict[str, Any] = {"phase": key[0], "batch_size": key[1], "prompt_tokens": key[2]}
    for name, rounds in rates.items():
        row[name] = round(statistics.median(round_[key] for round_ in rounds), 1)
    for name in names:
        pairs = zip(rates["tandem"], rates[name], strict=True)
        row[f"against_{name}"] = round(statistics.median(ours[key] / theirs[key] for ours, theirs in pairs), 3)
    return row


def plot(axes: Any, rows: list[dict[str, Any]], names: list[str]) -> None:
    """Grouped bars, one group per row."""
    width = 0.8 / len(names)
    for position, name in enumerate(names):
        axes.bar([i + position * width for i in range(len(rows))], [row[name] for row in rows], width, label=name)
    labels = [
        f"prefill\n{row['prompt_tokens']}" if row["phase"] == "prefill" else f"decode\nbatch {row['batch_size']}"
        for row in rows
    ]
    axes.set_xticks([i + 0.4 - width / 2 for i in range(len(rows))], labels)
    axes.set_ylabel("tokens/s")
    axes.legend()


if __name__ == "__main__":
    main()
