"""Means and lines learned from a series of numbers in which older ones count less. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

FADE = 0.5 ** (1 / 8)
"""Each request multiplies the weight of those before it by this: after eight requests, half the weight is left."""
HALF_LIFE_S = 60.0
"""Half-life of the weight of a line to which nothing is added."""
OUTLIER = 4.0
"""A request counts as at most this many times slower than expected: that a process was held up once tells nothing."""
MIN_KNOWN = 1.5
"""A line's earlier requests must weigh this much (of weight 1: be two) before the next one is compared with them."""
MIN_S = 1e-6
SPREAD_TOKENS = 64.0
"""Prompts whose lengths differ by less than this hardly show what a token costs."""


@dataclass(slots=True)
class FadingRatio:
    """The ratio of two sums in which older parts count less."""

    above: float = 0.0
    below: float = 0.0

    def add(self, above: float, below: float, fade: float) -> None:
        self.above = self.above * fade + above
        self.below = self.below * fade + below

    @property
    def value(self) -> float:
        """The ratio; 0 while nothing was added."""
        return self.above / self.below if self.below else 0.0


@dataclass(slots=True)
class FadingLine:
    """A line of seconds over tokens, fitted by least squares in which older requests count less."""

    overhead_tokens: float | None = None
    """The slope to assume where requests show none, because their lengths are too similar, or because all of them were
    far shorter: that of a line through 0 s at minus `overhead_tokens` tokens. None: flat where lengths are similar, and
    the fitted line beyond the longest."""
    _num: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0
    _last_s: float = 0.0

    def add(
        self,
        num_tokens: float,
        seconds: float,
        now_s: float,
        *,
        expected_s: float | None = None,
        weight: float = 1.0,
        fade: float = FADE,
    ) -> None:
        """Add one request. `expected_s`: the seconds to expect while the line knows too little to tell them itself, for
        the bound on outliers. None: unknown. `fade`: multiplies the weight of those before it."""
        if self.is_known:
            expected_s = self.at(num_tokens)
        if expected_s is not None:
            seconds = min(seconds, OUTLIER * max(expected_s, MIN_S))
        self._num = self._num * fade + weight
        self._x = self._x * fade + weight * num_tokens
        self._y = self._y * fade + weight * seconds
        self._xx = self._xx * fade + weight * num_tokens * num_tokens
        self._xy = self._xy * fade + weight * num_tokens * seconds
        self._last_s = max(now_s, self._last_s)

    @property
    def is_known(self) -> bool:
        """Whether it knows enough to tell an outlier."""
        return self._num >= MIN_KNOWN

    def age_s(self, now_s: float) -> float:
        """Seconds since something was added; infinity if nothing was."""
        return max(0.0, now_s - self._last_s) if self._num else math.inf

    def weight(self, now_s: float) -> float:
        """How many requests the line stands for now."""
        weight: float = self._num * 0.5 ** (max(0.0, now_s - self._last_s) / HALF_LIFE_S)
        return weight

    @property
    def mean(self) -> tuple[float, float]:
        """The means of tokens and of seconds. Zeros if nothing was added."""
        return (self._x / self._num, self._y / self._num) if self._num else (0.0, 0.0)

    def at(self, num_tokens: float) -> float:
        """The seconds for `num_tokens` tokens: never negative, never less for more tokens. 0 if nothing was added."""
        if self.overhead_tokens is None or (longest := self._longest()) >= num_tokens:
            return self._fitted(num_tokens)
        # The fitted slope does not hold far beyond what it was fitted to: prompts that were computed in one step took
        # equally long, as if further tokens took no time.
        return self._fitted(longest) * (num_tokens + self.overhead_tokens) / (longest + self.overhead_tokens)

    def _longest(self) -> float:
        """About as many tokens as the longest requests had: two standard deviations above the mean."""
        if not self._num:
            return 0.0
        mean = self._x / self._num
        return mean + 2 * math.sqrt(max(0.0, self._xx / self._num - mean * mean))

    def _fitted(self, num_tokens: float) -> float:
        if not self._num:
            return 0.0
        mean_x, mean_y = self._x / self._num, self._y / self._num
        assumed = 0.0 if self.overhead_tokens is None else mean_y / (mean_x + self.overhead_tokens)
        ridge = SPREAD_TOKENS**2
        spread = max(0.0, self._xx - mean_x * self._x)
        slope = (self._xy - mean_y * self._x + ridge * assumed) / (spread + ridge)
        slope = min(max(slope, 0.0), mean_y / mean_x if mean_x else 0.0)
        return max(0.0, mean_y + slope * (num_tokens - mean_x))  # rounding may leave it below
