"""What the router learns about the cost of prompts."""

from __future__ import annotations

import random

import pytest

from router.costs import PROMPT_OVERHEAD_TOKENS, Costs
from router.fading import HALF_LIFE_S, FadingLine
from router.request_events import WorkerKey

FAST, SLOW, NEW = (WorkerKey(name, "1") for name in ("fast", "slow", "new"))
LENGTHS = (50, 3000, 200, 1000, 500, 4000) * 4


def line_of(fixed_s: float, per_token_s: float, overhead_tokens: float | None = None) -> FadingLine:
    line = FadingLine(overhead_tokens)
    for num_tokens in LENGTHS:
        line.add(num_tokens, fixed_s + per_token_s * num_tokens, 0.0)
    return line


@pytest.mark.parametrize(("fixed_s", "per_token_s"), [(0.005, 2e-5), (0.0, 6e-4), (0.01, 0.0)])
def test_what_is_fixed_and_what_each_token_adds_are_told_apart(fixed_s: float, per_token_s: float) -> None:
    line = line_of(fixed_s, per_token_s)
    for num_tokens in (20, 2000, 8000):
        assert line.at(num_tokens) == pytest.approx(fixed_s + per_token_s * num_tokens, rel=0.02, abs=1e-5)


def test_prompts_of_one_length_do_not_tell_what_a_token_costs() -> None:
    prompts, handovers = FadingLine(PROMPT_OVERHEAD_TOKENS), FadingLine()
    for line in (prompts, handovers):
        for _ in range(20):
            line.add(1000 - PROMPT_OVERHEAD_TOKENS, 1.0, 0.0)
    assert prompts.at(2000 - PROMPT_OVERHEAD_TOKENS) == pytest.approx(2.0)
    assert handovers.at(10_000) == pytest.approx(1.0)


def test_more_tokens_never_cost_less_and_nothing_costs_less_than_nothing() -> None:
    line = FadingLine()
    for num_tokens, seconds in ((100, 5.0), (1000, 1.0)) * 5:
        line.add(num_tokens, seconds, 0.0)
    assert 0 <= line.at(0) <= line.at(100) <= line.at(10_000)
    steep = FadingLine()
    for num_tokens in (1000, 2000) * 5:
        steep.add(num_tokens, (num_tokens - 900) / 100, 0.0)
    assert steep.at(0) >= 0


def test_a_process_that_was_held_up_is_soon_forgotten() -> None:
    line = line_of(0.0, 1e-3)
    before_s = line.at(1000)
    line.add(1000, 1000.0, 0.0)
    assert line.at(1000) < 1.5 * before_s
    for num_tokens in LENGTHS:
        line.add(num_tokens, num_tokens / 1000, 0.0)
    assert line.at(1000) == pytest.approx(before_s, rel=0.1)


def test_a_worker_that_has_become_slow_is_soon_known() -> None:
    costs = Costs()
    for seconds_per_token in (1e-3, 1e-1):
        for num_tokens in LENGTHS:
            costs.computed(SLOW, num_tokens, seconds_per_token * num_tokens, 0.0)
    assert 50 < costs.prompt_s(SLOW, 1000, 0.0) < 110


def test_before_anything_was_seen_tokens_decide_and_moving_is_free() -> None:
    costs = Costs()
    assert costs.prompt_s(FAST, 1000, 0.0) == costs.prompt_s(SLOW, 1000, 0.0)
    assert costs.handover_s(1000, 0.0) == 0


def test_of_a_worker_that_is_new_what_is_known_of_all_is_thought() -> None:
    costs = Costs()
    for num_tokens in LENGTHS:
        costs.computed(FAST, num_tokens, 1e-4 * num_tokens, 0.0)
    assert costs.prompt_s(NEW, 1000, 0.0) == pytest.approx(0.1, rel=0.2)
    for num_tokens in LENGTHS:
        costs.computed(SLOW, num_tokens, 1e-2 * num_tokens, 0.0)
    assert costs.prompt_s(FAST, 1000, 0.0) < 0.15 < 8 < costs.prompt_s(SLOW, 1000, 0.0)
    costs.forget(FAST)
    assert costs.prompt_s(FAST, 1000, 0.0) == costs.prompt_s(NEW, 1000, 0.0)


def test_a_slow_worker_is_tried_again_after_long_and_so_is_a_slow_way() -> None:
    costs = Costs()
    for num_tokens in LENGTHS:
        costs.computed(SLOW, num_tokens, 1e-2 * num_tokens, 0.0)
        costs.handed_over(num_tokens, 5.0, 0.0)
    later_s = 8 * HALF_LIFE_S
    for num_tokens in LENGTHS:
        costs.computed(FAST, num_tokens, 1e-4 * num_tokens, later_s)
    assert costs.prompt_s(SLOW, 1000, later_s) < 1
    assert costs.handover_s(1000, 0.0) == pytest.approx(5, rel=0.1)
    assert costs.handover_s(1000, later_s) < 1


def test_a_prompt_that_is_all_cached_costs_nothing_at_the_least() -> None:
    """A negative number close to zero must not come up: its powers are complex."""
    draw = random.Random(1)
    for _ in range(2000):
        costs = Costs()
        for _ in range(draw.randint(1, 6)):
            num_tokens = draw.randint(1, 4000)
            costs.computed(SLOW, num_tokens, draw.random() * num_tokens**1.5, 0.0)
        assert isinstance(costs.prompt_s(SLOW, 0, 0.0), float)


def test_a_worker_that_starts_slowly_is_not_taken_for_a_slow_one() -> None:
    costs = Costs()
    for num_tokens in LENGTHS:
        costs.computed(FAST, num_tokens, 1e-3 * num_tokens, 0.0)
    costs.computed(NEW, 1000, 60.0, 0.0)
    assert costs.prompt_s(NEW, 1000, 0.0) < 5


def test_what_took_no_time_once_may_take_some_later() -> None:
    line = FadingLine()
    for seconds in [0.0] * 5 + [1.0] * 60:
        line.add(100, seconds, 0.0)
    assert line.at(100) > 0.5


def test_what_waits_in_a_burst_is_not_expected_to_take_no_time() -> None:
    """A worker that computes its first four prompts in one step has shown no cost of a token, and is no faster than
    others for that."""
    costs = Costs()
    for num_before in range(4):
        costs.computed(SLOW, 256 * (num_before + 1), 0.1, 0.0)
    assert costs.prompt_s(SLOW, 1024, 0.0) == pytest.approx(0.1, rel=0.1)
    assert costs.prompt_s(SLOW, 100 * 1024, 0.0) > 5
