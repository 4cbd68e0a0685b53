"""What a soak's history proves, and which faults are planned."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from rpc.errors import DeadlinePassed, InternalError, NoWorker, Overloaded, TandemError, Unreachable
from tandem.answer import StreamBroken
from tandem.chaos.asked import Asked, Ending, Heard, Way
from tandem.chaos.faults import DOORS, EXCHANGE_S, GRACE_S, RECOVERY_S, FaultKind, plan_faults
from tandem.chaos.load import ending_of
from tandem.chaos.verdict import Absence, Absences, Verdict, judge

WANTED = [1, 2, 3]


def asked_of(*answers: list[int], ending: Ending | None, **fields: Any) -> Asked:
    """A request that ran from second 100 to second 110."""
    heard = {sequence: Heard(token_ids) for sequence, token_ids in enumerate(answers)}
    fields = {"error": "why", "began_s": 100.0, "ended_s": 110.0} | fields
    return Asked(0, [5], {}, len(answers), answers=heard, ending=ending, **fields)


def judge_one(asked: Asked, *wanted: list[int], router_s: tuple[float, ...] = (), gateway_s: Any = ()) -> Verdict:
    return judge([asked], {0: [Heard(token_ids) for token_ids in wanted]}, killed(router_s, gateway_s))


def killed(router_s: Sequence[float] = (), gateway_s: Sequence[float] = ()) -> Absences:
    router, gateway = ([Absence(at_s, at_s) for at_s in deaths_s] for deaths_s in (router_s, gateway_s))
    return Absences([router], [gateway])


def verdict_of(ending: Ending | None, token_ids: list[int], *, router_deaths_s: tuple[float, ...] = ()) -> Verdict:
    return judge_one(asked_of(token_ids, ending=ending), WANTED, router_s=router_deaths_s)


@pytest.mark.parametrize(
    ("ending", "token_ids", "router_deaths_s"),
    [
        (Ending.ANSWERED, [1, 2, 3], ()),
        (Ending.LEFT, [1, 2], ()),
        (Ending.LEFT, [], ()),
        (Ending.OVERLOADED, [], ()),
        (Ending.UNAVAILABLE, [], (105.0,)),
    ],
)
def test_what_may_happen(ending: Ending, token_ids: list[int], router_deaths_s: tuple[float, ...]) -> None:
    verdict = verdict_of(ending, token_ids, router_deaths_s=router_deaths_s)
    assert not verdict.findings
    assert verdict.num_tokens_checked == len(token_ids)


@pytest.mark.parametrize(
    ("ending", "token_ids", "router_deaths_s", "counted"),
    [
        (None, [1], (), "num_lost"),
        (Ending.HUNG, [1], (105.0,), "num_lost"),
        (Ending.GIVEN_UP, [1], (105.0,), "num_lost"),
        (Ending.BROKEN, [1], (105.0,), "num_lost"),
        (Ending.UNAVAILABLE, [], (), "num_lost"),
        (Ending.UNAVAILABLE, [], (50.0, 150.0), "num_lost"),
        (Ending.ANSWERED, [1, 2], (), "num_lost"),
        (Ending.ANSWERED, [1, 2, 4], (), "num_wrong"),
        (Ending.ANSWERED, [1, 2, 3, 4], (), "num_wrong"),
        (Ending.LEFT, [2], (), "num_wrong"),
        (Ending.WRONG, [], (), "num_wrong"),
    ],
)
def test_what_may_not(
    ending: Ending | None, token_ids: list[int], router_deaths_s: tuple[float, ...], counted: str
) -> None:
    verdict = verdict_of(ending, token_ids, router_deaths_s=router_deaths_s)
    assert len(verdict.findings) == 1
    assert [getattr(verdict, name) for name in ("num_lost", "num_repeated", "num_wrong")].count(1) == 1
    assert getattr(verdict, counted) == 1


@pytest.mark.parametrize(("death_s", "num_lost"), [(105.0, 0), (95.0, 1), (115.0, 1)])
def test_a_stream_is_taken_up_again_only_where_its_router_died(death_s: float, num_lost: int) -> None:
    asked = asked_of(WANTED, ending=Ending.ANSWERED, num_resumed=1)
    verdict = judge_one(asked, WANTED, router_s=(death_s,))
    assert (verdict.num_resumed, verdict.num_lost) == (1, num_lost)


def test_a_stream_that_its_client_refused_is_counted_as_repeated() -> None:
    error = repr(StreamBroken("a gap"))
    asked = asked_of([1], ending=ending_of(StreamBroken("a gap"), 1), error=error)
    assert judge_one(asked, WANTED).num_repeated == 1


@pytest.mark.parametrize(
    ("answers", "counted"),
    [
        ([[1, 2, 3], [4, 5]], None),
        ([[1, 2, 3], [4]], "num_lost"),
        ([[1, 2, 3]], "num_lost"),
        ([[1, 2, 3], [1, 2]], "num_wrong"),
    ],
)
def test_each_of_several_answers_is_compared(answers: list[list[int]], counted: str | None) -> None:
    verdict = judge_one(asked_of(*answers, ending=Ending.ANSWERED), WANTED, [4, 5])
    assert verdict.num_tokens_checked == sum(map(len, answers))
    assert (verdict.num_lost, verdict.num_wrong) == (int(counted == "num_lost"), int(counted == "num_wrong"))


WHOLE = Heard([1, 2, 3], "abc", [(-0.5, 0), (-1.0, 1), (-1.5, 2)], "length")
NUMBERS = WHOLE.logprobs


@pytest.mark.parametrize(
    ("came", "ending", "counted"),
    [
        (Heard([1, 2, 3], "abc", NUMBERS, "length"), Ending.ANSWERED, None),
        (Heard([1, 2, 3], "abc", [(-0.5001, 0), *NUMBERS[1:]], "length"), Ending.ANSWERED, None),
        (Heard([1, 2], "a"), Ending.CUT, None),  # a detokenizer may hold back text until more tokens come
        (Heard(), Ending.CUT, None),
        (Heard([1, 2], "aa"), Ending.CUT, "num_wrong"),
        (Heard([1, 1], "a"), Ending.CUT, "num_wrong"),
        (Heard([1, 2, 3], "abb", finish_reason="length"), Ending.ANSWERED, "num_wrong"),
        (Heard([1, 2, 3], "ab", finish_reason="length"), Ending.ANSWERED, "num_lost"),
        (Heard([1, 2, 3], "abc", NUMBERS, "stop"), Ending.ANSWERED, "num_wrong"),
        (Heard([1, 2, 3], "abc", NUMBERS[:2], "length"), Ending.ANSWERED, "num_lost"),
        (Heard([1, 2, 3], "abc", [(-0.6, 0), *NUMBERS[1:]], "length"), Ending.ANSWERED, "num_wrong"),
        (Heard([1, 2, 3], "abc", [(-0.5, 1), *NUMBERS[1:]], "length"), Ending.ANSWERED, "num_wrong"),
        (Heard([1], "a", NUMBERS[1:2]), Ending.CUT, "num_wrong"),
        (Heard([], "abc", finish_reason="length"), Ending.ANSWERED, "num_lost"),
    ],
)
def test_texts_and_logprobs_are_compared(came: Heard, ending: Ending, counted: str | None) -> None:
    asked = asked_of([], ending=ending, way=Way.COMPLETIONS)
    asked.answers[0] = came
    verdict = judge([asked], {0: [WHOLE]}, killed(gateway_s=[105.0]))
    assert [name for name in ("num_lost", "num_repeated", "num_wrong") if getattr(verdict, name)] == (
        [counted] if counted else []
    )


@pytest.mark.parametrize(
    ("ending", "way", "router_s", "gateway_s", "num_lost"),
    [
        (Ending.CUT, Way.CHATS, (), (105.0,), 0),
        (Ending.CUT, Way.CHATS, (), (99.5,), 0),
        (Ending.CUT, Way.CHATS, (105.0,), (), 1),
        (Ending.CUT, Way.CHATS, (), (95.0, 111.0), 1),
        (Ending.NO_GATEWAY, Way.CHATS, (), (105.0,), 0),
        (Ending.NO_GATEWAY, Way.CHATS, (105.0,), (50.0,), 1),
        (Ending.UNAVAILABLE, Way.CHATS, (105.0,), (), 0),
        (Ending.UNAVAILABLE, Way.CHATS, (), (105.0,), 1),
        (Ending.UNAVAILABLE, Way.GRPC, (), (105.0,), 1),
    ],
)
def test_what_a_gateway_s_death_excuses(
    ending: Ending, way: Way, router_s: tuple[float, ...], gateway_s: tuple[float, ...], num_lost: int
) -> None:
    verdict = judge_one(asked_of([1], ending=ending, way=way), WANTED, router_s=router_s, gateway_s=gateway_s)
    assert verdict.num_lost == num_lost
    assert verdict.num_by_ending == {ending.value: 1}


LEFT_AT_90, LEFT_AT_99, LEFT_AT_102 = (Absence(since_s, since_s + 6, 5.0) for since_s in (90.0, 99.0, 102.0))
LEFT_EARLY = Absence(97.0, 98.0, 5.0)
"""It had no request to finish, so another one was there before its grace period would have been over."""


@pytest.mark.parametrize(
    ("ending", "way", "token_ids", "absences", "num_lost"),
    [
        (Ending.UNAVAILABLE, Way.GRPC, [], Absences(routers=[[LEFT_AT_102]]), 0),
        (Ending.UNAVAILABLE, Way.GRPC, [], Absences(routers=[[LEFT_AT_90]]), 0),
        (Ending.UNAVAILABLE, Way.GRPC, [], Absences(gateways=[[LEFT_AT_102]]), 1),
        (Ending.UNAVAILABLE, Way.CHATS, [], Absences(gateways=[[LEFT_AT_102]]), 0),
        (Ending.UNAVAILABLE, Way.CHATS, [], Absences(gateways=[[LEFT_AT_90]]), 1),
        (Ending.UNAVAILABLE, Way.CHATS, [], Absences(gateways=[[LEFT_EARLY]]), 1),
        (Ending.GIVEN_UP, Way.CHATS, [1], Absences(gateways=[[LEFT_AT_102]]), 0),
        (Ending.GIVEN_UP, Way.CHATS, [1], Absences(gateways=[[LEFT_AT_90]]), 1),
        (Ending.GIVEN_UP, Way.CHATS, [1], Absences(gateways=[[LEFT_EARLY]]), 1),
        (Ending.GIVEN_UP, Way.CHATS, [1], Absences(routers=[[LEFT_AT_102]]), 1),
        (Ending.GIVEN_UP, Way.CHATS, [1], killed(gateway_s=[105.0]), 1),
        (Ending.GIVEN_UP, Way.GRPC, [1], Absences(gateways=[[LEFT_AT_102]]), 1),
        (Ending.NO_GATEWAY, Way.CHATS, [], Absences(gateways=[[LEFT_AT_102]]), 0),
        (Ending.CUT, Way.CHATS, [1], Absences(gateways=[[LEFT_AT_102]]), 1),
        (Ending.CUT, Way.CHATS, [1], Absences(gateways=[[LEFT_AT_99]]), 1),
        (Ending.CUT, Way.CHATS, [], Absences(gateways=[[LEFT_AT_99]]), 0),
        (Ending.CUT, Way.CHATS, [], Absences(gateways=[[LEFT_AT_102]]), 1),
        (Ending.BROKEN, Way.GRPC, [1], Absences(routers=[[LEFT_AT_102]]), 1),
        # With several processes, another one is there.
        (Ending.UNAVAILABLE, Way.GRPC, [], Absences(routers=[[LEFT_AT_102], []]), 1),
        (Ending.UNAVAILABLE, Way.GRPC, [], Absences(routers=[[LEFT_AT_102], [LEFT_AT_99]]), 0),
        (Ending.NO_GATEWAY, Way.CHATS, [], Absences(gateways=[[], [LEFT_AT_102]]), 1),
        (Ending.CUT, Way.CHATS, [], Absences(gateways=[[], [LEFT_AT_99]]), 0),
        (Ending.GIVEN_UP, Way.CHATS, [1], Absences(gateways=[[], [LEFT_AT_102]]), 0),
    ],
)
def test_what_one_that_leaves_excuses(
    ending: Ending, way: Way, token_ids: list[int], absences: Absences, num_lost: int
) -> None:
    """The requests run from second 100 to second 110. A process that leaves finishes its requests, or says that it
    cannot wait any longer."""
    answers = [token_ids] if token_ids else []
    verdict = judge([asked_of(*answers, ending=ending, way=way)], {0: [Heard(WANTED)]}, absences)
    assert verdict.num_lost == num_lost


@pytest.mark.parametrize(("since_s", "num_lost"), [(101.0, 0), (96.0, 0), (109.0, 0), (93.0, 1), (111.0, 1)])
def test_a_stream_is_taken_up_again_also_where_its_router_left(since_s: float, num_lost: int) -> None:
    asked = asked_of(WANTED, ending=Ending.ANSWERED, num_resumed=1)
    absences = Absences(routers=[[Absence(since_s, since_s + 6, 5.0)]])
    assert judge([asked], {0: [Heard(WANTED)]}, absences).num_lost == num_lost
    of_several = Absences(routers=[[], *absences.routers])
    assert judge([asked], {0: [Heard(WANTED)]}, of_several).num_lost == num_lost


@pytest.mark.parametrize("of_model", [WANTED, [4, 5, 6]])
def test_an_adapter_that_answers_as_its_model_is_not_told_apart(of_model: list[int]) -> None:
    """The last digits of logprobs do not count: they depend on the batch."""
    asked = asked_of(WANTED, ending=Ending.ANSWERED, model="sql")
    asked.answers[0].logprobs = NUMBERS
    as_model = Heard(of_model, logprobs=[(-0.5001, 0), *NUMBERS[1:]])
    verdict = judge([asked], {0: [Heard(WANTED, logprobs=NUMBERS)]}, Absences(), {0: [as_model]})
    assert verdict.num_by_model == {"sql": 1}
    assert verdict.findings == (["adapter sql: it answers as the model itself does"] if of_model == WANTED else [])


@pytest.mark.parametrize(
    ("answers", "is_one_s"),
    [
        ([[1, 2, 3], [1, 2]], True),
        ([[7, 8], [9]], True),
        ([[1, 2, 3], [9]], False),
        ([[7, 8, 3], [9]], False),
        ([[7, 8], [1, 2]], False),
    ],
)
def test_where_adapters_were_exchanged_all_answers_are_those_of_one(answers: list[list[int]], is_one_s: bool) -> None:
    asked = asked_of(*answers, ending=Ending.ANSWERED, model="sql")
    now, before = ([Heard([1, 2, 3]), Heard([1, 2])], [Heard([7, 8]), Heard([9])])
    verdict = judge([asked], {0: now}, Absences(), of_others={0: [before]})
    assert bool(verdict.findings) is not is_one_s


@pytest.mark.parametrize(
    ("error", "num_tokens", "ending"),
    [
        (DeadlinePassed(), 0, Ending.HUNG),
        (Overloaded(), 0, Ending.OVERLOADED),
        (Overloaded(), 1, Ending.WRONG),
        (NoWorker(), 0, Ending.UNAVAILABLE),
        (NoWorker(), 1, Ending.GIVEN_UP),
        (Unreachable(), 1, Ending.BROKEN),
        (InternalError(), 0, Ending.WRONG),
    ],
)
def test_what_an_error_means(error: TandemError, num_tokens: int, ending: Ending) -> None:
    assert ending_of(error, num_tokens) is ending


WORKERS = ["prefill-1", "prefill-2", "decode-1", "decode-2"]


SEVERAL = ("router-1", "router-2", "gateway-1", "gateway-2")


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("doors", [DOORS, SEVERAL])
def test_of_each_role_one_is_whole_at_any_moment(doors: tuple[str, ...], seed: int) -> None:
    plan = plan_faults(seed, 300, WORKERS, 2.0, doors=doors)
    assert plan == plan_faults(seed, 300, WORKERS, 2.0, doors=doors)
    assert {fault.kind for fault in plan} == set(FaultKind) - {FaultKind.EXCHANGE}
    assert {fault.kind for fault in plan if fault.target in doors} == {FaultKind.KILL, FaultKind.LEAVE}
    assert {fault.target for fault in plan} == {*WORKERS, *doors, "redis", "clients"}
    for number, fault in enumerate(plan):
        lasts_s = {FaultKind.KILL: RECOVERY_S, FaultKind.LEAVE: GRACE_S + RECOVERY_S}.get(fault.kind, fault.duration_s)
        for later in plan[number + 1 :]:
            is_peer = later.target != fault.target and later.target.split("-")[0] == fault.target.split("-")[0]
            assert not is_peer or later.at_s >= fault.at_s + lasts_s


@pytest.mark.parametrize("seed", range(3))
def test_adapters_are_exchanged_where_there_are_any(seed: int) -> None:
    plan = plan_faults(seed, 300, WORKERS, 2.0, can_exchange=True)
    exchanges = [fault for fault in plan if fault.kind is FaultKind.EXCHANGE]
    assert {fault.target for fault in exchanges} == {"adapters"}
    assert len(exchanges) > 20
    assert all(later.at_s - fault.at_s > EXCHANGE_S for fault, later in pairwise(exchanges))


def test_where_kv_cannot_be_reached_it_is_not_damaged() -> None:
    assert all(fault.kind is not FaultKind.DAMAGE for fault in plan_faults(1, 300, WORKERS, 2.0, can_damage=False))


@pytest.mark.parametrize(
    ("heard_s", "said"),
    [(0.0, "nothing has come of it"), (108.5, "the last tokens came 1.5 s before (if this machine is too slow")],
)
def test_a_request_that_hangs_is_told_from_one_that_is_slow(heard_s: float, said: str) -> None:
    (finding,) = judge_one(asked_of([1], ending=Ending.HUNG, heard_s=heard_s), WANTED).findings
    assert f"1 tokens: why; {said}" in finding
