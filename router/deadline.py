"""A request's deadline, held against what its answer may take: refused at the door where it could not be kept, given up
in the queue while there is still time to say so. Decides; does nothing.
"""

from __future__ import annotations

import time

from protos import tandem_inference_pb2 as pb
from router.asked_answer import AskedAnswer
from router.forecast import Forecast
from rpc.errors import DeadlinePassed, Overloaded

CAUTION = 1.25
"""A request is let in that would be in time even if it took so many times longer than is to be expected. What is let in
and comes too late has cost others their time."""
MIN_ANSWER_S = 0.1
"""What a request that still waits for workers needs at least, so that it is refused before its time is up."""


class Deadline:
    """Of one answer, and of those that begin with it."""

    def __init__(self, asked: AskedAnswer, forecast: Forecast) -> None:
        self._deadline_s = asked.deadline_s
        self._forecast = forecast
        self._params = asked.sampling_params
        self._num_answers = asked.num_answers

    def refuse_if_passed(self) -> None:
        """Raise `DeadlinePassed` before anything is done for an answer whose deadline has passed."""
        assert self._deadline_s is not None
        if self._deadline_s <= time.monotonic():
            raise DeadlinePassed("the request's deadline passed before it was begun")

    def is_late(self, queued_s: float, num_tokens_to_compute: float) -> bool:
        """Whether an answer with a deadline could not be complete in time: see `refuse_if_late`."""
        return self._needed_s(queued_s, num_tokens_to_compute) > self._left_s

    def refuse_if_late(self, queued_s: float, num_tokens_to_compute: float) -> None:
        """Raise `Overloaded` where an answer with a deadline could not be complete in time, before anything is done for
        it.

        `queued_s`: until it has room. `num_tokens_to_compute`: at its worker until its prompt is, those before it
        included.
        """
        needed_s, left_s = self._needed_s(queued_s, num_tokens_to_compute), self._left_s
        if needed_s > left_s:
            raise Overloaded(
                f"the answer may take {needed_s:.1f} s, beside {self._forecast.num_running} other requests, "
                f"and the deadline is in {left_s:.1f} s",
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
        """Until when waiting for workers makes sense: what comes then still takes its time. None: for ever."""
        if self._deadline_s is None:
            return None
        return self._deadline_s - max(MIN_ANSWER_S, self.answer_s())

    def answer_s(self) -> float:
        """What the answer may take from its first token on."""
        return self._forecast.answer_s(_min_tokens(self._params), self._params.max_tokens, self._num_answers)


def _min_tokens(params: pb.SamplingParams) -> int:
    """The least that an answer can have."""
    return params.max_tokens if params.ignore_eos and not (params.stop or params.stop_token_ids) else params.min_tokens
