"""The integers of a step, as they are sent to the other ranks of an engine."""

from __future__ import annotations

import random
from dataclasses import fields

import numpy as np
import pytest

from engine.attention import StepLayout
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import PENDING_TOKEN, BlockExport, ScheduledSequence, SchedulerOutput, Sequence
from engine.step_input import StepInput

BLOCK_SIZE = 4


def random_output(rng: random.Random) -> tuple[SchedulerOutput, dict[int, int]]:
    """A step of every kind of sequence, and where the previous step left pending tokens."""
    scheduled = []
    for number in range(rng.randrange(5)):
        length = rng.randrange(1, 30)
        seq = Sequence(number, str(number), [rng.randrange(97) for _ in range(length)], length, SamplingParams())
        seq.block_table = rng.sample(range(50), 8)
        seq.num_computed_tokens = rng.randrange(length)
        if rng.random() < 0.3:
            seq.prompt_logprobs = []
        num_new = rng.randrange(1, length - seq.num_computed_tokens + 1)
        if num_new == 1 == length - seq.num_computed_tokens and rng.random() < 0.5:
            seq.token_ids[-1] = PENDING_TOKEN
        drafts = [1, 2] if num_new == length - seq.num_computed_tokens and rng.random() < 0.3 else []
        scheduled.append(ScheduledSequence(seq, num_new + len(drafts), drafts))
    exports = [BlockExport("0", 0, (3,))] if rng.random() < 0.5 else []
    return SchedulerOutput(scheduled, exports), {number: 7 - number for number in range(5)}


def numbers_of(step: StepInput | StepLayout) -> dict[str, object]:
    found: dict[str, object] = {}
    for field in fields(step):
        value = getattr(step, field.name)
        if isinstance(value, StepLayout):
            found |= numbers_of(value)
        else:
            found[field.name] = (value.shape, value.tolist()) if isinstance(value, np.ndarray) else value
    return found


@pytest.mark.parametrize("seed", range(40))
def test_what_arrives_is_what_was_sent(seed: int) -> None:
    output, row_of = random_output(random.Random(seed))
    step = StepInput.of(output, BLOCK_SIZE, row_of)
    assert len(step.token_ids) == sum(item.num_new_tokens for item in output.scheduled)
    arrived = StepInput.from_bytes(step.to_bytes())
    assert numbers_of(arrived) == numbers_of(step)
    assert arrived.token_ids.flags.writeable
    assert type(arrived.has_exports) is bool


@pytest.mark.parametrize("seed", range(40))
def test_drafts_as_sequences_of_their_own(seed: int) -> None:
    """Each attends to what is before it and writes where it did; nothing else changes."""
    output, row_of = random_output(random.Random(seed))
    together = StepInput.of(output, BLOCK_SIZE, row_of)
    num_read_again = sum(item.end * len(item.draft_token_ids) for item in output.scheduled)
    assert numbers_of(StepInput.of(output, BLOCK_SIZE, row_of, num_read_again - 1)) == numbers_of(together)
    apart = StepInput.of(output, BLOCK_SIZE, row_of, num_read_again)
    changed = {"query_lens", "context_lens", "block_tables", "num_decodes"}
    before, after = numbers_of(together), numbers_of(apart)
    assert {name: before[name] for name in before.keys() - changed} == {
        name: after[name] for name in after.keys() - changed
    }
    layout, row, number = apart.layout, 0, 0
    for item in output.scheduled:
        lens = [1] * item.num_new_tokens if item.draft_token_ids else [item.num_new_tokens]
        for num_queries in lens:
            row += num_queries
            assert layout.query_lens[number] == num_queries
            assert layout.context_lens[number] == apart.positions[row - 1] + 1
            num_blocks = -(-int(layout.context_lens[number]) // BLOCK_SIZE)
            assert layout.block_tables[number][:num_blocks].tolist() == item.seq.block_table[:num_blocks]
            number += 1
    assert number == len(layout.query_lens)
    assert row == len(apart.token_ids)


@pytest.mark.parametrize(("nums", "num_decodes"), [([1, 1, 2, 1], 2), ([1, 3], 1), ([2], 0), ([1, 1], 2), ([], 0)])
def test_only_leading_sequences_of_one_token_decode(nums: list[int], num_decodes: int) -> None:
    scheduled = []
    for number, num_new in enumerate(nums):
        seq = Sequence(number, str(number), list(range(9)), 9, SamplingParams(), block_table=list(range(3)))
        seq.num_computed_tokens = 9 - num_new
        scheduled.append(ScheduledSequence(seq, num_new))
    assert StepInput.of(SchedulerOutput(scheduled, []), BLOCK_SIZE, {}).layout.num_decodes == num_decodes


def test_a_step_of_drafts_is_one_in_which_all_decode() -> None:
    scheduled = []
    for number, drafts in enumerate(([], [5, 6], [7])):
        seq = Sequence(number, str(number), list(range(9 + number)), 9, SamplingParams(), block_table=list(range(4)))
        seq.num_computed_tokens = len(seq) - 1
        scheduled.append(ScheduledSequence(seq, 1 + len(drafts), drafts))
    output = SchedulerOutput(scheduled, [])
    assert StepInput.of(output, BLOCK_SIZE, {}).layout.num_decodes == 1
    step = StepInput.of(output, BLOCK_SIZE, {}, 1000)
    assert step.layout.num_decodes == len(step.token_ids) == len(step.sample_rows) == 6
    assert step.layout.context_lens.tolist() == [9, 10, 11, 12, 11, 12]
