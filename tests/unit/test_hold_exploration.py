"""Every order of the events that can happen to a prompt's held blocks, through the code that prefill workers run.

The role, the session host and its session, the sender and its pushes, the scheduler and its blocks are real. The
router, the engine's thread, the receiver and the link to it, streaming or one-sided, are scripted. Whatever these still
owe the service is an event: the answer to a connect, start, drain, commit or abandon, a stopped writer, digests, a
step, commands taken from the engine's queue. So is each fault: an error, a mismatch once or always, a lost answer, a
dead peer, a lease that passes, a step without a token, an engine that refuses, a router that cancels, dies or sends the
attempt again, a drain.

From every state the search tries each event next, with up to two faults. Between two events the loop runs until it is
idle. With up to one fault, the loop is also cut short once in each run, after each number of turns at which it still
had work. A run ends when it reaches a state that was seen before: 5550 states, 6850 runs.

Checked: blocks are freed once, when nothing reads them, and for a one-sided sender after the receiver was told;
`handed_over` is said once, after COMMITTED; nothing is said of a closed stream; an attempt that was not cancelled has
one end; a drain returns when all blocks are free, or when the commands that free them are in the engine's queue. When
nothing can happen any more, all blocks are free, and no task, push or stream is left. Mechanisms are then removed, one
at a time: each removal must be noticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hold_parts import Writer
from hold_world import explore

from engine.outputs import RequestOutput
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence as EngineSequence
from kv_transfer import KVSender, Push, TransferError
from prefill_service.prefill import PrefillRole
from protos import tandem_kv_transfer_pb2 as kv_pb
from protos import tandem_worker_pb2 as pb
from rpc.errors import TandemError, Unreachable
from worker_service.sessions import SessionHost, Stream


@pytest.mark.parametrize("is_one_sided", [False, True])
@pytest.mark.parametrize(
    ("num_faults", "max_hurries", "num_states"),
    [(0, 0, 15), pytest.param(2, 0, 1500, marks=pytest.mark.slow), (1, 1, 200)],
)
def test_every_order(is_one_sided: bool, num_faults: int, max_hurries: int, num_states: int) -> None:
    explorer = explore(is_one_sided, num_faults, max_hurries)
    assert len(explorer.seen) >= num_states


# -- mechanisms taken out -----------------------------------------------------------------------------------------


def release_at_once(self: Any, stream: Stream, push: Push, *, is_settled: bool) -> Any:
    async def let_go() -> None:
        self._engine.post(lambda engine: engine.hold(stream.engine_id))
        del self._pushes[stream.engine_id]
        self._engine.post(lambda engine: engine.abort(stream.engine_id))
        await push.abandon()

    return let_go()


async def let_go_without_hold(self: Any, stream: Stream, push: Push, *, is_settled: bool) -> None:
    await push.abandon()
    del self._pushes[stream.engine_id]
    self._engine.post(lambda engine: engine.abort(stream.engine_id))


async def let_go_where_it_went_well(self: Any, stream: Stream, push: Push, *, is_settled: bool) -> None:
    if is_settled:
        await LET_GO(self, stream, push, is_settled=is_settled)


async def let_go_twice(self: Any, stream: Stream, push: Push, *, is_settled: bool) -> None:
    await LET_GO(self, stream, push, is_settled=is_settled)
    self._engine.post(lambda engine: engine.abort(stream.engine_id))


async def let_go_and_keep_the_push(self: Any, stream: Stream, push: Push, *, is_settled: bool) -> None:
    await LET_GO(self, stream, push, is_settled=is_settled)
    self._pushes[stream.engine_id] = push


def cancel_and_close_later(self: SessionHost, stream: Stream) -> None:
    self.role.cancel(stream)


async def drain_without_clean_up(self: SessionHost) -> None:
    self._is_draining = True
    await self._has_no_streams.wait()


async def say_whatever_happened(self: Any, stream: Stream, command: pb.PrefillRequest) -> None:
    try:
        await self._serve(stream, command)
    except TransferError as error:
        stream.post_failure(Unreachable(str(error)), can_retry=True)
    self._host.close(stream)


def fail_silently(self: SessionHost, stream: Stream, error: TandemError) -> None:
    stream.post_failure(error, can_retry=False)
    self.close(stream)


async def believe(self: Push, *args: Any) -> None:
    await self._writer.drain()


async def say_nothing(self: Push) -> None:
    pass


async def abandon_while_writing(self: Any) -> None:
    self._is_open = False
    await self._send_abandon()
    await self._writer.stop()


async def abandon_what_is_open(self: Any) -> None:
    was_open, self._is_open = self._is_open, False
    await self._writer.stop()
    if was_open:
        await self._send_abandon()


async def abandon_in_the_background(self: Any) -> None:
    self._is_open = False
    await self._writer.stop()
    self._sender.spawn(self._send_abandon())


def write_for_ever(self: Any, layer: int, first_block: int, src_block_ids: Sequence[int]) -> None:
    self._post(layer, src_block_ids, self._dst_block_ids[first_block : first_block + len(src_block_ids)])


def free_what_failed(self: Any, seq: EngineSequence, offset: int) -> RequestOutput:
    output = FAIL(self, seq, offset)
    self.sequences.abort(seq.request_id)
    return output


async def open_and_stop_in_line(self: Any, grant: kv_pb.Grant) -> Push:
    kept = await self.links.get(grant)
    writer = kept.link.writer(grant)
    try:
        await writer.start()
    except BaseException:
        await writer.stop()
        raise
    return Push(self, kept, writer, grant)


LET_GO: Any = PrefillRole._let_go
FAIL = Scheduler._fail
CANCELS = "router: cancels!"


@pytest.mark.parametrize(
    ("owner", "mechanism", "without", "faults", "what"),
    [
        (PrefillRole, "_let_go", release_at_once, [CANCELS], "freed while a writer may read"),
        (PrefillRole, "_let_go", let_go_without_hold, [CANCELS], "computed for nobody"),
        (PrefillRole, "_let_go", let_go_where_it_went_well, [CANCELS], "never freed"),
        (PrefillRole, "_let_go", let_go_where_it_went_well, ["commit 1: gone!"], "never freed"),
        (PrefillRole, "_let_go", let_go_twice, [], "released twice"),
        (PrefillRole, "_let_go", let_go_and_keep_the_push, [], "a push is left"),
        (PrefillRole, "cancel", lambda *_: None, [CANCELS], "closed or cancelled|never freed|computed for nobody"),
        (SessionHost, "drain", drain_without_clean_up, ["drain", CANCELS], "drained before"),
        (PrefillRole, "_run", say_whatever_happened, ["drain 1: broken!", CANCELS], "closed or cancelled"),
        (SessionHost, "_cancel", cancel_and_close_later, [CANCELS], "closed or cancelled"),
        (SessionHost, "_fail", lambda *_, **__: None, ["engine: refuses!"], "a stream is left"),
        (SessionHost, "_fail_for_good", fail_silently, ["step: no token!"], "never freed"),
        (KVSender, "spawn", lambda _, work: work.close(), ["commit 1: gone!"], "not told"),
        (KVSender, "open", open_and_stop_in_line, ["start 1: gone!", CANCELS], "a writer is left"),
        (Push, "_push_until_committed", believe, [], "before it was committed"),
        (Push, "_send_abandon", say_nothing, [CANCELS], "not told"),
        (Push, "abandon", abandon_while_writing, [CANCELS], "before the last write"),
        (Push, "abandon", abandon_what_is_open, ["commit 1: gone!", CANCELS], "not told"),
        (Push, "abandon", abandon_in_the_background, [CANCELS], "before the receiver knows"),
        (Push, "write", write_for_ever, [CANCELS], "posted to a writer"),
        (Writer, "stop", say_nothing, [], "freed while a writer may read|before the last write"),
        (Scheduler, "_fail", free_what_failed, ["step: no token!"], "freed while a writer may read"),
    ],
)
def test_each_mechanism_is_missed(
    owner: type, mechanism: str, without: object, faults: list[str], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, mechanism, without)
    with pytest.raises(AssertionError, match=what):
        explore(True, len(faults), int(len(faults) == 2), faults or ["none"])
