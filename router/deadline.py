"""Compares a request's deadline with the time that its answer may take: a request that could not meet it is refused
before it is queued, or given up in the queue while there is still time to tell the client. Decides; does nothing.
"""

from __future__ import annotations

import time

from protos import tandem_inference_pb2 as pb
from router.asked_answer import AskedAnswer
from router.forecast import Forecast
from rpc.errors import DeadlinePassed, Overloaded

CAUTION = 1.25
"""A request is admitted only if it would be in time even when it took this many times longer than expected. A request
that is admitted and comes too late has wasted other requests' time."""
MIN_ANSWER_S = 0.1
"""The least time that an answer is assumed to need, so that a waiting request is refused before its deadline."""


class Deadline:
    """The deadline of one answer, and of further answers that begin with it."""

    def __init__(self, asked: AskedAnswer, forecast: Forecast) -> None:
        self._deadline_s = asked.deadline_s
        self._forecast = forecast
        self._params = asked.sampling_params
        self._num_answers = asked.num_answers

    def refuse_if_passed(self) -> None:
        """Raise `DeadlinePassed` if the deadline has passed, before anything is done for the answer."""
        assert self._deadline_s is not None
        if self._deadline_s <= time.monotonic():
            raise DeadlinePassed("the request's deadline passed before it was started")

    def is_late(self, queued_s: float, num_tokens_to_compute: float) -> bool:
        """Whether the answer could not be complete in time. Arguments: as in `refuse_if_late`."""
        return self._needed_s(queued_s, num_tokens_to_compute) > self._left_s

    def refuse_if_late(self, queued_s: float, num_tokens_to_compute: float) -> None:
        """Raise `Overloaded` if the answer could not be complete in time, before anything is done for it.

        `queued_s`: seconds until it has room. `num_tokens_to_compute`: tokens that its worker has to compute until the
        prompt is done, those queued before it included.
        """
        needed_s, left_s = self._needed_s(queued_s, num_tokens_to_compute), self._left_s
        if needed_s > left_s:
            raise Overloaded(
                f"the answer is expected to take {needed_s:.1f} s with {self._forecast.num_running} other requests "
                f"running, but the deadline is in {left_s:.1f} s; retry later, or allow more time",
                retry_after_s=needed_s - left_s,
            )

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
