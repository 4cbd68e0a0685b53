"""All that a router counts as taken, or listens for, belongs to a running request."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest
from lifecycle_bench import PROMPT, Asked, Bench, load, settle

from protos import tandem_worker_pb2 as pb
from router.audit import find_ownerless
from router.cluster_servicer import ClusterServicer
from router.lifecycle import Lifecycle
from router.open_requests import OpenRequests
from router.prefix_lookup import PrefixLookup
from router.request_events import WorkerKey
from router.sequences import Sequences


def ownerless(bench: Bench, *running: Lifecycle) -> list[str]:
    return list(find_ownerless(bench.pool, bench.queue, running).values())


async def read(lifecycle: Lifecycle) -> None:
    async for _ in lifecycle.run():
        pass


async def test_all_that_a_request_holds_is_its_own_and_nothing_is_left() -> None:
    bench = Bench(with_prefill=True)
    lifecycle = bench.lifecycle("r")
    task = asyncio.create_task(read(lifecycle))
    await settle()
    assert bench.pool.rooms == {lifecycle.room}
    assert ownerless(bench, lifecycle) == []
    assert sorted(ownerless(bench)) == [
        "counters of 1 clients are kept, but none of them has a request",
        "nobody waits for the events of 'r' at d",
        f"room on d for a prompt of {len(PROMPT)} tokens belongs to no request",
    ]
    task.cancel()
    await asyncio.wait([task])
    assert ownerless(bench) == []
    assert not bench.pool.rooms


async def test_several_answers_hold_each_their_own() -> None:
    """Each holds its own room and events, also once its prompt is computed and its room is settled."""
    bench = Bench()
    first = bench.lifecycle("r", name="0_r")
    others = [bench.lifecycle("r", name=f"{i}_r", sequence=i, after=first) for i in (1, 2)]
    sequences = Sequences([first, *others], is_streaming=True)
    asked = Asked(sequences.run())
    await settle()
    bench.d.say("0_r", 1, tokens=pb.Tokens(index=0, token_ids=[5, 6]))
    await settle()
    bench.d.say("1_r", 1, tokens=pb.Tokens(index=0, token_ids=[5]))
    await settle()
    assert len(bench.pool.rooms) == 3
    assert [room.is_settled for room in (first.room, others[0].room, others[1].room) if room] == [True, True, False]
    assert ownerless(bench, *sequences.lifecycles) == []
    assert len(ownerless(bench, first, others[1])) == 2, "the room of the second, though settled, and its events"
    await asked.leave()
    assert ownerless(bench) == []


async def test_a_router_knows_the_life_cycles_of_all_answers() -> None:
    bench = Bench()
    first = bench.lifecycle("r", name="0_r")
    sequences = Sequences([first, bench.lifecycle("r", name="1_r", sequence=1, after=first)], is_streaming=True)
    requests = OpenRequests()
    requests.enter("r", ["0_r", "1_r"])
    requests.enter("being tokenised", ["being tokenised"])
    requests.begin("r", sequences)
    assert [lifecycle.name for lifecycle in requests.lifecycles] == ["0_r", "1_r"]


class ForgetsCancels:
    """As a lookup in Redis was on Python 3.11: a request that is cancelled during the lookup goes on."""

    async def longest_match(self, token_ids: list[int], cache_salt: str, lora_digest: str = "") -> dict[WorkerKey, int]:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return {}
        raise AssertionError("not cancelled")


async def test_room_that_is_taken_for_a_client_that_has_left_is_found() -> None:
    bench = Bench()
    bench.cluster = replace(bench.cluster, prefixes=cast(PrefixLookup, ForgetsCancels()))
    asked = bench.request("r")
    await settle()
    await asked.leave()
    await settle()
    assert ownerless(bench) == [f"room on d for a prompt of {len(PROMPT)} tokens belongs to no request"]


@pytest.mark.parametrize("slip", ["num_planned_blocks", "num_planned_seqs", "num_prefill_tokens"])
async def test_counts_that_do_not_add_up_are_found(slip: str) -> None:
    bench = Bench()
    setattr(bench.decode, slip, 3)
    (problem,) = ownerless(bench)
    assert problem.startswith("d is counted as having ")
    bench = Bench()
    bench.queue.num_tokens += 7
    assert ownerless(bench) == ["the queue is empty, but its counter has 7 tokens"]


async def test_who_waits_in_the_queue_holds_nothing() -> None:
    bench = Bench()
    bench.decode.set_load(load(0))
    asked = bench.request("r")
    await settle()
    assert len(bench.queue) == 1
    assert ownerless(bench) == []
    await asked.leave()
    assert ownerless(bench) == []


async def test_an_audit_tells_what_it_finds_twice() -> None:
    """A single finding may fall between two steps of the loop: a request is planned, and has not heard of it yet."""
    bench = Bench()
    servicer = ClusterServicer(
        router_id="r",
        parts=bench.cluster,
        open_requests=OpenRequests(),
        unused=list,
    )

    async def audit(*, and_meanwhile: Any = lambda: None) -> list[str]:
        async def ask_all(ask: Any) -> tuple[list[pb.WorkerAudit], list[str]]:
            and_meanwhile()
            return [], []

        servicer._ask_all = ask_all  # type: ignore[method-assign,assignment]
        return list((await servicer.Audit(pb.AuditRequest(), cast(Any, None))).problems)

    assert await audit() == []
    bench.queue.num_tokens = 5
    assert await audit() == ["the queue is empty, but its counter has 5 tokens"]
    assert await audit(and_meanwhile=lambda: setattr(bench.queue, "num_tokens", 0)) == []
    assert await audit(and_meanwhile=lambda: setattr(bench.queue, "num_tokens", 5)) == []
    asyncio.get_running_loop().call_soon(setattr, bench.queue, "num_tokens", 0)
    assert await audit() == [], "no worker is waited for here, and yet there is time for it"
