"""What the draft model does in a step, and what it is known to have read."""

from __future__ import annotations

from engine.config import SchedulerConfig
from engine.sampling_params import SamplingParams
from engine.scheduling.block_ledger import BlockOwner
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.model_drafting import ModelDrafting
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import DraftPart, SchedulerOutput, Sequence
from engine.scheduling.speculation import SpeculativeConfig

BLOCK_SIZE = 4
Plan = tuple[int, int, int] | None


def config_of(*, catch_up: int = 100, model_len: int = 1000, num_drafts: int = 3) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=8, max_num_batched_tokens=64, prefill_chunk_tokens=64, prefill_batch_tokens=64, max_itl_ms=0,
        stream_interval=1, async_scheduling=False, draft_batch_tokens=16, draft_catch_up_tokens=catch_up,
        draft_model_len=model_len,
        speculation=SpeculativeConfig(method="draft_model", model="small", num_speculative_tokens=num_drafts),
    )  # fmt: skip


def blocks(num_blocks: int = 64) -> BlockManager:
    return BlockManager(num_blocks=num_blocks, block_size=BLOCK_SIZE, prefix_key=b"k" * 32, enable_prefix_caching=True)


def decoding(manager: BlockManager, tokens: list[int], number: int = 0, salt: str = "") -> Sequence:
    """A sequence whose tokens but the last are computed."""
    seq = Sequence(number, f"r{number}", tokens, len(tokens) - 1, SamplingParams(), cache_salt=salt)
    assert manager.allocate(seq, BlockOwner.SEQUENCE, num_reusable_tokens=len(tokens) - 1, num_spare_blocks=0)
    seq.num_computed_tokens = len(tokens) - 1
    manager.register_computed(seq, len(tokens) - 1)
    return seq


def holding(number: int, table: list[int], hashes: list[bytes], num_tokens: int = 0) -> Sequence:
    """A decoding sequence with these blocks, the last of which has one token unless `num_tokens` says otherwise."""
    tokens = [9] * (num_tokens or BLOCK_SIZE * len(table) - 3)
    seq = Sequence(number, "r", tokens, len(tokens), SamplingParams(), block_table=table, block_hashes=hashes)
    seq.num_computed_tokens = len(seq) - 1
    return seq


def plan(drafting: ModelDrafting, seq: Sequence, num_wanted: int = 3, num_left: int = 99) -> Plan:
    part = drafting.plan(seq, num_wanted, num_left)
    return None if part is None else (part.first, part.end, part.num_drafts)


def step(drafting: ModelDrafting, seq: Sequence, num_right: int, num_wanted: int = 3) -> Plan:
    """A step in which the first `num_right` guesses are right."""
    drafting.begin([])
    planned = plan(drafting, seq, num_wanted)
    seq.num_computed_tokens = len(seq) + num_right
    seq.token_ids.extend([9] * (1 + num_right))
    drafting.settle(seq)
    return planned


def test_it_reads_what_it_has_not_read() -> None:
    manager = blocks()
    drafting, seq = ModelDrafting(config_of(), manager), decoding(manager, [*range(10)])
    assert step(drafting, seq, 1) == (0, 10, 3)  # its guesses after the tenth: two of them are read
    assert step(drafting, seq, 3) == (11, 12, 3)  # the first was right, and the engine's token came after it
    assert step(drafting, seq, 0) == (14, 16, 3)  # all were right, the last of which it has not read
    assert step(drafting, seq, 0, num_wanted=1) == (16, 17, 1)
    assert step(drafting, seq, 0) == (17, 18, 3)


def test_a_step_reads_no_more_than_it_may() -> None:
    manager = blocks()
    drafting = ModelDrafting(config_of(catch_up=12), manager)
    first, second, third = (decoding(manager, [number] * length, number) for number, length in enumerate((7, 20, 5)))
    drafting.begin([])
    assert [plan(drafting, seq) for seq in (first, second, third)] == [(0, 7, 3), (0, 4, 0), None]
    drafting.begin([])
    assert plan(drafting, second) == (4, 16, 0)
    drafting.begin([])
    assert plan(drafting, second) == (16, 20, 3)
    assert plan(drafting, third) == (0, 5, 3)
    drafting.begin([])
    exact = decoding(manager, [7] * 12, 4)
    assert plan(drafting, exact) == (0, 12, 3)


def test_nothing_is_read_for_an_answer_that_ends_before_the_first_guess() -> None:
    manager = blocks()
    drafting, seq = ModelDrafting(config_of(catch_up=12), manager), decoding(manager, [7] * 30)
    drafting.begin([])
    assert plan(drafting, seq, num_left=3) is None, "the third step gives the last token: there is nothing to guess"
    assert plan(drafting, seq, num_left=4) == (0, 12, 0)
    drafting = ModelDrafting(config_of(catch_up=12, model_len=32), manager)
    drafting.begin([])
    assert plan(drafting, decoding(manager, [8] * 30, 1)) is None, "nor before the draft model's positions end"


def test_a_sequence_is_read_in_whole_blocks() -> None:
    """A step clears a block that it fills in part, and other sequences may have read the rest of it."""
    manager, tokens = blocks(), [*range(40)]
    drafting = ModelDrafting(config_of(catch_up=15), manager)
    first, second = decoding(manager, tokens), decoding(manager, [*tokens[:38], 90, 91], 1)
    assert first.block_table[:9] == second.block_table[:9]
    drafting.begin([])
    assert plan(drafting, first) == (0, 12, 0)
    assert plan(drafting, second) is None, "three tokens are less than a block"


def test_no_guesses_where_positions_or_blocks_end() -> None:
    manager = blocks(4)
    drafting, seq = ModelDrafting(config_of(model_len=18), manager), decoding(manager, [*range(14)])
    assert len(seq.block_table) == 4
    drafting.begin([])
    assert plan(drafting, seq) is None, "three guesses need a fifth block"
    assert plan(drafting, seq, 2) == (0, 14, 2)
    drafting.settle(seq)
    drafting = ModelDrafting(config_of(model_len=15), manager)
    drafting.begin([])
    assert plan(drafting, seq) == (13, 14, 1)
    seq.token_ids.append(9)
    assert plan(drafting, seq) is None


def test_what_it_has_read_for_one_sequence_serves_others() -> None:
    manager = blocks()
    drafting, tokens = ModelDrafting(config_of(), manager), [*range(20)]
    seq = decoding(manager, tokens)
    step(drafting, seq, 0)
    drafting.begin([])
    plan(drafting, seq)
    manager.free(seq)
    again = decoding(manager, [*tokens[:18], 99, 98], 1)
    salted = decoding(manager, [*tokens], 2, salt="other")
    drafting.begin([])
    assert plan(drafting, again) == (16, 20, 3)
    assert plan(drafting, salted) == (0, 20, 3)


def test_a_block_that_another_sequence_wrote_to_has_not_been_read() -> None:
    drafting = ModelDrafting(config_of(), blocks())
    first = holding(0, [5, 6, 7], [b"a", b"b"])
    step(drafting, first, 0)
    drafting.begin([])
    plan(drafting, first, 1)
    drafting.begin([])
    assert plan(drafting, holding(1, [6, 8], [b"c"])) == (0, 5, 3)
    drafting.begin([])
    assert plan(drafting, holding(2, [5, 6, 7], [b"a", b"b"])) == (4, 9, 3)


def test_a_block_that_guesses_were_written_to_has_not_been_read() -> None:
    drafting = ModelDrafting(config_of(), blocks())
    first = holding(0, [5, 6, 7], [b"a", b"b"])
    step(drafting, first, 0)
    drafting.begin([])
    plan(drafting, first, 1)
    other = holding(1, [8, 6], [], num_tokens=3)
    drafting.begin([])
    assert plan(drafting, other) == (0, 3, 3), "it also computes the first two guesses, the second one in block 6"
    drafting.begin([])
    assert plan(drafting, holding(2, [5, 6, 7], [b"a", b"b"])) == (4, 9, 3)


def test_a_preempted_sequence_is_read_again() -> None:
    manager = blocks(8)
    scheduler = Scheduler(config_of(), manager, max_model_len=100, eos_token_ids=frozenset({1}))
    seq = Sequence(0, "r", [*range(2, 12)], 10, SamplingParams(max_tokens=20))
    scheduler.sequences.add(seq)
    scheduler.begin(output := scheduler.schedule())
    scheduler.apply(output, [[40]])
    output = scheduler.schedule()
    assert [(part.first, part.end, part.num_drafts) for part in output.draft_parts] == [(0, 11, 3)]
    scheduler.begin(output := scheduler.take_drafts(output, [[41, 42, 99]]))
    assert output.scheduled[0].draft_token_ids == [41, 42, 99]
    scheduler.apply(output, [[41, 42, 43, 44]])
    assert seq.num_drafted_tokens == 13
    scheduler.sequences.preempt(seq)
    assert (seq.num_drafted_tokens, seq.num_drafted_blocks) == (0, 0)


def test_the_order_of_a_step() -> None:
    """Sequences without drafts come first, then those with drafts, then prompts."""
    scheduler = Scheduler(config_of(catch_up=8), blocks(), max_model_len=100, eos_token_ids=frozenset({1}))
    for number, length in enumerate((3, 12, 2)):
        tokens = [number + 2] * length
        scheduler.sequences.add(Sequence(number, f"r{number}", tokens, length, SamplingParams(max_tokens=9)))
    scheduler.begin(output := scheduler.schedule())
    scheduler.apply(output, [[20], [21], [22]])
    scheduler.sequences.add(Sequence(3, "r3", [30, 31], 2, SamplingParams()))
    output = scheduler.schedule()
    assert shapes(output) == [("r1", 1), ("r2", 1), ("r0", 1), ("r3", 2)]
    assert parts_of(output.draft_parts) == [("r2", 0, 3, 3), ("r0", 0, 4, 3)]
    output = scheduler.take_drafts(output, [[5, 6, 7], [8, 9]])
    assert shapes(output) == [("r1", 1), ("r2", 4), ("r0", 3), ("r3", 2)]


def test_a_long_prompt_is_read_with_what_others_leave() -> None:
    scheduler = Scheduler(config_of(catch_up=12), blocks(), max_model_len=100, eos_token_ids=frozenset({1}))
    for number, length in enumerate((40, 3)):
        tokens = [number + 2] * length
        scheduler.sequences.add(Sequence(number, f"r{number}", tokens, length, SamplingParams(max_tokens=50)))
    scheduler.begin(output := scheduler.schedule())
    scheduler.apply(output, [[20], [21]])
    output = scheduler.schedule()
    assert parts_of(output.draft_parts) == [("r1", 0, 4, 3), ("r0", 0, 8, 0)]


def shapes(output: SchedulerOutput) -> list[tuple[str, int]]:
    return [(item.seq.request_id, item.num_new_tokens) for item in output.scheduled]


def parts_of(parts: list[DraftPart]) -> list[tuple[str, int, int, int]]:
    return [(part.seq.request_id, part.first, part.end, part.num_drafts) for part in parts]
