"""A router's pool and queue with workers that say what a test scripts, and clients of that router. No network."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import replace
from typing import Any, cast

from protos import tandem_inference_pb2 as inference_pb
from protos import tandem_worker_pb2 as pb
from router.asked_answer import AskedAnswer, names_at_workers
from router.forecast import Forecast
from router.lifecycle import Lifecycle
from router.metrics import RouterMetrics
from router.parts import RouterParts
from router.policy import PolicyConfig
from router.prefix_lookup import PrefixLookup
from router.queue import RequestQueue
from router.rebalancer import Rebalancer
from router.request_events import Event, WorkerKey, WorkerLost, WorkerSaid, WorkerStalled
from router.request_state import AttemptNumbers
from router.retry_budget import RetryBudget
from router.sequences import Sequences
from router.text.detokenizer import IncrementalDetokenizer, TextDelta
from router.worker_handle import WorkerHandle
from router.worker_pool import WorkerPool
from router.worker_session import Inbox

BLOCK = 16
PROMPT = list(range(60 * BLOCK))
LENGTH = inference_pb.FINISH_REASON_LENGTH


class ScriptedSession:
    """A session with a worker that says what the test scripts."""

    is_open = True
    is_lost = False

    def __init__(self, key: WorkerKey) -> None:
        self.key = key
        self.sent: list[Any] = []
        self.inboxes: dict[str, Inbox] = {}

    @property
    def num_requests(self) -> int:
        return len(self.inboxes)

    @property
    def names(self) -> set[str]:
        return set(self.inboxes)

    def attach(self, request_id: str, inbox: Inbox) -> None:
        self.inboxes[request_id] = inbox

    def tell_stalled(self) -> None:
        for inbox in list(self.inboxes.values()):
            inbox(WorkerStalled(self.key))

    def detach(self, request_id: str) -> None:
        self.inboxes.pop(request_id, None)

    def send(self, command: Any) -> None:
        self.sent.append(command)

    async def close(self) -> None:
        """Does nothing; `WorkerSession` has it."""

    def say(self, request_id: str, attempt: int, **event: Any) -> None:
        said: Event = WorkerSaid(self.key, pb.WorkerEvent(request_id=request_id, attempt=attempt, **event))
        self.inboxes[request_id](said)


METRICS = RouterMetrics("m", 2048, good_ttft_ms=1000, good_tpot_ms=50)


class NoText:
    stop: str | None = None

    def push(self, token_ids: list[int]) -> TextDelta:
        return TextDelta("", None, len(token_ids), [])

    def finish(self) -> str:
        return ""


class NothingCached:
    async def longest_match(self, token_ids: list[int], cache_salt: str, lora_digest: str = "") -> dict[WorkerKey, int]:
        return {}


def load(num_free: int, *, num_running: int = 0, is_draining: bool = False, is_stalled: bool = False) -> pb.WorkerLoad:
    blocks = pb.BlockLedger(num_blocks=max(100, num_free), num_free=num_free, num_sequence=max(0, 100 - num_free))
    return pb.WorkerLoad(num_running=num_running, blocks=blocks, is_draining=is_draining, is_stalled=is_stalled)


class Bench:
    """A pool with one decode worker of 100 blocks and, if asked for, one prefill worker."""

    def __init__(
        self,
        *,
        with_prefill: bool = False,
        prefill_max_model_len: int = 2048,
        worker_wait_s: float = 30.0,
        is_registry_reachable: Callable[[], bool] = lambda: True,
        prefixes: Any = None,
    ) -> None:
        """`prefixes` stands in for the lookup in the prefix index; None: nothing is cached."""
        self.now_s = time.monotonic()  # the lifecycle's clock: small on a machine that has just booted
        """The time by which the pool ejects workers."""
        self.pool = WorkerPool(
            router_id="r",
            policy=PolicyConfig(),
            on_change=self.dispatch,
            now_s=lambda: self.now_s,
            is_registry_reachable=is_registry_reachable,
        )
        self.queue = RequestQueue(
            max_tokens=10**6,
            choose=self.pool.choose,
            has_workers=self.pool.has_decode_worker_for,
            has_fewer_workers=self.pool.has_fewer_workers,
            workers_for=self.pool.workers_for,
            worker_wait_s=worker_wait_s,
        )
        lookup = cast(PrefixLookup, prefixes or NothingCached())
        self.rebalancer = Rebalancer(PolicyConfig(), self.pool, self.queue, now_s=lambda: self.now_s)
        self.cluster = RouterParts(self.pool, self.queue, lookup, RetryBudget(), Forecast(), METRICS, self.rebalancer)
        self.decode = self.add("d", pb.Role.ROLE_DECODE, 2048)
        self.d = cast(ScriptedSession, self.decode.session)
        if with_prefill:
            self.prefill = self.add("p", pb.Role.ROLE_PREFILL, prefill_max_model_len)
            self.p = cast(ScriptedSession, self.prefill.session)

    def dispatch(self) -> None:
        self.queue.dispatch_soon()

    def add(self, name: str, role: pb.Role, max_model_len: int, *, incarnation: str = "1") -> WorkerHandle:
        model = inference_pb.GetModelInfoResponse(block_size=BLOCK, max_model_len=max_model_len)
        record = pb.WorkerRecord(worker_id=name, incarnation=incarnation, role=role, model=model, load=load(100))
        handle = WorkerHandle(record, channel=None)
        handle.session = cast(Any, ScriptedSession(handle.key))
        self.pool.workers.handles[handle.key] = handle
        self.pool.workers.num_changes += 1
        return handle

    def tell(self, handle: WorkerHandle, **fields: Any) -> None:
        """Set fields of a worker's record, as a report from the registry does."""
        for name, value in fields.items():
            setattr(handle.record, name, value)
        handle.take_record(handle.record)
        self.pool.workers.num_changes += 1

    def tell_adapters(self, handle: WorkerHandle, *leaving: tuple[str, str], **lora_digests: str) -> None:
        """Set all adapters of a worker, by name, and those that are `leaving`, by name and digest."""
        handle.record.model.lora_names[:] = lora_digests
        handle.record.lora_digests.clear()
        handle.record.lora_digests.update(lora_digests)
        handle.record.leaving_loras.clear()
        for name, digest in leaving:
            handle.record.leaving_loras.add(lora_name=name, lora_digest=digest)
        self.tell(handle)

    def take_away(self, handle: WorkerHandle) -> None:
        """Remove the worker's record from the registry: its session stays open, and its requests go on."""
        handle.is_leaving = True
        self.pool.workers.num_changes += 1

    def hear_load(self, handle: WorkerHandle, load: pb.WorkerLoad) -> None:
        """Set the load, as a message of the worker does."""
        self.pool.workers._on_load(handle, load)

    def lose_decode_session(self, *, num_lost: int) -> None:
        """Do what WorkerSession and WorkerPool do when `num_lost` sessions in a row were lost."""
        session, self.d.is_open, self.d.is_lost = self.d, False, True
        self.decode.num_lost = num_lost
        self.pool.workers.num_changes += 1
        inboxes, session.inboxes = session.inboxes, {}
        for inbox in inboxes.values():
            inbox(WorkerLost(session.key))
        self.dispatch()

    def reopen_decode_session(self) -> ScriptedSession:
        self.d = ScriptedSession(self.decode.key)
        self.decode.session = cast(Any, self.d)
        self.decode.num_lost = 0
        self.pool.workers.num_changes += 1
        return self.d

    def request(
        self,
        request_id: str,
        *,
        deadline_s: float | None = None,
        numbers: AttemptNumbers | None = None,
        grammar: str = "",
        cache_salt: str = "",
    ) -> Asked:
        lifecycle = self.lifecycle(
            request_id, deadline_s=deadline_s, numbers=numbers, grammar=grammar, cache_salt=cache_salt
        )
        return Asked(lifecycle.run())

    def requests(self, request_id: str, n: int) -> Asked:
        """One request for `n` answers."""
        names = names_at_workers(request_id, n)
        first = self.lifecycle(request_id, name=names[0])
        others = [
            self.lifecycle(request_id, name=name, sequence=i + 1, after=first) for i, name in enumerate(names[1:])
        ]
        return Asked(Sequences([first, *others], is_streaming=True).run())

    def lifecycle(
        self,
        request_id: str,
        *,
        deadline_s: float | None = None,
        numbers: AttemptNumbers | None = None,
        grammar: str = "",
        allowed_token_ids: Iterable[int] = (),
        after: Lifecycle | None = None,
        priority: int = 0,
        **asked: Any,
    ) -> Lifecycle:
        params = inference_pb.SamplingParams(max_tokens=8, priority=priority, allowed_token_ids=allowed_token_ids)
        if grammar:
            params.structured_outputs.regex = grammar
        answer = AskedAnswer(
            request_id=request_id,
            name=asked.pop("name", request_id),
            prompt_token_ids=asked.pop("prompt_token_ids", PROMPT),
            sampling_params=params,
            grammar=grammar,
            detokenizer=cast(IncrementalDetokenizer, NoText()),
            arrived_s=asyncio.get_running_loop().time(),
            deadline_s=deadline_s,
            **asked,
        )
        cluster = replace(self.cluster, numbers=numbers or AttemptNumbers())
        return Lifecycle(cluster, answer, after=after)


class Asked:
    """A client that reads a whole answer, or leaves."""

    def __init__(self, responses: AsyncGenerator[inference_pb.GenerateResponse, None]) -> None:
        self.received: list[inference_pb.GenerateResponse] = []
        self.task = asyncio.create_task(self._read(responses))

    async def _read(self, responses: AsyncGenerator[inference_pb.GenerateResponse, None]) -> None:
        try:
            async for response in responses:
                self.received.append(response)
        finally:
            await responses.aclose()

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)
