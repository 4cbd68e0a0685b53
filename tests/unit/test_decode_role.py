"""A decode worker's memory from Reserve to the answer: who frees it, and what the router is told. The engine is
scripted; sessions, grants and leases are those of a worker. No network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import grpc
import numpy as np
import pytest

from decode_service.decode import DecodeRole
from engine.llm_engine import Reservation
from kv_transfer import HostPool, Identity, InvalidTransfer, KVLayout, KVReceiver, create_endpoint
from protos import tandem_inference_pb2 as inference_pb
from protos import tandem_kv_transfer_pb2 as kv_pb
from protos import tandem_worker_pb2 as pb
from rpc.session import EventOutbox
from worker_service.sessions import RouterSession, SessionHost

IDENTITY = Identity(worker_id="d", incarnation="d-1", compat_digest="same")
LAYOUT = KVLayout(num_layers=2, num_blocks=8, block_size=4, num_kv_heads=1, head_dim=1, dtype="float16")
POOL = HostPool(LAYOUT, np.zeros((2, 8, LAYOUT.block_bytes), dtype=np.uint8))
BLOCKS = [3, 4]
NUM_TOKENS = 6
PARAMS = inference_pb.SamplingParams(max_tokens=8, temperature=0, top_p=1, repetition_penalty=1, seed=0)


class Engine:
    """Owns what it has been told to, until it is told to abort that. The test may hold up its next calls."""

    def __init__(self) -> None:
        self.owned: list[str] = []
        self.decoding: list[str] = []
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def call(self, function: Callable[[Engine], Any]) -> Any:
        await self.goes_on.wait()
        return function(self)

    def post(self, function: Callable[[Engine], Any]) -> None:
        function(self)

    def reserve(self, engine_id: str, **arguments: object) -> Reservation:
        self.owned.append(engine_id)
        return Reservation(BLOCKS, 0, b"")

    def add_request(self, engine_id: str, **arguments: object) -> bool:
        self.owned.append(engine_id)
        return True

    def commit(self, engine_id: str, first_token_id: int, num_prompt_tokens: int) -> None:
        if engine_id not in self.owned:
            raise KeyError(engine_id)
        if num_prompt_tokens != NUM_TOKENS:
            raise ValueError(f"{num_prompt_tokens} tokens")
        self.decoding.append(engine_id)

    def abort(self, engine_id: str) -> None:
        if engine_id in self.owned:
            self.owned.remove(engine_id)


class Worker:
    def __init__(self, lease_s: float) -> None:
        self.engine = Engine()
        self.host = SessionHost(incarnation="d-1", lease_ms=10_000, load=pb.WorkerLoad)
        role = self.host.role = DecodeRole(host=self.host, engine=cast(Any, self.engine))
        self.receiver = role.receiver = KVReceiver(
            pool=POOL,
            identity=IDENTITY,
            lease_s=lease_s,
            endpoint=create_endpoint("grpc", pool=POOL, identity=IDENTITY),
            on_commit=role.on_commit,
            on_freed=role.on_freed,
        )
        self.session = RouterSession(EventOutbox(pb.WorkerLoad))
        self._messages = self.session.outbox.messages()

    def send(self, **command: Any) -> None:
        self.host._handle(self.session, pb.DecodeCommand(**command))

    async def heard(self) -> pb.WorkerEvent:
        """The next event that the router is told."""
        async with asyncio.timeout(10):
            (event,) = (await anext(self._messages)).events
        return event

    async def granted(self) -> kv_pb.Grant:
        self.send(reserve=pb.EngineRequest(request_id="r", attempt=1, sampling_params=PARAMS))
        return (await self.heard()).granted

    async def commit(self, grant: kv_pb.Grant, *, num_tokens: int = NUM_TOKENS) -> kv_pb.CommitResponse:
        request = kv_pb.CommitRequest(
            grant_id=grant.grant_id,
            epoch=grant.epoch,
            incarnation=grant.incarnation,
            num_prompt_tokens=num_tokens,
            digests=POOL.digests(BLOCKS).astype("<u8").tobytes(),
            first_token_id=1,
        )
        return await self.receiver.commit(request)

    def cancel(self) -> None:
        self.send(cancel=pb.Cancel(request_id="r", attempt=1))


@pytest.fixture
async def worker(request: pytest.FixtureRequest) -> AsyncIterator[Worker]:
    worker = Worker(getattr(request, "param", 10.0))
    await worker.receiver.start("d:1")
    yield worker
    await worker.receiver.close()


async def test_a_commit_that_does_not_fit_frees_the_memory_and_the_router_is_told(worker: Worker) -> None:
    grant = await worker.granted()
    with pytest.raises(InvalidTransfer):
        await worker.commit(grant, num_tokens=NUM_TOKENS - 1)
    failed = (await worker.heard()).failed
    assert (failed.code, failed.can_retry) == (grpc.StatusCode.INVALID_ARGUMENT.value[0], True)
    assert (worker.engine.owned, worker.session.streams) == ([], {})
    assert (await worker.commit(grant)).outcome == kv_pb.CommitResponse.GRANT_GONE


@pytest.mark.parametrize("worker", [0.05], indirect=True)
async def test_a_grant_whose_lease_ends_frees_the_memory_and_the_router_is_told(worker: Worker) -> None:
    grant = await worker.granted()
    failed = (await worker.heard()).failed
    assert (failed.code, failed.can_retry) == (grpc.StatusCode.ABORTED.value[0], True)
    assert (worker.engine.owned, worker.session.streams) == ([], {})
    assert (await worker.commit(grant)).outcome == kv_pb.CommitResponse.GRANT_GONE


async def test_a_sign_of_life_of_its_router_restarts_the_lease(worker: Worker) -> None:
    await worker.granted()
    before_s = worker.receiver.table.next_expiry_s()
    await asyncio.sleep(0.01)
    worker.send(beat=pb.Beat())
    after_s = worker.receiver.table.next_expiry_s()
    assert before_s is not None
    assert after_s is not None
    assert after_s >= before_s + 0.01


async def test_memory_that_a_sender_may_write_to_is_not_freed_by_a_cancel(worker: Worker) -> None:
    grant = await worker.granted()
    attached = grant.grant_id, grant.epoch, grant.incarnation
    _, attachment_id = worker.receiver.table.attach(*attached)
    worker.cancel()
    assert worker.engine.owned
    worker.receiver.detach(grant.grant_id, attachment_id)
    assert worker.engine.owned == []


async def test_a_cancel_that_overtakes_the_commit_in_the_engine_ends_the_request(worker: Worker) -> None:
    """The prefill worker is told, so that it does not report a handover."""
    grant = await worker.granted()
    worker.engine.goes_on.clear()
    commit = asyncio.create_task(worker.commit(grant))
    stream = next(iter(worker.session.streams.values()))
    async with asyncio.timeout(10):
        while stream.grant_id is not None:  # noqa: ASYNC110 - from then on its memory is the engine's
            await asyncio.sleep(0.001)
    worker.cancel()
    worker.engine.goes_on.set()
    assert (await commit).outcome == kv_pb.CommitResponse.GRANT_GONE
    assert (worker.engine.owned, worker.engine.decoding) == ([], [])
    assert (await worker.commit(grant)).outcome == kv_pb.CommitResponse.GRANT_GONE


async def test_a_cancel_before_the_engine_has_heard_of_the_request_ends_it_all_the_same(worker: Worker) -> None:
    worker.engine.goes_on.clear()
    worker.send(generate=pb.EngineRequest(request_id="r", attempt=1, sampling_params=PARAMS))
    await asyncio.sleep(0)
    worker.cancel()
    worker.engine.goes_on.set()
    await worker.host.wait_for_tasks()
    assert worker.engine.owned == []
