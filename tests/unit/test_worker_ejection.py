"""A worker that fails again and again, as the router's requests see it: ejected, probed, used again. No network."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import grpc
import pytest
from lifecycle_bench import LENGTH, Asked, Bench, NoText, ScriptedSession, settle
from one_worker import OneWorker

from protos import tandem_inference_pb2 as inference_pb
from protos import tandem_worker_pb2 as pb
from protos.tandem_kv_transfer_pb2 import Grant
from router.ejection import FAILURES_TO_EJECT, PROBE_S, pause_of
from router.queued_request import QueuedRequest
from router.request_events import WorkerKey, WorkerPair
from router.retry_budget import CAPACITY
from router.text.detokenizer import TextDelta
from rpc.errors import NoWorker

INTERNAL, UNAVAILABLE, ABORTED, DATA_LOSS = 13, 14, 10, 15


class Two(Bench):
    """A decode worker `d` that is always the policy's first choice, and another one, `other`, which does not fail."""

    def __init__(self, *, with_prefill: bool = False) -> None:
        super().__init__(with_prefill=with_prefill)
        self.other_handle = self.add("other", pb.Role.ROLE_DECODE, 2048)
        self.decode.set_load(roomy_load(num_used=0))
        self.other_handle.set_load(roomy_load(num_used=50_000))
        self.other = cast(ScriptedSession, self.other_handle.session)
        self.num_asked = 0

    async def ask(self) -> tuple[str, Asked]:
        """Send a new request, and let the router send it to a worker."""
        self.num_asked += 1
        request_id = f"r{self.num_asked}"
        asked = self.request(request_id)
        await settle()
        return request_id, asked

    async def fail(self, *, code: int = INTERNAL) -> None:
        """Send a request that `d` fails, and whose client then gives up."""
        request_id, asked = await self.ask()
        failed = pb.Failed(code=code, message="broken", can_retry=True)
        self.d.say(request_id, attempt_of(self.d, request_id), failed=failed)
        await settle()
        await asked.leave()

    async def eject(self) -> None:
        for _ in range(FAILURES_TO_EJECT):
            await self.fail()
        assert self.pool.ejected == ["d"]


def roomy_load(*, num_used: int, is_draining: bool = False) -> pb.WorkerLoad:
    blocks = pb.BlockLedger(num_blocks=100_000, num_free=100_000 - num_used, num_sequence=num_used)
    return pb.WorkerLoad(blocks=blocks, is_draining=is_draining)


def attempt_of(session: ScriptedSession, request_id: str) -> int:
    """The request's last attempt that was sent to the worker."""
    asked = [getattr(command, command.WhichOneof("command")) for command in session.sent]
    return max(request.attempt for request in asked if request.request_id == request_id)


def ids_of(session: ScriptedSession) -> list[str]:
    """The ids of the requests that were sent to the worker."""
    return [command.generate.request_id for command in session.sent if command.WhichOneof("command") == "generate"]


def tokens(*, is_last: bool = True) -> pb.Tokens:
    return pb.Tokens(index=0, token_ids=[5], finish_reason=LENGTH if is_last else 0)  # type: ignore[arg-type]


async def test_a_worker_that_fails_each_request_is_asked_no_more_then_probed_then_used_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "router.worker_faults")
    bench = Two()
    await bench.eject()
    assert ids_of(bench.d) == ["r1", "r2", "r3"]
    asked = [(await bench.ask())[1] for _ in range(5)]
    assert ids_of(bench.d) == ["r1", "r2", "r3"]
    assert ids_of(bench.other)[-5:] == ["r4", "r5", "r6", "r7", "r8"]

    bench.now_s += pause_of(1)
    asked += [(await bench.ask())[1] for _ in range(3)]
    assert ids_of(bench.d)[3:] == ["r9"], "exactly one request is the probe"
    assert bench.pool.ejected == ["d"]
    bench.d.say("r9", 1, tokens=tokens())
    await settle()
    assert bench.pool.ejected == []
    asked += [(await bench.ask())[1] for _ in range(3)]
    assert ids_of(bench.d)[4:] == ["r12", "r13", "r14"]
    for each in asked:
        await each.leave()
    told = [record for record in caplog.records if record.name == "router.worker_faults"]
    lines = [(record.message, vars(record).get("worker")) for record in told]
    assert lines == [("worker ejected", "d"), ("worker readmitted", "d")]


@pytest.mark.parametrize("is_last", [False, True], ids=["in the middle", "in the last message"])
async def test_a_probe_that_ends_by_a_stop_string_has_succeeded(monkeypatch: pytest.MonkeyPatch, is_last: bool) -> None:
    bench = Two()
    await bench.eject()
    bench.now_s += pause_of(1)
    request_id, asked = await bench.ask()
    monkeypatch.setattr(NoText, "push", lambda _, token_ids: TextDelta("", "stop", len(token_ids), []))
    bench.d.say(request_id, 1, tokens=tokens(is_last=is_last))
    await asked.task
    assert asked.received[-1].finish_reason == inference_pb.FINISH_REASON_STOP
    assert bench.pool.ejected == []


async def test_a_probe_that_fails_goes_elsewhere_and_the_worker_is_left_alone_for_longer() -> None:
    bench = Two()
    await bench.eject()
    bench.now_s += pause_of(1)
    await bench.fail()
    assert ids_of(bench.other)[-1] == "r4"
    bench.now_s += pause_of(1)
    _, asked = await bench.ask()
    assert ids_of(bench.other)[-1] == "r5"
    await asked.leave()
    bench.now_s += pause_of(2) - pause_of(1)
    _, asked = await bench.ask()
    assert ids_of(bench.d)[-1] == "r6"
    await asked.leave()


@pytest.mark.parametrize("how", ["client leaves", "busy", "takes long"])
async def test_a_probe_that_shows_nothing_is_followed_by_another(how: str) -> None:
    bench = Two()
    await bench.eject()
    bench.now_s += pause_of(1)
    request_id, asked = await bench.ask()
    match how:
        case "client leaves":
            await asked.leave()
        case "busy":
            bench.d.say(request_id, 1, busy=pb.Busy())
            await settle()
            bench.decode.is_full = False
        case "takes long":
            bench.now_s += PROBE_S
    _, another = await bench.ask()
    assert ids_of(bench.d)[-2:] == ["r4", "r5"]
    await another.leave()
    await asked.leave()


async def test_a_probe_that_nobody_hears_of_is_followed_by_another() -> None:
    bench = Two()
    await bench.eject()
    bench.now_s += pause_of(1)
    for handle in (bench.decode, bench.other_handle):
        handle.is_full = True
    waiting = asyncio.create_task(bench.queue.wait_for_plan(QueuedRequest(num_tokens=16)))
    await settle()
    bench.decode.is_full = False
    bench.dispatch()  # plans the request
    waiting.cancel()  # before the request hears of it
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    _, asked = await bench.ask()
    assert ids_of(bench.d)[-1] == "r4"
    await asked.leave()


async def test_an_ejected_worker_gets_nothing_though_the_others_are_full() -> None:
    bench = Two()
    await bench.eject()
    bench.other_handle.is_full = True
    _, asked = await bench.ask()
    assert ids_of(bench.d) == ["r1", "r2", "r3"]
    bench.other_handle.is_full = False
    bench.dispatch()
    await settle()
    assert ids_of(bench.other)[-1] == "r4"
    await asked.leave()


async def test_where_all_decode_workers_are_ejected_they_serve_all_the_same() -> None:
    bench = Two()
    await bench.eject()
    bench.take_away(bench.other_handle)
    request_id, asked = await bench.ask()
    bench.d.say(request_id, 1, tokens=tokens())
    await asked.task
    assert bench.pool.ejected == []


@pytest.mark.parametrize("code", [INTERNAL, UNAVAILABLE, ABORTED, DATA_LOSS])
async def test_a_prefill_worker_that_fails_or_cannot_hand_over_is_not_needed(code: int) -> None:
    """A failure of its own ejects it. If its transfers fail, the router only stops pairing it with this decode
    worker."""
    bench = Bench(with_prefill=True)

    def left_out() -> tuple[list[str], list[WorkerPair]]:
        return bench.pool.ejected, bench.pool.apart

    async def reserve(request_id: str) -> Asked:
        asked = bench.request(request_id)
        await settle()
        bench.d.say(request_id, 1, granted=Grant(grant_id=1))
        await settle()
        return asked

    for index in range(FAILURES_TO_EJECT):
        asked = await reserve(f"r{index}")
        bench.p.say(f"r{index}", 1, failed=pb.Failed(code=code, message="broken", can_retry=True))
        await settle()
        await asked.leave()
    expected = (["p"], []) if code == INTERNAL else ([], [WorkerPair(bench.p.key, bench.decode.key)])
    assert left_out() == expected
    asked = bench.request("r")
    await settle()
    assert bench.d.sent[-1].generate.request_id == "r"
    await asked.leave()

    bench.now_s += pause_of(1)
    asked = await reserve("probe")
    bench.p.say("probe", 1, tokens=tokens(is_last=False))
    await settle()
    assert left_out() == expected, "its transfer may still fail"
    bench.p.say("probe", 1, handed_over=pb.HandedOver())
    await settle()
    assert left_out() == ([], [])
    await asked.leave()


async def fail_transfers(bench: Bench) -> None:
    """Fail transfers between the prefill worker and `d` until the router no longer pairs the two."""
    for index in range(FAILURES_TO_EJECT):
        asked = bench.request(f"r{index}")
        await settle()
        bench.d.say(f"r{index}", 1, granted=Grant(grant_id=1))
        await settle()
        bench.p.say(f"r{index}", 1, failed=pb.Failed(code=UNAVAILABLE, message="unreachable", can_retry=True))
        await settle()
        await asked.leave()


async def test_a_pair_that_is_kept_apart_works_with_others() -> None:
    bench = Bench(with_prefill=True)
    await fail_transfers(bench)
    other = bench.add("other", pb.Role.ROLE_DECODE, 2048)
    bench.decode.is_full = True
    asked = bench.request("r")
    await settle()
    assert cast(ScriptedSession, other.session).sent[-1].WhichOneof("command") == "reserve"
    await asked.leave()


@pytest.mark.parametrize("code", [UNAVAILABLE, ABORTED, DATA_LOSS])
async def test_what_may_be_the_peers_fault_ejects_nobody(code: int) -> None:
    bench = Two()
    for _ in range(2 * FAILURES_TO_EJECT):
        await bench.fail(code=code)
    assert bench.pool.ejected == []


async def test_a_worker_that_is_leaving_may_fail_what_it_likes() -> None:
    bench = Two()
    for _ in range(2 * FAILURES_TO_EJECT):
        request_id, asked = await bench.ask()
        bench.decode.set_load(roomy_load(num_used=0, is_draining=True))
        bench.d.say(request_id, 1, failed=pb.Failed(code=INTERNAL, message="going", can_retry=True))
        await settle()
        bench.decode.set_load(roomy_load(num_used=0))
        await asked.leave()
    assert bench.pool.ejected == []


async def test_requests_that_fail_in_one_moment_are_one_failure() -> None:
    bench = Two()
    asked = [await bench.ask() for _ in range(50)]
    assert len(ids_of(bench.d)) == 50
    for request_id, _ in asked:
        bench.d.say(request_id, 1, failed=pb.Failed(code=INTERNAL, message="broken", can_retry=True))
    await settle()
    assert bench.pool.ejected == []
    for _, each in asked:
        await each.leave()


async def test_a_cluster_in_which_every_worker_fails_says_so_after_the_second_failure() -> None:
    bench = Two()
    for _ in range(CAPACITY):
        bench.cluster.budget.take(2)
    request_id, asked = await bench.ask()
    for session in (bench.d, bench.other):
        failed = pb.Failed(code=INTERNAL, message="broken", can_retry=True)
        session.say(request_id, attempt_of(session, request_id), failed=failed)
        await settle()
    with pytest.raises(
        NoWorker, match="worker other: broken; not retried, since too many requests are being retried"
    ) as caught:
        await asked.task
    assert caught.value.retry_after_s is not None


# -- sessions that are lost -------------------------------------------------------------------------------------


async def test_a_session_lost_is_one_failure_however_many_requests_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = OneWorker(monkeypatch)
    for _ in range(FAILURES_TO_EJECT - 1):
        await worker.lose_session(num_requests=50)
    assert worker.pool.ejected == []
    await worker.lose_session(num_requests=50)
    assert worker.pool.ejected == ["d"]
    await worker.pool.close()


async def test_a_restarted_process_is_the_same_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = OneWorker(monkeypatch)
    for incarnation in range(FAILURES_TO_EJECT):
        worker.restart(f"process-{incarnation}")
        await worker.lose_session(num_requests=1)
    assert worker.pool.ejected == ["d"]
    await worker.pool.close()


@pytest.mark.parametrize("how", ["nobody was there", "leaving", "we were silent"])
async def test_a_session_lost_by_nobodys_fault_does_not_count(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    worker = OneWorker(monkeypatch)
    for _ in range(2 * FAILURES_TO_EJECT):
        match how:
            case "nobody was there":
                await worker.lose_session(num_requests=0)
            case "we were silent":
                await worker.lose_session(num_requests=5, code=grpc.StatusCode.ABORTED)
            case "leaving":
                await worker.lose_session(num_requests=5, code=None, is_leaving=True)
    assert worker.pool.ejected == []
    await worker.pool.close()


async def test_a_pair_of_which_one_was_restarted_is_another() -> None:
    bench = Bench(with_prefill=True)
    await fail_transfers(bench)
    assert bench.pool.apart
    del bench.pool.workers.handles[bench.decode.key]
    bench.decode.record.incarnation = "2"
    bench.decode.key = WorkerKey("d", "2")
    session = ScriptedSession(bench.decode.key)
    bench.decode.session = cast(Any, session)
    bench.pool.workers.handles[bench.decode.key] = bench.decode
    asked = bench.request("r")
    await settle()
    assert session.sent[-1].WhichOneof("command") == "reserve"
    assert not bench.pool.apart
    await asked.leave()
