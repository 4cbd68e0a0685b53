"""EAGLE-3 heads: what they guess, where their keys and values come from, and that no token depends on them."""

from __future__ import annotations

import json
import os
import signal
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_cases import (
    CPU,
    GREEDY,
    HEAD,
    MODEL,
    PLAIN,
    ReferenceHead,
    folder_of,
    load_causal_lm,
    make_engine,
    num_wrong,
    rewritten,
    write_random_head,
    write_random_model,
    write_ring,
    write_ring_head,
)
from handover import alone, finish, handed_over
from heads_at_work import agreement, drafted
from many_endings import BUDGETS, answers_of, prompt_of
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers_cases import GEMMA2, GPT_OSS, QWEN3_MOE

from engine.llm_engine import LLMEngine
from engine.models.eagle_config import LAYER_IDS
from engine.running.executor import RankLost
from engine.running.head_drafter import HeadDrafter
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import BlockExport
from engine.scheduling.speculation import DraftHistory
from engine.step_input import StepInput

DRAWN = SamplingParams(temperature=1.0, seed=7, max_tokens=30, ignore_eos=True)


@pytest.fixture
def always_guessing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after wrong guesses."""
    monkeypatch.setattr(DraftHistory, "num_wanted", lambda self, length: 3)


# -- what they guess --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [CPU, PLAIN], ids=["cpu", "torch"])
@pytest.mark.parametrize("num_drafts", [1, 3, 5])
def test_a_head_that_knows_the_answer_is_always_right(tmp_path: Path, backend: dict[str, Any], num_drafts: int) -> None:
    ring, head = write_ring(tmp_path / "ring"), write_ring_head(tmp_path / "head")
    engine = make_engine(ring, head, num_drafts=num_drafts, **backend)
    assert alone(engine, [3, 4, 5], GREEDY) == list(range(6, 36))
    assert num_wrong(engine) == 0
    # Each step gives one token more than guesses; the last token is never guessed.
    assert engine.stats.num_steps <= 1 + -(-29 // (num_drafts + 1)) + 1


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"norm_before_residual": True},
        {"fc_norm": True, "norm_output": True},
        {"norm_before_fc": True, "draft_vocab_size": 60},
    ],
    ids=["authors", "norm_before_residual", "eagle31", "norm_before_fc"],
)
@pytest.mark.parametrize("layers", [None, [0, 1, 4, 2]], ids=["default", "given"])
def test_guesses_are_those_of_the_reference(tmp_path: Path, fields: dict[str, Any], layers: list[int] | None) -> None:
    """The model's hidden states by transformers, all of the head in float64; prompts in chunks, several sequences."""
    model = load_causal_lm(write_random_model(tmp_path / "model", num_layers=6))
    if layers is not None:
        fields = fields | {"eagle_aux_hidden_state_layer_ids": layers}
    head = write_random_head(tmp_path / "head", num_features=len(layers or (2, 3, 3)), **fields)
    config = json.loads((head / "config.json").read_text())
    reference = ReferenceHead(config, load_file(head / "model.safetensors"), model.model.embed_tokens.weight.detach())
    engine = make_engine(tmp_path / "model", head, prefill_chunk_tokens=7, num_drafts=3, **PLAIN)
    collected = drafted(engine)
    for number in range(4):
        engine.add_request(str(number), prompt_of(number + 3), replace(GREEDY, max_tokens=24))
    finish(engine)
    assert len(collected) > 20
    for token_ids, guesses in collected:
        with torch.no_grad():
            states = model(torch.tensor([token_ids[:-1]]), output_hidden_states=True).hidden_states
        features_TF = torch.cat([states[layer][0] for layer in layers or (2, 3, 3)], dim=-1)
        assert guesses == reference.guesses(token_ids, features_TF, len(guesses))
    assert max(len(guesses) for _, guesses in collected) == 3
    assert sum(guesses != [] for _, guesses in collected) > 20


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "config", [GEMMA2, GPT_OSS, QWEN3_MOE | {"num_hidden_layers": 3}], ids=lambda of: of["model_type"]
)
def test_hidden_states_of_transformers_code(tmp_path: Path, config: dict[str, Any]) -> None:
    """Before the first layer, after the last one, and between."""
    (tmp_path / "model").mkdir()
    layers = [0, 1, config["num_hidden_layers"]]
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()
    model.save_pretrained(tmp_path / "model")
    fields = {name: config[name] for name in ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size")}
    head = write_random_head(tmp_path / "head", **fields, draft_vocab_size=50, eagle_aux_hidden_state_layer_ids=layers)
    head_config = json.loads((head / "config.json").read_text())
    reference = ReferenceHead(
        head_config, load_file(head / "model.safetensors"), model.get_input_embeddings().weight.detach()
    )
    noted: dict[int, torch.Tensor] = {}
    decoder_layers = model.model.layers
    decoder_layers[0].register_forward_pre_hook(lambda _, args, kwargs: noted.update({0: args[0][0]}), with_kwargs=True)
    decoder_layers[0].register_forward_hook(lambda _, args, output: noted.update({1: output[0]}))
    model.model.norm.register_forward_pre_hook(lambda _, args: noted.update({layers[-1]: args[0][0]}))
    engine = make_engine(tmp_path / "model", head, num_drafts=3, model_impl="transformers", **PLAIN)
    collected = drafted(engine)
    for number in range(3):
        engine.add_request(str(number), prompt_of(number + 3), replace(GREEDY, max_tokens=16))
    finish(engine)
    assert sum(guesses != [] for _, guesses in collected) > 10
    for token_ids, guesses in collected:
        with torch.no_grad():
            model(torch.tensor([token_ids[:-1]]))
        features_TF = torch.cat([noted[layer].view(len(token_ids) - 1, -1) for layer in layers], dim=-1)
        assert guesses == reference.guesses(token_ids, features_TF, len(guesses))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", [CPU, PLAIN], ids=["cpu", "torch"])
def test_drawn_guesses_are_right_while_the_ring_is_kept(tmp_path: Path, backend: dict[str, Any]) -> None:
    ring, head = write_ring(tmp_path / "ring"), write_ring_head(tmp_path / "head")
    engine, plain = make_engine(ring, head, **backend), make_engine(ring, None, **backend)
    for seed in range(6):
        params = replace(DRAWN, seed=seed, max_tokens=60)
        assert alone(engine, [3, 4, 5], params) == alone(plain, [3, 4, 5], params)
    assert engine.stats.num_accepted_tokens > 30
    assert num_wrong(engine) > 10


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", [CPU, PLAIN], ids=["cpu", "torch"])
def test_answers_that_end_in_every_way(tmp_path: Path, backend: dict[str, Any]) -> None:
    """All parameters, in batches, with a pool in which sequences are preempted."""
    model, head = folder_of(tmp_path / "model", MODEL), folder_of(tmp_path / "head", HEAD)
    settings = {"load_format": "dummy"} | backend
    expected = answers_of(make_engine(model, None, **settings), range(24))
    cramped = make_engine(model, head, num_kv_blocks=14, max_model_len=160, prefill_chunk_tokens=7, **settings)
    assert answers_of(cramped, range(24)) == expected
    assert cramped.stats.num_preemptions > 0
    assert cramped.stats.num_drafts > 20


def test_forms_thoughts_and_bad_words_hold_within_guesses(tmp_path: Path) -> None:
    ring, head = write_ring(tmp_path / "ring", sharpness=4), write_ring_head(tmp_path / "head")
    engine, plain = make_engine(ring, head, **CPU), make_engine(ring, None, **CPU)
    for number in (2, 5, 6, 7):
        params = replace(DRAWN, thinking_budget=BUDGETS[number], bad_words_token_ids=((8, 9), (20,)), max_tokens=60)
        assert alone(engine, [3, 4, 5], params) == alone(plain, [3, 4, 5], params)
    assert engine.stats.num_accepted_tokens > 20


# -- where keys and values come from ----------------------------------------------------------------------------


def test_blocks_of_the_prefix_cache_have_the_heads_keys(tmp_path: Path, always_guessing: None) -> None:
    """The head reads what it has not computed: with zeros there, its guesses would be others."""
    model = write_random_model(tmp_path / "model")
    head = write_random_head(tmp_path / "head")
    prompt = [(7 * i) % 55 + 5 for i in range(80)]
    cold, warm = (make_engine(model, head, num_drafts=3, **PLAIN) for _ in range(2))
    alone(warm, prompt[:70], replace(GREEDY, max_tokens=1))
    expected, found = drafted(cold), drafted(warm)
    assert alone(cold, prompt, GREEDY) == alone(warm, prompt, GREEDY)
    assert warm.stats.num_prefix_hits_tokens == 64
    assert agreement(found, expected) > 0.9, "one key of 80 has no feature"
    for block_id in range(72):
        warm.executor.kv_pool[-1, block_id] = 0
    again = drafted(warm)
    alone(warm, prompt, GREEDY)
    assert agreement(again, expected) < 0.8


def test_a_prompt_from_another_engine(tmp_path: Path, always_guessing: None) -> None:
    """It brings the head's keys and values as those of one more layer."""
    model, head = write_random_model(tmp_path / "model"), write_random_head(tmp_path / "head")
    prompt = [(7 * i) % 55 + 5 for i in range(75)]
    whole, prefill, decode = (make_engine(model, head, num_drafts=3, **PLAIN) for _ in range(3))
    assert prefill.executor.kv_shape.num_layers == MODEL["num_hidden_layers"] + 1
    expected, found = drafted(whole), drafted(decode)
    assert handed_over(prefill, decode, prompt, GREEDY) == alone(whole, prompt, GREEDY)
    assert found
    assert agreement(found, expected) > 0.9


def test_only_engines_with_the_same_head_exchange_blocks(tmp_path: Path) -> None:
    ring, head = write_ring(tmp_path / "ring"), write_ring_head(tmp_path / "head")
    other = write_ring_head(tmp_path / "other", norm_before_residual=True)
    trained = rewritten(head, lambda of: {**of, "fc.weight": of["fc.weight"] / 2})
    digests = {make_engine(ring, each, **CPU).config.compat_digest for each in (None, head, other, trained)}
    assert len(digests) == 4
    for max_model_len in (64, 128):  # as without a head
        assert make_engine(ring, head, max_model_len=max_model_len, **CPU).config.compat_digest in digests
    assert make_engine(ring, write_ring_head(tmp_path / "same"), **CPU).config.compat_digest in digests


@pytest.mark.parametrize("layers", [[0], [4]], ids=["before the first layer", "after the last"])
@pytest.mark.parametrize("backend", [CPU, PLAIN], ids=["cpu", "torch"])
def test_the_heads_layer_is_offered_to_other_workers(
    tmp_path: Path, backend: dict[str, Any], layers: list[int]
) -> None:
    """After the model's, when it is written; with the content that it has where nobody is told of layers."""
    model = write_random_model(tmp_path / "model")
    head = write_random_head(tmp_path / "head", num_features=1, **{LAYER_IDS: layers})
    prompt = [(7 * i) % 55 + 5 for i in range(40)]
    plain = make_engine(model, head, prefill_chunk_tokens=24, **backend)
    alone(plain, prompt, replace(GREEDY, max_tokens=1))
    written: dict[tuple[int, int], torch.Tensor] = {}

    def on_layer_written(layer: int, exports: list[BlockExport]) -> None:
        pool = engine.executor.kv_pool
        written.update({(layer, block_id): pool[layer, block_id].clone() for e in exports for block_id in e.block_ids})

    engine = LLMEngine(plain.config, on_layer_written)
    engine.add_prefill("r", prompt, GREEDY)
    finish(engine)
    pool, other = engine.executor.kv_pool, plain.executor.kv_pool
    assert sorted({layer for layer, _ in written}) == list(range(5))
    assert len(written) == 5 * 3
    for (layer, block_id), content in written.items():
        assert torch.equal(content, pool[layer, block_id])
        assert torch.equal(content, other[layer, block_id])
    assert pool[-1].count_nonzero()


@pytest.mark.parametrize("backend", [CPU, PLAIN], ids=["cpu", "torch"])
def test_a_feature_after_the_last_layer(tmp_path: Path, backend: dict[str, Any]) -> None:
    ring, head = write_ring(tmp_path / "ring"), write_ring_head(tmp_path / "head", **{LAYER_IDS: [4]})
    engine = make_engine(ring, head, **backend)
    assert alone(engine, [3, 4, 5], GREEDY) == list(range(6, 36))
    assert num_wrong(engine) == 0


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({"torch_dtype": "float16"}, {"dtype": "auto", "attention_backend": "torch"}),
        ({"max_position_embeddings": 16}, CPU),
        ({}, CPU | {"max_num_seqs": 64}),
    ],
    ids=["another dtype", "short texts", "many sequences"],
)
def test_a_head_computes_as_the_model_does(tmp_path: Path, fields: dict[str, Any], settings: dict[str, Any]) -> None:
    """In the model's dtype, in sequences of any length, and for all of them at once."""
    ring, head = write_ring(tmp_path / "ring"), write_ring_head(tmp_path / "head", **fields)
    engine = make_engine(ring, head, **settings)
    assert alone(engine, [3, 4, 5], GREEDY) == list(range(6, 36))
    assert num_wrong(engine) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", [pytest.param(CPU, id="cpu"), pytest.param(PLAIN, id="torch", marks=pytest.mark.slow)]
)
def test_all_ranks_guess_together(tmp_path: Path, backend: dict[str, Any]) -> None:
    ring, head = write_ring(tmp_path / "ring"), write_ring_head(tmp_path / "head")
    with closing(make_engine(ring, head, tensor_parallel_size=2, **backend)) as engine:
        assert alone(engine, [3, 4, 5], GREEDY) == list(range(6, 36))
        assert num_wrong(engine) == 0
        assert engine.stats.num_steps < 10


@pytest.mark.slow
@pytest.mark.parametrize("model_impl", ["tandem", "transformers"])
def test_ranks_guess_what_one_rank_guesses(tmp_path: Path, always_guessing: None, model_impl: str) -> None:
    model, head = write_random_model(tmp_path / "model"), write_random_head(tmp_path / "head")
    settings = PLAIN | {"model_impl": model_impl}
    alone_engine = make_engine(model, head, num_drafts=3, **settings)
    expected = drafted(alone_engine)
    tokens = alone(alone_engine, prompt_of(11), GREEDY)
    with closing(make_engine(model, head, num_drafts=3, tensor_parallel_size=2, **settings)) as engine:
        found = drafted(engine)
        assert alone(engine, prompt_of(11), GREEDY) == tokens
    assert agreement(found, expected) == 1.0


@pytest.mark.slow
def test_a_rank_that_ends_within_the_rounds(tmp_path: Path) -> None:
    """Nothing waits for it, and the error names it."""
    ring, head = write_ring(tmp_path / "ring"), write_ring_head(tmp_path / "head")
    with closing(make_engine(ring, head, tensor_parallel_size=2, **CPU)) as engine:
        drafter = engine.executor._worker.drafter
        assert isinstance(drafter, HeadDrafter)
        tell = drafter.on_round

        def killing(step: StepInput, is_first: bool) -> None:
            if not is_first:
                os.kill(engine.executor.rank_pids[0], signal.SIGKILL)
            tell(step, is_first)

        drafter.on_round = killing
        with pytest.raises(RankLost, match="rank 1 of the engine has ended with SIGKILL"):
            alone(engine, [3, 4, 5], GREEDY)
