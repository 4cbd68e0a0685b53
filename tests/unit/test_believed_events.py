"""Which of a worker's events a request believes: those that its attempt can have, once, and in order. No network, no
clock."""

from __future__ import annotations

import pytest
from test_request_state import D2, LENGTH, D, P, emitted, prefilling, said, tokens

from protos import tandem_worker_pb2 as pb
from protos.tandem_kv_transfer_pb2 import Grant
from router.request_events import End, EnterQueue, NoteFault, NoteSuccess, Plan, Planned, SendCancel, WorkerKey
from router.request_state import RequestState
from router.retry_budget import RetryBudget


def test_busy_after_the_grant_is_not_believed() -> None:
    state = prefilling()
    actions = state.on(said(D, 1, busy=pb.Busy()))
    cancels = [SendCancel(D, 1), SendCancel(P, 1)]
    assert actions == [NoteFault(D), *cancels, EnterQueue(is_return=True, avoid=frozenset({D}))]


def test_busy_after_the_first_token_is_not_believed() -> None:
    """What it has begun must be cancelled there."""
    state = RequestState(max_attempts=3, budget=RetryBudget())
    state.start()
    state.on(Planned(Plan(D, None)))
    state.on(tokens(D, 1, 0, 5))
    actions = state.on(said(D, 1, busy=pb.Busy()))
    assert actions == [NoteFault(D), SendCancel(D, 1), EnterQueue(is_return=True, avoid=frozenset({D}))]


def test_nonsense_of_a_worker_is_not_believed() -> None:
    state = prefilling()
    actions = state.on(said(P, 1, granted=Grant()))
    assert EnterQueue(is_return=True, avoid=frozenset({P})) in actions


def test_a_handover_is_believed_once_and_not_before_the_prompt_was_sent() -> None:
    state = RequestState(max_attempts=3, budget=RetryBudget())
    state.start()
    state.on(Planned(Plan(D, P)))
    handed_over = pb.HandedOver()
    assert NoteFault(P) in state.on(said(P, 1, handed_over=handed_over))
    state = prefilling()
    state.on(tokens(P, 1, 0, 5))
    assert NoteSuccess(P) in state.on(said(P, 1, handed_over=handed_over))
    assert NoteFault(P) in state.on(said(P, 1, handed_over=handed_over))


@pytest.mark.parametrize("stranger", [D2, WorkerKey("d", "0")], ids=["another worker", "a predecessor's process"])
def test_what_a_worker_of_no_part_in_the_attempt_says_is_not_heard(stranger: WorkerKey) -> None:
    state = prefilling()
    events = {"tokens": pb.Tokens(token_ids=[9]), "busy": pb.Busy(), "failed": pb.Failed(can_retry=True)}
    for name, event in events.items():
        assert state.on(said(stranger, 1, **{name: event})) == [], name
    assert emitted(state.on(tokens(P, 1, 0, 5))) == [(0, [5])]  # type: ignore[arg-type]
    assert state.on(tokens(stranger, 1, 1, 9)) == []
    assert emitted(state.on(tokens(D, 1, 1, 6))) == [(1, [6])]  # type: ignore[arg-type]


def test_after_an_early_token_that_ends_the_attempt_no_other_counts() -> None:
    state = prefilling()
    state.on(tokens(D, 1, 2, 7))
    state.on(tokens(D, 1, 1, 6))
    actions = state.on(tokens(P, 1, 0, 5))
    assert emitted(actions) == [(0, [5])]  # type: ignore[arg-type]
    assert [action for action in actions if isinstance(action, EnterQueue)] == [
        EnterQueue(is_return=True, avoid=frozenset({D}))
    ]
    assert (state.token_ids, state.num_failures) == ([5], 1)


def test_no_early_token_follows_the_last_one() -> None:
    state = prefilling()
    state.on(tokens(D, 1, 1, 6, finish=LENGTH))
    state.on(tokens(D, 1, 2, 7))
    assert emitted(state.on(tokens(P, 1, 0, 5))) == [(0, [5]), (1, [6])]  # type: ignore[arg-type]
    assert state.on(said(P, 1, handed_over=pb.HandedOver()))[-1:] == [End(LENGTH, None)]
