"""Which stream moves to which worker, with the numbers at which the choice changes.

A token of a worker's streams takes 10 ms, and 0.1 ms more for each KV block in use; a prompt's token takes 1 ms. An
answer has 200 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from router.costs import Costs
from router.moves import Loaded, PromptShares, choose_move
from router.request_events import WorkerKey

BLOCK = 16
NOW_S = 100.0
D, D2, P, P2 = (WorkerKey(name, "1") for name in ("d", "d2", "p", "p2"))


@dataclass(frozen=True)
class Stream:
    """A stream with a prompt of 160 tokens, which `cached_at` keeps."""

    num_answer_tokens: int = 40
    max_tokens_left: int = 1000
    cached_at: WorkerKey = P
    stays: bool = False

    @property
    def num_tokens(self) -> int:
        return 160 + self.num_answer_tokens

    def num_tokens_again(self, worker: WorkerKey) -> int:
        return self.num_tokens - (160 if worker == self.cached_at else 0)

    def may_go_to(self, worker: WorkerKey) -> bool:
        return not self.stays


def learned(*workers: WorkerKey) -> Costs:
    costs = Costs()
    for second, num_blocks in enumerate((0, 500) * 10):
        for worker in workers or (D,):
            costs.paces.decoded(worker, 100, 0.01 * (100 + num_blocks), num_blocks, NOW_S + second)
    for num_tokens in (100, 1000, 4000, 500) * 4:
        costs.computed(P, num_tokens, num_tokens / 1000, NOW_S)
    for _ in range(20):
        costs.paces.answered(200)
    return costs


def loaded(worker: WorkerKey, num_used_blocks: int) -> Loaded:
    return Loaded(worker, num_used_blocks, BLOCK)


def chosen(
    used: int,
    *,
    idle: Sequence[Loaded] = (loaded(P, 0),),
    streams: Sequence[Stream] = (Stream(),),
    busy: Sequence[Loaded] = (),
    costs: Costs | None = None,
) -> tuple[Stream, WorkerKey] | None:
    return choose_move(
        costs or learned(),
        now_s=NOW_S,
        busy=[loaded(D, used), *busy],
        idle=idle,
        streams_of=lambda worker: streams if worker == D else (),
    )


def with_pace_of_p(token_s: float) -> Costs:
    """As `learned`, and P's tokens took so long with 50 blocks in use, where D takes 15 ms."""
    costs = learned()
    for second in range(20):
        costs.paces.decoded(P, 10, 10 * token_s, 50, NOW_S + second, is_prefill=True)
    return costs


def test_one_moves_where_a_token_takes_a_fifth_longer_than_it_would_elsewhere() -> None:
    """There, the stream's own 13 blocks are in use: 11.3 ms."""
    costs = with_pace_of_p(0.0155)
    assert (chosen(30, costs=costs), chosen(45, costs=costs)) == (None, (Stream(), P))
    others = [loaded(P, 20)]
    assert (chosen(55, idle=others, costs=costs), chosen(70, idle=others, costs=costs)) == (None, (Stream(), P))


def test_and_one_and_a_half_times_as_long_where_that_worker_has_decoded_nothing_yet() -> None:
    assert (chosen(65), chosen(75)) == (None, (Stream(), P))
    assert (chosen(95, idle=[loaded(P, 20)]), chosen(105, idle=[loaded(P, 20)])) == (None, (Stream(), P))


def test_prompts_that_a_worker_has_as_of_late_leave_its_streams_the_rest_of_the_time() -> None:
    """With prompts for half of the time, 22.6 ms; with prompts all the time, none."""
    half, whole = (loaded(P, 0)._replace(prompt_share=share) for share in (0.5, 1.0))
    assert (chosen(230, idle=[half]), chosen(250, idle=[half])) == (None, (Stream(), P))
    assert chosen(10_000, idle=[whole]) is None


def test_what_share_of_the_time_a_worker_has_prompts_fades() -> None:
    shares = PromptShares()
    assert shares.of(P) == 0
    shares.note([(P, True), (P2, False)], NOW_S)
    assert (shares.of(P), shares.of(P2)) == (1, 0)
    for step in range(1, 41):  # every other moment
        shares.note([(P, step % 2 == 0)], NOW_S + 0.5 * step)
    assert 0.4 < shares.of(P) < 0.6
    assert shares.of(P2) == 0, "it has left"
    for step in range(1, 5):
        shares.note([(P, False)], NOW_S + 20 + 2 * step)
    assert shares.of(P) < 0.1
    shares.note([(P, True)], NOW_S + 1000)
    assert shares.of(P) > 0.5, "one look after a long time tells more than what was"


@pytest.mark.parametrize("idle", [[], [loaded(P, 200)]], ids=["none", "as full"])
def test_it_stays_where_nobody_is_better(idle: list[Loaded]) -> None:
    assert chosen(200, idle=idle) is None


def test_a_prefill_worker_that_decodes_slowly_is_known_by_what_it_has_decoded() -> None:
    """It takes twice as long: 22.6 ms for the stream that would come."""
    costs = with_pace_of_p(0.03)
    assert chosen(160, costs=costs) is None, "26 ms here"
    assert chosen(190, costs=costs) == (Stream(), P), "29 ms here"


def test_where_nothing_is_known_of_its_pace_it_stays() -> None:
    assert chosen(200, costs=Costs()) is None


def test_what_it_gains_is_more_than_what_is_computed_again_takes() -> None:
    """Each token comes 18.7 ms sooner, and what is computed again takes a millisecond a token."""
    assert chosen(200) is not None
    assert chosen(200, streams=[Stream(cached_at=D2)]) is not None, "160 tokens to come, 200 to compute"
    for num_left, moves in ((2, False), (3, True)):
        assert (chosen(200, streams=[Stream(max_tokens_left=num_left)]) is not None) == moves, "40 to compute"
    for num_tokens, moves in ((190, False), (210, True)):
        stream = Stream(num_answer_tokens=num_tokens)
        assert (chosen(200, streams=[stream]) is not None) == moves, "a long one may become twice as long"
    assert chosen(90, streams=[Stream(num_answer_tokens=2, max_tokens_left=16, cached_at=D2)]) is None


def test_the_one_of_which_least_is_computed_again_moves() -> None:
    long, short, elsewhere = Stream(90), Stream(30), Stream(10, cached_at=D2)
    assert chosen(200, streams=[long, elsewhere, short]) == (short, P)
    assert chosen(200, streams=[long, elsewhere, Stream(30, stays=True)]) == (long, P)
    assert chosen(200, streams=[Stream(stays=True)]) is None


def test_it_leaves_the_slowest_worker_for_the_one_with_least_to_do() -> None:
    costs = learned(D, D2)
    assert chosen(200, busy=[loaded(D2, 100)], costs=costs) == (Stream(), P)
    assert chosen(200, busy=[loaded(D2, 300)], costs=costs) == (Stream(), P), "the slowest one has none that may move"
    assert chosen(200, idle=[loaded(P, 30), loaded(P2, 20)], costs=costs) == (Stream(), P2)
    assert chosen(200, idle=[loaded(P, 20), loaded(P2, 30)], costs=costs) == (Stream(), P)


def test_where_the_slowest_or_the_best_cannot_the_next_ones_share() -> None:
    """The slowest worker's stream may go to no one; the next one's, only to the prefill worker with more to do."""

    class Choosy(Stream):
        def may_go_to(self, worker: WorkerKey) -> bool:
            return worker == P2

    choosy, costs = Choosy(), learned(D, D2)
    streams = {D: [Stream(stays=True)], D2: [choosy]}

    def choose(num_used_blocks: int) -> tuple[Stream, WorkerKey] | None:
        return choose_move(
            costs,
            now_s=NOW_S,
            busy=[loaded(D, 400), loaded(D2, 300)],
            idle=[loaded(P, 0), loaded(P2, num_used_blocks)],
            streams_of=lambda worker: streams[worker],
        )

    assert choose(10) == (choosy, P2)
    assert choose(290) is None, "it has as much to do"
    streams[D] = [Stream()]
    assert choose(10) == (Stream(), P), "the slowest one first, to the best"


@pytest.mark.parametrize("may_go", [False, True])
def test_a_look_does_not_take_long_with_many_streams(may_go: bool) -> None:
    """A router does so every few milliseconds, and does nothing else meanwhile."""
    num_asked = 0

    class Counting(Stream):
        def may_go_to(self, worker: WorkerKey) -> bool:
            nonlocal num_asked
            num_asked += 1
            return may_go

    sources = [WorkerKey(f"d{number}", "1") for number in range(20)]
    streams = [Counting(max_tokens_left=1)] * 1000
    assert choose_move(
        learned(*sources),
        now_s=NOW_S,
        busy=[loaded(source, 300) for source in sources],
        idle=[loaded(WorkerKey(f"p{number}", "1"), 0) for number in range(20)],
        streams_of=lambda _: streams,
    ) is None  # fmt: skip
    assert 1000 <= num_asked <= 2000, "of 20,000"
