"""How long a request would take now, learned from those before it. Pure: times are passed in, in seconds.

    entered(prompt tokens) ──> ahead of all that come later ──computed, or left──> no more
                                                            └── how fast prompts are computed while there are any
    answered(tokens, seconds) ──> how long answers are, and how long a token of them takes

One queue as far as this goes, wherever a prompt waits: here, or at a worker. Every figure is a mean in which older
parts count less. What nobody has seen yet counts as no time at all: nobody is refused on a guess, and where nothing is
ahead, a request is always tried, so that a figure that has gone wrong corrects itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

HALF_LIFE_S = 5.0
"""Of what was learned about prompts, in seconds with prompts to compute."""
HALF_LIFE_REQUESTS = 8.0
"""Of all that was learned: one pause of a minute is forgotten after some dozens of prompts."""


@dataclass(slots=True)
class FadingRatio:
    """A sum over another, in both of which older parts count less."""

    above: float = 0.0
    below: float = 0.0

    def add(self, above: float, below: float, fade: float) -> None:
        self.above = self.above * fade + above
        self.below = self.below * fade + below

    @property
    def value(self) -> float:
        """0 while there is nothing."""
        return self.above / self.below if self.below else 0.0


@dataclass(slots=True)
class Forecast:
    """Of one router."""

    num_tokens_ahead: int = 0
    """Of prompts that have entered and are not computed yet."""
    _moved_s: float = 0.0
    """When the last prompt was computed, or the first one entered."""
    _seconds_per_prompt_token: FadingRatio = field(default_factory=FadingRatio)
    _seconds_per_answer_token: FadingRatio = field(default_factory=FadingRatio)
    _tokens_per_answer: FadingRatio = field(default_factory=FadingRatio)

    # -- what happens -------------------------------------------------------------------------------------------

    def entered(self, num_tokens: int, now_s: float) -> None:
        """A prompt is to be computed."""
        if not self.num_tokens_ahead:
            self._moved_s = now_s
        self.num_tokens_ahead += num_tokens

    def computed(self, num_tokens: int, now_s: float) -> None:
        """A prompt that had entered has its first token."""
        seconds, self._moved_s = now_s - self._moved_s, now_s
        fade = 0.5 ** max(seconds / HALF_LIFE_S, 1 / HALF_LIFE_REQUESTS)
        self._seconds_per_prompt_token.add(seconds, num_tokens, fade)
        self.left(num_tokens)

    def left(self, num_tokens: int) -> None:
        """A prompt that had entered is not to be computed any more."""
        self.num_tokens_ahead -= num_tokens
        assert self.num_tokens_ahead >= 0, "left without having entered"

    def answered(self, num_tokens: int, seconds: float) -> None:
        """An answer of so many tokens was complete so long after its first one."""
        fade = 0.5 ** (1 / HALF_LIFE_REQUESTS)
        self._tokens_per_answer.add(num_tokens, 1, fade)
        if num_tokens > 1:
            self._seconds_per_answer_token.add(seconds, num_tokens - 1, fade)

    # -- what is to be expected ---------------------------------------------------------------------------------

    def answer_s(self, min_tokens: int, max_tokens: int) -> float:
        """From an answer's first token to its last. It is as long as answers are, within its bounds."""
        num_tokens = min(max(min_tokens, self._tokens_per_answer.value), max_tokens)
        return num_tokens * self._seconds_per_answer_token.value

    def needed_s(self, num_prompt_tokens: int, min_tokens: int, max_tokens: int) -> float:
        """From now to the last token of a request that would enter now; 0 where nothing is ahead of it."""
        if not self.num_tokens_ahead:
            return 0.0
        prompts_s = (self.num_tokens_ahead + num_prompt_tokens) * self._seconds_per_prompt_token.value
        return prompts_s + self.answer_s(min_tokens, max_tokens)
