"""The errors that a pool's audit finds, on which other tests and `tandem audit` rely. Each test breaks correct books in
one way."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from test_offloading_order import again, gave_way, offloading
from test_scheduler import sequence, step

from engine.scheduling.block_manager import BlockManager
from engine.scheduling.sequence import Sequence

Break = Callable[[BlockManager, Sequence], object]


def hold_twice(manager: BlockManager, seq: Sequence) -> None:
    seq.block_table.append(seq.block_table[0])


def lose(manager: BlockManager, seq: Sequence) -> None:
    seq.block_table.pop()


def hold_a_free_one(manager: BlockManager, seq: Sequence) -> None:
    seq.block_table[-1] = manager._pool._free[0]


def free_twice(manager: BlockManager, seq: Sequence) -> None:
    manager._pool._free.append(manager._pool._free[0])


def find_a_free_one(manager: BlockManager, seq: Sequence) -> None:
    manager.prefixes.store(manager._pool._free[0], b"another's")


def find_a_cached_one_no_more(manager: BlockManager, seq: Sequence) -> None:
    manager.prefixes.drop(
        next(block_id for block_id in range(manager.num_blocks) if block_id in manager._pool._evictor)
    )


def free_while_they_load(manager: BlockManager, seq: Sequence) -> None:
    seq.num_loading_blocks = 0
    manager.free(seq)


def find_two_by_one_hash(manager: BlockManager, seq: Sequence) -> None:
    first, second = seq.block_table[:2]
    manager.prefixes._hash_of[second] = manager.prefixes._hash_of[first]


def lose_on_the_host(manager: BlockManager, seq: Sequence) -> None:
    manager.prefixes.offloading._free.popleft()


def keep_what_is_free_on_the_host(manager: BlockManager, seq: Sequence) -> None:
    host = manager.prefixes.offloading
    host._kept[b"another's"] = host._free[0]


REFS = "reference counts differ from the block tables"
SUM = "the ledger does not sum up to the pool"
CASES: list[tuple[Break, list[str]]] = [
    (hold_twice, ["sequence # holds a block twice", REFS]),
    (lose, [REFS, "block # is in # places"]),
    (hold_a_free_one, [REFS, "block # is in # places"]),
    (free_twice, ["a block is free twice", SUM]),
    (find_a_free_one, ["free block # has a hash"]),
    (find_a_cached_one_no_more, ["cached block # has no hash"]),
    (free_while_they_load, ["block # is loaded for nobody"]),
    (find_two_by_one_hash, ["the prefix cache and the blocks' hashes differ"]),
    (lose_on_the_host, ["host block # is in # places"]),
    (keep_what_is_free_on_the_host, ["host block # is in # places"]),
]


@pytest.mark.parametrize(("break_it", "expected"), CASES, ids=[case[0].__name__ for case in CASES])
def test_the_audit_says_what_is_wrong(break_it: Break, expected: list[str]) -> None:
    scheduler = offloading(12)
    manager = scheduler.block_manager
    seq = again(gave_way(scheduler), "loads")
    assert scheduler.reserve(seq)
    scheduler.sequences.add(sequence("leaves a free block", 3, max_tokens=1))
    step(scheduler)
    assert manager.check_integrity() == []
    break_it(manager, seq)
    problems = [re.sub(r"\d+", "#", problem.split(":")[0]) for problem in manager.check_integrity()]
    assert list(dict.fromkeys(problems)) == expected
