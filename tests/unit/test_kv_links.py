"""A sender's connections: pushes share them, and they are closed once they are lost and unused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kv_transfer.errors import PeerUnreachable
from kv_transfer.links import Links
from protos import tandem_kv_transfer_pb2 as pb

DEADLINE_S = 5.0


class Connection:
    """A link that can be lost."""

    is_broken = False

    def __init__(self) -> None:
        self.is_lost = asyncio.Event()
        self.has_closed = asyncio.Event()

    async def lost(self) -> None:
        await self.is_lost.wait()

    async def close(self) -> None:
        assert not self.has_closed.is_set(), "closed twice"
        self.has_closed.set()


class Network:
    """Makes a connection for each `connect`; none is ready while `may_connect` is not set."""

    def __init__(self) -> None:
        self.made: list[Connection] = []
        self.may_connect = asyncio.Event()
        self.may_connect.set()
        self.is_down = False
        self.links = Links(self.connect)

    async def connect(self, grant: pb.Grant) -> Any:
        await self.may_connect.wait()
        if self.is_down:
            raise PeerUnreachable("nobody there")
        self.made.append(Connection())
        return self.made[-1]


@pytest.fixture
async def network() -> AsyncIterator[Network]:
    network = Network()
    yield network
    await asyncio.wait_for(network.links.close(), DEADLINE_S)
    assert all(connection.has_closed.is_set() for connection in network.made)
    assert len(asyncio.all_tasks()) == 1, "a watch is left"


def grant_of(address: str = "d:1", incarnation: str = "d-1") -> pb.Grant:
    return pb.Grant(kv_address=address, worker_id="d", incarnation=incarnation)


async def until(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), DEADLINE_S)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_pushes_share_one_and_it_stays_when_none_uses_it(network: Network) -> None:
    first, second = await asyncio.gather(network.links.get(grant_of()), network.links.get(grant_of()))
    assert first.link is second.link
    for kept in (first, second):
        network.links.give_back(kept)
    await settle()
    third = await network.links.get(grant_of())
    assert third.link is first.link
    assert len(network.made) == 1


async def test_a_lost_one_is_closed_at_once_where_nobody_uses_it(network: Network) -> None:
    """Otherwise it would keep what it holds of its peer, perhaps all of the peer's memory, until the next push to that
    peer."""
    network.links.give_back(await network.links.get(grant_of()))
    (connection,) = network.made
    connection.is_lost.set()
    await until(connection.has_closed)
    assert (await network.links.get(grant_of())).link is not connection


async def test_a_lost_one_is_closed_when_the_last_push_over_it_has_ended(network: Network) -> None:
    users = [await network.links.get(grant_of()) for _ in range(2)]
    (connection,) = network.made
    connection.is_lost.set()
    await settle()
    again = await network.links.get(grant_of())
    assert again.link is not connection  # no new push gets it
    for user in users:
        assert not connection.has_closed.is_set()  # may still carry a commit
        network.links.give_back(user)
    await until(connection.has_closed)
    assert not network.made[1].has_closed.is_set()


async def test_a_broken_one_is_replaced_and_closed(network: Network) -> None:
    kept = await network.links.get(grant_of())
    (connection,) = network.made
    connection.is_broken = True
    await network.links.get(grant_of())
    assert len(network.made) == 2
    assert not connection.has_closed.is_set()
    network.links.give_back(kept)
    await until(connection.has_closed)


async def test_another_process_at_the_address_ends_the_connection_to_the_one_before(network: Network) -> None:
    old = await network.links.get(grant_of(incarnation="d-1"))
    elsewhere = await network.links.get(grant_of(address="d:2"))
    await network.links.get(grant_of(incarnation="d-2"))
    network.links.give_back(old)
    await until(network.made[0].has_closed)
    assert elsewhere.link is network.made[1]
    assert not network.made[1].has_closed.is_set()


async def test_who_cannot_be_reached_is_tried_again_by_the_next(network: Network) -> None:
    network.is_down = True
    for _ in range(2):
        with pytest.raises(PeerUnreachable):
            await network.links.get(grant_of())
    network.is_down = False
    await network.links.get(grant_of())
    assert len(network.made) == 1


async def test_who_waits_no_more_takes_the_connection_from_nobody(network: Network) -> None:
    network.may_connect.clear()
    gone, other = (asyncio.create_task(network.links.get(grant_of())) for _ in range(2))
    await settle()
    gone.cancel()
    await settle()
    network.may_connect.set()
    kept = await other
    network.links.give_back(kept)
    network.made[0].is_lost.set()
    await until(network.made[0].has_closed)


async def test_closing_ends_what_is_being_made_and_what_is_used(network: Network) -> None:
    used = await network.links.get(grant_of())
    network.may_connect.clear()
    waiting = asyncio.create_task(network.links.get(grant_of(address="d:2")))
    await settle()
    await asyncio.wait_for(network.links.close(), DEADLINE_S)
    assert network.made[0].has_closed.is_set()
    assert waiting.cancelled()
    network.links.give_back(used)  # late: nothing is closed twice
    await settle()


async def test_closing_ends_what_is_retired_and_still_used(network: Network) -> None:
    await network.links.get(grant_of())
    network.made[0].is_lost.set()
    await settle()
    await asyncio.wait_for(network.links.close(), DEADLINE_S)
    assert network.made[0].has_closed.is_set()


async def test_one_that_nobody_waited_for_to_its_end_is_closed_when_it_is_lost(network: Network) -> None:
    """Its first push was cancelled while the connection was being made, and no other push has come."""
    network.may_connect.clear()
    gone = asyncio.create_task(network.links.get(grant_of()))
    await settle()
    gone.cancel()
    await settle()
    network.may_connect.set()
    await settle()
    (connection,) = network.made
    connection.is_lost.set()
    await until(connection.has_closed)
