"""Measures what offloading KV to host memory gains for prompts that return after others have evicted their blocks.

    python benchmarks/offloading.py
    python benchmarks/offloading.py --prompt-tokens 256,1024 --num-prompts 12 --json

Runs the same prompts one after the other, round after round; the pool has room for a third of them. Three engines in
one process take turns: one recomputes what was evicted, one loads it from host memory, and one has a pool with room for
all, which shows the best possible gain. Answers must be equal. Ratios are taken round by round; the first round, in
which nothing is cached yet, is left out. The last line is one JSON object.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

if __name__ == "__main__":
    # When run as a file, this folder comes first on the path, and its `engine.py` would hide the package `engine`.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.flags import COUNT, Numbers, wrong_usage
from benchmarks.machine import machine
from benchmarks.report import keep, path_of
from benchmarks.stepping import new_prompt
from engine.config import GIB
from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.model_loader import create_engine_config
from engine.sampling_params import SamplingParams

BLOCK_SIZE = EngineArgs.block_size
ENDING = 24
"""Tokens at the end of each prompt that are new in each round."""
FRACTION = 3
"""The pool has room for one in FRACTION prompts, and one more."""


@dataclass(frozen=True)
class Row:
    prompt_tokens: int
    computed_ms: float
    """Time to the first token; median over all prompts of all rounds but the first."""
    loaded_ms: float
    cached_ms: float
    ratio: float
    """Time computed / time loaded: the median of the rounds' ratios."""
    share_loaded: float
    """Share of the prompts' tokens that were loaded from host memory."""


def first_token(engine: LLMEngine, name: str, prompt: list[int]) -> tuple[int, float]:
    """The first token, and the seconds that it took."""
    start_s = time.perf_counter()
    engine.add_request(name, prompt, SamplingParams(max_tokens=1, temperature=0))
    token_ids: list[int] = []
    while engine.has_unfinished_requests():
        token_ids += [token_id for output in engine.step() for token_id in output.token_ids]
    return token_ids[0], time.perf_counter() - start_s


def open_engines(settings: Mapping[str, Any], num_tokens: int, num_prompts: int) -> dict[str, LLMEngine]:
    """Raises `ValueError` if the model's context is shorter than a prompt, or memory is too small."""
    num_each = -(-num_tokens // BLOCK_SIZE) + 1
    num_all, num_small = (num_prompts + 1) * num_each, (num_prompts // FRACTION + 1) * num_each
    settings = {"max_model_len": num_tokens + 1, **settings}
    small = LLMEngine(create_engine_config(EngineArgs(num_kv_blocks=num_small, **settings)))
    host_gib = num_all * small.executor.kv_shape.all_layers_bytes / GIB
    others = {
        "loaded": {"num_kv_blocks": num_small, "kv_offloading_size": host_gib},
        "cached": {"num_kv_blocks": num_all},
    }
    return {"computed": small} | {
        name: LLMEngine(create_engine_config(EngineArgs(**settings, **other))) for name, other in others.items()
    }


def measure(settings: Mapping[str, Any], prompt_tokens: int, num_prompts: int, num_rounds: int) -> Row:
    """Raises `AssertionError` if the engines' tokens differ."""
    engines = open_engines(settings, prompt_tokens + ENDING, num_prompts)
    vocab_size = engines["computed"].config.model.vocab_size
    beginnings = [new_prompt(prompt_tokens, vocab_size) for _ in range(num_prompts)]
    rounds: list[dict[str, list[float]]] = []
    for number in range(num_rounds + 1):
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for i, beginning in enumerate(beginnings):
            prompt = beginning + new_prompt(ENDING, vocab_size)
            told = {name: first_token(engine, f"{number}-{i}", prompt) for name, engine in engines.items()}
            assert len({token_id for token_id, _ in told.values()}) == 1, f"other tokens: {told}"
            for name, (_, each) in told.items():
                seconds[name].append(each)
        rounds.append(seconds)
    known = rounds[1:]
    medians = {name: 1e3 * statistics.median(each for r in known for each in r[name]) for name in engines}
    num_loaded = engines["loaded"].stats.num_loaded_tokens
    for engine in engines.values():
        engine.close()
    return Row(
        prompt_tokens=prompt_tokens,
        computed_ms=medians["computed"],
        loaded_ms=medians["loaded"],
        cached_ms=medians["cached"],
        ratio=statistics.median(sum(r["computed"]) / sum(r["loaded"]) for r in known),
        share_loaded=num_loaded / (num_rounds * num_prompts * (prompt_tokens + ENDING)),
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", default=EngineArgs.model, show_default=True)
@click.option("--prompt-tokens", default=(256, 1024, 4096), type=Numbers(), show_default="256,1024,4096",
              help="Lengths of the repeated prompts, comma-separated.")  # fmt: skip
@click.option("--num-prompts", default=9, type=COUNT, show_default=True)
@click.option(
    "--num-rounds",
    default=3,
    type=COUNT,
    show_default=True,
    help="Rounds after the first, in which no prompt is cached.",
)
@click.option("--json", "as_json", is_flag=True, help="Print only the last line, JSON.")
def main(model: str, prompt_tokens: tuple[int, ...], num_prompts: int, num_rounds: int, as_json: bool) -> None:
    """Measure what KV offloading to host memory gains for prompts that are repeated after they were evicted."""
    rows: list[Row] = []
    for num_tokens in prompt_tokens:
        with wrong_usage():
            row = measure({"model": model}, num_tokens, num_prompts, num_rounds)
        if not as_json and not rows:
            print(f"{'prompt':>7}{'computed':>10}{'loaded':>9}{'in the pool':>13}{'ratio':>7}{'found':>8}", end="")
            print("     (ms to the first token)")
        rows.append(row)
        if not as_json:
            print(
                f"{row.prompt_tokens:7}{row.computed_ms:10.1f}{row.loaded_ms:9.1f}{row.cached_ms:13.1f}"
                f"{row.ratio:7.2f}{row.share_loaded:8.0%}",
                flush=True,
            )
    summary = machine() | {"num_prompts": num_prompts, "rows": [asdict(row) for row in rows]}
    path = path_of("offloading", summary.get("commit"))
    keep(path, summary)
    print(f"kept in {path.parent.name}/{path.name}", file=sys.stderr)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
