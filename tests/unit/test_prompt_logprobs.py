"""Logprobs of a prompt: each position is reported once, whatever is cached, in flight or preempted, and its numbers are
those of its logits."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from many_endings import CONFIG
from pretend_gpu.engines import make_engine

from engine.config import SchedulerConfig
from engine.outputs import FinishReason, Logprob, RequestOutput, TokenLogprobs
from engine.sampling import logprobs as module
from engine.sampling.logprobs import prompt_logits, prompt_logprobs
from engine.sampling_params import SamplingParams
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import ScheduledSequence, SchedulerOutput, Sequence
from engine.step_input import StepInput
from protos import tandem_inference_pb2 as pb
from router.asked_answer import params_of_sequence

PROMPT = list(range(100, 120))
VOCAB_SIZE = 300


def make(*, num_blocks: int = 64, chunk: int = 8) -> Scheduler:
    manager = BlockManager(num_blocks=num_blocks, block_size=4, prefix_key=b"k" * 32, enable_prefix_caching=True)
    config = SchedulerConfig(
        max_num_seqs=8, max_num_batched_tokens=16, prefill_chunk_tokens=chunk, prefill_batch_tokens=chunk,
        max_itl_ms=0, stream_interval=1, async_scheduling=False, speculation=None, draft_batch_tokens=0,
    )  # fmt: skip
    return Scheduler(config, manager, max_model_len=100, eos_token_ids=frozenset())


def sequence(seq_id: int, token_ids: list[int], *, asks: bool, max_tokens: int = 30, num_top: int = 0) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=num_top if asks else None)
    told: list[TokenLogprobs] | None = [] if asks else None
    return Sequence(seq_id, str(seq_id), token_ids, len(token_ids), params, prompt_logprobs=told)


def take_in(scheduler: Scheduler, output: SchedulerOutput) -> list[RequestOutput]:
    """Apply a step in which the logprob of a position names that position as its token."""
    told = {s.seq.seq_id: [TokenLogprobs(Logprob(p, 0.0, 1), []) for p in s.prompt_positions] for s in output.scheduled}
    return scheduler.apply(output, [[7] * s.num_sampled for s in output.scheduled], {}, told)


def positions(output: RequestOutput) -> list[int]:
    return [each.sampled.token_id for each in output.prompt_logprobs or ()]


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_each_position_is_told_once_and_with_the_first_token(runs_ahead: bool) -> None:
    scheduler = make()
    for seq_id in (1, 2):  # the second finds all blocks in the cache, but must not use them
        scheduler.sequences.add(sequence(seq_id, PROMPT, asks=True))
        launched: list[SchedulerOutput] = []
        outputs: list[RequestOutput] = []
        while len(outputs) < 2:
            launched.append(scheduler.schedule())
            scheduler.begin(launched[-1])
            if len(launched) > runs_ahead:
                outputs += take_in(scheduler, launched.pop(0))
        assert positions(outputs[0]) == list(range(19))
        assert outputs[0].num_cached_tokens == 0
        assert outputs[1].prompt_logprobs is None
        scheduler.sequences.abort(str(seq_id))
        for output in launched:
            assert take_in(scheduler, output) == []
    scheduler.sequences.add(sequence(3, [*PROMPT, 5], asks=False))
    output = scheduler.schedule()
    assert output.scheduled[0].first == 20, "who does not ask takes them from the cache"
    assert not output.scheduled[0].prompt_positions


def test_after_a_preemption_it_goes_on_where_it_was() -> None:
    scheduler = make(num_blocks=8, chunk=1)
    scheduler.sequences.add(sequence(1, list(range(8)), asks=False, max_tokens=20))
    while not scheduler.sequences.running or scheduler.sequences.running[0].num_uncomputed_tokens > 1:
        output = scheduler.schedule()
        scheduler.begin(output)
        take_in(scheduler, output)
    young = sequence(2, PROMPT[:13], asks=True)
    scheduler.sequences.add(young)
    told: list[int] = []
    at_preemption: list[int] = []
    firsts: list[int] = []
    while young.prompt_logprobs is not None:
        output = scheduler.schedule()
        scheduler.begin(output)
        mine = [s for s in output.scheduled if s.seq is young]
        told += [position for s in mine for position in s.prompt_positions]
        firsts += [s.first for s in mine if young.num_preemptions]
        at_preemption = at_preemption or (list(told) if young.num_preemptions else [])
        outputs = take_in(scheduler, output)
    assert young.num_preemptions == 1
    assert 0 < len(at_preemption) < 12
    assert told == list(range(12))
    assert positions(next(each for each in outputs if each.request_id == "2")) == told
    assert firsts[0] <= len(at_preemption), "no position is skipped"
    assert firsts[0] > 0, "what was told of need not be computed again where it is cached"


@pytest.mark.parametrize("rows_at_a_time", [1, 3, 256])
def test_the_numbers_are_those_of_the_logits(rows_at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the second and third of three sequences in a step, the second of which is in the middle of its prompt."""
    monkeypatch.setattr(module, "PROMPT_ROWS_AT_A_TIME", rows_at_a_time)
    seqs = [sequence(n, PROMPT, asks=n > 0, num_top=n) for n in range(3)]
    seqs[1].num_computed_tokens = 5
    seqs[1].prompt_logprobs = [TokenLogprobs(Logprob(0, 0.0, 1), [])] * 6  # one more than computed: it was preempted
    scheduled = [ScheduledSequence(seq, num_new) for seq, num_new in zip(seqs, (20, 7, 20), strict=True)]
    logits_TV = torch.randn(47, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 3
    output = SchedulerOutput(scheduled, [])
    for seq in seqs:
        seq.block_table = [0]
    step = StepInput.of(output, 64, {})
    found = prompt_logprobs(output, prompt_logits(step, logits_TV, lambda x_TD: x_TD))
    assert [each.seq for each in found] == seqs[1:]
    for each, positions_told, first_row in zip(found, (range(6, 12), range(19)), (20 - 5, 27), strict=True):
        told = each.read()
        assert [one.sampled.token_id for one in told] == [PROMPT[position + 1] for position in positions_told]
        for one, position in zip(told, positions_told, strict=True):
            row = logits_TV[first_row + position].double().log_softmax(dim=-1)
            assert math.isclose(one.sampled.logprob, float(row[one.sampled.token_id]), rel_tol=1e-5)
            assert one.sampled.rank == 1 + int((row > row[one.sampled.token_id]).sum())
            assert [top.token_id for top in one.top] == row.topk(each.seq.seq_id).indices.tolist()


def test_who_is_told_of_a_prompt_shares_no_blocks_of_it() -> None:
    scheduler = make(num_blocks=9)
    scheduler.sequences.add(sequence(1, PROMPT, asks=False))
    for _ in range(4):
        output = scheduler.schedule()
        scheduler.begin(output)
        take_in(scheduler, output)
    assert scheduler.has_room(sequence(2, PROMPT, asks=False)), "five of its blocks are there"
    assert not scheduler.has_room(sequence(3, PROMPT, asks=True))


def test_the_first_of_several_answers_tells_the_prompts() -> None:
    asked = pb.SamplingParams(prompt_logprobs=2, logprobs=1, seed=1)
    first, second = (params_of_sequence(asked, index) for index in (0, 1))
    assert (first.prompt_logprobs, first.logprobs) == (2, 1)
    assert not second.HasField("prompt_logprobs")
    assert second.logprobs == 1


@pytest.mark.parametrize("num_asked", [None, 0])
def test_where_the_model_computes_no_numbers_for_a_prompt_it_fails(num_asked: int | None, tmp_path: Path) -> None:
    """A sliding window hides the damage from the answer's tokens: a request that does not ask for prompt logprobs goes
    on."""
    windowed = CONFIG | {"architectures": ["MistralForCausalLM"], "sliding_window": 4}
    settings = {"device": "cpu", "prefill_chunk_tokens": 8}
    engine = make_engine(tmp_path, windowed, **settings)
    prompt = list(range(10, 50))
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=num_asked)

    def ask(name: str, *, spoilt: bool) -> list[RequestOutput]:
        engine.add_request(name, prompt, params)
        outputs = engine.step()
        if spoilt:
            engine.executor.kv_pool[:, engine._scheduler.sequences.running[0].block_table[1]] = float("nan")
        while engine.has_unfinished_requests():
            outputs += engine.step()
        return outputs

    outputs = ask("spoilt", spoilt=True)
    assert engine.audit()[1] == []
    if num_asked is None:
        assert [len(output.token_ids) for output in outputs] == [1, 1]
        return
    [failed] = outputs
    assert (failed.finish_reason, failed.token_ids, failed.prompt_logprobs) == (FinishReason.ERROR, [], None)
    assert failed.error == "the model's numbers for the next token are not numbers"
    first, last = ask("healed", spoilt=False)
    assert (first.num_cached_tokens, last.finish_reason) == (0, FinishReason.LENGTH)
    assert not any(math.isnan(each.sampled.logprob) for each in first.prompt_logprobs or ())
