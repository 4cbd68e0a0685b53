"""Requests whose answers began on workers of another kind than new requests go to, as in an upgrade. No network."""

from __future__ import annotations

from typing import Any, cast

from lifecycle_bench import BLOCK, PROMPT, Asked, Bench, ScriptedSession, load, settle

from protos import tandem_worker_pb2 as pb
from router.served_kind import Kind
from router.validation.resumption import Resumption


class Upgrade(Bench):
    """One decode worker of the old kind, which is full, and two of the new kind."""

    def __init__(self) -> None:
        super().__init__()
        self.tell(self.decode, compat_digest="old")
        self.new = [self.add(name, pb.Role.ROLE_DECODE, 2048) for name in ("new-1", "new-2")]
        for handle in self.new:
            self.tell(handle, compat_digest="new")
        self.decode.set_load(load(0))

    def moved(self, name: str, **asked: Any) -> Asked:
        """Resume a stream that began on a worker of the old kind and lost that worker."""
        resumption = Resumption(token_ids=[1, 2, 3], kind=Kind("old"))
        return Asked(self.lifecycle(name, resumption=resumption, **asked).run())

    def free_old(self, num_blocks: int) -> None:
        self.decode.set_load(load(num_blocks))
        self.dispatch()

    @property
    def sent_to_new(self) -> list[str]:
        sessions = [cast(ScriptedSession, handle.session) for handle in self.new]
        return [command.generate.request_id for session in sessions for command in session.sent]

    @property
    def sent_to_old(self) -> list[str]:
        return [command.generate.request_id for command in self.d.sent if command.HasField("generate")]


async def test_who_waits_for_a_worker_of_another_kind_keeps_nobody_from_those_of_this_one() -> None:
    bench = Upgrade()
    moved = bench.moved("moved")
    await settle()
    new = bench.request("new")
    await settle()
    assert (bench.sent_to_new, len(bench.queue)) == (["new"], 1)
    bench.free_old(100)
    await settle()
    assert (bench.sent_to_old, len(bench.queue), bench.queue.num_tokens) == (["moved"], 0, 0)
    await moved.leave()
    await new.leave()


async def test_among_themselves_they_go_first_come_first_served() -> None:
    bench = Upgrade()
    first, second = bench.moved("first"), bench.moved("second")
    await settle()
    bench.free_old(70)  # room for one of them
    await settle()
    assert (bench.sent_to_old, len(bench.queue)) == (["first"], 1)
    await first.leave()
    await settle()
    assert bench.sent_to_old[-1] == "second"
    await second.leave()


async def test_among_themselves_the_lower_number_goes_first() -> None:
    bench = Upgrade()
    batch, urgent = bench.moved("batch", priority=5), bench.moved("urgent")
    await settle()
    bench.free_old(70)  # room for one of them
    await settle()
    assert (bench.sent_to_old, len(bench.queue)) == (["urgent"], 1)
    await urgent.leave()
    await settle()
    assert bench.sent_to_old[-1] == "batch"
    await batch.leave()


async def test_who_finds_its_worker_busy_is_the_next_one_there_all_the_same() -> None:
    bench = Upgrade()
    first, second = bench.moved("first"), bench.moved("second")
    await settle()
    bench.free_old(70)
    await settle()
    assert bench.sent_to_old == ["first"]
    bench.d.say("first", bench.d.sent[-1].generate.attempt, busy=pb.Busy())
    await settle()
    assert len(bench.queue) == 2
    bench.decode.set_load(load(0))
    bench.free_old(70)
    await settle()
    assert (bench.sent_to_old, len(bench.queue)) == (["first", "first"], 1)
    await first.leave()
    await second.leave()


async def test_who_comes_later_overtakes_nobody_of_its_kind_that_is_aside() -> None:
    """Otherwise a long request would wait for as long as short ones come."""
    bench = Upgrade()
    long = bench.moved("long")
    await settle()
    bench.decode.set_load(load(30))  # too little for the long one
    short = bench.moved("short", prompt_token_ids=PROMPT[: 4 * BLOCK])
    await settle()
    assert (bench.sent_to_old, len(bench.queue)) == ([], 2)
    bench.free_old(100)
    await settle()
    assert (bench.sent_to_old, len(bench.queue)) == (["long", "short"], 0)
    await long.leave()
    await short.leave()


async def test_the_time_that_they_wait_is_no_measure_of_the_line() -> None:
    """That time may be minutes, and may fall between two requests in line that had room at once."""
    bench = Upgrade()
    moved = bench.moved("moved")
    await settle()
    new = [bench.request(name) for name in ("new", "newer")]
    await settle()
    assert (len(bench.sent_to_new), len(bench.queue)) == (2, 1)
    assert bench.queue.pace._moved_s is None
    for each in (moved, *new):
        await each.leave()


async def test_who_gives_up_aside_leaves_nothing() -> None:
    bench = Upgrade()
    moved = bench.moved("moved")
    await settle()
    assert len(bench.queue) == 1
    await moved.leave()
    await settle()
    assert (len(bench.queue), bench.queue.num_tokens, bench.queue.num_clients) == (0, 0, 0)
    assert not bench.queue._aside


async def test_where_their_kind_is_the_one_that_is_left_they_go_before_new_ones_of_their_priority() -> None:
    bench = Upgrade()
    moved = [bench.moved("batch", priority=5), *(bench.moved(name) for name in ("moved", "moved too"))]
    await settle()
    for handle in bench.new:
        bench.take_away(handle)
    new = bench.request("new")
    await settle()
    assert len(bench.queue) == 4
    for request in (moved[1], moved[2], new, moved[0]):
        bench.decode.set_load(load(0))
        bench.free_old(70)
        await settle()
        await request.leave()
    assert bench.sent_to_old == ["moved", "moved too", "new", "batch"]
    assert (len(bench.queue), bench.queue.num_tokens, bench.queue.num_clients) == (0, 0, 0)


async def test_what_is_ahead_of_a_new_request_is_ahead_of_it_at_workers_that_it_goes_to() -> None:
    """The old worker has nothing to do. If it counted, the router would accept the request, which would miss its
    deadline."""
    bench = Upgrade()
    bench.decode.set_load(load(100))
    for handle in bench.new:
        handle.set_load(pb.WorkerLoad(num_waiting_tokens=5000))
    assert bench.pool.num_tokens_to_compute(100) == 5100
