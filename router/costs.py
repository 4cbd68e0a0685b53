"""What prompts cost at each worker of this cluster, and moving them, in seconds, learned from those before, and how
fast each decodes: what plans are chosen by (`policy`). Pure: times are passed in.

    the first token came          computed ─────> prompt_s     at that worker, behind what waits there
    the decode worker went on     handed_over ──> handover_s   the room asked for, and the gap before the second token:
                                                               what a prompt computed where it decodes is spared
    the answer has ended          paces.answered ──> paces.slowness

Seconds are a straight line over tokens. Newer requests count more than older ones, and a line to which nothing was
added for minutes is believed less: a worker that has computed nothing for long is thought to be as the others are, so
that it is tried again, however slow it once was; and moving KV, if nobody has seen it for as long, to cost nothing.
(Whom to refuse is another question, and another learner's: `forecast`.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from router.fading import FADE, MIN_S, FadingLine
from router.paces import Paces
from router.request_events import WorkerKey

PRIOR_REQUESTS = 0.25
"""What is thought of a worker before it has computed anything counts as so many requests. The mean of both is the
geometric one: workers may be a hundred times faster than others."""
PROMPT_OVERHEAD_TOKENS = 64
"""Where all prompts are of one length, one is thought to cost as much as so many tokens before its first."""
UNSEEN_S_PER_TOKEN = 1e-3
"""Before the first prompt. As it is for all workers alike, it decides by tokens between them."""


@dataclass(slots=True)
class Costs:
    """Of one router."""

    _by_worker: dict[WorkerKey, FadingLine] = field(default_factory=dict)
    _num: float = 0.0
    _log_rates: float = 0.0
    """Of all workers' prompts, newer ones counting more: how many, and the logarithms of their seconds per token."""
    _handovers: FadingLine = field(default_factory=FadingLine)
    paces: Paces = field(default_factory=Paces)

    # -- what happens -------------------------------------------------------------------------------------------

    def computed(self, worker: WorkerKey, num_tokens: int, seconds: float, now_s: float) -> None:
        """A prompt's first token came so long after `worker` was told. `num_tokens`: what it had to compute for that,
        what was before it included."""
        expected_s = self._others_s(num_tokens) if self._num else None
        line = self._by_worker.setdefault(worker, FadingLine(PROMPT_OVERHEAD_TOKENS))
        line.add(num_tokens, seconds, now_s, expected_s=expected_s)
        self._num = self._num * FADE + 1
        rate = max(seconds, MIN_S) / (num_tokens + PROMPT_OVERHEAD_TOKENS)
        self._log_rates = self._log_rates * FADE + math.log(rate)

    def handed_over(self, num_tokens: int, seconds: float, now_s: float) -> None:
        """A request waited so long for its KV to move, of `num_tokens` tokens."""
        self._handovers.add(num_tokens, seconds, now_s)

    def forget(self, worker: WorkerKey) -> None:
        """It is gone."""
        self._by_worker.pop(worker, None)
        self.paces.forget(worker)

    # -- what is to be expected ---------------------------------------------------------------------------------

    def prompt_s(self, worker: WorkerKey, num_tokens: int, now_s: float) -> float:
        """From telling `worker` to the first token, where it has so many tokens to compute for that."""
        others_s = self._others_s(num_tokens)
        own = self._by_worker.get(worker)
        if own is None:
            return others_s
        share = own.weight(now_s) / (own.weight(now_s) + PRIOR_REQUESTS)
        mean: float = own.at(num_tokens) ** share * others_s ** (1 - share)
        return mean

    def _others_s(self, num_tokens: int) -> float:
        """What is thought of a worker that is not known."""
        rate = math.exp(self._log_rates / self._num) if self._num else UNSEEN_S_PER_TOKEN
        return rate * (num_tokens + PROMPT_OVERHEAD_TOKENS)

    def handover_s(self, num_tokens: int, now_s: float) -> float:
        """What moving the KV of so many tokens adds to a request's time."""
        weight = self._handovers.weight(now_s)
        return self._handovers.at(num_tokens) * weight / (weight + PRIOR_REQUESTS)
