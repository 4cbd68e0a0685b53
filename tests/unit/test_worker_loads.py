"""Workers report their load with each step: which reports make the router look at the waiting requests. No network."""

from __future__ import annotations

import asyncio

import pytest
from lifecycle_bench import BLOCK, PROMPT, Bench, load, settle

from protos import tandem_worker_pb2 as pb
from router.known_workers import LOOK_S
from router.needs import Needs
from router.queued_request import QueuedRequest
from router.taken_room import TakenRoom


class Looks(Bench):
    """Counts the looks at the queue."""

    num_looks = 0

    def dispatch(self) -> None:
        self.num_looks += 1
        super().dispatch()

    def num_looks_at(self, *loads: pb.WorkerLoad) -> int:
        """The number of looks at the last of `loads`, which arrive one after another at one moment."""
        for each in loads:
            before = self.num_looks
            self.hear_load(self.decode, each)
        return self.num_looks - before


def waiting(num_tokens: int) -> pb.WorkerLoad:
    told = load(50)
    told.num_waiting_tokens = num_tokens
    return told


async def test_a_step_that_frees_nothing_is_no_news() -> None:
    """Most steps free nothing. With hundreds of workers, a router would do little else than look at the queue after
    each."""
    bench = Looks()
    assert bench.num_looks_at(load(50), load(49, num_running=1), load(48, num_running=2)) == 0


def saving(num_blocks: int) -> pb.WorkerLoad:
    told = load(50)
    told.host_blocks.num_saving = num_blocks
    return told


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(load(50), load(51), id="memory"),
        pytest.param(load(50, num_running=2), load(40, num_running=1), id="a place"),
        pytest.param(saving(3), saving(0), id="memory that was being copied"),
        pytest.param(waiting(90), waiting(60), id="prompts that wait are fewer"),
        pytest.param(load(50), load(50, is_draining=True), id="it leaves"),
        pytest.param(load(50, is_stalled=True), load(50), id="it goes on"),
    ],
)
async def test_what_may_let_somebody_through_is_looked_at(before: pb.WorkerLoad, after: pb.WorkerLoad) -> None:
    assert Looks().num_looks_at(before, after) == 1


async def test_what_hangs_on_time_is_looked_at_now_and_then() -> None:
    bench = Looks()
    bench.num_looks_at(load(50))
    bench.now_s += 0.9 * LOOK_S
    assert bench.num_looks_at(load(50)) == 0
    bench.now_s += 0.2 * LOOK_S
    assert bench.num_looks_at(load(50)) == 1
    assert bench.num_looks_at(load(50)) == 0


async def test_who_waits_is_looked_at_once_for_all_loads_of_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look tries the first request on all workers. With one look for each load, a router of hundreds of workers
    would have no time for anything else while requests wait. More routers would not help: each hears all loads."""
    bench = Bench()
    bench.hear_load(bench.decode, load(0))
    asked = bench.request("waits")
    await settle()
    num_tried = 0

    def choose(request: QueuedRequest, num_waiting_tokens: int) -> TakenRoom | None:
        nonlocal num_tried
        num_tried += 1
        return bench.pool.choose(request, num_waiting_tokens)

    monkeypatch.setattr(bench.queue, "_choose", choose)
    for turn in (1, 2):
        for number in range(100):
            bench.hear_load(bench.decode, load(number % 50, num_running=1))
        await asyncio.sleep(0)
        assert num_tried == turn
    await asked.leave()


@pytest.mark.parametrize(("num_state_blocks", "has_room"), [(10, True), (11, False)])
async def test_a_prompt_of_another_worker_takes_room_for_its_state_too(num_state_blocks: int, has_room: bool) -> None:
    """Otherwise the decode worker would say Busy, again and again."""
    bench = Bench(with_prefill=True)
    bench.decode.record.num_state_blocks = num_state_blocks
    bench.decode.take_record(bench.decode.record)
    bench.hear_load(bench.decode, load(len(PROMPT) // BLOCK + 10))
    room = bench.pool.choose(QueuedRequest(num_tokens=len(PROMPT), needs=Needs()))
    assert (room is not None) == has_room
    if room is not None:
        assert room.plan.prefill == bench.prefill.key
        assert bench.decode.num_planned_blocks == len(PROMPT) // BLOCK + num_state_blocks
        room.end()
        assert bench.decode.num_planned_blocks == 0
