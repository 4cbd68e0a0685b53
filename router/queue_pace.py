"""How fast the queue moves while there is one, learned from those who waited. Pure: times are passed in, in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.fading import FadingRatio

HALF_LIFE_S = 2.0
"""Of what was learned, in seconds in which somebody waited."""
MIN_WAIT_S = 0.005
"""Who has room at once has not waited."""


@dataclass(slots=True)
class QueuePace:
    """Of one queue."""

    _moved_s: float | None = None
    """Since when requests have waited for room, or when the last one got it. None: nobody waits."""
    _seconds_per_token: FadingRatio = field(default_factory=FadingRatio)

    def queued(self, now_s: float) -> None:
        """A request waits for room."""
        if self._moved_s is None:
            self._moved_s = now_s

    def planned(self, num_tokens: int, now_s: float, *, is_last: bool) -> None:
        """A request that waited has got room. `is_last`: nobody waits behind it."""
        seconds = 0.0 if self._moved_s is None else now_s - self._moved_s
        if seconds > MIN_WAIT_S or not is_last:
            self._seconds_per_token.add(seconds, num_tokens, 0.5 ** (seconds / HALF_LIFE_S))
        self._moved_s = None if is_last else now_s

    def nobody_waits(self) -> None:
        """Whoever waited for room has left."""
        self._moved_s = None

    def queued_s(self, num_tokens: int) -> float:
        """Until so many tokens that wait for room have got it. 0 while nobody has waited."""
        return num_tokens * self._seconds_per_token.value
