"""Compares a request's deadline with the time that its answer may take: a request that could not meet it is refused
before it is queued, or given up in the queue while there is still time to tell the client.

Reads the queue and the workers' load; changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping

from protos import tandem_inference_pb2 as pb
from router.asked_answer import AskedAnswer
from router.forecast import Forecast
from router.queue import RequestQueue
from router.request_events import WorkerKey
from router.worker_pool import NOTHING_CACHED, WorkerPool
from rpc.errors import DeadlinePassed, Overloaded

CAUTION = 1.25
"""A request is admitted only if it would be in time even when it took this many times longer than expected. A request
that is admitted and comes too late has wasted other requests' time."""
MIN_ANSWER_S = 0.1
"""The least time that an answer is assumed to need, so that a waiting request is refused before its deadline."""


class Deadline:
    """The deadline of one answer, and of further answers that begin with it."""

    def __init__(self, asked: AskedAnswer, forecast: Forecast, queue: RequestQueue, pool: WorkerPool) -> None:
        self._asked = asked
        self._deadline_s = asked.deadline_s
        self._forecast = forecast
        self._queue = queue
        self._pool = pool
        self._params = asked.sampling_params
        self._num_answers = asked.num_answers

    def refuse_if_passed(self) -> None:
        """Raise `DeadlinePassed` if the deadline has passed, before anything is done for the answer."""
        assert self._deadline_s is not None
        if self._deadline_s <= time.monotonic():
            raise DeadlinePassed("the request's deadline passed before it was started")

    async def refuse_if_late(self, find_cached: Callable[[], Awaitable[Mapping[WorkerKey, int]]]) -> None:
        """Raise `Overloaded` if the answer could not be complete in time, given the load of all workers and the length
        of the queue, before anything is done for it. `find_cached` asks the prefix index how many blocks of the prompt
        each worker has cached; it is called only if that could change the decision."""
        num_tokens, cached = len(self._asked.prompt_token_ids), NOTHING_CACHED
        if self._is_late(*self._ahead(num_tokens, cached)) and not self._is_late(*self._ahead(1, cached)):
            cached = await find_cached()
        ahead = self._ahead(num_tokens, cached)  # other requests may have come meanwhile
        if self._is_late(*ahead):
            needed_s, left_s = self._needed_s(*ahead), self._left_s
            raise Overloaded(
                f"the answer is expected to take {needed_s:.1f} s with {self._forecast.num_running} other requests "
                f"running, but the deadline is in {left_s:.1f} s; retry later, or allow more time",
                retry_after_s=needed_s - left_s,
            )

    def _ahead(self, num_tokens: int, cached: Mapping[WorkerKey, int]) -> tuple[float, float]:
        """What now lies ahead of the first token of a prompt with `num_tokens` tokens: the seconds that it would wait
        for room, and the number of tokens to compute then, its own uncached ones included."""
        queue, pool, lora_name = self._queue, self._pool, self._asked.lora_name
        first = queue.may_be_overtaken
        if first is not None and pool.takes_at_once(num_tokens, lora_name, cached, first):
            return 0.0, pool.num_tokens_to_compute(num_tokens, lora_name, cached)
        num_before = queue.num_tokens_before(self._params.priority, self._asked.fairness_id, lora_name=lora_name)
        # In a first burst nobody knows yet how fast the queue moves: no sooner than its prompts are computed.
        num_waiting_tokens = 0 if queue.pace.is_known else num_before
        num_to_compute = pool.num_tokens_to_compute(
            num_tokens, lora_name, cached, num_waiting_tokens=num_waiting_tokens
        )
        return queue.pace.queued_s(num_before), num_to_compute

    def _is_late(self, queued_s: float, num_tokens_to_compute: float) -> bool:
        return self._needed_s(queued_s, num_tokens_to_compute) > self._left_s

    @property
    def _left_s(self) -> float:
        assert self._deadline_s is not None
        return self._deadline_s - time.monotonic()

    def _needed_s(self, queued_s: float, num_tokens_to_compute: float) -> float:
        return CAUTION * self._forecast.needed_s(
            queued_s, num_tokens_to_compute, _min_tokens(self._params), self._params.max_tokens, self._num_answers
        )

    def give_up_s(self) -> float | None:
        """Until when waiting for workers makes sense, which leaves time for the answer itself. None: forever."""
        if self._deadline_s is None:
            return None
        return self._deadline_s - max(MIN_ANSWER_S, self.answer_s())

    def answer_s(self) -> float:
        """Seconds that the answer may take from its first token on."""
        return self._forecast.answer_s(_min_tokens(self._params), self._params.max_tokens, self._num_answers)


def _min_tokens(params: pb.SamplingParams) -> int:
    """The fewest tokens that the answer can have."""
    return params.max_tokens if params.ignore_eos and not (params.stop or params.stop_token_ids) else params.min_tokens
