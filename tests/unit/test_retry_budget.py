"""How many retries all requests together get: in a sick cluster, and in one where a request fails now and then."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from protos import tandem_inference_pb2 as inference_pb
from protos import tandem_worker_pb2 as pb
from router.lifecycle import MAX_ATTEMPTS
from router.request_events import Action, End, Plan, Planned, WorkerKey, WorkerSaid
from router.request_state import Phase, RequestState
from router.retry_budget import ANSWERS_PER_TOKEN, RetryBudget
from rpc.errors import InternalError, NoWorker

D = WorkerKey("d", "1")
INTERNAL = 13


def ask(budget: RetryBudget, fails: Callable[[], bool]) -> tuple[int, End]:
    """Run one request from start to end. Returns the number of attempts, and its end."""
    state = RequestState(MAX_ATTEMPTS, budget)
    actions: list[Action] = state.start()
    while state.phase is not Phase.DONE:
        state.on(Planned(Plan(D, None)))
        said = pb.WorkerEvent(request_id="r", attempt=state.attempt)
        if fails():
            said.failed.CopyFrom(pb.Failed(code=INTERNAL, message="why", can_retry=True))
        else:
            said.tokens.CopyFrom(pb.Tokens(token_ids=[5], finish_reason=inference_pb.FINISH_REASON_LENGTH))
        actions = state.on(WorkerSaid(D, said))
    end = actions[-1]
    assert isinstance(end, End)
    return state.attempt, end


def test_the_first_retry_is_free_and_the_others_are_not() -> None:
    budget = RetryBudget(2)
    assert all(budget.take(1) for _ in range(100))
    assert [budget.take(2), budget.take(3), budget.take(2)] == [True, True, False]
    assert budget.take(1)


def test_ten_answers_are_a_token_and_a_full_bucket_gets_no_fuller() -> None:
    budget = RetryBudget(2)
    assert budget.take(2)
    for _ in range(ANSWERS_PER_TOKEN - 1):
        budget.note_answer()
    assert budget.num_tokens == 1
    budget.note_answer()
    assert budget.num_tokens == 2
    for _ in range(10 * ANSWERS_PER_TOKEN):
        budget.note_answer()
    assert budget.num_tokens == 2


def test_a_bucket_cannot_be_less_than_empty() -> None:
    with pytest.raises(ValueError, match="capacity must be at least 0"):
        RetryBudget(-1)


def test_a_sick_cluster_gets_twice_the_work_not_four_times() -> None:
    num_requests = 1000
    unbounded = RetryBudget(MAX_ATTEMPTS * num_requests)
    assert sum(ask(unbounded, lambda: True)[0] for _ in range(num_requests)) == MAX_ATTEMPTS * num_requests
    budget = RetryBudget()
    num_attempts = sum(ask(budget, lambda: True)[0] for _ in range(num_requests))
    assert num_attempts == 2 * num_requests + 100


def test_where_one_attempt_in_five_fails_nobody_notices() -> None:
    chance = random.Random(1)
    budget = RetryBudget()
    failed = [end for _ in range(5000) if (end := ask(budget, lambda: chance.random() < 0.2)[1]).error]
    assert not [end for end in failed if isinstance(end.error, NoWorker)]
    assert budget.num_tokens > 50


def test_who_is_refused_hears_why_and_when_to_come_again() -> None:
    num_attempts, end = ask(RetryBudget(0), lambda: True)
    assert num_attempts == 2
    assert isinstance(end.error, NoWorker)
    assert end.error.message == "worker d: why; not retried, since too many requests are being retried"
    assert end.error.retry_after_s is not None
    assert end.finish_reason == inference_pb.FINISH_REASON_ERROR


def test_who_has_no_attempt_left_hears_the_failure_itself_and_pays_nothing() -> None:
    budget = RetryBudget(MAX_ATTEMPTS - 2)
    num_attempts, end = ask(budget, lambda: True)
    assert num_attempts == MAX_ATTEMPTS
    assert isinstance(end.error, InternalError)
    assert budget.num_tokens == 0


def test_only_answers_put_something_back() -> None:
    budget = RetryBudget(1)
    assert budget.take(2)
    for _ in range(ANSWERS_PER_TOKEN):
        ask(budget, lambda: True)
    assert budget.num_tokens == 0
    for _ in range(ANSWERS_PER_TOKEN):
        ask(budget, lambda: False)
    assert budget.num_tokens == 1
