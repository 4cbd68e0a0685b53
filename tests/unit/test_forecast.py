"""What the router expects of a request's time."""

from __future__ import annotations

import pytest

from router.forecast import Forecast


def busy_forecast(seconds_per_prompt: float = 0.5) -> Forecast:
    """After 40 prompts of 100 tokens, one computed after the other, and answers of 11 tokens within a second."""
    forecast = Forecast()
    for _ in range(40):
        forecast.entered(100, 0.0)
    for number in range(40):
        forecast.computed(100, seconds_per_prompt * (number + 1))
        forecast.answered(11, 1.0)
    return forecast


def test_a_request_waits_for_all_that_is_ahead() -> None:
    forecast = busy_forecast()
    forecast.entered(300, 100.0)
    assert forecast.needed_s(100, 11, 11) == pytest.approx(400 * 0.005 + 11 * 0.1)
    forecast.left(300)


def test_nobody_is_refused_on_a_guess() -> None:
    assert Forecast().needed_s(10_000, 1, 10_000) == 0
    unknown = Forecast()
    unknown.entered(10_000, 0.0)
    assert unknown.needed_s(10_000, 1, 10_000) == 0
    assert busy_forecast().needed_s(10_000, 1, 10_000) == 0, "where nothing is ahead, it is tried"


def test_an_answer_is_as_long_as_answers_are_within_its_bounds() -> None:
    forecast = busy_forecast()
    assert forecast.answer_s(0, 1000) == pytest.approx(1.1)
    assert forecast.answer_s(0, 5) == pytest.approx(0.5)
    assert forecast.answer_s(20, 1000) == pytest.approx(2.0)


def test_idle_time_is_not_counted() -> None:
    forecast = Forecast()
    for start_s in (0.0, 1000.0, 2000.0):
        forecast.entered(100, start_s)
        forecast.computed(100, start_s + 0.5)
    forecast.entered(100, 3000.0)
    assert forecast.needed_s(100, 0, 1) == pytest.approx(1.0)


def test_what_was_long_ago_counts_little() -> None:
    forecast = busy_forecast(seconds_per_prompt=5.0)
    for number in range(100):  # 25 seconds at a quarter of a second each
        forecast.entered(100, 1000 + number * 0.25)
        forecast.computed(100, 1000 + (number + 1) * 0.25)
    forecast.entered(100, 2000.0)
    assert forecast.needed_s(100, 0, 0) == pytest.approx(0.5, rel=0.2)


def test_one_long_pause_is_soon_forgotten() -> None:
    forecast = busy_forecast()
    forecast.entered(100, 1000.0)
    forecast.computed(100, 1060.0)  # the router stood still, or nobody was there
    for number in range(40):
        forecast.entered(100, 2000 + number)
        forecast.computed(100, 2000 + number + 0.5)
    forecast.entered(100, 3000.0)
    assert forecast.needed_s(100, 0, 0) < 4
