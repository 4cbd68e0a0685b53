"""The scheduler keeps steps as short as asked, on machines of any speed."""

from __future__ import annotations

import random

import pytest

from engine.scheduling.pace import MIN_BUDGET, UNKNOWN_BUDGET, StepPace


def step(
    pace: StepPace, *, decode_s: float, token_s: float, num_waiting: int = 1, noise: random.Random | None = None
) -> float:
    """One step of a machine that decodes and always has prompts to prefill. Returns the step's time."""
    num_tokens = pace.num_prefill_tokens(num_waiting)
    assert num_tokens is not None
    if not num_tokens:  # now and then the pace measures decoding alone
        pace.note(num_decoding=4, num_prefill_tokens=0, seconds=decode_s)
        num_tokens = pace.num_prefill_tokens(num_waiting)
        assert num_tokens
    seconds = (decode_s + token_s * num_tokens) * (noise.uniform(0.8, 1.3) if noise else 1.0)
    pace.note(num_decoding=4, num_prefill_tokens=num_tokens, seconds=seconds)
    return seconds


def warmed_up(max_itl_s: float, *, decode_s: float, token_s: float) -> StepPace:
    pace = StepPace(max_itl_s)
    assert pace.num_prefill_tokens(1) == UNKNOWN_BUDGET
    pace.note(num_decoding=0, num_prefill_tokens=512, seconds=512 * token_s)
    pace.note(num_decoding=4, num_prefill_tokens=0, seconds=decode_s)
    return pace


@pytest.mark.parametrize(("decode_s", "token_s"), [(0.02, 1e-3), (0.01, 25e-6), (0.001, 1e-6), (0.03, 1e-3)])
def test_a_step_takes_what_was_asked(decode_s: float, token_s: float) -> None:
    pace = warmed_up(0.05, decode_s=decode_s, token_s=token_s)
    for _ in range(20):
        assert 0.045 <= step(pace, decode_s=decode_s, token_s=token_s) <= 0.0501


@pytest.mark.parametrize(("num_waiting", "expected_s"), [(0, 0.05), (1, 0.05), (2, 0.075), (7, 0.2), (100, 0.2)])
def test_it_may_take_half_as_long_again_for_each_further_prompt(num_waiting: int, expected_s: float) -> None:
    pace = warmed_up(0.05, decode_s=0.02, token_s=5e-4)
    for _ in range(20):
        assert step(pace, decode_s=0.02, token_s=5e-4, num_waiting=num_waiting) == pytest.approx(expected_s, rel=0.02)


def test_it_follows_a_machine_that_becomes_slower_and_faster_again() -> None:
    pace = warmed_up(0.05, decode_s=0.01, token_s=1e-4)
    for token_s in (4e-4, 1e-4):
        for _ in range(20):
            step(pace, decode_s=0.01, token_s=token_s)
        assert 0.04 <= step(pace, decode_s=0.01, token_s=token_s) <= 0.051


def test_noise_does_not_carry_it_away() -> None:
    pace, noise = warmed_up(0.05, decode_s=0.02, token_s=5e-4), random.Random(1)
    seconds = sorted(step(pace, decode_s=0.02, token_s=5e-4, noise=noise) for _ in range(300))
    assert 0.04 < seconds[150] < 0.055
    assert seconds[-1] < 0.1


def test_half_of_what_decoding_takes_less_is_believed_at_once() -> None:
    pace = warmed_up(0.05, decode_s=0.02, token_s=5e-4)
    pace.note(num_decoding=4, num_prefill_tokens=0, seconds=0.016)
    assert pace.num_prefill_tokens(1) == int((0.05 - 0.018) / 5e-4)


def test_the_last_tokens_of_a_prompt_say_nothing_of_what_many_take() -> None:
    """A step with a few prompt tokens takes as long as one without, apart from noise."""
    pace = warmed_up(0.05, decode_s=0.02, token_s=5e-4)
    for _ in range(5):
        pace.note(num_decoding=4, num_prefill_tokens=2, seconds=0.025)
    assert step(pace, decode_s=0.02, token_s=5e-4) == pytest.approx(0.05, rel=0.02)


def test_prompts_that_noise_hides_do_not_make_steps_endless() -> None:
    """As if a tenth of each step were the prompt's."""
    pace = warmed_up(0.05, decode_s=0.02, token_s=5e-4)
    for _ in range(100):
        pace.note(num_decoding=4, num_prefill_tokens=64, seconds=0.019)
    pace.note(num_decoding=4, num_prefill_tokens=0, seconds=0.02)
    assert pace.num_prefill_tokens(1) == pytest.approx((0.05 - 0.02) / (0.1 * 0.019 / 64), rel=0.01)


def test_prompts_beside_which_nothing_decodes_put_off_nobody() -> None:
    pace = warmed_up(0.05, decode_s=0.02, token_s=5e-4)
    for _ in range(20):
        pace.note(num_decoding=0, num_prefill_tokens=512, seconds=512 * 5e-4)
    assert pace.num_prefill_tokens(1)


@pytest.mark.parametrize("pause_s", [0.5, 5.0])
def test_a_pause_is_forgotten_though_prompts_come_without_end(pause_s: float) -> None:
    pace = warmed_up(0.04, decode_s=0.02, token_s=5e-4)
    pace.note(num_decoding=4, num_prefill_tokens=0, seconds=pause_s)
    for _ in range(100):
        step(pace, decode_s=0.02, token_s=5e-4)
    assert 0.035 <= step(pace, decode_s=0.02, token_s=5e-4) <= 0.0401


def test_the_end_of_a_heavy_load_is_noticed_though_prompts_come_without_end() -> None:
    pace = warmed_up(0.04, decode_s=0.2, token_s=5e-4)
    for _ in range(100):
        step(pace, decode_s=0.01, token_s=5e-4)
    assert 0.035 <= step(pace, decode_s=0.01, token_s=5e-4) <= 0.0401


def test_prompts_get_on_where_decoding_alone_takes_too_long() -> None:
    pace = warmed_up(0.05, decode_s=0.2, token_s=1e-3)
    assert step(pace, decode_s=0.2, token_s=1e-3) == pytest.approx(0.3, rel=0.02)
    slow = warmed_up(0.05, decode_s=0.049, token_s=0.1)
    assert slow.num_prefill_tokens(1) == MIN_BUDGET


def test_without_an_aim_there_is_no_limit() -> None:
    pace = StepPace(0)
    pace.note(num_decoding=4, num_prefill_tokens=512, seconds=9.0)
    assert pace.num_prefill_tokens(1) is None
