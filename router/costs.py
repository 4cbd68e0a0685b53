"""What prompts cost at the workers of this cluster, in seconds, learned from those before. Pure: times are passed in.

    the first token came          computed ─────> prompt_s     at that worker, behind what waits there
    the decode worker went on     handed_over ──> handover_s   the room asked for, and the gap before the second token:
                                                               what a prompt computed where it decodes is spared

Each is a straight line over tokens. Newer requests count more than older ones, and a line to which nothing was added
for minutes is believed less: a worker that has computed nothing for long is thought to be as the others are, so that it
is tried again, however slow it once was; and moving KV, if nobody has seen it for as long, to cost nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from router.request_events import WorkerKey

FADE = 0.5 ** (1 / 8)
"""What each request leaves of the weight of those before it."""
HALF_LIFE_S = 60.0
OUTLIER = 4.0
"""A request counts as at most so many times slower than expected: a process that was held up is no news of it."""
MIN_KNOWN = 1.5
"""So much must two requests weigh before a third is compared with them."""
PRIOR_REQUESTS = 0.25
"""What is thought of a worker before it has computed anything counts as so many requests. The mean of both is the
geometric one: workers may be a hundred times faster than others."""
MIN_S = 1e-6
PROMPT_OVERHEAD_TOKENS = 64
"""Where all prompts are of one length, one is thought to cost as much as so many tokens before its first."""
SPREAD_TOKENS = 64.0
"""Prompts whose lengths differ by less tell hardly what a token costs."""
UNSEEN_S_PER_TOKEN = 1e-3
"""Before the first prompt. As it is for all workers alike, it decides by tokens between them."""


@dataclass(slots=True)
class FadingLine:
    """Seconds over tokens, by least squares in which older requests count less."""

    overhead_tokens: float | None = None
    """Of the slope that is assumed while lengths do not show it: through 0 s at minus so many tokens. None: flat."""
    _num: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0
    _last_s: float = 0.0

    def add(self, num_tokens: float, seconds: float, now_s: float, *, expected_s: float | None = None) -> None:
        """`expected_s`: what was expected, for as long as the line knows too little to say so itself. None: nothing."""
        if self._num >= MIN_KNOWN:
            expected_s = self.at(num_tokens)
        if expected_s is not None:
            seconds = min(seconds, OUTLIER * max(expected_s, MIN_S))
        self._num = self._num * FADE + 1
        self._x = self._x * FADE + num_tokens
        self._y = self._y * FADE + seconds
        self._xx = self._xx * FADE + num_tokens * num_tokens
        self._xy = self._xy * FADE + num_tokens * seconds
        self._last_s = now_s

    def weight(self, now_s: float) -> float:
        """How many requests it stands for."""
        weight: float = self._num * 0.5 ** (max(0.0, now_s - self._last_s) / HALF_LIFE_S)
        return weight

    def at(self, num_tokens: float) -> float:
        """Never negative, and never less for more tokens. 0 where nothing was added."""
        if not self._num:
            return 0.0
        mean_x, mean_y = self._x / self._num, self._y / self._num
        assumed = 0.0 if self.overhead_tokens is None else mean_y / (mean_x + self.overhead_tokens)
        ridge = SPREAD_TOKENS**2
        spread = max(0.0, self._xx - mean_x * self._x)
        slope = (self._xy - mean_y * self._x + ridge * assumed) / (spread + ridge)
        slope = min(max(slope, 0.0), mean_y / mean_x if mean_x else 0.0)
        return max(0.0, mean_y + slope * (num_tokens - mean_x))  # rounding may leave it below


@dataclass(slots=True)
class Costs:
    """Of one router."""

    _by_worker: dict[WorkerKey, FadingLine] = field(default_factory=dict)
    _num: float = 0.0
    _log_rates: float = 0.0
    """Of all workers' prompts, newer ones counting more: how many, and the logarithms of their seconds per token."""
    _handovers: FadingLine = field(default_factory=FadingLine)

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
