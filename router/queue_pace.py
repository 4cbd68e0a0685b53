"""Learns from waiting requests how fast the queue moves. Pure: times are passed in, in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.fading import FadingRatio

HALF_LIFE_S = 2.0
"""Half-life of what was learned, in seconds during which some request waited."""


@dataclass(slots=True)
class QueuePace:
    """The pace of one queue."""

    _moved_s: float | None = None
    """When a waiting request last got room, or, before that, when the first one began to wait. None: none waits."""
    _seconds_per_token: FadingRatio = field(default_factory=FadingRatio)

    def queued(self, now_s: float) -> None:
        """A request waits for room."""
        if self._moved_s is None:
            self._moved_s = now_s

    def planned(self, num_tokens: int, now_s: float, *, has_waited: bool, is_last: bool) -> None:
        """A request has got room. `has_waited`: not on its arrival. `is_last`: no request waits behind it."""
        seconds = 0.0 if self._moved_s is None else now_s - self._moved_s
        if has_waited or not is_last:
            self._seconds_per_token.add(seconds, num_tokens, 0.5 ** (seconds / HALF_LIFE_S))
        self._moved_s = None if is_last else now_s

    def nobody_waits(self) -> None:
        """No request waits for room any more."""
        self._moved_s = None

    @property
    def is_known(self) -> bool:
        """Whether some request has waited."""
        return self._seconds_per_token.below > 0

    def queued_s(self, num_tokens: int) -> float:
        """Seconds until `num_tokens` waiting tokens have got room. 0 if no request has waited yet."""
        return num_tokens * self._seconds_per_token.value
