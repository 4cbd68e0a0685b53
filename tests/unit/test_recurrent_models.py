"""Models whose layers keep a state besides keys and values: their tokens are those of transformers, whatever else a
step computes, after a preemption, and where another engine goes on from the state."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from handover import alone, finish, handed_over
from model_bench import Bench, assert_close, engine_config, random_tokens, reference, save_model
from recurrent_benches import LAYERS
from recurrent_cases import CONFIGS

from engine.llm_engine import LLMEngine
from engine.models.recurrent_shape import recurrent_bytes
from engine.models.recurrent_states import RecurrentStates
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams
from engine.scheduling import snapshots
from engine.scheduling.sequence import BlockExport

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=1, seed=5, max_tokens=12, ignore_eos=True)


def engine_of(folder: Path, **settings: Any) -> LLMEngine:
    return LLMEngine(engine_config(folder, **{"max_model_len": 100, "max_num_seqs": 4} | settings))


def continued(model: Any, prompt: list[int], num_tokens: int = GREEDY.max_tokens) -> list[int]:
    """What transformers says after the prompt."""
    tokens = torch.tensor([prompt])
    whole = model.generate(
        tokens, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    found: list[int] = whole[0, len(prompt) :].tolist()
    return found


def check_at_rest(engine: LLMEngine) -> None:
    engine.forget_prefixes()
    ledger, problems = engine.audit()
    assert not problems
    assert ledger.num_free == ledger.num_blocks


@pytest.fixture(params=sorted(CONFIGS))
def model_and_folder(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    return save_model(CONFIGS[request.param](), tmp_path), tmp_path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(CONFIGS["qwen3.5"](), tmp_path)
    return tmp_path


REPEATING = replace(GREEDY, max_tokens=30, allowed_token_ids=frozenset(range(20, 24)))


@pytest.mark.one_in(4)
def test_guesses_that_were_wrong_are_taken_back(model_and_folder: tuple[Any, Path]) -> None:
    """In the states, too: alone and beside others."""
    _, folder = model_and_folder
    prompts = [random_tokens(length, seed=length) for length in (9, 23, 30)]
    plain = engine_of(folder)
    expected = [alone(plain, prompt, REPEATING) for prompt in prompts]
    guessing = engine_of(folder, speculative_config='{"num_speculative_tokens": 4, "prompt_lookup_min": 1}')
    assert [alone(guessing, prompt, REPEATING) for prompt in prompts] == expected
    for number, prompt in enumerate(prompts):
        guessing.add_request(str(number), prompt, REPEATING)
    tokens: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    while guessing.has_unfinished_requests():
        for output in guessing.step():
            tokens[output.request_id] += output.token_ids
        assert guessing.audit()[1] == []
    assert list(tokens.values()) == expected
    stats = guessing.stats
    assert stats.num_accepted_tokens > 10
    assert stats.num_draft_tokens - stats.num_accepted_tokens > 10
    reused = stats.num_prefix_hits_tokens
    assert stats.num_prompt_tokens + reused == 2 * sum(map(len, prompts)), "tokens computed again are no prompt's"
    check_at_rest(guessing)


def test_a_prompt_does_not_wait_for_answers_that_compute_tokens_again(folder: Path) -> None:
    """Steps with such answers are no steps with prompts, of which some must be followed by some without."""
    speculation = '{"num_speculative_tokens": 5, "prompt_lookup_min": 1}'
    config = engine_config(folder, max_num_seqs=8, max_model_len=128, max_itl_ms=5.0, speculative_config=speculation)
    # Of so many answers, some compute tokens again in nearly every step.
    engine = LLMEngine(replace(config, scheduler=replace(config.scheduler, draft_batch_tokens=64)))
    few = replace(GREEDY, temperature=1.0, max_tokens=110, allowed_token_ids=frozenset(range(20, 23)))
    for number in range(7):
        engine.add_request(str(number), random_tokens(12, seed=number), replace(few, seed=number))
    waited = []
    for number in range(14):
        engine.add_request(f"late {number}", random_tokens(40, seed=50 + number), replace(GREEDY, max_tokens=1))
        num_steps, outputs = 0, list[RequestOutput]()
        while not any(output.request_id == f"late {number}" for output in outputs):
            num_steps, outputs = num_steps + 1, engine.step()
        waited.append(num_steps)
    assert engine.stats.num_accepted_tokens > 10
    assert max(waited) <= 8


def test_a_state_is_put_back_only_where_its_sequence_still_has_it(folder: Path) -> None:
    engine = engine_of(folder, speculative_config='{"num_speculative_tokens": 3, "prompt_lookup_min": 1}')
    scheduler, num_spoilt = engine._scheduler, 0
    for number in range(6):
        params = replace(REPEATING, temperature=1.0, seed=number)
        engine.add_request(str(number), random_tokens(12, seed=number), params)
        while engine.has_unfinished_requests():
            engine.step()
            if scheduler._drafting.put_back():
                num_spoilt += 1
                assert engine.abort(str(number))
                assert scheduler._drafting.put_back() == []
    assert num_spoilt > 3
    check_at_rest(engine)


@torch.inference_mode()
def test_rows_are_copied_and_put_back(folder: Path) -> None:
    states = engine_of(folder, speculative_config='{"num_speculative_tokens": 1}').executor._worker.runner._states
    assert states is not None
    rows = states._rows
    rows.copy_(torch.arange(len(rows), dtype=torch.uint8)[:, None].expand_as(rows))
    before = rows.clone()
    states.keep(np.array([2, 0]))
    assert torch.equal(rows[:5], before[:5])
    rows[:4] = 77
    states.put_back(np.array([[1, 0], [0, 2]]))
    assert torch.equal(rows[[0, 2]], before[[0, 2]])
    assert (rows[[1, 3]] == 77).all()


def test_logits_are_those_of_transformers(model_and_folder: tuple[Any, Path]) -> None:
    """With chunks beside decodes, of one token and shorter than the convolution, and a row that another sequence had
    before."""
    model, folder = model_and_folder
    bench = Bench(engine_config(folder, max_num_seqs=4))
    before = bench.sequence(random_tokens(40, seed=9), num_blocks=10)
    before.state_slot = 2
    bench.logits((before, 40))
    running, late = [bench.sequence(random_tokens(n, seed=n)) for n in (2, 31)], bench.sequence(random_tokens(29, 99))
    for slot, seq in enumerate((*running, late)):
        seq.state_slot = slot
    bench.logits(*[(seq, len(seq)) for seq in running])
    for num_late_tokens in (1, 2, 25, 1):
        for seq in running:
            seq.token_ids.append(random_tokens(1, seed=len(seq))[0])
        logits = bench.logits(*[(seq, 1) for seq in running], (late, num_late_tokens))
    assert_close(logits, torch.stack([reference(model, seq.token_ids) for seq in (*running, late)]))


@pytest.mark.one_in(4)
def test_tokens_of_requests_that_preempt_each_other(model_and_folder: tuple[Any, Path]) -> None:
    model, folder = model_and_folder
    num_state_blocks = engine_of(folder).block_manager.num_state_blocks
    num_blocks = 15 + max(12, num_state_blocks)
    engine = engine_of(folder, num_kv_blocks=num_blocks, max_model_len=60, max_num_batched_tokens=16, max_num_seqs=6)
    prompts = [random_tokens(n, seed=n) for n in (21, 1, 30, 13, 2, 25)]
    params = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params)
    tokens: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    assert engine.stats.num_preemptions > 0
    assert list(tokens.values()) == [continued(model, prompt, 25) for prompt in prompts]
    check_at_rest(engine)


@pytest.mark.one_in(4)
def test_another_engine_goes_on_from_the_state(model_and_folder: tuple[Any, Path]) -> None:
    model, folder = model_and_folder
    prefill, decode = engine_of(folder, max_num_batched_tokens=16), engine_of(folder)
    assert decode.block_manager.num_state_blocks > 1
    for length in (1, 3, 4, 33):
        prompt = random_tokens(length, seed=length)
        expected = continued(model, prompt)
        assert handed_over(prefill, decode, prompt, GREEDY) == expected == alone(decode, prompt, GREEDY)
        assert handed_over(prefill, decode, prompt, SEEDED) == alone(prefill, prompt, SEEDED)
    check_at_rest(prefill)
    check_at_rest(decode)


def test_a_receiver_is_offered_every_block_in_every_layer_once_it_is_final(tmp_path: Path) -> None:
    """Also those of the state, which no layer of attention writes."""
    save_model(CONFIGS["falcon-h1"](), tmp_path)
    offered: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}

    def on_layer_written(layer: int, exports: list[BlockExport]) -> None:
        for export in exports:
            for place, block_id in enumerate(export.block_ids, export.first_block):
                assert (layer, place) not in offered
                offered[layer, place] = block_id, pool[layer, block_id].clone()

    engine = LLMEngine(
        engine_config(tmp_path, max_model_len=100, max_num_seqs=4, max_num_batched_tokens=16), on_layer_written
    )
    pool = engine.executor.kv_pool.view(torch.uint8)
    assert len(pool) == 2
    engine.add_prefill("r", random_tokens(33, seed=1), GREEDY)
    outputs: list[RequestOutput] = []
    while not outputs:
        outputs = engine.step()
    held = outputs[0].held_block_ids
    assert offered.keys() == {(layer, place) for layer in range(len(pool)) for place in range(len(held))}
    for (layer, place), (block_id, content) in offered.items():
        assert block_id == held[place]
        assert content.equal(pool[layer, block_id])


def test_a_state_that_has_not_been_loaded_is_computed_again(folder: Path) -> None:
    """A reserved prompt is committed while the pool is full, and preempted before its first step."""
    prefill = engine_of(folder)
    num_blocks = 8 + 5 + 1 + prefill.block_manager.num_state_blocks
    decode = engine_of(folder, num_kv_blocks=num_blocks, max_model_len=52)
    prompts = random_tokens(30, seed=1), random_tokens(19, seed=2)
    expected = [alone(prefill, prompt, SEEDED) for prompt in prompts]
    decode.add_request("first", prompts[0], SEEDED)
    tokens: dict[str, list[int]] = {"first": [], "r": []}

    def step() -> None:
        for output in decode.step():
            tokens[output.request_id] += output.token_ids

    step()
    assert decode.reserve("r", prompts[1], SEEDED) is not None
    while decode.block_manager.num_available or len(decode._scheduler.sequences.running[0]) % 4 != 1:
        step()  # until the first one needs a block for its next token
    decode.commit("r", expected[1][0], len(prompts[1]))
    assert decode._scheduler.sequences.running[1].has_state_to_load
    step()
    assert decode.stats.num_preemptions == 1
    [again] = [seq for seq in decode._scheduler.sequences.running if seq.request_id == "r"]
    assert not again.num_state_blocks
    while decode.has_unfinished_requests():
        step()
    assert [tokens["first"], [expected[1][0], *tokens["r"]]] == expected
    check_at_rest(decode)


@pytest.mark.one_in(4)
def test_a_conversation_goes_on_from_snapshots(
    model_and_folder: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one engine, and where another one decodes. A fourth prompt leaves the third one's way, and a fifth one goes on
    from there."""
    monkeypatch.setattr(snapshots, "MIN_TOKENS", 8)
    monkeypatch.setattr(snapshots, "WORTH", 1000)
    model, folder = model_and_folder
    one, prefill, decode = (engine_of(folder, num_kv_blocks=200) for _ in range(3))
    prompt = random_tokens(30, seed=1)
    for turn in range(3):
        expected = continued(model, prompt)
        assert alone(one, prompt, GREEDY) == expected
        assert handed_over(prefill, decode, prompt, GREEDY) == expected
        prompt = [*prompt, *expected[:5], *random_tokens(12, seed=turn)]
    assert one.stats.num_prefix_hits_tokens == prefill.stats.num_prefix_hits_tokens == 20 + 36
    for number in (3, 4):
        other = [*prompt[:32], *random_tokens(30, seed=number)]
        assert alone(one, other, GREEDY) == continued(model, other)
    assert one.stats.num_prefix_hits_tokens == 20 + 36 + 20 + 32
    for engine in (one, prefill, decode):
        check_at_rest(engine)


@pytest.mark.parametrize("when", ["waiting", "prefilled", "granted", "committed", "loaded"])
def test_nothing_is_left_of_a_request_that_ends_early(when: str, folder: Path) -> None:
    prefill, decode = engine_of(folder), engine_of(folder)
    prompt = random_tokens(9, seed=1)
    prefill.add_prefill("r", prompt, GREEDY)
    if when == "prefilled":
        prefill.step()
    prefill.hold("r")
    prefill.abort("r")
    reserved = decode.reserve("r", prompt, GREEDY)
    assert reserved is not None
    assert decode.granted_block_ids() == set(reserved.block_ids), "or an audit finds the grant stale"
    if when in ("committed", "loaded"):
        decode.commit("r", 3, len(prompt))
    if when == "loaded":
        assert decode.audit()[0].num_sequence == 3 + decode.block_manager.num_state_blocks
        decode.step()
        assert decode.audit()[0].num_sequence == 3
    decode.abort("r")
    check_at_rest(prefill)
    check_at_rest(decode)
    assert alone(decode, prompt, GREEDY) == alone(prefill, prompt, GREEDY)


def test_rows_of_states_are_recounted(folder: Path) -> None:
    engine = engine_of(folder)
    engine.add_request("r", random_tokens(9, seed=1), GREEDY)
    engine.step()
    assert not engine.audit()[1]
    engine._scheduler.sequences.running[0].state_slot = 3
    assert engine.audit()[1] == ["of 4 rows of states, 3 are free and 1 taken: [3]"]


def test_rows_of_a_recorded_step_are_new_with_a_text_of_one_token() -> None:
    """And those left over belong to no sequence, whatever the recording was used for before."""
    [layer, *_] = LAYERS
    states = RecurrentStates((layer,), 5, recurrent_bytes((layer,), 4), torch.float32, "cpu")
    reserved = states.reserve_decodes(4)
    for context_lens, slots, is_new in (([8, 1, 2, 1], [3, 0, 1, 4], [False, True, False, True]), ([9], [2], [False])):
        states.refill(reserved, np.array(context_lens), np.array(slots))
        assert reserved.slots.tolist() == [*slots, 5, 5, 5][:4]
        assert reserved.is_new[: len(slots)].tolist() == is_new


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    ("fields", "why", "family"),
    [
        ({"hidden_act": "gelu"}, "its layers of delta rules have hidden_act 'gelu'", "qwen"),
        ({"linear_num_value_heads": 3}, "its layers of delta rules have 3 value heads for 2", "qwen"),
        ({"conv_bias": True}, "its convolutions have a bias", "lfm2"),
        ({"hidden_act": "gelu"}, "its Mamba-2 layers have the activation 'gelu'", "granite"),
        ({"mamba_n_groups": 4}, "its Mamba-2 layers have 6 heads of size 16 in 4 groups, for 96 channels", "granite"),
        ({"mamba_d_state": 0}, "its Mamba-2 layers have states of 0 numbers and convolutions of 4 taps", "granite"),
        ({"mamba_d_conv": 0}, "its Mamba-2 layers have states of 8 numbers and convolutions of 0 taps", "granite"),
        ({"time_step_limit": None}, "its Mamba-2 layers have the time_step_limit None, not the least", "granite"),
        ({"time_step_limit": (1.0, 0.5)}, r"its Mamba-2 layers have the time_step_limit \(1.0, 0.5\), not", "granite"),
    ],
)
def test_what_our_layers_do_not_compute_is_refused(
    fields: dict[str, Any], why: str, family: str, tmp_path: Path
) -> None:
    for name, config in CONFIGS.items():
        if name.startswith(family):
            save_model(config(**fields), tmp_path / name)
            with pytest.raises(ValueError, match=why):
                engine_config(tmp_path / name)


def test_what_cannot_go_back_to_an_earlier_token_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"kv_offloading_size must be 0: .* keep a state in place of keys and values"):
        engine_config(folder, kv_offloading_size=1)
    for drafts in ({"method": "mtp"}, {"method": "eagle3", "model": str(folder)}):
        with pytest.raises(
            ValueError, match="speculative_config method must be 'ngram' or 'draft_model': the model has"
        ):
            engine_config(folder, speculative_config=json.dumps(drafts | {"num_speculative_tokens": 2}))
    with pytest.raises(ValueError, match=r"num_kv_blocks .*, what max_model_len=100 and a state of .* GiB need, is 26"):
        engine_config(folder, num_kv_blocks=26, max_model_len=100)
    assert finish(engine_of(folder)) == []
    (folder / "model.safetensors").unlink()  # refused before the weights are read, which takes a while
    with pytest.raises(ValueError, match=r"max_num_seqs must be at most \d+, .* is 100000000: each sequence keeps"):
        engine_config(folder, max_num_seqs=100_000_000, max_num_batched_tokens=100_000_000)
