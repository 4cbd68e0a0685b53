"""Which requests wait for blocks that are being copied to host memory or back, case by case: no request is worse
off."""

from __future__ import annotations

import pytest
from test_scheduler import make, plan, sequence, step

from engine.config import SchedulerConfig
from engine.scheduling import block_pool
from engine.scheduling.block_manager import BlockManager, BlockOwner
from engine.scheduling.offloading import BlockCopy, Offloading
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence


def offloading(num_blocks: int, num_host_blocks: int = 100) -> Scheduler:
    config: SchedulerConfig = make(budget=64, chunk=64)._config
    manager = BlockManager(
        num_blocks=num_blocks, block_size=4, prefix_key=b"k" * 32, enable_prefix_caching=True,
        num_host_blocks=num_host_blocks,
    )  # fmt: skip
    return Scheduler(config, manager, max_model_len=400, eos_token_ids=frozenset({1}))


def end_copies(scheduler: Scheduler) -> list[BlockCopy]:
    copies = scheduler.block_manager.take_copies()
    scheduler.take_copied(copies)
    return copies


def again(seq: Sequence, name: str) -> Sequence:
    """Another sequence with the same prompt."""
    other = sequence(name, seq.num_prompt_tokens)
    other.token_ids = seq.token_ids[: seq.num_prompt_tokens]
    return other


def gave_way(scheduler: Scheduler) -> Sequence:
    """A sequence that has ended in a pool of 12 blocks. Two later ones took its place, so its blocks are in host
    memory."""
    earlier = sequence("earlier", 25, max_tokens=1)
    for seq in (earlier, sequence("other", 40, max_tokens=1), sequence("another", 40, max_tokens=1)):
        scheduler.sequences.add(seq)
        step(scheduler)
        end_copies(scheduler)
    return earlier


def test_nothing_is_preempted_for_want_of_blocks_that_are_being_saved() -> None:
    scheduler = offloading(12)
    manager = scheduler.block_manager
    scheduler.sequences.add(sequence("goes on", 36))
    scheduler.sequences.add(sequence("ends", 8, max_tokens=1))
    step(scheduler)
    copies = manager.take_copies()
    assert len(copies) == manager.host_ledger().num_saving == 2
    assert [plan(step(scheduler)) for _ in range(5)] == [[("goes on", 1)]] * 4 + [[]]
    assert scheduler.stats.num_preemptions == 0
    scheduler.take_copied(copies)
    assert plan(step(scheduler)) == [("goes on", 1)]


def test_the_older_is_not_preempted_for_the_younger_that_loads() -> None:
    scheduler = offloading(12)
    first = sequence("first", 25, max_tokens=1)
    scheduler.sequences.add(first)
    step(scheduler)
    for number in range(2):
        scheduler.sequences.add(sequence(f"{number}", 44, max_tokens=1))
        end_copies(scheduler)
        step(scheduler)
        end_copies(scheduler)
    scheduler.sequences.add(sequence("older", 15))
    step(scheduler)
    scheduler.sequences.add(again(first, "younger"))
    assert plan(step(scheduler)) == [("older", 1)]
    assert "younger" in scheduler.sequences.loading
    loads = scheduler.block_manager.take_copies()
    while scheduler.block_manager.num_available:
        assert plan(step(scheduler)) == [("older", 1)]
    while plan(step(scheduler)):
        pass
    assert scheduler.stats.num_preemptions == 0
    scheduler.take_copied(loads)
    while scheduler.stats.num_preemptions == 0:
        step(scheduler)
        end_copies(scheduler)
    assert [seq.request_id for seq in scheduler.sequences.running] == ["older"]


def test_of_a_large_pool_few_blocks_are_not_to_be_had_while_they_are_saved() -> None:
    num_blocks = 8 * block_pool.SAVES_AT_ONCE
    manager = BlockManager(
        num_blocks=num_blocks, block_size=4, prefix_key=b"k" * 32, enable_prefix_caching=True,
        num_host_blocks=num_blocks,
    )  # fmt: skip
    ended = sequence("ended", num_blocks * 4)
    assert manager.allocate(ended, BlockOwner.SEQUENCE, num_reusable_tokens=0, num_spare_blocks=0)
    manager.register_computed(ended, len(ended))
    manager.free(ended)
    copies = manager.take_copies()
    assert manager.num_available == num_blocks - len(copies) == 7 / 8 * num_blocks
    for copy in copies:
        manager.end_copy(copy)
    copies = manager.take_copies()
    assert len(copies) == block_pool.SAVES_AT_ONCE
    for copy in copies:
        manager.end_copy(copy)
    assert manager.take_copies() == []  # a quarter of the pool is ready


def test_no_more_is_saved_than_makes_a_quarter_of_the_pool_ready() -> None:
    scheduler = offloading(40)
    scheduler.sequences.add(sequence("ended", 160, max_tokens=1))
    for _ in range(3):
        step(scheduler)
    copies = scheduler.block_manager.take_copies()
    assert len(copies) == 10
    assert scheduler.block_manager.take_copies() == [], "as many are on their way"
    scheduler.take_copied(copies)
    assert scheduler.block_manager.take_copies() == []


def test_what_is_used_again_while_it_is_saved_does_not_count_as_cached() -> None:
    scheduler = offloading(16)
    manager, ends = scheduler.block_manager, sequence("ends", 9, max_tokens=1)
    scheduler.sequences.add(sequence("goes on", 44))
    scheduler.sequences.add(ends)
    step(scheduler)
    copies = manager.take_copies()
    assert len(copies) == manager.host_ledger().num_saving == 1
    scheduler.sequences.add(again(ends, "again"))
    assert plan(step(scheduler)) == [("goes on", 1), ("again", 1)]
    assert manager.host_ledger().num_saving == 0
    scheduler.take_copied(copies)
    assert not scheduler.check_integrity()


def test_the_host_evicts_what_was_saved_or_loaded_least_recently() -> None:
    evicted: list[bytes] = []
    host = Offloading(2, evicted.append)
    for block_id, block_hash in enumerate((b"loaded later", b"only saved")):
        copy = host.begin_save(block_id, block_hash)
        assert copy is not None
        host.end_save(copy.host_block_id, is_wanted=True)
    host.end_load(host.begin_load(2, b"loaded later").host_block_id)
    assert host.begin_save(3, b"new") is not None
    assert evicted == [b"only saved"]


def test_of_a_stream_that_goes_on_here_only_the_prompt_counts_as_found() -> None:
    scheduler = offloading(12)
    earlier = gave_way(scheduler)
    resumed = again(earlier, "resumed")
    resumed.num_prompt_tokens = 3  # the rest was its answer so far
    assert scheduler.reserve(resumed)
    assert resumed.num_loading_blocks > 1
    assert scheduler.stats.num_loaded_tokens == scheduler.stats.num_prefix_hits_tokens == 3


def test_newcomers_leave_room_for_what_loads_to_grow() -> None:
    scheduler = offloading(12)
    earlier = gave_way(scheduler)
    scheduler.sequences.add(again(earlier, "loads"))
    assert plan(step(scheduler)) == []
    assert "loads" in scheduler.sequences.loading
    assert not scheduler.has_room(sequence("as large as what is left", 20))
    assert scheduler.has_room(sequence("smaller", 16))


@pytest.mark.parametrize("is_there", [False, True], ids=["being loaded", "loaded"])
def test_what_was_loaded_and_is_forgotten_leaves_the_host_once_nothing_reads_it(is_there: bool) -> None:
    scheduler = offloading(12)
    manager = scheduler.block_manager
    failing = again(gave_way(scheduler), "fails")
    assert scheduler.reserve(failing)
    num_loads = failing.num_loading_blocks
    copies = manager.take_copies()
    if is_there:
        scheduler.take_copied(copies)
    num_free, num_kept = manager.host_ledger().num_free, manager.host_ledger().num_kept
    manager.forget(failing)
    assert manager.host_ledger().num_kept == num_kept - num_loads < num_kept
    assert manager.host_ledger().num_free == num_free + (num_loads if is_there else 0)
    if not is_there:
        scheduler.take_copied(copies)
    ledger = manager.host_ledger()
    assert ledger.num_free + ledger.num_kept == ledger.num_blocks


@pytest.mark.parametrize("has_ended", [False, True], ids=["in use", "nobody's"])
def test_what_is_saved_and_is_forgotten_meanwhile_is_kept_nowhere(has_ended: bool) -> None:
    scheduler = offloading(12)
    manager = scheduler.block_manager
    ended = sequence("ended", 45, max_tokens=1)
    scheduler.sequences.add(ended)
    step(scheduler)
    saves = manager.take_copies()
    assert saves
    assert scheduler.reserve(again(ended, "fails"))
    manager.forget(scheduler.sequences.granted["fails"])
    if has_ended:
        scheduler.sequences.abort("fails")
    assert manager.check_integrity() == []
    scheduler.take_copied(saves)
    assert manager.host_ledger().num_free == manager.host_ledger().num_blocks
    assert scheduler.sequences.abort("fails") != has_ended
    assert manager.ledger().num_free == manager.num_blocks
    assert manager.check_integrity() == []
