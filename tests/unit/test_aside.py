"""Whose turn it is among the requests set aside, in random histories, against a model that sorts all of them each
time."""

from __future__ import annotations

import random

import pytest

from router.aside import Aside
from router.fair_shares import FairShares, Share


class Asked:
    """A request, compared by identity."""

    def __init__(self, lane: str, share: Share[Asked], num_tokens: int, *, is_return: bool, is_ahead: bool) -> None:
        self.lane, self.share, self.num_tokens = lane, share, num_tokens
        self.is_return, self.is_ahead = is_return, is_ahead
        self.number = 0

    @property
    def turn(self) -> tuple[int, ...]:
        priority = self.share.owner.priority
        if self.is_return:
            return priority, 0, -self.number
        return priority, 1, self.share.counter, not self.is_ahead, self.number


class Model:
    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.aside = Aside[Asked]()
        shares = [FairShares[Asked](priority) for priority in (0, 5)]
        self.shares = [each.enter(client) for each in shares for client in "abc"]
        self.there: list[Asked] = []
        self.gone: list[Asked] = []
        self.num_pushed = 0

    def push(self, asked: Asked) -> None:
        self.num_pushed += 1
        asked.number = self.num_pushed
        self.there.append(asked)
        self.aside.push(
            asked.lane,
            asked.share,
            asked,
            asked.num_tokens,
            is_return=asked.is_return,
            is_ahead=asked.is_ahead,
        )

    def new(self) -> Asked:
        chance = self.chance
        lane, share = chance.choice("xyz"), chance.choice(self.shares)
        is_return, is_ahead = chance.random() < 0.2, chance.random() < 0.2
        return Asked(lane, share, chance.randrange(1, 9), is_return=is_return, is_ahead=is_ahead)

    def discard(self, asked: Asked) -> None:
        self.there.remove(asked)
        self.aside.discard(asked)
        self.gone.append(asked)

    def of(self, lane: str) -> list[Asked]:
        return sorted((asked for asked in self.there if asked.lane == lane), key=lambda asked: asked.turn)

    def check(self) -> None:
        assert (len(self.aside), set(self.aside)) == (len(self.there), set(self.there))
        assert set(self.aside.lanes) == {asked.lane for asked in self.there}
        for lane in "xyz":
            of_lane, first = self.of(lane), self.aside.first_of(lane)
            assert (None if first is None else first[1]) is (of_lane[0] if of_lane else None)
            assert self.aside.num_tokens(lane) == sum(asked.num_tokens for asked in of_lane)
            assert self.aside.in_turn({lane}) == of_lane

    def go_through(self) -> None:
        """Go through the lanes as a queue does: plan and charge some requests until the workers of each lane are
        full."""
        left: set[str] = set()
        due = self.aside.due()
        while (lane := due.first()) is not None:
            expected = min((asked for asked in self.there if asked.lane not in left), key=lambda asked: asked.turn)
            first = self.aside.first_of(lane)
            assert first is not None
            assert first[1] is expected
            if self.chance.random() < 0.6:
                self.discard(expected)
                expected.share.charge_prompt(self.chance.randrange(1, 9))
            else:
                left.add(expected.lane)
                due.pop()
        assert {asked.lane for asked in self.there} <= left


@pytest.mark.parametrize("seed", range(20))
def test_turns_are_those_of_all_who_wait(seed: int) -> None:
    model = Model(random.Random(seed))
    chance = model.chance
    for _ in range(300):
        match chance.choice(("push", "push", "push", "again", "leave", "charge", "through")):
            case "push":
                model.push(model.new())
            case "again" if model.gone:
                again = model.gone.pop(chance.randrange(len(model.gone)))
                again.is_return = chance.random() < 0.5
                model.push(again)
            case "leave" if model.there:
                model.discard(chance.choice(model.there))
            case "charge":
                chance.choice(model.shares).charge_answer(chance.randrange(1, 9))
            case "through" if chance.random() < 0.1:
                model.go_through()
        model.check()
    for asked in list(model.there):
        model.discard(asked)
    model.check()


def test_what_goes_before_a_further_request_is_as_much_as_its_client_has() -> None:
    model = Model(random.Random(0))
    urgent, _, _, a, b, c = model.shares
    for share, num_tokens in ((urgent, 7), (a, 10), (a, 10), (b, 4), (c, 100)):
        model.push(Asked("x", share, num_tokens, is_return=False, is_ahead=False))
    before = {client: model.aside.num_tokens_before("x", 5, client) for client in "abcd"}
    assert before == {"a": 7 + 20 + 4 + 100, "b": 7 + 4 + 10 + 100, "c": 7 + 100 + 20 + 4, "d": 7 + 10 + 4 + 100}
    assert model.aside.num_tokens_before("x", 0, "d") == 7
    assert model.aside.num_tokens_before("y", 5, "a") == 0
