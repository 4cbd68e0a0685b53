"""Measures what speculative decoding gains: the same requests with and without it, in turn.

    python benchmarks/speculation.py
    python benchmarks/speculation.py --speculative-config '{"num_speculative_tokens": 8}' --num-rounds 5 --json
    python benchmarks/speculation.py --times-deeper 8 --speculative-config \
        '{"model": "smollm2-135m-instruct", "quantization": "int8", "num_speculative_tokens": 4}'

Two engines in one process, each with all threads, answer one after the other. Answers have 128 tokens, or end when an
object of a schema is complete; those of both engines must be equal. Ratios are taken round by round. The last line is
one JSON object.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import click

if __name__ == "__main__":
    # Run as a file, this folder comes first on the path, and in it `engine.py` would pass for the package `engine`.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.deeper_model import make_deeper
from benchmarks.flags import COUNT, wrong_usage
from benchmarks.machine import machine
from benchmarks.report import keep, path_of
from engine.model_loader import resolve_model
from tandem import LLM, SamplingParams
from tandem.structured_outputs import StructuredOutputsParams

NUM_TOKENS = 128
ROOT = Path(__file__).resolve().parent.parent
PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 20},
        "last_name": {"type": "string", "maxLength": 20},
        "occupation": {"type": "string", "maxLength": 40},
        "address": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "country": {"enum": ["Norway", "Denmark"]}},
            "required": ["city", "country"],
            "additionalProperties": False,
        },
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "is_married": {"type": "boolean"},
    },
    "required": ["first_name", "last_name", "occupation", "address", "age", "is_married"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 4, "maxItems": 4}


@dataclass(frozen=True)
class Case:
    texts: str
    asked: list[list[int]]
    """Prompts, answered together."""
    temperature: float
    schema: dict[str, object] | None = None

    @property
    def params(self) -> SamplingParams:
        if self.schema is None:
            return SamplingParams(max_tokens=NUM_TOKENS, temperature=self.temperature, seed=1, ignore_eos=True)
        form = StructuredOutputsParams(json=self.schema)
        return SamplingParams(max_tokens=1000, temperature=self.temperature, seed=1, structured_outputs=form)


@dataclass(frozen=True)
class Row:
    texts: str
    temperature: float
    num_requests: int
    num_tokens: int
    """Tokens of all answers together."""
    plain_tokens_per_s: float
    """Median over the rounds, for all requests together."""
    guessing_tokens_per_s: float
    ratio: float
    """Median of the rounds' ratios."""
    tokens_per_step: float
    """Tokens of a request per step, with speculation."""
    share_right: float
    """Share of the draft tokens that were accepted."""


def prompts(llm: LLM) -> dict[str, list[list[int]]]:
    """Prompts as token ids, by kind of text: conversations of one question each, and a file to rewrite."""
    file = (ROOT / "engine" / "scheduling" / "pace.py").read_text()[:1500]
    readme = (ROOT / "README.md").read_text()[:1200]
    questions = {
        "code edited": [f"Write this file again, with `StepPace` renamed to `Pace`:\n\n{file}"],
        "text summed up": [f"Sum this up:\n\n{readme}"],
        "questions": [
            "Write a Python function that reverses a string, with tests.",
            "Explain how photosynthesis works.",
            "Write a letter to a landlord about a broken heater.",
        ],
        "an object by a schema": ["Make up a person, as JSON."],
        "four objects by a schema": ["Make up four persons, as JSON."],
    }
    found = {}
    for kind, texts in questions.items():
        params = SamplingParams(max_tokens=1, temperature=0)
        chats = [[{"role": "user", "content": text}] for text in texts]
        found[kind] = [output.prompt_token_ids for output in llm.chat(chats, params, use_tqdm=False)]
    return found


def cases_of(llm: LLM) -> list[Case]:
    asked = prompts(llm)
    schema_of = {"an object by a schema": PERSON, "four objects by a schema": PEOPLE}
    cases = [
        Case(kind, ids, temperature, schema_of.get(kind)) for kind, ids in asked.items() for temperature in (0.0, 0.8)
    ]
    mixed = [ids for kind, texts in asked.items() if kind not in schema_of for ids in texts]
    return [*cases, Case("all texts", mixed, 0.0), Case("all texts, 4 times", mixed * 4, 0.0)]


def answer(llm: LLM, case: Case) -> tuple[list[list[int]], float]:
    """The answers to all prompts, computed together, and the seconds that they took."""
    start_s = time.perf_counter()
    outputs = llm.generate(case.asked, case.params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs], time.perf_counter() - start_s


def measure(plain: LLM, guessing: LLM, case: Case, num_rounds: int) -> Row:
    """Raises `AssertionError` if the answers differ."""
    seconds: list[tuple[float, float]] = []
    num_tokens = 0
    stats = guessing.llm_engine.stats
    before = stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens
    for _ in range(num_rounds):
        (expected, plain_s), (found, guessing_s) = (answer(llm, case) for llm in (plain, guessing))
        assert found == expected, f"{case.texts}: other tokens with guesses than without"
        num_tokens = sum(map(len, found))
        seconds.append((plain_s, guessing_s))
    num_drafts, num_draft_tokens, num_right = (
        now - then
        for now, then in zip((stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens), before, strict=True)
    )
    num_all = num_tokens * num_rounds
    return Row(
        texts=case.texts,
        temperature=case.temperature,
        num_requests=len(case.asked),
        num_tokens=num_tokens,
        plain_tokens_per_s=num_tokens / statistics.median(s for s, _ in seconds),
        guessing_tokens_per_s=num_tokens / statistics.median(s for _, s in seconds),
        ratio=statistics.median(plain_s / guessing_s for plain_s, guessing_s in seconds),
        tokens_per_step=num_all / (num_all - num_right),
        share_right=num_right / num_draft_tokens if num_drafts else 0.0,
    )


def measure_all(plain: LLM, guessing: LLM, num_rounds: int, *, shows: bool) -> list[Row]:
    rows = []
    if shows:
        print(f"{'texts':26}{'temperature':>12}{'requests':>10}{'plain':>9}{'guessing':>10}{'ratio':>7}", end="")
        print(f"{'a step':>8}{'right':>7}     (plain, guessing: tokens/s)")
    for case in cases_of(plain):
        row = measure(plain, guessing, case, num_rounds)
        rows.append(row)
        if shows:
            print(
                f"{row.texts:26}{row.temperature:12.1f}{row.num_requests:10}{row.plain_tokens_per_s:9.1f}"
                f"{row.guessing_tokens_per_s:10.1f}{row.ratio:7.2f}{row.tokens_per_step:8.2f}{row.share_right:7.0%}",
                flush=True,
            )
    return rows


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option(
    "--times-deeper",
    default=1,
    type=COUNT,
    show_default=True,
    help="Give the model so many times as many layers, of which the additional ones change nothing, so that the model "
    "itself can guess for it: a stand-in for a larger model of the same family.",
)
@click.option("--speculative-config", default='{"num_speculative_tokens": 4}', show_default=True)
@click.option(
    "--num-rounds", default=3, type=COUNT, show_default=True, help="Rounds, each with and without speculation."
)
@click.option("--json", "as_json", is_flag=True, help="Print only the last line, JSON.")
def main(model: str, times_deeper: int, speculative_config: str, num_rounds: int, as_json: bool) -> None:
    """Measure what speculative decoding gains: the same requests with and without it, in turn."""
    with tempfile.TemporaryDirectory() as folder:
        with wrong_usage():
            if times_deeper > 1:
                make_deeper(resolve_model(model), times_deeper, Path(folder))
                model = folder
            # A token of a deeper model takes as many times as much memory.
            room = {"max_model_len": 2048, "kv_cache_gib": max(1.0, times_deeper / 2)}
            plain = LLM(model=model, enable_prefix_caching=False, **room)
            guessing = LLM(model=model, enable_prefix_caching=False, speculative_config=speculative_config, **room)
        rows = measure_all(plain, guessing, num_rounds, shows=not as_json)
    settings = {"speculative_config": json.loads(speculative_config), "times_deeper": times_deeper}
    summary = machine() | settings | {"rows": [asdict(row) for row in rows]}
    path = path_of("speculation", summary.get("commit"))
    keep(path, summary)
    print(f"kept in {path.parent.name}/{path.name}", file=sys.stderr)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
