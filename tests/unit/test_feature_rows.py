"""Where the features of the last step are, and which tokens have none."""

from __future__ import annotations

from engine.running.feature_rows import NO_FEATURE, FeatureRows
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import ScheduledSequence, SchedulerOutput, Sequence


def scheduled(seq_id: int, first: int, num_tokens: int) -> ScheduledSequence:
    seq = Sequence(seq_id, f"r{seq_id}", [9] * 20, 20, SamplingParams(), num_computed_tokens=first)
    return ScheduledSequence(seq, num_tokens)


def rows_of(rows: FeatureRows, *items: ScheduledSequence) -> list[int]:
    return rows.next_step(SchedulerOutput(list(items), [])).tolist()


def test_rows_of_the_step_before_and_of_this_one() -> None:
    rows = FeatureRows()
    assert rows_of(rows, scheduled(1, 0, 3), scheduled(2, 4, 2)) == [NO_FEATURE, 1, 2, NO_FEATURE, 4]
    assert [rows.find(1, position) for position in range(4)] == [1, 2, 3, NO_FEATURE]
    assert [rows.find(2, position) for position in range(3, 7)] == [NO_FEATURE, 4, 5, NO_FEATURE]
    # Five rows of the step before come first. Sequence 2 goes on after a token that was dropped.
    assert rows_of(rows, scheduled(2, 5, 1), scheduled(1, 3, 2)) == [4, 3, 5 + 2]


def test_a_sequence_that_skips_a_step_has_no_feature() -> None:
    """What is in its rows belongs to others."""
    rows = FeatureRows()
    rows_of(rows, scheduled(1, 0, 3), scheduled(2, 0, 1))
    rows_of(rows, scheduled(2, 1, 4))
    assert rows.find(1, 2) == NO_FEATURE
    assert rows_of(rows, scheduled(1, 3, 2)) == [NO_FEATURE, 4 + 1]


def test_a_gap_is_no_feature() -> None:
    rows = FeatureRows()
    rows_of(rows, scheduled(1, 0, 3))
    assert rows_of(rows, scheduled(1, 4, 1)) == [NO_FEATURE]
