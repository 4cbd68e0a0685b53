"""A worker whose engine is stalled: it gets no new requests, and its own move to where another worker can continue
them."""

from __future__ import annotations

from typing import Any, cast

import pytest
from lifecycle_bench import Bench, ScriptedSession, load, settle

from protos import tandem_worker_pb2 as pb
from router.ejection import FAILURES_TO_EJECT

STALLED = load(50, num_running=1, is_stalled=True)


class Two(Bench):
    """`d`, which the test stalls, and `other`."""

    def __init__(self, *, with_prefill: bool = False) -> None:
        super().__init__(with_prefill=with_prefill)
        self.add_other()

    def add_other(self) -> None:
        self.other_handle = self.add("other", pb.Role.ROLE_DECODE, 2048)
        self.other_handle.set_load(load(90))  # the second choice
        self.other = cast(ScriptedSession, self.other_handle.session)

    def stall(self) -> None:
        self.hear_load(self.decode, STALLED)


def what(session: ScriptedSession) -> list[str]:
    """The commands that the worker was sent, in order."""
    return [str(command.WhichOneof("command")) for command in session.sent]


def tokens(index: int, *token_ids: int) -> pb.Tokens:
    return pb.Tokens(index=index, token_ids=token_ids)


async def test_nothing_new_goes_to_a_stalled_worker_until_it_goes_on() -> None:
    bench = Two()
    bench.stall()
    asked = bench.request("a")
    await settle()
    assert (what(bench.d), what(bench.other)) == ([], ["generate"])
    bench.hear_load(bench.decode, load(100))
    again = bench.request("b")
    await settle()
    assert what(bench.d) == ["generate"]
    await asked.leave()
    await again.leave()


async def test_a_stream_leaves_a_stalled_worker_and_goes_on_at_the_next_position() -> None:
    bench = Two()
    asked = bench.request("a")
    await settle()
    bench.d.say("a", 1, tokens=tokens(0, 7, 8))
    await settle()
    bench.stall()
    await settle()
    assert what(bench.d) == ["generate", "cancel"]
    request = bench.other.sent[-1].generate
    assert (request.attempt, list(request.output_token_ids)) == (2, [7, 8])
    bench.other.say("a", 2, tokens=tokens(2, 9))
    await settle()
    assert [token for response in asked.received for token in response.token_ids] == [7, 8, 9]
    await asked.leave()


async def test_a_request_that_nobody_else_can_compute_waits_and_goes_on_where_it_is() -> None:
    bench = Bench()
    asked = bench.request("a")
    await settle()
    for _ in range(3):
        bench.hear_load(bench.decode, STALLED)
        await settle()
    assert what(bench.d) == ["generate"]
    bench.d.say("a", 1, tokens=tokens(0, 7))
    await settle()
    assert [list(response.token_ids) for response in asked.received] == [[7]]
    await asked.leave()


async def test_it_leaves_with_the_next_beat_once_somebody_else_is_there() -> None:
    bench = Bench()
    asked = bench.request("a")
    await settle()
    bench.hear_load(bench.decode, STALLED)
    await settle()
    Two.add_other(cast(Any, bench))
    other = cast(Any, bench).other
    await settle()
    assert what(other) == [], "nobody has told it"
    bench.hear_load(bench.decode, STALLED)
    await settle()
    assert (what(bench.d), what(other)) == (["generate", "cancel"], ["generate"])
    await asked.leave()


async def test_news_of_a_stall_that_is_over_moves_nobody() -> None:
    bench = Two()
    asked = bench.request("a")
    await settle()
    bench.stall()
    bench.hear_load(bench.decode, load(100))  # before the request hears of the stall
    await settle()
    assert (what(bench.d), what(bench.other)) == (["generate"], [])
    await asked.leave()


async def test_whoever_can_do_less_is_nobody() -> None:
    bench = Two()
    bench.tell(bench.decode, takes_grammars=True)
    asked = bench.request("a", grammar="x")
    await settle()
    bench.stall()
    await settle()
    assert (what(bench.d), what(bench.other)) == (["generate"], [])
    await asked.leave()


async def test_a_stream_does_not_go_to_another_kind() -> None:
    bench = Two()
    bench.tell(bench.decode, compat_digest="mine")
    asked = bench.request("a")
    await settle()
    bench.d.say("a", 1, tokens=tokens(0, 7))
    await settle()
    bench.tell(bench.other_handle, compat_digest="another")
    bench.stall()
    await settle()
    assert (what(bench.d), what(bench.other)) == (["generate"], [])
    await asked.leave()


async def test_a_stalled_prefill_worker_is_done_without() -> None:
    bench = Bench(with_prefill=True)
    asked = bench.request("a")
    await settle()
    bench.d.say("a", 1, granted={"grant_id": 1})
    await settle()
    assert what(bench.p) == ["prefill"]
    bench.hear_load(bench.prefill, STALLED)
    await settle()
    assert what(bench.p) == ["prefill", "cancel"]
    assert what(bench.d) == ["reserve", "cancel", "generate"]
    again = bench.request("b")
    await settle()
    assert what(bench.p) == ["prefill", "cancel"]
    await asked.leave()
    await again.leave()


async def test_a_stall_is_one_failure_however_often_it_is_said_and_whoever_is_there() -> None:
    bench = Two()
    asked = [bench.request(name) for name in "ab"]
    await settle()
    for number in range(FAILURES_TO_EJECT):
        assert bench.pool.ejected == []
        bench.decode.session = cast(Any, ScriptedSession(bench.decode.key))
        bench.decode.session.attach("x", lambda _: None)
        for _ in range(5):
            bench.stall()
        bench.hear_load(bench.decode, load(100))
        bench.now_s += number
    assert bench.pool.ejected == ["d"]
    for each in asked:
        await each.leave()


async def test_a_stall_without_requests_is_nobodys_loss() -> None:
    bench = Two()
    for _ in range(2 * FAILURES_TO_EJECT):
        bench.stall()
        bench.hear_load(bench.decode, load(100))
    assert bench.pool.ejected == []


@pytest.mark.parametrize("is_stalled", [True, False])
async def test_where_all_stand_still_new_requests_wait_until_one_goes_on(is_stalled: bool) -> None:
    bench = Bench()
    bench.hear_load(bench.decode, load(100, is_stalled=is_stalled))
    asked = bench.request("a")
    await settle()
    assert what(bench.d) == ([] if is_stalled else ["generate"])
    assert not asked.task.done()
    bench.hear_load(bench.decode, load(100))
    await settle()
    assert what(bench.d) == ["generate"]
    await asked.leave()
