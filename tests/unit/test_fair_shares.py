"""Whose turn it is, in random histories, against a model that compares all counters each time; and what each client
earns."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from router import fair_shares
from router.fair_shares import ANSWER_WEIGHT, FairShares, Share

MAX_PROMPT = 9
MAX_ANSWER = 4
NUM_AT_ONCE = 3
"""Most requests that run or wait to return."""
AT_MOST = MAX_PROMPT + ANSWER_WEIGHT * MAX_ANSWER * NUM_AT_ONCE
"""How far the counters of two waiting clients may differ: by one prompt, and all answers under way."""


class Request:
    def __init__(self, share: Share[Request], turn: int, num_tokens: int, *, is_ahead: bool = False) -> None:
        self.share = share
        self.turn = turn
        self.num_tokens = num_tokens
        self.is_ahead = is_ahead
        self.num_answered = 0
        self.is_return = False


class World:
    """Requests that arrive, are served, return and leave, and the checks that hold at any time."""

    def __init__(self) -> None:
        self.shares: FairShares[Request] = FairShares()
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_turns = 0
        self.served: dict[str, int] = {}
        """Weighted tokens that each client was served."""
        self.since: dict[tuple[str, str], tuple[int, int]] = {}
        """What two clients had been served when both had begun to wait."""

    def come(self, client: str, num_tokens: int, *, is_ahead: bool = False) -> Request:
        self.num_turns += 1
        line = self.by_client().get(client)
        turn = line[0].turn if line and is_ahead else self.num_turns
        request = Request(self.shares.enter(client), turn, num_tokens, is_ahead=is_ahead)
        self.wait(request)
        return request

    def wait(self, request: Request) -> None:
        self.shares.push(
            request.share, request, request.num_tokens, is_return=request.is_return, is_ahead=request.is_ahead
        )
        self.waiting.append(request)

    def plan(self) -> Request | None:
        """Run the first waiting request, if there is room."""
        request = self.shares.first()
        num_returned = sum(each.is_return for each in self.waiting)
        if request is None or len(self.running) + num_returned - request.is_return >= NUM_AT_ONCE:
            return None
        self.stop_waiting(request)
        self.running.append(request)
        if not request.is_return:
            request.share.charge_prompt(request.num_tokens)
            self.note(request, request.num_tokens)
        return request

    def stop_waiting(self, request: Request) -> None:
        self.shares.remove(request.share, request)
        self.waiting.remove(request)

    def answer(self, request: Request) -> None:
        request.num_answered += 1
        request.share.charge_answer(1)
        self.note(request, ANSWER_WEIGHT)
        if request.num_answered == MAX_ANSWER:
            self.end(request)

    def come_back(self, request: Request) -> None:
        self.running.remove(request)
        request.is_return = True
        self.num_turns += 1
        request.turn = self.num_turns
        self.wait(request)

    def end(self, request: Request) -> None:
        if request in self.running:
            self.running.remove(request)
        else:
            self.stop_waiting(request)
        self.shares.leave(request.share)

    def note(self, request: Request, num_tokens: int) -> None:
        client = request.share.client
        self.served[client] = self.served.get(client, 0) + num_tokens

    def by_client(self) -> dict[str, list[Request]]:
        """The requests that wait for their first turn, by client, each client's in the order of their turns."""
        lines: dict[str, list[Request]] = {}
        for request in sorted(self.waiting, key=lambda request: not request.is_ahead):
            if not request.is_return:
                lines.setdefault(request.share.client, []).append(request)
        return lines

    def check(self) -> None:
        returned = [request for request in self.waiting if request.is_return]
        lines = self.by_client()
        assert self.shares.num_waiting == len(self.waiting)
        assert self.shares.num_tokens == sum(request.num_tokens for request in self.waiting)
        expected = None
        if returned:
            expected = max(returned, key=lambda request: request.turn)
        elif lines:
            expected = min((line[0] for line in lines.values()), key=lambda r: (r.share.counter, r.turn))
        assert self.shares.first() is expected
        for client in ("a", "b", "new"):
            num_own = sum(request.num_tokens for request in lines.get(client, ()))
            others = [[request.num_tokens for request in line] for name, line in lines.items() if name != client]
            parts = [line[0] + min(sum(line[1:]), num_own) for line in others]
            num_returned = sum(request.num_tokens for request in returned)
            assert self.shares.num_tokens_before(client) == num_returned + num_own + sum(parts)
        pairs = list(combinations(sorted(lines), 2))
        self.since = {pair: since for pair, since in self.since.items() if pair in pairs}
        for one, other in pairs:
            counters = [lines[name][0].share.counter for name in (one, other)]
            assert abs(counters[0] - counters[1]) <= AT_MOST
            now = (self.served.get(one, 0), self.served.get(other, 0))
            before = self.since.setdefault((one, other), now)
            assert abs((now[0] - before[0]) - (now[1] - before[1])) <= 2 * AT_MOST


deeds = st.one_of(
    st.tuples(
        st.sampled_from(["come", "come", "come ahead"]),
        st.sampled_from(["a", "a", "a", "b", "c", ""]),
        st.integers(1, MAX_PROMPT),
    ),
    st.tuples(st.sampled_from(["plan", "plan", "answer", "answer", "end", "return", "leave"]), st.integers(0, 20)),
)


@settings(max_examples=150)
@given(st.lists(deeds, min_size=20, max_size=80))
def test_under_any_history_the_least_served_goes_first_and_nobody_goes_short(history: list[tuple]) -> None:  # type: ignore[type-arg]
    world = World()
    for what, *how in history:
        if what.startswith("come"):
            world.come(*how, is_ahead=what == "come ahead")
        elif what == "plan":
            world.plan()
        elif (group := world.waiting if what == "leave" else world.running) and (request := group[how[0] % len(group)]):
            {"answer": world.answer, "end": world.end, "return": world.come_back, "leave": world.end}[what](request)
        world.check()
    for request in [*world.running, *world.waiting]:
        world.end(request)
    assert world.shares.first() is None
    assert (world.shares.num_tokens, world.shares.num_waiting, world.shares.num_known_clients) == (0, 0, 0)
    assert not world.shares.with_rest


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=30))
def test_one_client_alone_is_served_in_turn(history: list[tuple[bool, int]]) -> None:
    world, order = World(), []
    for comes, num_tokens in history:
        if comes:
            world.come("", num_tokens)
        elif (request := world.plan()) is not None:
            order.append(request.turn)
            world.end(request)
    while (request := world.plan()) is not None:
        order.append(request.turn)
        world.end(request)
    assert order == sorted(order)
    assert len(order) == sum(comes for comes, _ in history)


def served_in_order(world: World, num: int) -> str:
    """The clients of the next `num` requests. Each request is answered in full before the next one is planned."""
    clients = []
    for _ in range(num):
        request = world.plan()
        assert request is not None
        clients.append(request.share.client)
        for _ in range(MAX_ANSWER):
            world.answer(request)
    return "".join(clients)


def test_who_was_idle_has_earned_nothing_and_who_sends_many_does_not_go_before() -> None:
    world = World()
    for _ in range(20):
        world.come("a", 5)
    assert served_in_order(world, 8) == "aaaaaaaa"
    for _ in range(6):
        world.come("b", 5)
    assert served_in_order(world, 8) == "abababab", "from where b came on, as much each"
    world.come("c", 5)
    assert sorted(served_in_order(world, 3)) == ["a", "b", "c"]


def test_who_has_the_longer_prompts_and_answers_has_fewer_turns() -> None:
    world = World()
    for _ in range(9):
        world.come("a", 24)  # and the answer counts eight
        world.come("b", 8)
    assert served_in_order(world, 12).count("b") == 8


def test_where_nobody_waits_nobody_goes_short() -> None:
    """What a client was served while nobody else waited is not held against it."""
    world = World()
    for _ in range(9):
        world.come("a", 9)
        assert served_in_order(world, 1) == "a"
    assert world.shares.num_known_clients == 0
    for client in "ab" * 4:
        world.come(client, 5)
    assert served_in_order(world, 8) == "abababab"


def test_a_client_that_had_more_than_those_who_wait_is_remembered_until_they_had_as_much() -> None:
    world = World()
    for client in "abcd":
        world.come(client, 1)
    assert served_in_order(world, 1) == "a"
    assert world.shares.num_known_clients == 4
    world.come("a", 1)
    world.come("d", 1)
    assert served_in_order(world, 4) == "bcda", "as if it had never left"
    assert served_in_order(world, 1) == "d"
    assert world.shares.num_known_clients == 0


def test_names_without_end_take_no_memory_without_end() -> None:
    """Each of these clients is served while another one waits that was served less, so each must be remembered for a
    time."""
    world = World()
    names = [f"client {number}" for number in range(3 * fair_shares.MAX_REMEMBERED)]
    for name in names:
        world.come(name, 1)
    for _ in names[:-1]:
        served_in_order(world, 1)
        assert world.shares.num_known_clients <= len(world.waiting) + fair_shares.MAX_REMEMBERED
    request = world.come("new", 1)
    assert request.share.counter <= 1 + ANSWER_WEIGHT * MAX_ANSWER, "not behind those who were served"
    for _ in range(2):
        served_in_order(world, 1)
    assert world.shares.num_known_clients == 0


def test_who_comes_and_goes_behind_others_leaves_nothing() -> None:
    shares: FairShares[Request] = FairShares()
    first = Request(shares.enter("first"), 1, 1)
    shares.push(first.share, first, 1)
    for number in range(2000):
        passer = Request(shares.enter(f"passer {number}"), 1, 1)
        shares.push(passer.share, passer, 1)
        shares.remove(passer.share, passer)
        shares.leave(passer.share)
    assert shares.num_known_clients == 1
    assert len(shares._lines) < 100
    assert shares.first() is first
