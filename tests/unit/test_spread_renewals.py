"""When a `SpreadChannel` opens new connections, and what becomes of the old ones. Connections here only say whether a
peer serves."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from rpc import spread_channel
from rpc.spread_channel import SpreadChannel


class Connections:
    opened: list[Connections]
    serves = False
    is_closed = False

    def __init__(self, *_: object) -> None:
        Connections.opened.append(self)
        self.have_ended = asyncio.Event()

    def is_one_serving(self) -> bool:
        return self.serves

    async def close(self, grace_s: float | None = None) -> None:
        if grace_s is not None:
            await self.have_ended.wait()  # the streams that still run over them
        self.is_closed = True

    def cancel_calls(self) -> None:
        self.have_ended.set()


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(Connections, "opened", [], raising=False)
    monkeypatch.setattr(spread_channel, "_Spread", Connections)
    monkeypatch.setattr(spread_channel, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    return clock


async def test_connections_over_which_nobody_serves_are_replaced_now_and_then(clock: Clock) -> None:
    channel = SpreadChannel("routers:1", service="s")
    [first] = Connections.opened
    first.serves = True
    for _ in range(20):
        clock.now_s += 1
        assert channel._newest() is first
    first.serves = False
    nums_opened = []
    for _ in range(12):
        clock.now_s += 1
        channel._newest()
        nums_opened.append(len(Connections.opened))
    assert nums_opened == [1] * 5 + [2] * 6 + [3]
    async with asyncio.timeout(10):
        await channel.close()
    assert [each.is_closed for each in Connections.opened] == [True] * 3, "those with streams, too"


@pytest.mark.parametrize("serves", [True, False])
async def test_new_connections_are_used_once_one_serves_over_them(serves: bool, clock: Clock) -> None:
    channel = SpreadChannel("routers:1", service="s", renew_s=300)
    [first] = Connections.opened
    first.serves = True
    for _ in range(310):
        clock.now_s += 1
        assert channel._newest() is first
    _, second = Connections.opened
    second.serves = serves
    assert channel._newest() is (second if serves else first)
    async with asyncio.timeout(10):
        await channel.close()
    assert (first.is_closed, second.is_closed) == (True, True)
