"""Learns from earlier requests how many seconds a prompt takes at each worker, how many seconds moving KV takes, and
how fast each worker decodes. Plans are chosen by these costs (`policy`). Pure: times are passed in.

    the first token came          computed ─────> prompt_s     at that worker, behind what waits there
    the decode worker went on     handed_over ──> handover_s   asking for room, and the gap before the second token:
                                                               costs that a locally computed prompt does not have
    some tokens came              paces.decoded ──> paces.slowness, paces.token_s
    the answer has ended          paces.answered ──> paces.answer_s

Seconds are a straight line over tokens; those of prompts, beyond the longest seen, are in proportion to tokens. Newer
requests count more than older ones, and a line to which nothing was added for minutes counts less: a worker that has
computed nothing for long is assumed to be as fast as the others, so that it is tried again however slow it once was;
and moving KV, if none has moved for as long, to cost nothing. (`forecast` learns which requests to refuse.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from router.fading import FADE, MIN_S, FadingLine
from router.paces import Paces
from router.request_events import WorkerKey

PRIOR_REQUESTS = 0.25
"""The weight, in requests, of the assumption that a worker is as fast as the others. It is combined with the worker's
own figures by the geometric mean, since workers may be a hundred times faster than others."""
PROMPT_OVERHEAD_TOKENS = 64
"""The fixed cost of a prompt, in tokens, that is assumed while all prompts have one length."""
UNSEEN_S_PER_TOKEN = 1e-3
"""Assumed before the first prompt. Since it is the same for all workers, tokens decide between them."""


@dataclass(slots=True)
class Costs:
    """The costs that one router has learned."""

    _by_worker: dict[WorkerKey, FadingLine] = field(default_factory=dict)
    _num: float = 0.0
    _log_rates: float = 0.0
    """Over the prompts of all workers, newer ones counting more: their number, and the sum of the logarithms of their
    seconds per token."""
    _handovers: FadingLine = field(default_factory=FadingLine)
    paces: Paces = field(default_factory=Paces)

    # -- measurements -------------------------------------------------------------------------------------------

    def computed(self, worker: WorkerKey, num_tokens: int, seconds: float, now_s: float) -> None:
        """A prompt's first token came `seconds` after the prompt was sent to `worker`. `num_tokens`: what the worker
        had to compute for it, tokens queued before it included."""
        expected_s = self._others_s(num_tokens) if self._num else None
        line = self._by_worker.setdefault(worker, FadingLine(PROMPT_OVERHEAD_TOKENS))
        line.add(num_tokens, seconds, now_s, expected_s=expected_s)
        self._num = self._num * FADE + 1
        rate = max(seconds, MIN_S) / (num_tokens + PROMPT_OVERHEAD_TOKENS)
        self._log_rates = self._log_rates * FADE + math.log(rate)

    def handed_over(self, num_tokens: int, seconds: float, now_s: float) -> None:
        """A request waited `seconds` for the KV of `num_tokens` tokens to move."""
        self._handovers.add(num_tokens, seconds, now_s)

    def forget(self, worker: WorkerKey) -> None:
        """The worker is gone."""
        self._by_worker.pop(worker, None)
        self.paces.forget(worker)

    # -- expectations -------------------------------------------------------------------------------------------

    def prompt_s(self, worker: WorkerKey, num_tokens: float, now_s: float) -> float:
        """Expected seconds from sending a prompt to `worker` until its first token, if the worker has to compute
        `num_tokens` tokens for that."""
        others_s = self._others_s(num_tokens)
        own = self._by_worker.get(worker)
        if own is None:
            return others_s
        share = own.weight(now_s) / (own.weight(now_s) + PRIOR_REQUESTS)
        mean: float = own.at(num_tokens) ** share * others_s ** (1 - share)
        return mean

    def _others_s(self, num_tokens: float) -> float:
        """The expectation for a worker about which nothing is known: the mean of all."""
        rate = math.exp(self._log_rates / self._num) if self._num else UNSEEN_S_PER_TOKEN
        return rate * (num_tokens + PROMPT_OVERHEAD_TOKENS)

    def handover_s(self, num_tokens: int, now_s: float) -> float:
        """Expected seconds that moving the KV of `num_tokens` tokens adds to a request."""
        weight = self._handovers.weight(now_s)
        return self._handovers.at(num_tokens) * weight / (weight + PRIOR_REQUESTS)
