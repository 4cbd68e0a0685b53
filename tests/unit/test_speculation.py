"""Draft tokens: which are guessed, how many, and what the scheduler does with right and wrong ones."""

from __future__ import annotations

import json
from array import array
from concurrent.futures import Future, wait
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from engine.config import SchedulerConfig
from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.model_loader import create_engine_config
from engine.outputs import FinishReason, RequestOutput
from engine.sampling_params import SamplingParams
from engine.scheduling import grammar
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.grammar import GrammarState
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import INVALID_TOKEN, ScheduledSequence, SchedulerOutput, Sequence
from engine.scheduling.speculation import MAX_DRAFTS, DraftHistory, SpeculativeConfig, propose
from tandem import LLM

CONFIG = SpeculativeConfig(num_speculative_tokens=4)
EOS = 1
TOY = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "eos_token_id": 1,
}  # fmt: skip


# -- what is guessed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([5, 6, 7, 8, 9, 5, 6], [7, 8, 9, 5]),
        ([1, 2, 3, 4, 1, 2, 9, 9, 1, 2], [9, 9, 1, 2]),  # where the pair stood last
        ([1, 2, 3, 7, 9, 2, 3, 8, 9, 1, 2, 3], [7, 9, 2, 3]),  # a longer match goes before a later one
        ([1, 2, 3, 1, 2, 3], [1, 2, 3, 1]),  # goes round in circles
        ([8, 8, 8], [8, 8, 8, 8]),
        ([5, 6, 7, 9, 6], []),  # one matching token is not enough
        ([5, 6, 7, 8], []),
        ([5], []),
    ],
)
def test_what_followed_the_last_tokens_before(tokens: list[int], drafts: list[int]) -> None:
    assert propose(array("q", tokens), CONFIG, 4) == drafts


def test_how_many_tokens_must_be_found_again() -> None:
    tokens = array("q", [1, 2, 3, 4, 9, 3, 4, 7, 2, 3, 4])

    def drafts(least: int, most: int) -> list[int]:
        config = SpeculativeConfig(num_speculative_tokens=1, prompt_lookup_min=least, prompt_lookup_max=most)
        return propose(tokens, config, 1)

    assert drafts(1, 2) == [7]
    assert drafts(1, 3) == [9]
    assert drafts(3, 3) == [9]
    assert drafts(4, 5) == []


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 6))
def test_a_draft_follows_a_copy_of_the_end(tokens: list[int], num_wanted: int) -> None:
    words = array("q", tokens)
    drafts = propose(words, CONFIG, num_wanted)
    words.append(0)  # raises if a buffer of it is still in use
    if not drafts:
        ends = [tuple(tokens[i - 2 : i]) for i in range(2, len(tokens))]
        assert tuple(tokens[-2:]) not in ends or len(tokens) < 2
        return
    assert len(drafts) == num_wanted
    text = tokens + drafts
    # An earlier place has the same last two tokens, and the drafts follow there.
    assert any(
        text[i : i + 2 + num_wanted] == text[len(tokens) - 2 : len(tokens) + num_wanted] for i in range(len(tokens) - 2)
    )


def test_more_where_all_were_right_and_fewer_where_not() -> None:
    history = DraftHistory()
    assert history.num_wanted(10) == MAX_DRAFTS
    for num_drafts, num_right, wanted in ((4, 2, 2), (2, 2, 4), (4, 4, 8), (16, 16, MAX_DRAFTS), (8, 0, 1), (1, 1, 2)):
        history.note(num_drafts, num_right, 20)
        assert history.num_wanted(20) == wanted


def test_a_while_without_where_not_even_one_was_right() -> None:
    history = DraftHistory()
    length = 20
    pauses = []
    for _ in range(7):
        history.note(1, 0, length)
        pauses.append(next(n for n in range(100) if history.num_wanted(length + n)))
        length += pauses[-1]
    assert pauses == [1, 2, 4, 8, 16, 32, 32]
    history.note(1, 1, length)
    assert history.num_wanted(length) == 2
    history.note(2, 0, length)
    assert history.num_wanted(length) == 1


def test_patience_with_what_is_wrong_now_and_then() -> None:
    history = DraftHistory()

    def pause_after(num_right: int) -> int:
        history.note(1, num_right, 20, patience=3)
        return next(n for n in range(100) if history.num_wanted(20 + n))

    assert [pause_after(right) for right in (0, 0, 1, 0, 0, 0, 0, 0, 1, 0)] == [0, 0, 0, 0, 0, 1, 2, 4, 0, 0]
    history.note(2, 0, 20, patience=3)
    assert history.num_wanted(20) == 1, "several drafts are no single one"


def test_after_a_single_wrong_draft_one_step_has_none() -> None:
    tokens = [10, 11, 20, 5, 6, 10, 11, 12, 7, 8, 9]  # after 10 and 11, the draft is 12; after 11 and 20 it is 5
    scheduler, seq = make(num_drafts=1), Sequence(0, "r0", tokens, len(tokens), SamplingParams())
    begin(scheduler, seq)
    outputs = [run(scheduler, [token_id, 7])[0] for token_id in (20, 5, 6)]
    assert [list(output.scheduled[0].draft_token_ids) for output in outputs] == [[12], [], [6]]


# -- the setting ------------------------------------------------------------------------------------------------


def test_the_setting_is_json_with_vllms_words() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 4}'
    assert SpeculativeConfig.parse(text) == SpeculativeConfig(
        num_speculative_tokens=3, prompt_lookup_max=4, prompt_lookup_min=4
    )
    assert SpeculativeConfig.parse("") is None
    assert SpeculativeConfig.parse('{"num_speculative_tokens": 3}') == SpeculativeConfig(num_speculative_tokens=3)
    by_model = SpeculativeConfig(num_speculative_tokens=3, method="draft_model", model="small", quantization="int8")
    text = '{"model": "small", "num_speculative_tokens": 3, "quantization": "int8"}'
    assert SpeculativeConfig.parse(text) == by_model
    text = '{"model": "small", "num_speculative_tokens": 3, "quantization": "int8", "draft_tensor_parallel_size": 1}'
    assert SpeculativeConfig.parse(text) == by_model, "vLLM's field, with what holds here"
    own_head = SpeculativeConfig(num_speculative_tokens=1, method="mtp")
    for method in ("mtp", "deepseek_mtp", "glm4_moe_mtp"):  # vLLM's older names
        assert SpeculativeConfig.parse(json.dumps({"method": method, "num_speculative_tokens": 1})) == own_head
    head = SpeculativeConfig.parse('{"model": "/eagle/EAGLE3-Llama", "num_speculative_tokens": 3}')
    assert head == SpeculativeConfig(num_speculative_tokens=3, method="eagle3", model="/eagle/EAGLE3-Llama")
    by_folder = SpeculativeConfig.parse('{"model": "/eagle3/small", "num_speculative_tokens": 3}')
    assert by_folder == SpeculativeConfig(num_speculative_tokens=3, method="draft_model", model="/eagle3/small")
    only_one = SpeculativeConfig.parse('{"num_speculative_tokens": 3, "prompt_lookup_max": 1}')
    assert only_one is not None
    assert only_one.prompt_lookup_min == 1


@pytest.mark.parametrize(
    ("given_config", "sentence"),
    [
        ("ngram", "must be a JSON object"),
        ("[4]", "must be a JSON object"),
        ("[" * 100_000, "must be a JSON object"),
        ("{}", "must have num_speculative_tokens"),
        ({"num_speculative_tokens": 0}, r"num_speculative_tokens must be a whole number in \[1, 16\], is 0"),
        ({"num_speculative_tokens": 17}, r"in \[1, 16\], is 17"),
        ({"num_speculative_tokens": True}, "is True"),
        ({"num_speculative_tokens": 2.5}, "is 2.5"),
        (
            {"num_speculative_tokens": 2, "method": "eagle"},
            "method must be 'ngram' .*, 'draft_model' .a smaller model guesses., 'eagle3' .* or 'mtp' .*, is 'eagle'",
        ),
        ({"method": "mtp", "model": "x", "num_speculative_tokens": 2}, "model must be empty with the method 'mtp'"),
        (
            {"method": "mtp", "quantization": "int8", "num_speculative_tokens": 2},
            "quantization must be 'auto' without a model, is 'int8'",
        ),
        ({"method": "medusa", "model": "x", "draft_tensor_parallel_size": 1}, "method must be 'ngram'"),
        ({"method": "eagle3", "num_speculative_tokens": 2}, "model must name the EAGLE-3 head: a folder or a hub id"),
        ({"num_speculative_tokens": 2, "prompt_lookup_max": "4"}, r"prompt_lookup_max .* is '4'"),
        ({"num_speculative_tokens": 2, "prompt_lookup_max": 65}, r"in \[1, 64\], is 65"),
        ({"num_speculative_tokens": 2, "prompt_lookup_min": 6}, "at most prompt_lookup_max=5, is 6"),
        (5, "must be a text, is 5"),
        ({"num_speculative_tokens": 2, "medusa": "x"}, "has no medusa; there are num_speculative_tokens, method"),
        ({"num_speculative_tokens": 2, "model": 5}, "model must be a text, is 5"),
        ({"num_speculative_tokens": 2, "method": "draft_model"}, "model must name the draft model: .*, is ''"),
        (
            {"num_speculative_tokens": 2, "method": "ngram", "model": "x"},
            "model must be empty with the method 'ngram', is 'x'",
        ),
        ({"model": "x"}, "must have num_speculative_tokens"),
        (
            {"num_speculative_tokens": 2, "model": "x", "draft_tensor_parallel_size": 2},
            "draft_tensor_parallel_size must be 1, since rank 0 guesses for all, is 2",
        ),
        ({"num_speculative_tokens": 2, "model": "x", "draft_tensor_parallel_size": True}, "must be 1, .* is True"),
        (
            {"num_speculative_tokens": 2, "quantization": "int8"},
            "quantization must be 'auto' without a model, is 'int8'",
        ),
    ],
)
def test_a_wrong_setting_is_named(given_config: object, sentence: str) -> None:
    text = json.dumps(given_config) if isinstance(given_config, dict) else given_config
    with pytest.raises(ValueError, match=f"^speculative_config .*{sentence}"):
        EngineArgs(speculative_config=text)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [0, {1}])
def test_offline_it_may_be_a_dict(wrong: object) -> None:
    with pytest.raises(ValueError, match="speculative_config num_speculative_tokens must be a whole number"):
        LLM(speculative_config={"num_speculative_tokens": wrong})


# -- in the scheduler -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_num_seqs", "num_drafts", "draft_batch", "most", "expected"),
    [
        (8, 4, 256, 512, 40), (64, 4, 256, 512, 256), (256, 4, 256, 512, 256), (300, 4, 256, 512, 300),
        (8, 1, 12, 512, 12), (8, 0, 256, 512, 8), (8, 4, 256, 16, 16), (8, 4, 256, 8, 8),
    ],
)  # fmt: skip
def test_the_most_rows_that_decode_in_a_step(
    max_num_seqs: int, num_drafts: int, draft_batch: int, most: int, expected: int
) -> None:
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=most, prefill_chunk_tokens=64, prefill_batch_tokens=64,
        max_itl_ms=0, stream_interval=1, async_scheduling=False, draft_batch_tokens=draft_batch,
        speculation=SpeculativeConfig(num_speculative_tokens=num_drafts) if num_drafts else None,
    )  # fmt: skip
    assert config.max_decode_rows == expected


def make(*, num_blocks: int = 64, budget: int = 64, draft_batch: int = 16, num_drafts: int = 4) -> Scheduler:
    manager = BlockManager(num_blocks=num_blocks, block_size=4, prefix_key=b"k" * 32, enable_prefix_caching=True)
    config = SchedulerConfig(
        max_num_seqs=8, max_num_batched_tokens=budget, prefill_chunk_tokens=budget, prefill_batch_tokens=64,
        max_itl_ms=0, stream_interval=1, async_scheduling=False, draft_batch_tokens=draft_batch,
        speculation=SpeculativeConfig(num_speculative_tokens=num_drafts),
    )  # fmt: skip
    return Scheduler(config, manager, max_model_len=30, eos_token_ids=frozenset({EOS}))


def repeating(number: int = 0, **params: object) -> Sequence:
    """Ten tokens. After a 10 the drafts are 11, 12, 13, 14."""
    tokens = [10, 11, 12, 13, 14, 15, 16, 17, 18, 9]
    sampling = SamplingParams(**{"max_tokens": 20, **params})  # type: ignore[arg-type]
    return Sequence(number, f"r{number}", tokens, len(tokens), sampling)


def begin(scheduler: Scheduler, *seqs: Sequence) -> None:
    """Compute all prompts, each of which goes on with 10 and 11: the next drafts are 12, 13, 14, 15."""
    for seq in seqs:
        scheduler.sequences.add(seq)
    for token_id in (10, 11):
        run(scheduler, [token_id])


def run(scheduler: Scheduler, sampled: list[int]) -> tuple[SchedulerOutput, list[RequestOutput]]:
    """Run a step in which each sequence samples the first of these tokens, as many as it samples."""
    output = scheduler.schedule()
    scheduler.begin(output)
    return output, scheduler.apply(output, [sampled[: s.num_sampled] for s in output.scheduled])


def test_right_drafts_and_the_token_after_them_come_in_one_step() -> None:
    scheduler, seq = make(), repeating()
    begin(scheduler, seq)
    output, [result] = run(scheduler, [12, 13, 14, 15, 99])
    [scheduled] = output.scheduled
    assert list(scheduled.draft_token_ids) == [12, 13, 14, 15]
    assert (result.offset, result.token_ids, result.finish_reason) == (2, [12, 13, 14, 15, 99], None)
    assert list(seq.token_ids[10:]) == [10, 11, 12, 13, 14, 15, 99]
    assert seq.num_uncomputed_tokens == 1
    stats = scheduler.stats
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (1, 4, 4)


@pytest.mark.parametrize(
    ("sampled", "told"),
    [
        ([99, 13, 14, 15, 16], [99]),
        ([12, 99, 14, 15, 16], [12, 99]),
        ([12, 13, 14, 99, 16], [12, 13, 14, 99]),
        ([12, 13, INVALID_TOKEN, 15, 16], [12, 13]),  # the error is reported when it is computed again, alone
    ],
)
def test_what_comes_after_a_wrong_draft_was_never_computed(sampled: list[int], told: list[int]) -> None:
    scheduler, seq = make(), repeating()
    begin(scheduler, seq)
    _, [result] = run(scheduler, sampled)
    assert (result.token_ids, result.finish_reason) == (told, None)
    assert list(seq.token_ids[12:]) == told
    assert seq.num_uncomputed_tokens == 1
    assert seq.draft_history.max_drafts == max(1, len(told) - 1)
    # Other sequences cannot find a block whose KV is wrong.
    assert len(scheduler.block_manager.cached_hashes()) == seq.num_computed_tokens // 4


def test_no_next_token_ends_a_sequence_also_behind_a_draft_that_was_right() -> None:
    scheduler, seq = make(), repeating()
    begin(scheduler, seq)
    run(scheduler, [12, 13, INVALID_TOKEN, 15, 16])
    _, [result] = run(scheduler, [INVALID_TOKEN] * 5)
    assert (result.offset, result.token_ids, result.finish_reason) == (4, [], FinishReason.ERROR)


@pytest.mark.parametrize(
    ("params", "told", "reason"),
    [
        ({"stop_token_ids": frozenset({13})}, [12, 13], FinishReason.STOP),
        ({"max_tokens": 5}, [12, 13, 14], FinishReason.LENGTH),
        ({}, [12, 13, 14, 15, 99], None),
    ],
)
def test_an_answer_ends_at_its_end(params: dict[str, object], told: list[int], reason: FinishReason | None) -> None:
    scheduler, seq = make(), repeating(**params)
    begin(scheduler, seq)
    _, [result] = run(scheduler, [12, 13, 14, 15, 99])
    assert (result.token_ids, result.finish_reason) == (told, reason)
    if reason is not None:
        assert scheduler.block_manager.ledger().num_sequence == 0


def test_no_more_drafts_than_tokens_that_may_come() -> None:
    scheduler, seq = make(), repeating(max_tokens=4)
    begin(scheduler, seq)
    output, [result] = run(scheduler, [12, 13])
    assert list(output.scheduled[0].draft_token_ids) == [12]
    assert (result.token_ids, result.finish_reason) == ([12, 13], FinishReason.LENGTH)


def test_sequences_without_drafts_come_first_and_prompts_last() -> None:
    scheduler, seq, other = make(), repeating(0), repeating(1)
    other.token_ids[0] = other.token_ids[1] = 77  # nothing is found for a draft
    begin(scheduler, seq, other)
    scheduler.sequences.add(repeating(2))
    output = scheduler.schedule()
    assert [(s.seq.request_id, s.num_new_tokens) for s in output.scheduled] == [("r1", 1), ("r0", 5), ("r2", 2)]


@pytest.mark.parametrize(("draft_batch", "nums"), [(16, [5, 5]), (8, [5, 3]), (6, [1, 5]), (2, [1, 1])])
def test_a_step_of_many_rows_takes_no_more_drafts(draft_batch: int, nums: list[int]) -> None:
    scheduler = make(draft_batch=draft_batch)
    begin(scheduler, repeating(0), repeating(1))
    assert [s.num_new_tokens for s in scheduler.schedule().scheduled] == nums


def test_drafts_take_only_what_prompts_leave_of_a_step() -> None:
    scheduler, seq = make(budget=16), repeating()
    begin(scheduler, seq)
    scheduler.sequences.add(Sequence(1, "prompt", list(range(30, 43)), 13, SamplingParams()))
    output = scheduler.schedule()
    assert {s.seq.request_id: s.num_new_tokens for s in output.scheduled} == {"r0": 3, "prompt": 13}


def test_nothing_is_preempted_for_drafts() -> None:
    # 12 tokens are 3 blocks for each sequence. Drafts take a fourth, and one block is left.
    scheduler = make(num_blocks=7)
    begin(scheduler, repeating(0), repeating(1))
    output = scheduler.schedule()
    assert {s.seq.request_id: s.num_new_tokens for s in output.scheduled} == {"r0": 5, "r1": 1}
    assert scheduler.stats.num_preemptions == 0


def test_nothing_waits_for_a_grammar_that_is_being_compiled() -> None:
    scheduler = make()
    held, other = repeating(0), repeating(1)
    begin(scheduler, held, other)
    compiling: Future[LLMatcher] = Future()
    held.grammar = GrammarState(lambda: compiling, 100, frozenset({EOS}))
    assert [s.seq for s in scheduler.schedule().scheduled] == [other]
    compiling.cancel()
    assert {s.seq.request_id for s in scheduler.schedule().scheduled} == {"r0", "r1"}
    assert not scheduler.wait_for_grammar()


def test_a_grammar_that_is_compiled_between_two_looks_leaves_nobody_behind() -> None:
    """The step finds nothing to compute and then asks for the grammar, which is there by then: the engine must not go
    idle."""
    scheduler, seq = make(), repeating()
    begin(scheduler, seq)
    compiling: Future[LLMatcher] = Future()
    seq.grammar = GrammarState(lambda: compiling, 100, frozenset({EOS}))
    assert not scheduler.schedule().scheduled
    compiling.set_exception(ValueError("no tokenizer"))
    assert scheduler.wait_for_grammar()
    assert [s.seq for s in scheduler.schedule().scheduled] == [seq]


def test_of_many_grammars_that_take_long_none_is_waited_for_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, seqs = make(), [repeating(number) for number in range(8)]
    begin(scheduler, *seqs)
    for seq in seqs[1:]:
        seq.grammar = GrammarState(Future, 100, frozenset({EOS}))
    waited_s: list[float] = []

    def note_and_wait(futures: list[Future[LLMatcher]], timeout_s: float) -> object:
        waited_s.append(timeout_s)
        return wait(futures, timeout_s)

    monkeypatch.setattr(grammar, "wait", note_and_wait)
    assert [s.seq for s in scheduler.schedule().scheduled] == seqs[:1]
    assert len(waited_s) == 7
    assert sum(waited_s) <= 1.5 * grammar.COMPILE_PATIENCE_S


def test_with_nothing_else_to_do_the_grammar_that_is_compiled_first_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler, seqs = make(), [repeating(number) for number in range(3)]
    begin(scheduler, *seqs)
    compiling: list[Future[LLMatcher]] = [Future() for _ in seqs]
    for seq, future in zip(seqs, compiling, strict=True):
        seq.grammar = GrammarState(lambda future=future: future, 100, frozenset({EOS}))
    waited_for: list[Future[LLMatcher]] = []

    def note_and_go_on(futures: list[Future[LLMatcher]], timeout_s: float | None = None) -> object:
        if timeout_s is None:
            waited_for.extend(futures)
        return wait(futures, 0)

    monkeypatch.setattr(grammar, "wait", note_and_go_on)
    assert not scheduler.schedule().scheduled
    assert scheduler.wait_for_grammar()
    assert waited_for == compiling[:1]


def test_blocks_of_wrong_drafts_are_given_back() -> None:
    scheduler, seq = make(num_drafts=8), repeating()
    begin(scheduler, seq)  # 12 tokens: 3 blocks
    output = scheduler.schedule()
    assert len(output.scheduled[0].draft_token_ids) == 8
    assert scheduler.block_manager.ledger().num_sequence == len(seq.block_table) == 5
    scheduler.begin(output)
    scheduler.apply(output, [[12, 99, 0, 0, 0, 0, 0, 0, 0]])
    assert len(seq) == 14
    assert scheduler.block_manager.ledger().num_sequence == len(seq.block_table) == 4
    assert scheduler.block_manager.check_integrity() == []


def test_a_prompt_for_another_engine_ends_with_one_token_though_its_last_chunk_is_one() -> None:
    scheduler = make(budget=11)
    seq = repeating()
    seq.token_ids = array("q", [*seq.token_ids, 10, 11])
    seq.num_prompt_tokens = 12
    seq.is_prefill_only = True
    scheduler.sequences.add(seq)
    assert run(scheduler, [])[1] == []
    output, [result] = run(scheduler, [12, 13, 14])
    assert [s.num_new_tokens for s in output.scheduled] == [1]
    assert result.token_ids == [12]


def test_prompts_beside_them_are_cut_without_drafts() -> None:
    scheduler, seq = make(), repeating()
    begin(scheduler, seq)
    scheduler.sequences.add(repeating(1))
    assert [s.num_new_tokens for s in scheduler.schedule(1).scheduled] == [5, 1]


def test_drafts_are_no_prompts(tmp_path: Path, one_thread: None) -> None:
    """The statistics do not count them as prompt tokens, and the pace does not take them for such."""
    (tmp_path / "config.json").write_text(json.dumps(TOY))
    args = EngineArgs(
        model=str(tmp_path), load_format="dummy", device="cpu", dtype="float32", num_kv_blocks=16,
        speculative_config='{"num_speculative_tokens": 4, "prompt_lookup_min": 1}',
    )  # fmt: skip
    engine = LLMEngine(create_engine_config(args))
    engine.add_request("r", [5, 6, 7] * 4, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    num_tokens = 0
    while engine.has_unfinished_requests():
        num_tokens += sum(len(output.token_ids) for output in engine.step())
    assert engine.stats.num_accepted_tokens > 0
    assert (num_tokens, engine.stats.num_generation_tokens, engine.stats.num_prompt_tokens) == (40, 40, 12)


def test_a_prompt_of_one_token_is_a_prompt(tmp_path: Path, one_thread: None) -> None:
    """The statistics count it as prompt, whether it is a whole prompt or the last chunk of one."""
    (tmp_path / "config.json").write_text(json.dumps(TOY))
    args = EngineArgs(
        model=str(tmp_path), load_format="dummy", device="cpu", dtype="float32", num_kv_blocks=16,
        prefill_chunk_tokens=4,
    )  # fmt: skip
    engine = LLMEngine(create_engine_config(args))
    for number, length in enumerate((1, 5)):
        engine.add_request(str(number), [5] * length, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    assert (engine.stats.num_generation_tokens, engine.stats.num_prompt_tokens) == (6, 6)


def test_a_draft_finds_its_sequence_with_the_drafts_before_it() -> None:
    scheduler, seq = make(), repeating()
    begin(scheduler, seq)
    scheduled = ScheduledSequence(seq, 3, [12, 13])
    assert scheduled.token_ids == [11, 12, 13]
    assert [list(each.token_ids[10:]) for each in scheduled.sampled_seqs] == [[10, 11], [10, 11, 12], [10, 11, 12, 13]]
    assert list(seq.token_ids[10:]) == [10, 11]
