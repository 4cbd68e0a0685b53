"""The life of a request, event by event. No network, no clock."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from grpc import StatusCode

from protos import tandem_inference_pb2 as inference_pb
from protos import tandem_worker_pb2 as pb
from protos.tandem_kv_transfer_pb2 import Grant
from router.request_events import (
    AccountOverdue,
    Action,
    Emit,
    End,
    EnterQueue,
    Event,
    NoteFault,
    NoteSuccess,
    Plan,
    Planned,
    Rebalanced,
    SendCancel,
    SendGenerate,
    SendPrefill,
    SendReserve,
    Stopped,
    WorkerKey,
    WorkerLost,
    WorkerPair,
    WorkerSaid,
    WorkerStalled,
)
from router.request_state import Phase, RequestState
from router.retry_budget import ANSWERS_PER_TOKEN, RetryBudget
from rpc.errors import CorruptKV, NoWorker, TandemError

P, D, D2 = WorkerKey("p", "1"), WorkerKey("d", "1"), WorkerKey("d2", "1")
UNFINISHED = inference_pb.FINISH_REASON_UNSPECIFIED
LENGTH = inference_pb.FINISH_REASON_LENGTH
STOP = inference_pb.FINISH_REASON_STOP


def said(worker: WorkerKey, attempt: int, **event: object) -> WorkerSaid:
    return WorkerSaid(worker, pb.WorkerEvent(request_id="r", attempt=attempt, **event))  # type: ignore[arg-type]


def tokens(worker: WorkerKey, attempt: int, index: int, *ids: int, finish: int = UNFINISHED) -> WorkerSaid:
    message = pb.Tokens(index=index, token_ids=ids, finish_reason=finish)  # type: ignore[arg-type]
    return said(worker, attempt, tokens=message)


def failed(worker: WorkerKey, attempt: int, *, code: int = 15, can_retry: bool) -> WorkerSaid:
    return said(worker, attempt, failed=pb.Failed(code=code, message="why", can_retry=can_retry))


def prefilling() -> RequestState:
    state = RequestState(max_attempts=3, budget=RetryBudget())
    assert state.start() == [EnterQueue(is_return=False)]
    assert state.on(Planned(Plan(D, P))) == [SendReserve(D)]
    grant = Grant(grant_id=7)
    assert state.on(said(D, 1, granted=grant)) == [SendPrefill(P, grant)]
    return state


def emitted(actions: list[object]) -> list[tuple[int, list[int]]]:
    return [(a.offset, a.token_ids) for a in actions if isinstance(a, Emit)]


def with_logprobs(event: WorkerSaid, *token_ids: int) -> WorkerSaid:
    for token_id in token_ids:
        event.event.tokens.logprobs.add(sampled=inference_pb.Logprob(token_id=token_id))
    return event


def test_logprobs_travel_with_their_tokens() -> None:
    """So do those of a token that arrives before its turn."""
    state = prefilling()
    state.wants_logprobs = True
    assert state.on(with_logprobs(tokens(D, 1, 1, 6), 6)) == []
    emits = [a for a in state.on(with_logprobs(tokens(P, 1, 0, 5), 5)) if isinstance(a, Emit)]
    assert [[each.sampled.token_id for each in emit.logprobs] for emit in emits] == [[5], [6]]


@pytest.mark.parametrize(("wants", "come"), [(True, ()), (True, (5, 6)), (False, (5,))])
def test_a_worker_that_leaves_out_logprobs_is_not_believed(wants: bool, come: tuple[int, ...]) -> None:
    state = prefilling()
    state.wants_logprobs = wants
    actions = state.on(with_logprobs(tokens(P, 1, 0, 5), *come))
    assert NoteFault(P) in actions
    assert not emitted(actions)
    assert state.phase is Phase.QUEUED


def with_prompt_logprobs(event: WorkerSaid, num: int) -> WorkerSaid:
    for _ in range(num):
        event.event.tokens.prompt_logprobs.add()
    return event


@pytest.mark.parametrize(("num_due", "num_come"), [(3, 0), (3, 2), (0, 3), (3, 4)])
def test_a_worker_that_leaves_out_logprobs_of_the_prompt_is_not_believed(num_due: int, num_come: int) -> None:
    state = prefilling()
    state.num_prompt_logprobs = num_due
    actions = state.on(with_prompt_logprobs(tokens(P, 1, 0, 5), num_come))
    assert NoteFault(P) in actions
    assert not emitted(actions)


def test_logprobs_of_the_prompt_come_with_the_first_token_alone() -> None:
    state = prefilling()
    state.num_prompt_logprobs = 3
    assert state.on(tokens(D, 1, 1, 6)) == []
    emits = [a for a in state.on(with_prompt_logprobs(tokens(P, 1, 0, 5), 3)) if isinstance(a, Emit)]
    assert [len(emit.prompt_logprobs) for emit in emits] == [3, 0]
    assert NoteFault(D) in state.on(with_prompt_logprobs(tokens(D, 1, 2, 7), 3))
    state.on(Planned(Plan(D, None)))
    actions = state.on(tokens(D, 2, 2, 7))
    assert emitted(actions) == [(2, [7])], "the next worker goes on after them"


def test_disaggregated_from_queue_to_end() -> None:
    state = prefilling()
    assert emitted(state.on(tokens(P, 1, 0, 5))) == [(0, [5])]
    assert state.on(said(P, 1, handed_over=pb.HandedOver())) == [NoteSuccess(P), NoteSuccess(WorkerPair(P, D))]
    assert state.phase is Phase.DECODING
    assert emitted(state.on(tokens(D, 1, 1, 6))) == [(1, [6])]
    actions = state.on(tokens(D, 1, 2, 7, finish=LENGTH))
    assert emitted(actions) == [(2, [7])]
    assert NoteSuccess(D) in actions
    assert actions[-1] == End(LENGTH)
    assert state.token_ids == [5, 6, 7]


def test_the_usage_says_what_was_cached_where_the_prompt_was_first_computed() -> None:
    state = prefilling()
    state.on(said(P, 1, tokens=pb.Tokens(token_ids=[5], num_cached_tokens=32)))
    state.on(tokens(D, 1, 1, 6))
    assert state.num_cached_tokens == 32
    state.on(WorkerLost(D))
    state.on(Planned(Plan(D2, None)))
    state.on(said(D2, 2, tokens=pb.Tokens(index=2, token_ids=[7], num_cached_tokens=16)))
    assert (state.token_ids, state.num_cached_tokens) == ([5, 6, 7], 32)


def test_local_needs_no_grant() -> None:
    state = RequestState(max_attempts=3, budget=RetryBudget())
    state.start()
    assert state.on(Planned(Plan(D, None))) == [SendGenerate(D)]
    assert emitted(state.on(tokens(D, 1, 0, 5, finish=STOP))) == [(0, [5])]
    assert state.phase is Phase.DONE


def test_tokens_of_the_decode_worker_wait_for_the_first() -> None:
    state = prefilling()
    assert state.on(tokens(D, 1, 1, 6)) == []
    assert state.on(tokens(D, 1, 2, 7)) == []
    assert emitted(state.on(tokens(P, 1, 0, 5))) == [(0, [5]), (1, [6]), (2, [7])]


def test_the_end_waits_for_the_account_of_the_transfer() -> None:
    state = prefilling()
    state.on(tokens(P, 1, 0, 5))
    assert emitted(state.on(tokens(D, 1, 1, 6, finish=LENGTH))) == [(1, [6])]
    assert state.phase is not Phase.DONE
    actions = state.on(said(P, 1, handed_over=pb.HandedOver(stats=inference_pb.KVTransferStats(num_bytes=9))))
    assert actions[-1] == End(LENGTH)
    assert state.transfer is not None
    assert state.transfer.num_bytes == 9


def settling() -> RequestState:
    state = prefilling()
    state.on(tokens(P, 1, 0, 5))
    state.on(tokens(D, 1, 1, 6, finish=LENGTH))
    assert state.phase is Phase.SETTLING
    return state


@pytest.mark.parametrize(
    "event",
    [
        AccountOverdue(),
        WorkerLost(P),
        WorkerLost(D),
        WorkerStalled(P),
        WorkerStalled(D),
        failed(P, 1, can_retry=True),
        tokens(D, 1, 2, 7),
    ],
    ids=[
        "overdue",
        "prefill worker lost",
        "decode worker lost",
        "p stalled",
        "d stalled",
        "transfer failed",
        "nonsense",
    ],
)
def test_a_complete_answer_ends_well_whatever_becomes_of_its_account(event: Event) -> None:
    actions = settling().on(event)
    assert emitted(actions) == []
    assert actions[-1] == End(LENGTH)
    assert not [action for action in actions if isinstance(action, EnterQueue)]


def test_an_account_cannot_be_overdue_before_the_last_token() -> None:
    state = prefilling()
    assert state.on(AccountOverdue()) == []
    assert state.phase is Phase.PREFILLING


def test_all_workers_that_failed_the_request_are_avoided() -> None:
    state = RequestState(max_attempts=4, budget=RetryBudget())
    state.start()
    p2 = WorkerKey("p2", "1")
    for worker, avoided in ((P, {P}), (p2, {P, p2})):
        state.on(Planned(Plan(D, worker)))
        assert state.on(WorkerLost(worker))[-1] == EnterQueue(is_return=True, avoid=frozenset(avoided))


def test_where_nobody_is_left_the_error_says_what_happened_to_the_last_one() -> None:
    state = prefilling()
    state.on(WorkerLost(D))
    end = state.on(Stopped(LENGTH, NoWorker("no decode worker is available", retry_after_s=2)))[-1]
    assert isinstance(end, End)
    assert isinstance(end.error, NoWorker)
    assert end.error.message == "worker d was lost; no decode worker is available"
    assert end.error.retry_after_s == 2


def test_first_token_that_is_the_last_gives_the_grant_back() -> None:
    state = prefilling()
    actions = state.on(tokens(P, 1, 0, 5, finish=STOP))
    assert SendCancel(D, 1) in actions
    assert actions[-1] == End(STOP)


def test_busy_returns_to_the_front_and_costs_no_attempt() -> None:
    state = RequestState(max_attempts=1, budget=RetryBudget())
    state.start()
    for _ in range(5):
        state.on(Planned(Plan(D, P)))
        assert state.on(said(D, state.attempt, busy=pb.Busy())) == [EnterQueue(is_return=True)]


@pytest.mark.parametrize("how", [WorkerLost, WorkerStalled])
def test_prefill_worker_lost_before_commit_starts_again_elsewhere(how: type[WorkerLost | WorkerStalled]) -> None:
    state = prefilling()
    assert state.on(how(P)) == [
        SendCancel(D, 1),
        SendCancel(P, 1),
        EnterQueue(is_return=True, avoid=frozenset({P})),
    ]
    assert state.on(Planned(Plan(D, None))) == [SendGenerate(D)]
    assert emitted(state.on(tokens(D, 2, 0, 5))) == [(0, [5])]


@pytest.mark.parametrize("how", [WorkerLost, WorkerStalled])
def test_prefill_worker_lost_after_commit_does_not_matter(how: type[WorkerLost | WorkerStalled]) -> None:
    state = prefilling()
    state.on(tokens(P, 1, 0, 5))
    state.on(said(P, 1, handed_over=pb.HandedOver()))
    assert state.on(how(P)) == []


@pytest.mark.parametrize("how", [WorkerLost, WorkerStalled])
def test_decode_worker_lost_goes_on_at_the_next_index(how: type[WorkerLost | WorkerStalled]) -> None:
    state = prefilling()
    state.on(tokens(P, 1, 0, 5))
    state.on(said(P, 1, handed_over=pb.HandedOver()))
    state.on(tokens(D, 1, 1, 6))
    assert EnterQueue(is_return=True, avoid=frozenset({D})) in state.on(how(D))
    state.on(Planned(Plan(D2, None)))
    assert state.on(tokens(D, 1, 2, 99)) == []  # a late message of the first attempt
    assert emitted(state.on(tokens(D2, 2, 2, 7))) == [(2, [7])]
    assert state.token_ids == [5, 6, 7]


def test_a_stream_that_moves_goes_on_at_the_next_index() -> None:
    state = prefilling()
    assert state.on(Rebalanced(P)) == [], "it does not stream yet"
    state.on(tokens(P, 1, 0, 5))
    assert state.on(Rebalanced(P)) == [], "its KV is on the way"
    state.on(said(P, 1, handed_over=pb.HandedOver()))
    state.on(tokens(D, 1, 1, 6))
    assert state.on(Rebalanced(D)) == [], "it is there"
    expected = [SendCancel(D, 1), SendCancel(P, 1), EnterQueue(is_return=True, wanted=P)]
    assert state.on(Rebalanced(P)) == expected
    assert state.on(Rebalanced(P)) == [], "it is on its way"
    assert state.on(tokens(D, 1, 2, 7)) == [], "what comes late is computed again"
    assert state.on(Planned(Plan(P, None, is_stay=True))) == [SendGenerate(P)]
    assert emitted(state.on(tokens(P, 2, 2, 7))) == [(2, [7])]  # type: ignore[arg-type]
    assert (state.num_failures, state.num_futile) == (0, 0)


def test_the_first_retry_after_a_move_is_free() -> None:
    """The attempt that the stream left had brought tokens, so what failed before it does not count any more."""
    state = RequestState(max_attempts=2, budget=RetryBudget(0))
    state.start()
    state.on(Planned(Plan(D, None)))
    state.on(failed(D, 1, can_retry=True))
    state.on(Planned(Plan(D2, None)))
    state.on(tokens(D2, 2, 0, 5))
    state.on(Rebalanced(P))
    state.on(Planned(Plan(P, None, is_stay=True)))
    assert EnterQueue(is_return=True, avoid=frozenset({D, P})) in state.on(failed(P, 3, can_retry=True))


def test_the_transfer_is_that_of_the_last_attempt() -> None:
    state = prefilling()
    state.on(tokens(P, 1, 0, 5))
    state.on(said(P, 1, handed_over=pb.HandedOver(stats=inference_pb.KVTransferStats(num_bytes=3))))
    assert state.transfer is not None
    state.on(tokens(D, 1, 1, 6))
    state.on(Rebalanced(P))
    state.on(Planned(Plan(P, None, is_stay=True)))
    assert state.transfer is None


def test_one_that_has_not_begun_at_its_worker_does_not_move() -> None:
    state = RequestState(max_attempts=3, budget=RetryBudget())
    state.start()
    assert state.on(Rebalanced(P)) == []
    state.on(Planned(Plan(D, None)))
    assert state.on(Rebalanced(P)) == []
    state.on(tokens(D, 1, 0, 5))
    assert state.on(Rebalanced(P)) == [SendCancel(D, 1), EnterQueue(is_return=True, wanted=P)]


def test_who_meets_a_second_stall_stays_until_it_has_got_something() -> None:
    """Its own prompt may be what stalls the worker. If it moved again, it would go from worker to worker for ever."""
    state = RequestState(max_attempts=6, budget=RetryBudget())
    state.start()
    state.on(Planned(Plan(D, None)))
    assert EnterQueue(is_return=True, avoid=frozenset({D})) in state.on(WorkerStalled(D))
    assert state.on(WorkerStalled(D)) == []
    state.on(Planned(Plan(D2, None)))
    assert state.on(WorkerStalled(D2)) == []
    assert emitted(state.on(tokens(D2, 2, 0, 5))) == [(0, [5])]
    assert EnterQueue(is_return=True, avoid=frozenset({D, D2})) in state.on(WorkerStalled(D2))


@pytest.mark.parametrize("index", [0, 3])
def test_gap_or_repetition_ends_the_attempt_and_is_not_emitted(index: int) -> None:
    state = prefilling()
    state.on(tokens(P, 1, 0, 5))
    state.on(said(P, 1, handed_over=pb.HandedOver()))
    actions = state.on(tokens(D, 1, index, 8))
    assert emitted(actions) == []
    assert EnterQueue(is_return=True, avoid=frozenset({D})) in actions


@pytest.mark.parametrize(
    ("code", "error", "retry_after_s"),
    [
        (StatusCode.DATA_LOSS, CorruptKV, None),
        (StatusCode.FAILED_PRECONDITION, NoWorker, 1.0),  # the worker let go of an adapter; its record will say so
    ],
)
def test_gives_up_after_max_attempts_with_the_last_error(
    code: StatusCode, error: type[TandemError], retry_after_s: float | None
) -> None:
    state = RequestState(max_attempts=2, budget=RetryBudget())
    state.start()
    state.on(Planned(Plan(D, None)))
    assert isinstance(state.on(failed(D, 1, code=code.value[0], can_retry=True))[-1], EnterQueue)
    state.on(Planned(Plan(D, None)))
    end = state.on(failed(D, 2, code=code.value[0], can_retry=True))[-1]
    assert isinstance(end, End)
    assert isinstance(end.error, error)
    assert (end.error.message, end.error.retry_after_s) == ("worker d: why", retry_after_s)


def test_failure_that_cannot_be_retried_ends_at_once() -> None:
    state = prefilling()
    actions = state.on(failed(P, 1, code=3, can_retry=False))
    assert SendCancel(D, 1) in actions
    assert isinstance(actions[-1], End)


def test_stop_cancels_and_nothing_follows() -> None:
    state = prefilling()
    actions = state.on(Stopped())
    assert actions == [SendCancel(D, 1), SendCancel(P, 1), End(inference_pb.FINISH_REASON_ABORT)]
    assert state.on(tokens(P, 1, 0, 5)) == []
    assert state.on(Stopped(error=NoWorker("x"))) == []


def notes(actions: Sequence[Action]) -> list[Action]:
    return [action for action in actions if isinstance(action, NoteFault | NoteSuccess)]


@pytest.mark.parametrize(
    ("code", "can_retry", "is_fault"),
    [
        (StatusCode.INTERNAL, True, True),
        (StatusCode.CANCELLED, True, True),
        (StatusCode.INTERNAL, False, False),
        (StatusCode.INVALID_ARGUMENT, False, False),
        (StatusCode.INVALID_ARGUMENT, True, False),
        (StatusCode.UNAVAILABLE, True, False),
        (StatusCode.ABORTED, True, False),
        (StatusCode.FAILED_PRECONDITION, True, False),
        (StatusCode.DATA_LOSS, True, False),
    ],
    ids=lambda value: value.name if isinstance(value, StatusCode) else str(value),
)
@pytest.mark.parametrize("worker", [P, D], ids=["prefill", "decode"])
def test_only_a_failure_of_its_own_is_held_against_a_worker(
    worker: WorkerKey, code: StatusCode, can_retry: bool, is_fault: bool
) -> None:
    """A failure that may be either worker's is held against the pair: a transfer, which the prefill worker reports, and
    what one worker asked of the other."""
    actions = prefilling().on(failed(worker, 1, code=code.value[0], can_retry=can_retry))
    is_pairs = can_retry and (worker == P or code is StatusCode.INVALID_ARGUMENT)
    blamed = worker if is_fault else WorkerPair(P, D) if is_pairs else None
    assert notes(actions) == ([NoteFault(blamed)] if blamed else [])


def test_the_last_failure_counts_too() -> None:
    state = RequestState(max_attempts=1, budget=RetryBudget())
    state.start()
    state.on(Planned(Plan(D, None)))
    actions = state.on(failed(D, 1, code=StatusCode.INTERNAL.value[0], can_retry=True))
    assert actions[0] == NoteFault(D)
    assert isinstance(actions[-1], End)


@pytest.mark.parametrize(
    "event",
    [WorkerLost(D), WorkerStalled(D), Stopped(), said(D, 1, busy=pb.Busy())],
    ids=["lost", "stalled", "gone", "busy"],
)
def test_a_lost_session_a_client_that_leaves_and_a_full_worker_are_nobodys_fault(event: Event) -> None:
    state = RequestState(max_attempts=3, budget=RetryBudget())
    state.start()
    state.on(Planned(Plan(D, P)))
    assert notes(state.on(event)) == []


def test_success_is_a_prompt_handed_over_or_an_answer_completed() -> None:
    assert notes(settling().on(said(P, 1, handed_over=pb.HandedOver()))) == [
        NoteSuccess(P),
        NoteSuccess(WorkerPair(P, D)),
        NoteSuccess(D),
    ]
    assert notes(settling().on(AccountOverdue())) == [NoteSuccess(D)]
    assert notes(prefilling().on(tokens(P, 1, 0, 5, finish=STOP))) == [NoteSuccess(P)]
    assert notes(prefilling().on(tokens(P, 1, 0, 5))) == []


def test_an_answer_that_ends_by_a_stop_string_is_complete() -> None:
    budget = RetryBudget(1)
    assert budget.take(2)
    for _ in range(ANSWERS_PER_TOKEN):
        state = RequestState(max_attempts=3, budget=budget)
        state.start()
        state.on(Planned(Plan(D, None)))
        state.on(tokens(D, 1, 0, 5))
        assert notes(state.on(Stopped(STOP))) == [NoteSuccess(D)]
    assert budget.num_tokens == 1


def test_an_empty_budget_ends_the_request_with_what_failed_and_cancels_it() -> None:
    state = RequestState(max_attempts=4, budget=RetryBudget(0))
    state.start()
    state.on(Planned(Plan(D, None)))
    state.on(WorkerLost(D))
    state.on(Planned(Plan(D2, P)))
    actions = state.on(WorkerLost(P))
    end = actions.pop()
    assert actions == [SendCancel(D2, 2), SendCancel(P, 2)]
    assert isinstance(end, End)
    assert isinstance(end.error, NoWorker)
    assert end.error.message == "worker p was lost; not retried, since too many requests are being retried"


def test_a_stream_that_goes_on_each_time_may_lose_any_number_of_workers() -> None:
    """Only failures in a row without a new token count, and take from the budget."""
    state = RequestState(max_attempts=2, budget=RetryBudget(0))
    state.start()
    for index in range(10):
        worker = WorkerKey(f"d{index}", "1")
        state.on(Planned(Plan(worker, None)))
        tokens = pb.Tokens(index=index, token_ids=[index])
        state.on(WorkerSaid(worker, pb.WorkerEvent(request_id="r", attempt=state.attempt, tokens=tokens)))
        assert any(isinstance(action, EnterQueue) for action in state.on(WorkerLost(worker)))
    assert state.token_ids == list(range(10))
    last = WorkerKey("last", "1")
    state.on(Planned(Plan(last, None)))
    (end,) = (action for action in state.on(WorkerLost(last)) if isinstance(action, End))
    assert isinstance(end.error, NoWorker)
