"""What the scheduler promises about order and budget, case by case."""

from __future__ import annotations

import pytest

from engine.config import SchedulerConfig
from engine.outputs import FinishReason, RequestOutput
from engine.sampling_params import SamplingParams
from engine.scheduling import prefix_cache
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import INVALID_TOKEN, SchedulerOutput, Sequence, SequenceStatus
from engine.scheduling.speculation import SpeculativeConfig
from prefix_hash import extend_block_hashes

EOS = 1


def make(
    *,
    num_blocks: int = 64,
    budget: int = 16,
    chunk: int = 8,
    batch: int = 64,
    max_num_seqs: int = 8,
    speculation: SpeculativeConfig | None = None,
) -> Scheduler:
    manager = BlockManager(num_blocks=num_blocks, block_size=4, prefix_key=b"k" * 32, enable_prefix_caching=True)
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, prefill_chunk_tokens=chunk,
        prefill_batch_tokens=batch, max_itl_ms=0, stream_interval=1, async_scheduling=False,
        speculation=speculation, draft_batch_tokens=12,
    )  # fmt: skip
    return Scheduler(config, manager, max_model_len=100, eos_token_ids=frozenset({EOS}))


_numbers = iter(range(10_000))


def sequence(name: str, length: int, **params: object) -> Sequence:
    """A sequence of tokens that no other sequence has."""
    number = next(_numbers)
    tokens = [1000 * number + 10 + i for i in range(length)]
    sampling = SamplingParams(**{"max_tokens": 20, **params})  # type: ignore[arg-type]
    return Sequence(
        seq_id=number, request_id=name, token_ids=tokens, num_prompt_tokens=length, sampling_params=sampling
    )


def compute(scheduler: Scheduler, output: SchedulerOutput, sampled: list[int | None]) -> list[RequestOutput]:
    """Run a step. `sampled`: for each sequence its token, or None."""
    scheduler.begin(output)
    return apply(scheduler, output, sampled)


def apply(scheduler: Scheduler, output: SchedulerOutput, sampled: list[int | None]) -> list[RequestOutput]:
    return scheduler.apply(output, [[] if token is None else [token] for token in sampled])


def step(scheduler: Scheduler, token: int = 7) -> SchedulerOutput:
    output = scheduler.schedule()
    compute(scheduler, output, [token if s.is_sampled else None for s in output.scheduled])
    return output


def plan(output: SchedulerOutput) -> list[tuple[str, int]]:
    return [(s.seq.request_id, s.num_new_tokens) for s in output.scheduled]


def test_a_long_prompt_is_cut_into_chunks_and_decoding_goes_first() -> None:
    scheduler = make()
    scheduler.sequences.add(sequence("short", 3))
    assert plan(step(scheduler)) == [("short", 3)]
    scheduler.sequences.add(sequence("long", 20))
    assert plan(step(scheduler)) == [("short", 1), ("long", 8)]
    assert plan(step(scheduler)) == [("short", 1), ("long", 8)]
    assert plan(step(scheduler)) == [("short", 1), ("long", 4)]
    assert plan(step(scheduler)) == [("short", 1), ("long", 1)]


def test_prompts_are_cut_further_where_something_decodes_beside_them() -> None:
    scheduler = make()
    scheduler.sequences.add(sequence("first", 8))
    output = scheduler.schedule(3)
    assert plan(output) == [("first", 8)]
    compute(scheduler, output, [7])
    for length in (4, 5):
        scheduler.sequences.add(sequence(f"of {length}", length))
    output = scheduler.schedule(6)
    assert plan(output) == [("first", 1), ("of 4", 4), ("of 5", 2)]


def test_prompts_that_wait_are_counted_until_their_first_token() -> None:
    scheduler = make(budget=10)
    assert scheduler.sequences.num_waiting_prompts == 0
    for name, length in (("decoding", 3), ("begun", 12), ("not begun", 5)):
        scheduler.sequences.add(sequence(name, length))
    assert scheduler.sequences.num_waiting_prompts == 3
    step(scheduler)
    assert (len(scheduler.sequences.running), scheduler.sequences.num_waiting_prompts) == (2, 2)
    for _ in range(3):
        step(scheduler)
    assert (len(scheduler.sequences.running), scheduler.sequences.num_waiting_prompts) == (3, 0)


def test_prompts_are_cut_for_what_may_begin_to_decode_at_any_moment() -> None:
    scheduler = make()
    scheduler.sequences.add(sequence("prompt", 8))
    granted = sequence("granted", 5)
    assert scheduler.reserve(granted)
    assert (
        scheduler.sequences.num_free_seqs == 8 - len(scheduler.sequences.running) - len(scheduler.sequences.waiting) - 1
    )
    output = scheduler.schedule(3)
    assert plan(output) == [("prompt", 3)]
    compute(scheduler, output, [None])
    assert plan(scheduler.schedule(0)) == [("prompt", 5)]  # nothing decodes yet, so an empty step would help no one
    assert scheduler.sequences.abort("granted")
    assert plan(scheduler.schedule(3)) == [("prompt", 5)]


def test_a_sequence_without_a_next_token_fails_alone() -> None:
    scheduler = make()
    for name in ("good", "bad"):
        scheduler.sequences.add(sequence(name, 3))
    output = scheduler.schedule()
    outputs = compute(scheduler, output, [INVALID_TOKEN if s.seq.request_id == "bad" else 7 for s in output.scheduled])
    assert [(o.request_id, o.is_finished, o.token_ids) for o in outputs] == [
        ("good", False, [7]),
        ("bad", True, []),
    ]
    assert outputs[1].finish_reason is FinishReason.ERROR
    assert plan(step(scheduler)) == [("good", 1)]
    assert scheduler.sequences.abort("good")
    assert not scheduler.block_manager.check_integrity()
    ledger = scheduler.block_manager.ledger()
    assert ledger.num_free + ledger.num_cached == ledger.num_blocks


def test_what_failed_is_not_found_again_through_those_that_share_its_blocks() -> None:
    scheduler = make(chunk=16)
    first = sequence("first", 9)
    scheduler.sequences.add(first)
    step(scheduler, EOS)
    bad, good, late = (sequence(name, 9) for name in ("bad", "good", "late"))
    for seq in (bad, good, late):
        seq.token_ids[:] = first.token_ids[:9]
    scheduler.sequences.add(bad)
    scheduler.sequences.add(good)
    output = scheduler.schedule()
    assert plan(output) == [("bad", 1), ("good", 1)]
    compute(scheduler, output, [INVALID_TOKEN, 7])
    scheduler.sequences.add(late)
    assert plan(step(scheduler)) == [("good", 1), ("late", 9)]
    assert not scheduler.check_integrity()


def test_a_prompt_without_a_next_token_keeps_its_blocks() -> None:
    """A transfer to a receiver may still read its first blocks. The sender says when they are free."""
    scheduler = make(chunk=4)
    prompt = sequence("bad", 6)
    prompt.is_prefill_only = True
    scheduler.sequences.add(prompt)
    step(scheduler)
    (output,) = compute(scheduler, scheduler.schedule(), [INVALID_TOKEN])
    assert output.finish_reason is FinishReason.ERROR
    assert scheduler.block_manager.ledger().num_held == 2
    assert scheduler.sequences.abort("bad")
    assert scheduler.block_manager.ledger().num_held == 0


def test_an_output_says_how_long_its_request_waited_for_its_first_step() -> None:
    scheduler = make()
    seq = sequence("r", 3)
    seq.arrived_s, seq.first_scheduled_s = 3.0, 5.5
    scheduler.sequences.add(seq)
    (output,) = compute(scheduler, scheduler.schedule(), [7])
    assert output.waited_s == 2.5


def test_the_budget_bounds_a_step() -> None:
    scheduler = make(budget=10, chunk=8)
    for name in "abc":
        scheduler.sequences.add(sequence(name, 8))
    assert plan(step(scheduler)) == [("a", 8), ("b", 2)]
    assert plan(step(scheduler)) == [("a", 1), ("b", 6), ("c", 3)]


def test_prompts_share_a_step_until_they_are_enough() -> None:
    """The first prompt does not wait for others that only make its step longer."""
    scheduler = make(budget=40, chunk=40, batch=6)
    for name in "abcde":
        scheduler.sequences.add(sequence(name, 10 if name == "d" else 4))
    assert plan(step(scheduler)) == [("a", 4), ("b", 4)]
    assert [seq.request_id for seq in scheduler.sequences.waiting] == ["c", "d", "e"]
    assert plan(step(scheduler)) == [("a", 1), ("b", 1), ("c", 4), ("d", 10)]
    assert plan(step(scheduler)) == [("a", 1), ("b", 1), ("c", 1), ("d", 1), ("e", 4)]


def test_nothing_overtakes_the_head_of_the_queue() -> None:
    scheduler = make(num_blocks=12)
    scheduler.sequences.add(sequence("running", 20))
    step(scheduler)
    scheduler.sequences.add(sequence("large", 40))  # 10 blocks: too many while the first runs
    scheduler.sequences.add(sequence("small", 2))
    assert "small" not in [name for name, _ in plan(step(scheduler))]
    scheduler.sequences.abort("running")
    assert plan(step(scheduler))[0][0] == "large"


def test_newcomers_leave_a_hundredth_of_the_pool_to_those_that_run() -> None:
    scheduler = make(num_blocks=400)
    scheduler.sequences.add(sequence("running", 4))
    assert scheduler.has_room(sequence("of the whole pool but its block", 4 * 399))
    step(scheduler)
    assert scheduler.has_room(sequence("of all but four blocks", 4 * 395))
    assert not scheduler.has_room(sequence("of more", 4 * 395 + 1))


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    scheduler = make(num_blocks=6, budget=64, chunk=64)
    old, young = sequence("old", 8), sequence("young", 8)
    scheduler.sequences.add(old)
    scheduler.sequences.add(young)
    while young.status is SequenceStatus.RUNNING or (
        young.status is SequenceStatus.WAITING and not young.num_preemptions
    ):
        step(scheduler)
    late = sequence("late", 4)
    scheduler.sequences.add(late)
    assert old.status is SequenceStatus.RUNNING
    assert [seq.request_id for seq in scheduler.sequences.waiting] == ["young", "late"]
    assert young.block_table == []
    scheduler.sequences.abort("old")
    step(scheduler)
    assert young.status is SequenceStatus.RUNNING
    assert (young.num_cached_tokens, scheduler.stats.num_prefix_hits_tokens) == (0, 0), "it found its own blocks"


def test_what_is_preempted_comes_back_before_all_that_wait_already() -> None:
    scheduler = make(num_blocks=6, budget=64, chunk=64)
    for name in ("old", "young"):
        scheduler.sequences.add(sequence(name, 8))
    step(scheduler)
    scheduler.sequences.add(sequence("too large", 16))
    while not scheduler.stats.num_preemptions:
        step(scheduler)
    assert [seq.request_id for seq in scheduler.sequences.waiting] == ["young", "too large"]


def test_ends_by_eos_stop_token_and_length() -> None:
    for params, token, reason in (
        ({}, EOS, FinishReason.STOP),
        ({"stop_token_ids": frozenset({5})}, 5, FinishReason.STOP),
        ({"max_tokens": 1}, 9, FinishReason.LENGTH),
        ({"ignore_eos": True}, EOS, None),
        ({"min_tokens": 2}, EOS, None),
        ({"min_tokens": 1}, EOS, FinishReason.STOP),
    ):
        scheduler = make()
        scheduler.sequences.add(sequence("r", 4, **params))
        output = scheduler.schedule()
        (result,) = compute(scheduler, output, [token])
        assert result.finish_reason is reason, params
        assert result.is_finished == (reason is not None)


# -- a step ahead ---------------------------------------------------------------------------------------------------


def launch(scheduler: Scheduler) -> SchedulerOutput:
    output = scheduler.schedule()
    scheduler.begin(output)
    return output


def test_a_sequence_goes_on_from_a_token_that_is_still_to_come() -> None:
    scheduler = make()
    scheduler.sequences.add(sequence("r", 3, max_tokens=5, ignore_eos=True))
    first, second = launch(scheduler), launch(scheduler)
    assert [(s.first, s.end, s.is_sampled) for s in first.scheduled + second.scheduled] == [(0, 3, True), (3, 4, True)]
    tokens = []
    for output, token in ((first, 21), (second, 22)):
        [result] = apply(scheduler, output, [token])
        tokens.append((result.offset, result.token_ids))
    assert tokens == [(0, [21]), (1, [22])]
    assert list(second.scheduled[0].seq.token_ids[3:]) == [21, 22]


def test_what_is_computed_beyond_a_stop_token_is_thrown_away_and_its_blocks_wait_for_it() -> None:
    scheduler = make()
    seq = sequence("r", 3, max_tokens=5, stop_token_ids=frozenset({9}))
    scheduler.sequences.add(seq)
    first, second = launch(scheduler), launch(scheduler)
    [result] = apply(scheduler, first, [9])
    assert result.is_finished
    assert not scheduler.sequences.has_work
    ledger = scheduler.block_manager.ledger()
    assert ledger.num_sequence == 1, "the second step still writes there"
    assert not launch_of_nothing(scheduler)
    assert apply(scheduler, second, [22]) == []
    assert scheduler.block_manager.ledger().num_sequence == 0


def launch_of_nothing(scheduler: Scheduler) -> list[str]:
    return [s.seq.request_id for s in scheduler.schedule().scheduled]


@pytest.mark.parametrize("is_held", [False, True])
def test_blocks_of_what_ends_from_outside_wait_for_the_steps_that_write_them(is_held: bool) -> None:
    scheduler = make()
    seq = sequence("r", 12)
    seq.is_prefill_only = is_held
    scheduler.sequences.add(seq)
    output = launch(scheduler)
    if is_held:
        scheduler.sequences.hold("r")
    assert scheduler.sequences.abort("r")
    ledger = scheduler.block_manager.ledger()
    assert ledger.num_sequence + ledger.num_held == len(seq.block_table) > 0
    assert apply(scheduler, output, [None]) == []
    ledger = scheduler.block_manager.ledger()
    assert ledger.num_free + ledger.num_cached == ledger.num_blocks


@pytest.mark.parametrize(
    ("length", "max_tokens", "is_prefill_only"), [(9, 1, False), (9, 5, True), (99, 5, False)],
    ids=["answer", "prefill", "context"],
)  # fmt: skip
def test_nothing_is_computed_beyond_a_token_that_must_be_the_last(
    length: int, max_tokens: int, is_prefill_only: bool
) -> None:
    scheduler = make(budget=128, chunk=128)
    seq = sequence("r", length, max_tokens=max_tokens)
    seq.is_prefill_only = is_prefill_only
    scheduler.sequences.add(seq)
    launch(scheduler)
    assert scheduler.schedule().scheduled == []


def test_a_prompt_whose_blocks_are_being_pushed_is_not_preempted() -> None:
    scheduler = make(num_blocks=11, budget=12, chunk=2)
    old, young = sequence("old", 8, max_tokens=50), sequence("young", 8, max_tokens=50)
    scheduler.sequences.add(old)
    scheduler.sequences.add(young)
    while not young.num_output_tokens:
        step(scheduler)
    pushed = sequence("pushed", 16)  # takes all blocks that are left, but for one
    pushed.is_prefill_only = True
    scheduler.sequences.add(pushed)
    step(scheduler)
    assert pushed.status is SequenceStatus.RUNNING
    while pushed.status is SequenceStatus.RUNNING:
        step(scheduler)
    assert young.num_preemptions == 1
    assert pushed.num_preemptions == 0


def test_nobody_is_preempted_while_a_step_is_in_flight() -> None:
    scheduler = make(num_blocks=5)
    for name in ("old", "young"):
        scheduler.sequences.add(sequence(name, 8, max_tokens=50))
    first = launch(scheduler)
    assert len(first.scheduled) == 2
    assert scheduler.schedule().scheduled == []  # each needs another block, and one is left
    apply(scheduler, first, [7, 7])
    assert plan(scheduler.schedule()) == [("old", 1)]
    assert scheduler.stats.num_preemptions == 1


def test_the_context_ends_an_answer() -> None:
    scheduler = make(budget=128, chunk=128)
    scheduler.sequences.add(sequence("r", 99))
    output = scheduler.schedule()
    (result,) = compute(scheduler, output, [9])
    assert result.finish_reason is FinishReason.LENGTH


def test_a_reservation_does_not_take_what_waiting_requests_need() -> None:
    scheduler = make(num_blocks=20)
    scheduler.sequences.add(sequence("waiting", 60))  # 15 blocks
    assert not scheduler.reserve(sequence("granted", 24))  # 6 more
    assert scheduler.reserve(sequence("small", 8))
    assert scheduler.block_manager.ledger().num_grant == 2


def test_what_shares_its_prompt_with_others_needs_room_for_the_rest_alone() -> None:
    """Also while others wait that share it, but not once no sequence has that prompt any more."""
    scheduler = make(num_blocks=14)
    first = sequence("first", 38)
    scheduler.sequences.add(first)
    for _ in range(6):
        step(scheduler)  # ten blocks, and one to grow into
    others = [sequence(f"other {i}", 38) for i in range(3)]
    for other in others:
        other.token_ids[:] = first.token_ids[:38]
    assert [scheduler.block_manager.num_shared_blocks(other) for other in others] == [9, 9, 9]
    stranger = sequence("stranger", 38)
    assert not scheduler.has_room(stranger)
    assert scheduler.has_room(others[0])
    scheduler.sequences.add(others[0])
    assert scheduler.has_room(others[1])
    assert not scheduler.has_room(stranger)
    step(scheduler)
    assert {seq.request_id for seq in scheduler.sequences.running} == {"first", "other 0"}
    for request_id in ("first", "other 0"):
        scheduler.sequences.abort(request_id)
    assert scheduler.block_manager.num_shared_blocks(others[1]) == 0, "cached, and nobody's"
    assert scheduler.has_room(stranger)
    assert scheduler.block_manager.check_integrity() == []


def test_no_more_sequences_than_max_num_seqs() -> None:
    scheduler = make(max_num_seqs=2)
    for name in "abc":
        scheduler.sequences.add(sequence(name, 2))
    assert [name for name, _ in plan(step(scheduler))] == ["a", "b"]
    assert not scheduler.sequences.num_free_seqs
    assert not scheduler.reserve(sequence("granted", 2))


def test_what_is_granted_is_no_more_than_that_either_when_it_begins() -> None:
    """Requests that arrive meanwhile wait: the device has room, and recorded steps, for no more sequences."""
    scheduler = make(max_num_seqs=2)
    assert scheduler.reserve(sequence("granted", 2))
    for name in "ab":
        scheduler.sequences.add(sequence(name, 2))
    assert plan(step(scheduler)) == [("a", 2)]
    scheduler.commit("granted", 7, 2)
    assert plan(step(scheduler)) == [("a", 1), ("granted", 1)]
    scheduler.sequences.abort("a")
    assert plan(step(scheduler)) == [("granted", 1), ("b", 2)]


def test_a_computed_prompt_is_held_until_it_is_aborted() -> None:
    scheduler = make()
    seq = sequence("r", 10)
    seq.is_prefill_only = True
    scheduler.sequences.add(seq)
    first = step(scheduler)
    assert [(e.first_block, e.block_ids) for e in first.exports] == [(0, tuple(seq.block_table[:2]))]
    second = step(scheduler)
    assert [(e.first_block, e.block_ids) for e in second.exports] == [(2, tuple(seq.block_table[2:]))]
    assert seq.status is SequenceStatus.HELD
    assert scheduler.block_manager.ledger().num_held == 3
    assert scheduler.sequences.abort("r")
    ledger = scheduler.block_manager.ledger()
    assert (ledger.num_held, ledger.num_cached) == (0, 2)


def test_a_committed_prompt_is_found_by_who_comes_next() -> None:
    scheduler = make()
    first, second = sequence("first", 10), sequence("second", 10)
    second.token_ids[:] = first.token_ids[:]
    assert scheduler.reserve(first)
    assert scheduler.block_manager.num_shared_blocks(second) == 0, "nothing is there yet"
    scheduler.commit("first", 7, 10)
    assert scheduler.block_manager.num_shared_blocks(second) == 2
    ledger = scheduler.block_manager.ledger()
    assert (ledger.num_grant, ledger.num_sequence) == (0, 3), "it is promised to nobody any more"
    assert scheduler.reserve(second)
    assert second.num_cached_tokens == 8


def test_of_a_prompt_that_is_cached_to_its_end_the_last_block_is_computed() -> None:
    """The next token needs the logits at the last token."""
    scheduler = make()
    first, second = sequence("first", 8), sequence("second", 8)
    second.token_ids[:] = first.token_ids[:]
    scheduler.sequences.add(first)
    step(scheduler)
    scheduler.sequences.abort("first")
    scheduler.sequences.add(second)
    assert plan(scheduler.schedule()) == [("second", 4)]


def test_what_waits_for_memory_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in each step that finds no room for it: to hash a long prompt takes as long as a step."""
    hashed: list[int] = []

    def count(hashes: list[bytes], token_ids: list[int], block_size: int, key: bytes) -> None:
        num_before = len(hashes)
        extend_block_hashes(hashes, token_ids, block_size, key)
        hashed.append(len(hashes) - num_before)

    monkeypatch.setattr(prefix_cache, "extend_block_hashes", count)
    scheduler = make(num_blocks=12)
    scheduler.sequences.add(sequence("runs", 16))
    scheduler.sequences.add(sequence("waits", 40))
    for _ in range(8):
        step(scheduler)
    assert [seq.request_id for seq in scheduler.sequences.waiting] == ["waits"]
    assert not scheduler.has_room(sequence("other", 4))
    assert sum(hashed) <= 6 + 10 + 1
