"""Random conversations with models whose layers keep a state: an engine that goes on from snapshots gives every request
the tokens and logprobs, to the bit, that one without prefix caching gives it alone.

Prompts begin like earlier ones, continue or leave them, or are those of others at the same time. Pools are so small
that sequences preempt each other and snapshots are evicted. Some requests are aborted, some go on in another engine.
Some engines guess, by lookup or with a draft model, so that states are put back.
Everything follows from the seed in brackets in a test's name.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from grammar_cases import EOS, KINDS, grammar_text, tokenizer
from handover import handed_over
from lora_folders import CONFIG as LORA_CONFIG
from model_bench import SMALL, save_model
from transformers_cases import GRANITE_H, LFM2, QWEN3_5

from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.model_loader import create_engine_config
from engine.outputs import TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.scheduling import snapshots
from engine.scheduling.sequence import SchedulerOutput

DRAFTS = "draft model"
MODELS = {"delta": QWEN3_5, "convolutions": LFM2, "mamba-2": GRANITE_H}
VOCAB_SIZE, MAX_MODEL_LEN, NUM_ROUNDS = 97, 128, 8
SEEDS = [(name, seed) for seed in range(3) for name in MODELS]
MORE_SEEDS = [(name, seed) for seed in range(3, 40) for name in MODELS]


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    params: SamplingParams
    salt: str


@dataclass
class Told:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def until(self, told: Told) -> Told:
        return Told(self.token_ids[: len(told.token_ids)], self.logprobs[: len(told.logprobs)])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, config in MODELS.items():
        made[name] = tmp_path_factory.mktemp("model")
        save_model(transformers.AutoConfig.for_model(**config | {"architectures": None}), made[name])
    made[DRAFTS] = tmp_path_factory.mktemp("draft")
    save_model(transformers.LlamaConfig(**SMALL | {"vocab_size": VOCAB_SIZE}), made[DRAFTS])
    return made


def random_guesses(folders: dict[str, Path], rng: random.Random) -> str:
    """A speculative_config; empty for none."""
    if rng.random() < 0.3:
        return ""
    guessing: dict[str, Any] = {"num_speculative_tokens": rng.randint(1, 5)}
    guessing |= {"prompt_lookup_min": 1} if rng.random() < 0.6 else {"model": str(folders[DRAFTS])}
    return json.dumps(guessing)


@pytest.fixture(scope="module")
def drafts() -> Iterator[Counter[str]]:
    """Counts guesses in all rounds."""
    counts: Counter[str] = Counter()
    yield counts
    if counts["rounds"] >= len(SEEDS):
        assert min(counts["right"], counts["wrong"]) > 50, "the rounds test little"


def engine_of(folder: Path, *, is_ahead: bool = False, **settings: Any) -> LLMEngine:
    args = EngineArgs(model=str(folder), dtype="bfloat16", num_threads=1, max_model_len=MAX_MODEL_LEN, **settings)
    config = create_engine_config(args)
    if config.device.attention_backend != "cpu":
        pytest.skip("no CPU kernels here")
    return LLMEngine(replace(config, scheduler=replace(config.scheduler, async_scheduling=is_ahead)))


def check_budget(engine: LLMEngine, max_tokens: int) -> None:
    """Let no step be scheduled that computes more tokens."""
    scheduler = engine._scheduler
    schedule = scheduler.schedule

    def checked(*args: Any) -> SchedulerOutput:
        output = schedule(*args)
        assert sum(item.num_new_tokens for item in output.scheduled) <= max_tokens
        return output

    scheduler.schedule = checked  # type: ignore[method-assign]


class Conversations:
    """Makes up requests, and remembers what was said."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.said = [self._tokens(rng.randint(1, 60)) for _ in range(2)]

    def _tokens(self, number: int) -> list[int]:
        return [self._rng.randrange(3, VOCAB_SIZE - 1) for _ in range(number)]

    def next(self) -> list[Request]:
        """One prompt, for one or several answers."""
        rng = self._rng
        prompt = rng.choice(self.said)[: rng.choice([rng.randint(1, 90), 90])] + self._tokens(rng.randint(0, 30))
        params = SamplingParams(
            temperature=rng.choice([0.0, 1.0]), seed=rng.randrange(3), max_tokens=rng.choice([1, 2, 8, 25]),
            ignore_eos=True, logprobs=rng.choice([None, 1]),
            # Of few tokens, many guesses are right.
            allowed_token_ids=frozenset(rng.sample(range(3, VOCAB_SIZE - 1), 3) if rng.random() < 0.5 else ()),
        )  # fmt: skip
        return [Request(tuple(prompt or [5]), params, rng.choice(["", "", "", "s"]))] * rng.choice([1, 1, 1, 2])


class Alone:
    """Answers of an engine without prefix caching, which computes one request at a time."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._known: dict[tuple[tuple[int, ...], str], Told] = {}

    def to(self, request: Request) -> Told:
        key = request.prompt, repr(request.params)
        if key not in self._known:
            self._engine.add_request("r", request.prompt, request.params)
            self._known[key] = told = Told()
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    told.token_ids += output.token_ids
                    told.logprobs += output.logprobs or ()
        return self._known[key]


def serve(engine: LLMEngine, requests: dict[str, Request], rng: random.Random) -> tuple[dict[str, Told], set[str]]:
    """Returns the answers, and which requests were aborted."""
    told, waiting, aborted = {name: Told() for name in requests}, list(requests), set()
    while waiting or engine.has_unfinished_requests():
        if waiting and (rng.random() < 0.5 or not engine.has_unfinished_requests()):
            request = requests[name := waiting.pop()]
            engine.add_request(name, request.prompt, request.params, cache_salt=request.salt)
        for output in engine.step():
            told[output.request_id].token_ids += output.token_ids
            told[output.request_id].logprobs += output.logprobs or ()
        if rng.random() < 0.03 and engine.abort(name := rng.choice(list(requests))):
            aborted.add(name)
        if rng.random() < 0.01:
            engine.forget_prefixes()
        assert engine.audit()[1] == []
    return told, aborted


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("name", "seed"), [*SEEDS, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE_SEEDS)]
)
def test_answers_with_snapshots(
    name: str, seed: int, folders: dict[str, Path], drafts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(f"{name} {seed}")
    monkeypatch.setattr(snapshots, "MIN_TOKENS", rng.choice([1, 8, 16, 40]))
    monkeypatch.setattr(snapshots, "WORTH", 10_000)
    monkeypatch.setattr(snapshots, "ANSWER_START_TOKENS", rng.choice([1, 8]))
    settings = {"max_num_seqs": rng.choice([3, 8]), "max_num_batched_tokens": rng.choice([8, 33, 128])}
    plain = engine_of(folders[name], enable_prefix_caching=False, num_kv_blocks=200)
    least = MAX_MODEL_LEN // 16 + plain.block_manager.num_state_blocks
    settings["num_kv_blocks"] = least + rng.choice([0, 3, least, 4 * least])
    guesses = [random_guesses(folders, rng) for _ in range(2)]
    engine, decode = (
        engine_of(folders[name], is_ahead=not each and rng.random() < 0.7, speculative_config=each, **settings)
        for each in guesses
    )
    for each in (engine, decode):
        check_budget(each, settings["max_num_batched_tokens"])
    alone, conversations = Alone(plain), Conversations(rng)
    for number in range(NUM_ROUNDS):
        asked = [request for _ in range(rng.randint(1, 6)) for request in conversations.next()]
        requests = {f"{number}.{place}": request for place, request in enumerate(asked)}
        answers, aborted = serve(engine, requests, rng)
        for request_id, request in requests.items():
            told, expected = answers[request_id], alone.to(request)
            assert told == (expected.until(told) if request_id in aborted else expected)
            conversations.said = [*conversations.said, [*request.prompt, *told.token_ids]][-6:]
        [request, *_] = conversations.next()
        expected = alone.to(request)
        if len(expected.token_ids) > 1:
            assert handed_over(engine, decode, list(request.prompt), request.params) == expected.token_ids
    if settings["num_kv_blocks"] > 2 * least:
        assert engine.stats.num_prefix_hits_tokens > 0
    for each in (engine, decode):
        each.forget_prefixes()
        ledger, problems = each.audit()
        assert not problems
        assert ledger.num_free == ledger.num_blocks
        stats = each.stats
        drafts.update(right=stats.num_accepted_tokens, wrong=stats.num_draft_tokens - stats.num_accepted_tokens)
    drafts.update(rounds=1)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MODELS)
def test_text_that_grammars_force(name: str, tmp_path: Path) -> None:
    """It is guessed, and what the model splits into other tokens is taken back."""
    fields = MODELS[name] | {"architectures": None, "vocab_size": LORA_CONFIG["vocab_size"], "eos_token_id": EOS}
    save_model(transformers.AutoConfig.for_model(**fields | {"pad_token_id": 0}), tmp_path)
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    answers = []
    for guesses in ("", '{"num_speculative_tokens": 4, "prompt_lookup_min": 1}'):
        engine = engine_of(tmp_path, num_kv_blocks=300, speculative_config=guesses)
        told: dict[str, list[int]] = {}
        for number, kind in enumerate(KINDS):
            params = SamplingParams(
                temperature=0.8 * (number % 2), seed=number, max_tokens=60, grammar=grammar_text(kind)
            )
            engine.add_request(str(number), [(7 * j + number) % 50 + 5 for j in range(12 + number)], params)
            told[str(number)] = []
            grammar = engine._scheduler.sequences.waiting[-1].grammar
            assert grammar is not None
            grammar.wait_until_compiled()
        while engine.has_unfinished_requests():
            for output in engine.step():
                told[output.request_id] += output.token_ids
            assert engine.audit()[1] == []
        answers.append(told)
    assert answers[0] == answers[1]
    assert engine.stats.num_accepted_tokens > 10
    assert engine.stats.num_draft_tokens > engine.stats.num_accepted_tokens
