"""How long the router expects a request to take."""

from __future__ import annotations

import pytest

from router.forecast import FREE_BATCH, PROMPT_OVERHEAD_TOKENS, Forecast
from router.queue_pace import QueuePace


def forecast_of(num_answering: int, seconds_per_token: float, num_seconds: int = 20) -> Forecast:
    """The forecast after `num_answering` answers at once, which emit a token each every `seconds_per_token`. Answers
    have 10 tokens."""
    forecast = Forecast(num_running=num_answering)
    for _ in range(num_answering):
        forecast.answering(0.0)
    for step in range(round(num_seconds / seconds_per_token)):
        forecast.emitted(num_answering, (step + 1) * seconds_per_token)
    forecast.ended(10, float(num_seconds), is_complete=True)
    forecast.answering(float(num_seconds))
    return forecast


def test_nobody_is_refused_on_a_guess() -> None:
    assert QueuePace().queued_s(10_000) == 0
    assert Forecast().needed_s(10.0, 20_000, 1, 10_000) == 0
    assert Forecast(num_running=5).needed_s(0.0, 20_000, 1, 10_000) == 0
    idle = forecast_of(1, 0.1)
    idle.num_running = 0
    assert idle.needed_s(0, 10_000, 1, 10_000) == 0, "where nothing runs, it is tried"


def test_an_answer_is_as_long_as_answers_are_within_its_bounds() -> None:
    forecast = forecast_of(1, 0.1)
    forecast.num_running = 0
    assert forecast.answer_s(0, 1000) == pytest.approx(1.0, rel=0.05)
    assert forecast.answer_s(0, 5) == pytest.approx(0.5, rel=0.05)
    assert forecast.answer_s(20, 1000) == pytest.approx(2.0, rel=0.05)


def test_more_answers_than_were_seen_take_longer() -> None:
    forecast = forecast_of(1, 0.1)
    alone_s = forecast.answer_s(10, 10)
    forecast.num_running = 100
    assert forecast.answer_s(10, 10) == pytest.approx(alone_s * (101 + FREE_BATCH) / (2 + FREE_BATCH), rel=0.05)
    many_s = forecast.answer_s(10, 10, num_answers=51)
    assert many_s == pytest.approx(alone_s * (151 + FREE_BATCH) / (2 + FREE_BATCH), rel=0.05)
    assert forecast.needed_s(0, 0, 10, 10, 51) == pytest.approx(many_s)


def test_it_learns_from_answers_that_never_end() -> None:
    """With 60 answers at once a token takes a second. One answer has completed; the router learns from the tokens of
    the others, too, how slow they are."""
    forecast = forecast_of(60, 1.0)
    assert forecast.needed_s(0, 10, 10, 10) > 8


def test_a_prompt_waits_for_what_is_before_it_at_its_worker() -> None:
    forecast = Forecast(num_running=1)
    for _ in range(20):
        forecast.computed(1000 - PROMPT_OVERHEAD_TOKENS, 1.0)
    assert forecast.needed_s(0, 3000 + 1000 - PROMPT_OVERHEAD_TOKENS, 0, 0) == pytest.approx(4.0, rel=0.05)


def test_what_tiny_prompts_take_is_not_held_against_long_ones() -> None:
    forecast = Forecast(num_running=1)
    for _ in range(20):
        forecast.computed(4, 0.04)
    assert forecast.needed_s(0, 1500, 0, 0) < 1


def test_the_queue_counts_while_there_is_one() -> None:
    pace = QueuePace()
    pace.queued(0.0)
    for number in range(20):
        pace.planned(100, (number + 1) * 0.5, has_waited=True, is_last=number == 19)
    assert pace.queued_s(1000) == pytest.approx(5.0)
    pace.queued(1000.0)  # the idle time before this is not counted
    pace.planned(100, 1000.5, has_waited=True, is_last=True)
    assert pace.queued_s(1000) == pytest.approx(5.0)
    pace.queued(2000.0)
    pace.planned(100, 2000.1, has_waited=False, is_last=True)  # there was room at once: the router took this long
    assert pace.queued_s(1000) == pytest.approx(5.0)
    assert Forecast(num_running=1).needed_s(pace.queued_s(1000), 0, 0, 0) == pytest.approx(5.0)


def test_one_tiny_prompt_that_met_a_pause_refuses_no_long_one() -> None:
    """A refused prompt is never computed, so nothing would correct the estimate."""
    forecast = Forecast(num_running=1)
    forecast.computed(4, 2.0)
    assert forecast.needed_s(0, 3500, 0, 0) < 4
