"""Launching a step before the previous step's tokens are known changes no token, whatever happens in between."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from many_endings import CONFIG, Answers, answers_alone, answers_of, check_told, params_of, prompt_of

from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.model_loader import create_engine_config
from engine.outputs import FinishReason
from engine.running.input_batch import build_input_batch
from engine.sampling.sampled_tokens import SampledTokens
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import INVALID_TOKEN, PENDING_TOKEN, ScheduledSequence, SchedulerOutput, Sequence
from engine.step_input import StepInput

EITHER = pytest.mark.parametrize("runs_ahead", [False, True], ids=["in-turn", "ahead"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def make(folder: Path, runs_ahead: bool, **settings: object) -> LLMEngine:
    args = EngineArgs(
        model=str(folder), load_format="dummy", dtype="float32", block_size=4, device="cpu", num_threads=1,
        attention_backend="torch", **{"num_kv_blocks": 256, **settings},
    )  # fmt: skip
    config = create_engine_config(args)
    # On a CPU the launch itself computes, so this gains no time, but it takes every path.
    return LLMEngine(replace(config, scheduler=replace(config.scheduler, async_scheduling=runs_ahead)))


@pytest.fixture(scope="module")
def expected(folder: Path) -> Answers:
    """The answers of each request alone, without async scheduling."""
    return answers_alone(make(folder, False), range(24))


def test_the_requests_end_in_every_way(expected: Answers) -> None:
    reasons = [reason for _, reason in expected.values()]
    assert min(reasons.count(FinishReason.STOP), reasons.count(FinishReason.LENGTH)) >= 5


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "settings",
    [{}, {"prefill_chunk_tokens": 8}, {"enable_prefix_caching": False}, {"num_kv_blocks": 66, "max_num_seqs": 9},
     {"max_num_seqs": 3}],
    ids=["batched", "chunked", "uncached", "preempted", "few"],
)  # fmt: skip
def test_same_tokens(folder: Path, expected: Answers, settings: dict[str, object]) -> None:
    engine = make(folder, True, **settings)
    assert answers_of(engine, range(24)) == expected
    assert (engine.stats.num_preemptions > 0) == ("num_kv_blocks" in settings)
    assert answers_of(engine, range(24)) == expected, "on cached prefixes"


def test_tokens_come_a_step_later_and_steps_are_idle_only_without_work(folder: Path) -> None:
    engine = make(folder, True)
    engine.add_request("r", [9, 8, 7], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    nums_tokens = []
    while engine.has_unfinished_requests():
        nums_tokens.append(len(engine.step()))
        assert not engine.is_idle
    assert nums_tokens == [0, 1, 1, 1]
    assert engine.step() == []
    assert engine.is_idle


def test_an_abort_between_two_steps_frees_its_blocks_after_them(folder: Path) -> None:
    engine = make(folder, True, enable_prefix_caching=False)
    for name in ("stays", "goes"):
        engine.add_request(name, [9, 8, 7], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    engine.step()
    assert engine.abort("goes")
    assert engine.audit()[0].num_sequence == 2, "a launched step still writes there"
    tokens = [output.request_id for _ in range(2) for output in engine.step()]
    assert tokens == ["stays", "stays"]
    assert engine.audit()[0].num_sequence == 2  # both of "stays", which has begun its second block
    assert engine.abort("stays")
    while engine.has_unfinished_requests():
        assert engine.step() == []
    assert engine.audit()[0].num_free == 256


@EITHER
def test_a_request_waits_until_its_first_step_and_a_step_begins_when_the_one_before_is_done(
    folder: Path, runs_ahead: bool
) -> None:
    began_s = time.monotonic()
    engine = make(folder, runs_ahead, max_num_seqs=1)
    for name in ("first", "second"):
        engine.add_request(name, [9, 8, 7], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    came_s, waited_s, ended_s = time.monotonic(), dict[str, set[float]](), 0.0
    while engine.has_unfinished_requests():
        for output in engine.step():
            waited_s.setdefault(output.request_id, set()).add(output.waited_s)
            if output.request_id == "first":
                ended_s = time.monotonic()
    (first,), (second,) = waited_s["first"], waited_s["second"]
    assert 0 < first < second
    assert ended_s - came_s <= second <= time.monotonic() - began_s
    assert 0 < engine.stats.seconds_in_steps <= time.monotonic() - began_s


@EITHER
def test_an_answer_that_has_begun_tells_nothing_of_its_prompt(folder: Path, runs_ahead: bool) -> None:
    """The prompt logprobs came with the first token."""
    engine = make(folder, runs_ahead)
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, prompt_logprobs=1)
    engine.add_request("r", [9, 8, 7], params, output_token_ids=[11, 12])
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [output.offset for output in outputs] == [2, 3, 4, 5]
    assert all(output.prompt_logprobs is None for output in outputs)


@EITHER
def test_disaggregated(folder: Path, expected: Answers, runs_ahead: bool) -> None:
    """One engine prefills, the blocks are copied to another engine, and that one decodes, with preemptions."""
    prefill, decode = make(folder, runs_ahead), make(folder, runs_ahead, num_kv_blocks=120)
    source, destination = prefill.executor.kv_pool, decode.executor.kv_pool
    answers: Answers = {}
    for number in range(24):
        name, prompt = str(number), prompt_of(number)
        prefill.add_prefill(name, prompt, params_of(number))
        outputs = []
        while not outputs:
            outputs = prefill.step()
        [output] = outputs
        check_told(output)
        answers[name] = output.token_ids, output.finish_reason
        if not output.is_finished:
            reservation = decode.reserve(name, prompt, params_of(number))
            assert reservation is not None
            first = reservation.num_cached_blocks
            destination[:, reservation.block_ids[first:]] = source[:, list(output.held_block_ids)[first:]]
            decode.commit(name, output.token_ids[0], len(prompt))
        prefill.abort(name)
    while decode.has_unfinished_requests():
        for output in decode.step():
            check_told(output)
            tokens, _ = answers[output.request_id]
            answers[output.request_id] = tokens + output.token_ids, output.finish_reason
    assert answers == expected
    assert decode.stats.num_preemptions > 0
    for engine in (prefill, decode):
        ledger, problems = engine.audit()
        assert not problems
        assert ledger.num_free + ledger.num_cached == ledger.num_blocks


def test_a_step_reads_pending_tokens_where_the_step_before_left_them() -> None:
    def sequence(number: int, tokens: list[int], num_computed: int) -> Sequence:
        seq = Sequence(number, str(number), tokens, 1, SamplingParams(), block_table=[number])
        seq.num_computed_tokens = num_computed
        return seq

    seqs = [sequence(0, [11], 0), sequence(1, [12, 13], 0), sequence(2, [14], 0)]
    launched = SchedulerOutput([ScheduledSequence(seqs[0], 1), ScheduledSequence(seqs[1], 1),
                                ScheduledSequence(seqs[2], 1)], [])  # fmt: skip
    before = SampledTokens(launched, torch.tensor([31, INVALID_TOKEN]), None, [], "cpu")  # seqs[1] samples no token
    assert before.wait() == [[31], [], [INVALID_TOKEN]]
    following = [sequence(2, [14, PENDING_TOKEN], 1), sequence(0, [11, PENDING_TOKEN], 1), sequence(1, [12, 13], 1)]
    output = SchedulerOutput([ScheduledSequence(seq, 1) for seq in following], [])
    batch = build_input_batch(StepInput.of(output, 4, before.row_of), "cpu", before.on_device)
    # A sequence with an invalid token fails once the host reads it; until then the token must not index the embedding.
    assert batch.token_ids.tolist() == [0, 31, 13]
    assert batch.last_token_ids.tolist() == [0, 31, 13]
