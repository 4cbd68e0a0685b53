"""Random requests on one engine: whatever runs beside a request, its answer equals, bit for bit, that of the same
request alone.

Requests of every kind arrive at random times and some are aborted. The engine has so few blocks that it preempts
requests, evicts cached blocks, and finds prefixes again in the pool or in host memory; it computes prompts in chunks,
drafts tokens and launches steps ahead. Everything follows from the seed in brackets in a test's name: a failure can be
repeated by that name (a slow one with `-m slow`).
"""

from __future__ import annotations

import json
import random
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from grammar_cases import EOS, KINDS, grammar_text, tokenizer
from lora_folders import CONFIG, write_adapter, write_adapter_of

from engine.config import GIB
from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.model_loader import create_engine_config
from engine.models.eagle_config import LAYER_IDS
from engine.outputs import FinishReason, RequestOutput, TokenLogprobs
from engine.running.executor import Executor
from engine.running.head_drafter import HeadDrafter
from engine.sampling_params import SamplingParams
from engine.scheduling.offloading import BlockCopy
from engine.scheduling.sequence import OnLayerWritten
from engine.scheduling.thinking import ThinkingBudget

SEEDS = range(20)
MORE_SEEDS = range(len(SEEDS), 400)
SEEDS_OF_OWN_HEADS = range(4)
MORE_SEEDS_OF_OWN_HEADS = range(len(SEEDS_OF_OWN_HEADS), 60)
NUM_GROUPS = 20  # groups of requests in a round
BLOCK_SIZE = 16
BLOCK_BYTES = 2 * 2 * 2 * BLOCK_SIZE * 16 * 2  # layers, parts, heads, slots, dim, bytes
VOCAB_SIZE = CONFIG["vocab_size"]
ADAPTERS = ("", "", "", "a", "b")
OWN = "its own salt"
DRAFTS, HEAD = "drafts", "head"
"""The folders of a draft model and of an EAGLE-3 head."""
MET = (
    "preempted", "found", "loaded", "saved", "evicted", "right drafts", "wrong drafts", "right by a model", "aborted",
    "by a head", "moved", "ahead",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Request:
    prompt: list[int]
    params: SamplingParams
    lora_name: str
    cache_salt: str
    given: list[int] = field(default_factory=list)
    """The first tokens of the answer, if another engine has begun it."""

    @property
    def finds_nothing(self) -> bool:
        """Whether the whole prompt is computed, whatever is cached."""
        return self.cache_salt.startswith(OWN) or (self.params.prompt_logprobs is not None and not self.given)


@dataclass
class Told:
    """All that the engine has output for one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None

    def take(self, output: RequestOutput) -> None:
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or ()
        if output.prompt_logprobs is not None:
            assert self.prompt_logprobs is None
            self.prompt_logprobs = output.prompt_logprobs
        self.finish_reason = output.finish_reason

    def until(self, told: Told) -> Told:
        """Return this answer cut to the length of `told`, an aborted one."""
        length = len(told.token_ids)
        return Told(self.token_ids[:length], self.logprobs[:length], self.prompt_logprobs if length else None)


def draw_requests(rng: random.Random) -> list[Request]:
    """Return groups of requests; a group is several answers to one prompt. Prompts share beginnings, and some repeat
    themselves."""
    texts = [[rng.randrange(2, VOCAB_SIZE) for _ in range(100)] for _ in range(2)] + [[7, 8, 9, 10] * 25]
    requests: list[Request] = []
    for _ in range(NUM_GROUPS):
        text, params, lora_name = rng.choice(texts), draw_params(rng), rng.choice(ADAPTERS)
        likely = sorted(params.allowed_token_ids) or sorted(params.logit_bias) or range(VOCAB_SIZE)
        ending = rng.sample(likely, min(len(likely), 4)) * 5  # drafts repeat it, and may be right
        prompt = text[: rng.randint(1, 100)] + ending[: rng.choice([0, 1, 20, 20])]
        salt = rng.choice([*[""] * 8, "shared", OWN])
        for index in range(rng.choice([1, 1, 2, 3])):
            each = replace(params, seed=params.seed + index, prompt_logprobs=None if index else params.prompt_logprobs)
            own = f"{salt} {len(requests)}" if salt == OWN else salt
            requests.append(Request(prompt=prompt, params=each, lora_name=lora_name, cache_salt=own))
    return requests


def draw_params(rng: random.Random) -> SamplingParams:
    def maybe(value: Any, otherwise: Any = None, chance: float = 0.3) -> Any:
        return value if rng.random() < chance else otherwise

    max_tokens = rng.choice([1, rng.randint(2, 30), rng.randint(30, 70)])
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.8, 2.0]), seed=rng.randrange(-(2**63), 2**63 - 10), max_tokens=max_tokens,
        top_p=maybe(0.9, 1.0), top_k=maybe(rng.randint(1, 50), 0), min_p=maybe(0.02, 0.0, 0.1),
        presence_penalty=maybe(rng.uniform(-1, 1), 0.0), frequency_penalty=maybe(rng.uniform(-1, 1), 0.0),
        repetition_penalty=maybe(1.2, 1.0), stop_token_ids=frozenset(maybe(rng.sample(range(VOCAB_SIZE), 8), ())),
        logit_bias={rng.randrange(VOCAB_SIZE): rng.uniform(-5, 5) for _ in range(maybe(3, 0))},
        logprobs=rng.choice([None, 0, 3]), prompt_logprobs=maybe(rng.choice([0, 2])),
    )  # fmt: skip
    kind = rng.choice(["any", "few", "few", "in turn", "bad words", "held to a form"])
    if kind != "few" and params.seed % 5 < 2:
        params = replace(params, thinking_budget=random_budget(random.Random(params.seed)))
    if kind == "held to a form":
        return replace(params, grammar=grammar_text(rng.choice(list(KINDS))))
    some = rng.sample(range(2, VOCAB_SIZE), rng.randint(2, 4))
    if kind == "few":  # many drafts are right, and some are not
        params = replace(params, allowed_token_ids=frozenset([*some, EOS]), stop_token_ids=frozenset(some[:1]))
    elif kind == "in turn":  # drafts may contain the answer's end, and tokens after it
        in_turn = {some[0]: 60.0, some[1]: 50.0}
        ends, never = frozenset(some[1 : rng.randint(1, 2)]), tuple((token_id, token_id) for token_id in in_turn)
        params = replace(params, logit_bias=in_turn, bad_words_token_ids=never, stop_token_ids=ends)
    elif kind == "bad words":
        pairs = [(token_id, token_id) for token_id in range(VOCAB_SIZE)]
        params = replace(params, bad_words_token_ids=((some[0],), *pairs))
    can_go_on = not params.allowed_token_ids or params.allowed_token_ids - params.stop_token_ids - {EOS}
    min_tokens = maybe(rng.randint(1, max_tokens), 0) if can_go_on else 0
    return replace(params, ignore_eos=rng.random() < 0.3, min_tokens=min_tokens)


def random_budget(rng: random.Random) -> ThinkingBudget:
    begin = tuple(rng.sample(range(2, VOCAB_SIZE), rng.choice([1, 1, 2])))
    return ThinkingBudget(
        num_tokens=rng.randint(0, 8), end_token_id=rng.randrange(2, VOCAB_SIZE), begin_token_ids=begin,
        has_begun=rng.random() < 0.7, may_repeat=rng.random() < 0.5,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its tokenizer and two adapters."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": EOS, "initializer_range": 0.3}))
    tokenizer().save(str(folder / "tokenizer.json"))
    for seed, name in enumerate(("a", "b"), 1):
        write_adapter(folder / name, seed=seed)
    (folder / DRAFTS).mkdir()  # guesses well, since its first layer is the model's, and knows fewer positions
    draft_config = {**CONFIG, "eos_token_id": EOS, "num_hidden_layers": 1, "max_position_embeddings": 128}
    (folder / DRAFTS / "config.json").write_text(json.dumps({**draft_config, "initializer_range": 0.3}))
    (folder / HEAD).mkdir()
    head_config = {**CONFIG, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    (folder / HEAD / "config.json").write_text(json.dumps({**head_config, LAYER_IDS: [0, 1, 2]}))
    return folder


GLM = {
    "architectures": ["Glm4MoeForCausalLM"], "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 512, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True,
    "num_nextn_predict_layers": 1, "eos_token_id": EOS, "dtype": "bfloat16",
}  # fmt: skip
"""Its pool has as many bytes a block as that of `CONFIG`, but for the head's layer."""


@pytest.fixture(scope="module")
def folder_with_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a model whose checkpoint brings a head along."""
    folder = tmp_path_factory.mktemp("glm")
    (folder / "config.json").write_text(json.dumps(GLM))
    tokenizer().save(str(folder / "tokenizer.json"))
    sizes = {"q_proj": (128, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 128)}
    products = {f"model.layers.{layer}.self_attn.{name}": size for layer in range(2) for name, size in sizes.items()}
    for seed, name in enumerate(("a", "b"), 1):
        write_adapter_of(folder / name, products, rank=4, seed=seed)
    return folder


def make_engine(
    folder: Path, *, runs_ahead: bool = False, on_layer_written: OnLayerWritten | None = None, **settings: Any
) -> LLMEngine:
    """Make an engine with the CPU kernels: with others, sums depend on the rest of the batch."""
    args = EngineArgs(
        model=str(folder), load_format="dummy", dtype="bfloat16", device="cpu", num_threads=1, block_size=BLOCK_SIZE,
        max_model_len=160, lora_modules=f"a={folder / 'a'},b={folder / 'b'}", max_itl_ms=0.0, **settings,
    )  # fmt: skip
    config = create_engine_config(args)
    if config.device.attention_backend != "cpu":
        pytest.skip("no CPU kernels here")
    config = replace(config, scheduler=replace(config.scheduler, async_scheduling=runs_ahead))
    return LLMEngine(config, on_layer_written)


def make_cramped_engine(folder: Path, rng: random.Random, *, has_own_head: bool = False, **settings: Any) -> LLMEngine:
    """Make an engine with few blocks and random settings. A CPU computes a step in its launch, even with async
    scheduling: every path is taken, and timing decides nothing. `has_own_head`: the head in the checkpoint guesses."""
    runs_ahead = not has_own_head and rng.random() < 0.3  # then without drafts
    guessing: dict[str, object] = {"num_speculative_tokens": rng.randint(1, 6), "prompt_lookup_min": 1}
    if has_own_head:
        guessing["method"] = "mtp"
    elif not runs_ahead and rng.random() < 0.4:
        model = rng.choice([folder, *folder.glob(DRAFTS), *folder.glob(HEAD)])
        guessing |= {"model": str(model), "method": "eagle3" if model.name == HEAD else "draft_model"}
    engine = make_engine(
        folder, runs_ahead=runs_ahead, num_kv_blocks=rng.randint(11, 14), max_num_seqs=rng.choice([4, 12]),
        max_num_batched_tokens=rng.choice([16, 40, 300]), prefill_chunk_tokens=rng.choice([0, 7, 16]),
        stream_interval=rng.choice([1, 1, 3]), speculative_config="" if runs_ahead else json.dumps(guessing),
        kv_offloading_size=rng.choice([4, 12, 60]) * BLOCK_BYTES / GIB, **settings,
    )  # fmt: skip
    engine.executor.kv_pool.fill_(float("nan"))  # so that a read of unwritten KV shows
    _let_a_head_show_it(engine)
    CopiesInTurn(engine.executor, rng)
    return engine


def _let_a_head_show_it(engine: LLMEngine) -> None:
    """Guesses are verified, so that wrong ones would not show."""
    drafter = engine.executor._worker.drafter
    if not isinstance(drafter, HeadDrafter):
        return
    compute_logits = drafter._head.compute_logits

    def checked(x_TD: torch.Tensor) -> torch.Tensor:
        logits = compute_logits(x_TD)
        assert not logits.isnan().any()
        return logits

    drafter._head.compute_logits = checked  # type: ignore[method-assign]


class CopiesInTurn:
    """Makes the copies between pool and host memory on this thread, as the seed decides: at once or as late as allowed,
    in any order; reports them later."""

    def __init__(self, executor: Executor, rng: random.Random) -> None:
        assert executor._host_copies is not None
        self._rng = rng
        self._copy = executor._host_copies._copy
        self._begun: list[tuple[BlockCopy, bool]] = []
        """Copies, and whether each has been made."""
        self._must_end = False
        executor.copy_blocks = self.begin  # type: ignore[method-assign]
        executor.take_copied = self.take  # type: ignore[method-assign]
        executor.wait_for_copies = self.wait  # type: ignore[method-assign]

    def begin(self, copies: list[BlockCopy]) -> None:
        for copy in copies:
            is_made = self._rng.random() < 0.5
            if is_made:
                self._copy([copy])
            self._begun.append((copy, is_made))

    def take(self) -> list[BlockCopy]:
        num_ended = self._rng.randint(0, len(self._begun)) if self._rng.random() < 0.3 else 0
        num_ended, self._must_end = max(num_ended, self._must_end), False
        ended = [self._begun.pop(self._rng.randrange(len(self._begun))) for _ in range(num_ended)]
        for copy, is_made in ended:
            if not is_made:
                self._copy([copy])
        return [copy for copy, _ in ended]

    def wait(self) -> bool:
        self._must_end = bool(self._begun)
        return self._must_end


def add(engine: LLMEngine, name: str, request: Request) -> None:
    engine.add_request(
        name, request.prompt, request.params, output_token_ids=request.given, cache_salt=request.cache_salt,
        lora_name=request.lora_name,
    )  # fmt: skip
    if (grammar := engine._scheduler.sequences.waiting[-1].grammar) is not None:
        grammar.wait_until_compiled()  # so that compile time decides nothing


def answer_alone(engine: LLMEngine, request: Request) -> Told:
    """Return the answer of a request that runs alone. `engine` must have no cache and no drafts."""
    told = Told()
    add(engine, "alone", request)
    while engine.has_unfinished_requests():
        for output in engine.step():
            told.take(output)
    return told


def moved(request: Request, told: Told, num_given: int) -> tuple[Request, Told]:
    """Return the request as resumed after `num_given` tokens, and the rest of its answer."""
    rest = Told(told.token_ids[num_given:], told.logprobs[num_given:], None, told.finish_reason)
    return replace(request, given=told.token_ids[:num_given]), rest


def answer_all(engine: LLMEngine, requests: list[Request], rng: random.Random) -> tuple[list[Told], set[int]]:
    """Let requests arrive at random times and abort some. Return the answers and the aborted requests. The audit must
    find no problem after any step."""
    told = [Told() for _ in requests]
    to_come, running, aborted = deque(range(len(requests))), set[int](), set[int]()
    while to_come or engine.has_unfinished_requests():
        while to_come and (not engine.has_unfinished_requests() or rng.random() < 0.5):
            number = to_come.popleft()
            running.add(number)
            add(engine, str(number), requests[number])
        if running and rng.random() < 0.02:
            number = rng.choice(sorted(running))
            assert engine.abort(str(number))
            running.remove(number)
            aborted.add(number)
        for output in engine.step():
            number = int(output.request_id)
            assert number in running, "it had ended"
            assert output.offset == len(requests[number].given) + len(told[number].token_ids)
            assert not (output.num_cached_tokens and requests[number].finds_nothing)
            told[number].take(output)
            if output.is_finished:
                running.remove(number)
        assert engine.audit()[1] == []
        assert not (engine.is_idle and engine.has_unfinished_requests()), "nothing goes on"
    assert not running
    return told, aborted


def check_rest(engine: LLMEngine) -> Counter[str]:
    """Check an idle engine: all blocks are free or cached, and the cache events describe the cache. Return counts of
    what the round covered."""
    while engine.executor.wait_for_copies():
        engine.step()
    ledger, problems = engine.audit()
    assert problems == []
    assert ledger.num_free + ledger.num_cached == ledger.num_blocks
    host, events, stats = engine.block_manager.host_ledger(), engine.take_cache_events(), engine.stats
    assert host.num_free + host.num_kept == host.num_blocks
    is_findable = {event.block_hash: event.is_stored for event in events}
    assert {block_hash for block_hash, is_stored in is_findable.items() if is_stored} == set(engine.cached_hashes())
    return Counter({
        "preempted": stats.num_preemptions, "found": stats.num_prefix_hits_tokens, "loaded": stats.num_loaded_blocks,
        "saved": stats.num_saved_blocks, "evicted": sum(not event.is_stored for event in events),
        "right drafts": stats.num_accepted_tokens, "wrong drafts": stats.num_draft_tokens - stats.num_accepted_tokens,
        "right by a model": stats.num_accepted_tokens if engine.config.draft is not None else 0,
        "by a head": stats.num_draft_tokens if engine.config.head is not None else 0,
        "ahead": int(engine.config.scheduler.async_scheduling),
    })  # fmt: skip


@pytest.fixture(scope="module")
def met() -> Iterator[Counter[str]]:
    """Counts what happened in all rounds; together they must cover `MET`."""
    counts: Counter[str] = Counter()
    yield counts
    if counts["rounds"] >= len(SEEDS):
        assert [name for name in MET if not counts[name]] == [], "the rounds test little"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", [*SEEDS, *(pytest.param(seed, marks=pytest.mark.slow) for seed in MORE_SEEDS)])
def test_each_answer_is_that_of_the_request_alone(seed: int, folder: Path, met: Counter[str]) -> None:
    met.update(check_round(folder, seed))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "seed",
    [*SEEDS_OF_OWN_HEADS, *(pytest.param(seed, marks=pytest.mark.slow) for seed in MORE_SEEDS_OF_OWN_HEADS)],
)
def test_the_head_of_the_checkpoint_guesses(seed: int, folder_with_head: Path) -> None:
    counts = check_round(folder_with_head, seed, has_own_head=True)
    assert counts["by a head"] > 0


def check_round(folder: Path, seed: int, *, has_own_head: bool = False) -> Counter[str]:
    """Returns counts of what happened."""
    rng = random.Random(seed)
    requests = draw_requests(rng)
    by_itself = make_engine(folder, num_kv_blocks=16, enable_prefix_caching=False)
    expected = [answer_alone(by_itself, request) for request in requests]
    for number, (request, whole) in enumerate(zip(requests, expected, strict=True)):
        if rng.random() < 0.2 and (num_given := rng.randrange(len(whole.token_ids))):
            requests[number], expected[number] = moved(request, whole, num_given)
    with closing(make_cramped_engine(folder, rng, has_own_head=has_own_head)) as engine:
        told, aborted = answer_all(engine, requests, rng)
        counts = check_rest(engine)
    for number, (request, whole) in enumerate(zip(requests, expected, strict=True)):
        assert told[number] == (whole.until(told[number]) if number in aborted else whole), f"{number}: {request}"
    counts.update({"rounds": 1, "aborted": len(aborted), "moved": sum(bool(request.given) for request in requests)})
    return counts
