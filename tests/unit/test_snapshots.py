"""Snapshots of states: where they are taken, who goes on from them, and what they cost others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_scheduler import compute, plan, step

from engine.config import SchedulerConfig
from engine.outputs import FinishReason
from engine.sampling_params import SamplingParams
from engine.scheduling.block_ledger import CacheEvent
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import INVALID_TOKEN, Sequence, SequenceStatus
from engine.scheduling.snapshots import Snapshots, min_snapshot_tokens, snapshot_points

EOS = 1
NUM_STATE_BLOCKS = 3


def make(
    *, num_blocks: int = 64, min_snapshot_tokens: int = 8, enable_prefix_caching: bool = True, **settings: int
) -> Scheduler:
    manager = BlockManager(
        num_blocks=num_blocks, block_size=4, prefix_key=b"k" * 32, enable_prefix_caching=enable_prefix_caching,
        num_state_blocks=NUM_STATE_BLOCKS, min_snapshot_tokens=min_snapshot_tokens,
    )  # fmt: skip
    config = SchedulerConfig(
        max_num_seqs=8, max_num_batched_tokens=64, prefill_chunk_tokens=64, prefill_batch_tokens=64, max_itl_ms=0,
        stream_interval=1, async_scheduling=False, speculation=None, draft_batch_tokens=12,
    )  # fmt: skip
    return Scheduler(replace(config, **settings), manager, max_model_len=100, eos_token_ids=frozenset({EOS}))


_numbers = iter(range(10_000))


def sequence(name: str, token_ids: list[int], *, max_tokens: int = 20, is_prefill_only: bool = False) -> Sequence:
    return Sequence(
        seq_id=next(_numbers), request_id=name, token_ids=token_ids, num_prompt_tokens=len(token_ids),
        sampling_params=SamplingParams(max_tokens=max_tokens), is_prefill_only=is_prefill_only,
    )  # fmt: skip


def text(number: int, length: int) -> list[int]:
    return [1000 * number + 10 + i for i in range(length)]


def serve(scheduler: Scheduler, token_ids: list[int], token: int = EOS) -> list[tuple[str, int]]:
    """Serve a prompt whose answer is one token. Returns what its steps computed."""
    seq = sequence("r", token_ids)
    scheduler.sequences.add(seq)
    computed = []
    while seq.status is not SequenceStatus.FINISHED:
        computed += plan(step(scheduler, token))
    assert scheduler.check_integrity() == []
    return computed


@pytest.mark.parametrize(
    ("num_tokens", "num_reused", "num_shared", "points"),
    [
        (100, 0, 0, [92]),
        (101, 0, 0, [92]),
        (99, 0, 0, [88]),
        (100, 0, 40, [40, 92]),
        (100, 40, 40, [92]),
        (100, 40, 60, [60, 92]),
        (100, 40, 52, [92]),
        (100, 40, 80, [80]),
        (100, 0, 96, [92]),
        (100, 80, 84, []),
        (27, 0, 0, [16]),
        (23, 0, 0, []),
        (5, 0, 0, []),
        (5, 0, 4, []),
    ],
)
def test_points(num_tokens: int, num_reused: int, num_shared: int, points: list[int]) -> None:
    """Near the end, and where the prompt leaves the way to another snapshot, as far as that spares 16 tokens."""
    found = snapshot_points(num_tokens, num_reused=num_reused, num_shared=num_shared, block_size=4, min_tokens=16)
    assert found == points


def test_a_large_snapshot_must_spare_more() -> None:
    assert min_snapshot_tokens(1, 16) == 128
    assert min_snapshot_tokens(104, 16) == 128
    assert min_snapshot_tokens(197, 16) == 197
    assert min_snapshot_tokens(548, 16) == 548


def test_a_conversation_goes_on_from_the_last_turn() -> None:
    scheduler = make()
    first = text(1, 30)
    assert serve(scheduler, first) == [("r", 20), ("r", 10)], "a step ends at the point"
    assert serve(scheduler, [*first, *text(2, 30)]) == [("r", 32), ("r", 8)]
    assert scheduler.stats.num_prefix_hits_tokens == 20
    assert serve(scheduler, [*first, *text(2, 30), 5]) == [("r", 9)]
    assert scheduler.stats.num_prefix_hits_tokens == 20 + 52


def test_no_snapshot_comes_soon_after_the_one_that_a_prompt_begins_with() -> None:
    """Although the prompt leaves the way to another one there."""
    scheduler = make()
    assert serve(scheduler, text(1, 30)) == [("r", 20), ("r", 10)]
    assert serve(scheduler, text(1, 46)) == [("r", 16), ("r", 10)]
    assert serve(scheduler, [*text(1, 24), *text(2, 20)]) == [("r", 16), ("r", 8)]


def test_what_two_prompts_share_is_reused_by_the_third() -> None:
    scheduler = make()
    shared = text(1, 40)
    assert serve(scheduler, [*shared, *text(2, 23)]) == [("r", 52), ("r", 11)]
    assert serve(scheduler, [*shared, *text(3, 23)]) == [("r", 40), ("r", 12), ("r", 11)]
    assert serve(scheduler, [*shared, *text(4, 8)]) == [("r", 8)]


def test_a_step_takes_the_state_along_and_its_blocks_are_dropped_once_it_is_loaded() -> None:
    scheduler = make()
    serve(scheduler, text(1, 30))
    num_cached = scheduler.block_manager.ledger().num_cached
    assert num_cached == 30 // 4 + NUM_STATE_BLOCKS
    scheduler.sequences.add(seq := sequence("next", [*text(1, 30), 5, 6]))
    output = scheduler.schedule()
    assert seq.has_state_to_load
    assert len(seq.loaded_state_ids) == NUM_STATE_BLOCKS
    assert scheduler.block_manager.ledger().num_sequence == 8 + NUM_STATE_BLOCKS
    scheduler.begin(output)
    assert not seq.has_state_to_load
    assert len(seq.loaded_state_ids) == NUM_STATE_BLOCKS, "the step may not have begun"
    scheduler.apply(output, [[7]])
    assert not seq.loaded_state_ids
    assert scheduler.block_manager.ledger().num_sequence == 8


def test_others_learn_of_a_prefix_once_it_has_a_snapshot() -> None:
    scheduler = make()
    manager = scheduler.block_manager
    first = sequence("first", text(1, 30))
    scheduler.sequences.add(first)
    output = scheduler.schedule()
    compute(scheduler, output, [None])
    hashes = first.block_hashes[:5]
    assert manager.take_cache_events() == [CacheEvent(True, each) for each in hashes]
    assert manager.cached_hashes() == hashes
    step(scheduler, EOS)
    assert manager.take_cache_events() == [], "blocks after the snapshot cannot be reused"
    assert manager.forget_prefixes()
    assert manager.take_cache_events() == [CacheEvent(False, each) for each in reversed(hashes)]
    assert manager.cached_hashes() == []


def test_a_snapshot_goes_with_any_of_its_blocks_and_the_others_are_free_at_once() -> None:
    scheduler = make(num_blocks=40)
    serve(scheduler, text(1, 30))
    manager = scheduler.block_manager
    assert manager.ledger().num_cached == 7 + NUM_STATE_BLOCKS
    scheduler.sequences.add(sequence("large", text(2, 33 * 4)))
    scheduler.schedule()
    assert manager.ledger().num_free == NUM_STATE_BLOCKS - 1
    assert manager.ledger().num_cached == 5
    assert manager.cached_hashes() == []
    assert scheduler.check_integrity() == []


def test_a_snapshot_goes_with_any_block_of_its_prefix() -> None:
    scheduler = make(num_blocks=40, min_snapshot_tokens=16)
    shared = text(1, 20)
    scheduler.sequences.add(sequence("before", [*shared, 3]))
    step(scheduler)
    manager = scheduler.block_manager
    scheduler.sequences.add(sequence("after", [*shared, *text(2, 10)]))
    step(scheduler)
    step(scheduler)
    scheduler.sequences.abort("before")
    assert manager.ledger().num_cached == 5 + NUM_STATE_BLOCKS
    scheduler.sequences.abort("after")
    assert len(manager.cached_hashes()) == 5
    assert manager.ledger().num_cached == 5 + NUM_STATE_BLOCKS + 2, "prefix, snapshot, rest"
    scheduler.sequences.add(sequence("large", text(3, 33 * 4)))
    scheduler.schedule()
    assert manager.ledger().num_free == NUM_STATE_BLOCKS
    assert manager.ledger().num_cached == 4
    assert manager.cached_hashes() == []
    assert scheduler.check_integrity() == []


def test_a_reservation_shares_all_cached_keys_and_values_since_its_state_comes_with_the_rest() -> None:
    scheduler = make()
    serve(scheduler, text(1, 30))
    seq = sequence("granted", [*text(1, 30), 5, 6])
    seq.num_state_blocks = NUM_STATE_BLOCKS
    assert scheduler.reserve(seq)
    assert seq.num_computed_tokens == 28
    assert len(seq.loaded_state_ids) == NUM_STATE_BLOCKS
    assert not seq.has_state_to_load
    scheduler.commit("granted", 7, 32)
    assert seq.has_state_to_load
    assert plan(step(scheduler)) == [("granted", 1)]
    assert not seq.loaded_state_ids
    assert not seq.num_state_blocks, "if it is preempted, its state is computed"


def test_no_snapshot_where_running_sequences_may_need_the_blocks() -> None:
    for num_blocks, computed in ((8 + 2 + NUM_STATE_BLOCKS, [20, 10]), (8 + 1 + NUM_STATE_BLOCKS, [30])):
        assert serve(make(num_blocks=num_blocks), text(1, 30)) == [("r", num) for num in computed]


def test_a_snapshot_that_leaves_no_room_is_not_used() -> None:
    """With nothing else running, the prompt would wait for ever."""
    num_blocks = 8 + 2 + NUM_STATE_BLOCKS
    scheduler = make(num_blocks=num_blocks)
    assert serve(scheduler, text(1, 30)) == [("r", 20), ("r", 10)]
    assert serve(scheduler, [*text(1, 30), *text(2, 15)]) == [("r", 45)]
    assert scheduler.stats.num_prefix_hits_tokens == 0


@pytest.mark.parametrize("is_running", [False, True], ids=["ended", "runs"])
def test_no_request_goes_on_from_what_failed(is_running: bool) -> None:
    """Also if the blocks of another sequence have the hashes of its prefix."""
    scheduler = make(min_snapshot_tokens=16)
    shared = text(1, 20)
    scheduler.sequences.add(sequence("other", [*shared, 3]))
    step(scheduler, 7 if is_running else EOS)
    failing = sequence("failing", [*shared, *text(2, 10)])
    scheduler.sequences.add(failing)
    assert plan(step(scheduler))[-1] == ("failing", 20)
    assert scheduler.block_manager.prefixes.snapshots.longest(failing.block_hashes).num_reused == 5
    output = scheduler.schedule()
    outputs = compute(scheduler, output, [INVALID_TOKEN if s.seq is failing else 7 for s in output.scheduled])
    assert outputs[-1].finish_reason is FinishReason.ERROR
    assert scheduler.block_manager.cached_hashes() == []
    assert scheduler.sequences.abort("other") is is_running
    assert serve(scheduler, [*shared, *text(3, 10)]) == [("r", 20), ("r", 10)]


def test_a_sequence_ends_while_its_snapshot_is_saved() -> None:
    scheduler = make()
    scheduler.sequences.add(sequence("r", text(1, 30)))
    output = scheduler.schedule()
    assert output.scheduled[0].snapshot_ids
    scheduler.begin(output)
    scheduler.sequences.abort("r")
    assert scheduler.block_manager.ledger().num_sequence == 8 + NUM_STATE_BLOCKS, "the step still writes to them"
    scheduler.apply(output, [[]])
    assert scheduler.block_manager.ledger().num_free == 64
    assert scheduler.check_integrity() == []


def test_equal_prompts_take_one_snapshot() -> None:
    """Several answers to one prompt: each snapshot more would evict what is of use, to be dropped at once."""
    scheduler = make()
    prompt = text(1, 30)
    for name in ("a", "b", "c"):
        scheduler.sequences.add(sequence(name, prompt))
    assert plan(step(scheduler)) == [("a", 20), ("b", 30), ("c", 14)]
    assert plan(step(scheduler)) == [("b", 1), ("a", 10), ("c", 16)]
    assert scheduler.check_integrity() == []


def test_where_a_snapshot_ends_with_its_sequence_another_one_takes_it() -> None:
    scheduler = make()
    for name in ("a", "b"):
        scheduler.sequences.add(sequence(name, text(1, 61)))
    output = scheduler.schedule()
    assert plan(output) == [("a", 52), ("b", 12)]
    scheduler.begin(output)
    scheduler.sequences.abort("a")
    scheduler.apply(output, [[], []])
    assert plan(step(scheduler)) == [("b", 40)]
    assert len(scheduler.block_manager.cached_hashes()) == 52 // 4


def test_a_snapshot_is_as_recent_as_the_end_of_its_sequence() -> None:
    """It would be evicted before all that other sequences left during a long answer, and the prefix be of no use."""
    scheduler = make()
    manager = scheduler.block_manager
    scheduler.sequences.add(long := sequence("long", text(1, 30)))
    step(scheduler)
    step(scheduler)
    scheduler.sequences.add(sequence("short", text(2, 15)))
    step(scheduler)
    scheduler.sequences.abort("short")
    scheduler.sequences.abort("long")
    assert manager.ledger().num_cached == 7 + NUM_STATE_BLOCKS + 3
    scheduler.sequences.add(sequence("large", text(3, 4 * (manager.ledger().num_free + 3))))
    scheduler.schedule()
    assert manager.ledger().num_cached == 7 + NUM_STATE_BLOCKS
    assert manager.cached_hashes() == long.block_hashes[:5]


def test_a_snapshot_comes_after_the_blocks_of_its_own_sequence() -> None:
    """Not after those of an older one, which are evicted sooner, as soon as while the answer is written."""
    scheduler = make(min_snapshot_tokens=16)
    manager = scheduler.block_manager
    shared = text(1, 20)
    serve(scheduler, [*shared, 3])
    scheduler.sequences.add(answering := sequence("answering", [*shared, *text(2, 10)]))
    step(scheduler)
    assert manager.ledger().num_cached == NUM_STATE_BLOCKS, "there is one block for each hash"
    step(scheduler)
    scheduler.sequences.add(sequence("large", text(3, 4 * (manager.ledger().num_free - 1))))
    assert len(scheduler.schedule().scheduled) == 2
    assert manager.cached_hashes() == answering.block_hashes[:5]
    assert scheduler.check_integrity() == []


def test_what_no_prompt_can_go_on_from_is_evicted_first() -> None:
    """An answer's keys and values would evict all that can be reused, since they are more recent."""
    scheduler = make()
    manager = scheduler.block_manager
    serve(scheduler, text(1, 30))
    reusable = manager.cached_hashes()
    scheduler.sequences.add(sequence("answered", text(2, 30)))
    for _ in range(15):
        step(scheduler)
    scheduler.sequences.abort("answered")
    assert manager.ledger().num_cached == 7 + 10 + 2 * NUM_STATE_BLOCKS
    scheduler.sequences.add(sequence("large", text(3, 4 * (manager.ledger().num_free + 5))))
    scheduler.schedule()
    assert manager.cached_hashes()[:5] == reusable
    assert len(manager.cached_hashes()) == 5 + 5
    assert scheduler.check_integrity() == []


def test_without_snapshots_the_oldest_blocks_are_evicted_first() -> None:
    """A decode worker reuses keys and values in grants."""
    scheduler = make()
    manager = scheduler.block_manager
    names = ("old", "new")
    for number, name in enumerate(names):
        seq = sequence(name, text(number, 16))
        seq.num_state_blocks = NUM_STATE_BLOCKS
        assert scheduler.reserve(seq)
        scheduler.commit(name, 7, 16)
        step(scheduler)
        scheduler.sequences.abort(name)
    scheduler.sequences.add(sequence("large", text(3, 4 * (manager.ledger().num_free + 4))))
    scheduler.schedule()
    again = [sequence(name, text(number, 16)) for number, name in enumerate(names)]
    hashes = [manager.prefixes.hashes_of(seq, 16) for seq in again]
    assert [len(manager.prefixes.match(each)) for each in hashes] == [0, 4]


class CountedHash(bytes):
    num_lookups = 0

    def __hash__(self) -> int:
        CountedHash.num_lookups += 1
        return super().__hash__()


def test_many_snapshots_of_a_long_conversation_take_no_longer() -> None:
    """A snapshot for each fourth block of 1,000: each takes time for its own part of the way."""
    snapshots = Snapshots(lambda block_hash, is_stored: None)
    hashes = [CountedHash(i.to_bytes(16)) for i in range(1000)]
    for num_blocks in range(4, 1001, 4):
        snapshots.store(hashes[:num_blocks], [num_blocks])
    assert CountedHash.num_lookups < 20 * len(hashes)
    CountedHash.num_lookups = 0
    assert sorted(snapshots.drop_needing(hashes[2])) == [*range(4, 1001, 4)]
    assert CountedHash.num_lookups < 20 * len(hashes)
    assert snapshots.reusable_hashes() == []
    assert snapshots.check_integrity([]) == []


def test_without_prefix_caching_no_step_is_cut() -> None:
    scheduler = make(enable_prefix_caching=False)
    assert serve(scheduler, text(1, 30)) == serve(scheduler, text(1, 30)) == [("r", 30)]


@pytest.mark.parametrize(
    ("second", "third", "evicted"),
    [
        ([*text(1, 30), *text(2, 8)], [], 1),
        ([*text(1, 30), *text(2, 10)], [], 0),  # it spares as much as it takes
        ([*text(1, 30), *text(2, 8)], [*text(1, 20), *text(3, 18)], 0),  # it is on a third one's way
    ],
    ids=["superseded", "far apart", "on another way"],
)
def test_a_snapshot_that_the_next_turn_hardly_needs_is_evicted_before_older_ones(
    second: list[int], third: list[int], evicted: int
) -> None:
    scheduler = make(min_snapshot_tokens=4)
    manager = scheduler.block_manager
    prompts = [each for each in (text(8, 30), text(1, 30), second, third) if each]
    for prompt in prompts:
        serve(scheduler, prompt)
    num_blocks_up_to = [(len(each) - 8) // 4 for each in prompts]
    ends = [
        manager.prefixes.hashes_of(sequence("s", each), 4 * num)[-1]
        for each, num in zip(prompts, num_blocks_up_to, strict=True)
    ]
    num_useless = sum(len(each) // 4 - num for each, num in zip(prompts, num_blocks_up_to, strict=True))
    scheduler.sequences.add(sequence("large", text(9, 4 * (manager.ledger().num_free + num_useless + 1))))
    scheduler.schedule()
    assert [manager.prefixes.snapshots.has(each) for each in ends] == [i != evicted for i in range(len(prompts))]
