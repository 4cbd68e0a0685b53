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
