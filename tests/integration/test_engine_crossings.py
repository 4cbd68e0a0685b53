"""Random requests on a prefill engine and a decode engine, for several kinds of models: whether one of the two computes
a request or both do, its answer equals, bit for bit, that of the request alone in an engine of its own.

Requests and engines come from test_engine_fuzz.py. As there, everything follows from the seed in a test's name.
"""

from __future__ import annotations

import json
import random
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from grammar_cases import EOS, tokenizer
from lora_folders import CONFIG, PRODUCTS, write_adapter
from test_engine_fuzz import (
    Request,
    Told,
    add,
    answer_alone,
    check_rest,
    draw_requests,
    make_cramped_engine,
    make_engine,
    moved,
)

from engine.llm_engine import LLMEngine
from engine.outputs import RequestOutput
from engine.scheduling.sequence import BlockExport

WINDOW = {"sliding_window": 17, "use_sliding_window": True}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "Llama in int8": ({"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}, "int8"),
    "Mistral in int4": ({"architectures": ["MistralForCausalLM"], **WINDOW}, "int4"),
    "Qwen2": ({"architectures": ["Qwen2ForCausalLM"], "max_window_layers": 1, **WINDOW}, "none"),
    "Qwen3": ({"architectures": ["Qwen3ForCausalLM"], "num_attention_heads": 6}, "none"),
    "Mixtral": ({"architectures": ["MixtralForCausalLM"], **EXPERTS, **WINDOW}, "none"),
    "Qwen3-MoE": ({"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS, "mlp_only_layers": [0]}, "none"),
}
"""Changes to the config.json of lora_folders.py, and the quantization. All have equally many key heads and layers."""
ROUNDS = [(name, seed) for seed in (0, 1) for name in MODELS]
MORE_ROUNDS = [(name, seed) for seed in range(2, 30) for name in MODELS]
MET = ("handed over", "ended at once", "busy", "found", "loaded", "preempted", "right drafts", "ahead", "aborted")


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """Write the model and its adapters."""
    whole = {**CONFIG, "eos_token_id": EOS, "initializer_range": 0.3, **config}
    (folder / "config.json").write_text(json.dumps(whole))
    tokenizer().save(str(folder / "tokenizer.json"))
    size = whole["num_attention_heads"] * whole["head_dim"]
    changed = {"self_attn.k_proj": PRODUCTS["self_attn.k_proj"], "self_attn.o_proj": (whole["hidden_size"], size)}
    for seed, name in enumerate(("a", "b"), 1):
        write_adapter(folder / name, seed=seed, products=changed)


@dataclass
class HandOver:
    block_ids: list[int]
    """The decode engine's blocks for the prompt."""
    num_cached_blocks: int
    sent: Counter[int] = field(default_factory=Counter)
    """By index in `block_ids`: the number of layers sent."""


class Pair:
    """Two engines with too few blocks: one prefills for the other, and both also compute whole requests."""

    def __init__(self, folder: Path, rng: random.Random, quantization: str) -> None:
        self._hand_overs: dict[str, HandOver] = {}
        self.decode = make_cramped_engine(folder, rng, quantization=quantization)
        self.prefill = make_cramped_engine(folder, rng, quantization=quantization, on_layer_written=self._send)
        self.met: Counter[str] = Counter()

    def _send(self, layer: int, exports: list[BlockExport]) -> None:
        source, destination = self.prefill.executor.kv_pool, self.decode.executor.kv_pool
        for export in exports:
            hand_over = self._hand_overs[export.request_id]
            for place, block_id in enumerate(export.block_ids, export.first_block):
                if place < len(hand_over.block_ids):  # a further block may be for the sampled token
                    assert place >= hand_over.num_cached_blocks, "that one is there"
                    destination[layer, hand_over.block_ids[place]] = source[layer, block_id]
                    hand_over.sent[place] += 1

    @property
    def has_steps(self) -> bool:
        """Whether steps are left; one may have been launched ahead for a request that has ended since."""
        return self.prefill.has_unfinished_requests() or self.decode.has_unfinished_requests()

    def begin(self, name: str, request: Request) -> bool:
        """Start a hand-over. Returns False if the decode engine has no room now."""
        reservation = self.decode.reserve(
            name, request.prompt, request.params, output_token_ids=request.given, cache_salt=request.cache_salt,
            lora_name=request.lora_name,
        )  # fmt: skip
        if reservation is None:
            self.met["busy"] += 1
            return False
        self._hand_overs[name] = HandOver(list(reservation.block_ids), reservation.num_cached_blocks)
        computed = self.prefill.add_prefill(
            name, request.prompt, request.params, output_token_ids=request.given, cache_salt=request.cache_salt,
            lora_name=request.lora_name, num_receiver_blocks=reservation.num_cached_blocks,
        )  # fmt: skip
        assert computed == reservation.prompt_digest
        return True

    def go_on(self, output: RequestOutput, num_tokens: int) -> None:
        """Finish the hand-over once its first token is there. Does nothing for other requests."""
        hand_over = self._hand_overs.pop(output.request_id, None)
        if hand_over is None:
            return
        if output.is_finished:
            self.met["ended at once"] += 1
            assert self.decode.abort(output.request_id)
        else:
            self.met["handed over"] += 1
            lacking = range(hand_over.num_cached_blocks, len(hand_over.block_ids))
            assert hand_over.sent == dict.fromkeys(lacking, CONFIG["num_hidden_layers"])
            self.decode.commit(output.request_id, output.token_ids[0], num_tokens)
        assert self.prefill.abort(output.request_id)

    def abort(self, name: str) -> None:
        self._hand_overs.pop(name, None)
        assert any([self.prefill.abort(name), self.decode.abort(name)])


def answer_all(pair: Pair, requests: list[Request], rng: random.Random) -> tuple[list[Told], set[int]]:
    """Let requests arrive at random times, each at a random engine or handed over; abort some. Return the answers and
    the aborted requests."""
    told = [Told() for _ in requests]
    ways = rng.choices([partial(add, pair.prefill), partial(add, pair.decode), pair.begin, pair.begin], k=len(requests))
    to_come, running, aborted = deque(range(len(requests))), set[int](), set[int]()
    for _ in range(5000):
        if not (to_come or running or pair.has_steps):
            return told, aborted
        while to_come and (not running or rng.random() < 0.5):
            number = to_come[0]
            if ways[number](str(number), requests[number]) is False:
                break
            running.add(to_come.popleft())
        if running and rng.random() < 0.02:
            aborted.add(number := rng.choice(sorted(running)))
            running.remove(number)
            pair.abort(str(number))
        for engine in rng.sample([pair.prefill, pair.decode], rng.randint(1, 2)):
            for output in engine.step():
                number = int(output.request_id)
                told[number].take(output)
                if output.is_finished:
                    running.remove(number)
                pair.go_on(output, len(requests[number].prompt) + len(requests[number].given))
            assert engine.audit()[1] == []
    raise AssertionError(f"nothing goes on: {running}")


@pytest.fixture(scope="module")
def met() -> Iterator[Counter[str]]:
    """Counts what happened in all rounds; together they must cover `MET`."""
    counts: Counter[str] = Counter()
    yield counts
    if counts["rounds"] >= len(ROUNDS):
        assert [name for name in MET if not counts[name]] == [], "the rounds test little"


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "seed"), [*ROUNDS, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE_ROUNDS)]
)
def test_each_answer_is_that_of_the_request_alone(name: str, seed: int, tmp_path: Path, met: Counter[str]) -> None:
    rng = random.Random(f"{name} {seed}")
    config, quantization = MODELS[name]
    write_model(tmp_path, config)
    requests = draw_requests(rng)[:20]
    by_itself: LLMEngine = make_engine(
        tmp_path, num_kv_blocks=16, enable_prefix_caching=False, quantization=quantization
    )
    expected = [answer_alone(by_itself, request) for request in requests]
    for number, (request, whole) in enumerate(zip(requests, expected, strict=True)):
        if rng.random() < 0.2 and (num_given := rng.randrange(len(whole.token_ids))):
            requests[number], expected[number] = moved(request, whole, num_given)
    pair = Pair(tmp_path, rng, quantization)
    with ExitStack() as stack:
        for engine in (pair.prefill, pair.decode):
            stack.enter_context(closing(engine))
        told, aborted = answer_all(pair, requests, rng)
        for engine in (pair.prefill, pair.decode):
            met.update(check_rest(engine))
    for number, (request, whole) in enumerate(zip(requests, expected, strict=True)):
        assert told[number] == (whole.until(told[number]) if number in aborted else whole), f"{number}: {request}"
    met.update(pair.met)
    met.update({"rounds": 1, "aborted": len(aborted)})
