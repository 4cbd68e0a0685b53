"""Forecasts how long a request would take now on any worker, learned from earlier requests. The router refuses requests
that could not meet their deadline by this forecast (`deadline`). Pure: times are passed in, in seconds.

    computing the prompt  computed ───────────────────> what a token takes at a worker, those before it there included
    answering             answering, emitted, ended ──> what a token takes, and how many answer meanwhile

Every figure is a mean in which older measurements count less. What has not been measured yet counts as no time at all,
so no request is refused on a guess. Where no request runs, a request is always tried, so that a wrong figure corrects
itself. (`queue_pace` forecasts how long a request waits for room; `costs` says which worker is the best.)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from router.fading import FADE, FadingRatio

HALF_LIFE_S = 2.0
"""Half-life of figures that are learned from elapsed time, in seconds during which some answer was under way."""
PROMPT_OVERHEAD_TOKENS = 64
"""The fixed cost of a prompt, in tokens. Without it, the cost per token of tiny prompts would be expected of long ones
too."""
PRIOR_TOKENS = 2048.0
"""The mean starts with this many tokens that took no time. Otherwise one tiny prompt that met a pause would get long
prompts refused, and refused prompts would never correct the figure."""
FREE_BATCH = 8
"""A step for this many answers takes hardly longer than for one; beyond that, its time grows with their number."""


@dataclass(slots=True)
class Forecast:
    """One per router."""

    num_running: int = 0
    """Requests that have entered and not ended."""
    num_answering: int = 0
    """Running requests that have had their first token and have a worker."""
    _looked_s: float = 0.0
    """The time up to which answers have been counted."""
    _seconds_per_prompt_token: FadingRatio = field(default_factory=lambda: FadingRatio(0.0, PRIOR_TOKENS))
    _seconds_per_answer_token: FadingRatio = field(default_factory=FadingRatio)
    """Seconds between two tokens of one answer, beside the others."""
    _answers_at_once: FadingRatio = field(default_factory=FadingRatio)
    _tokens_per_answer: FadingRatio = field(default_factory=FadingRatio)

    # -- measurements -------------------------------------------------------------------------------------------

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A prompt's first token came `seconds` after the prompt was sent to its worker. `num_tokens`: the prompt's
        own, and those queued before it there."""
        self._seconds_per_prompt_token.add(seconds, num_tokens + PROMPT_OVERHEAD_TOKENS, FADE)

    def answering(self, now_s: float) -> None:
        """An answer has begun, or goes on after `interrupted`."""
        self._look(now_s, 0)
        self.num_answering += 1

    def interrupted(self, now_s: float) -> None:
        """An answer waits for another worker. This time says nothing about the workers' speed. `answering` ends it."""
        self._look(now_s, 0)
        self.num_answering -= 1

    def emitted(self, num_tokens: int, now_s: float) -> None:
        """Answers that had begun have got `num_tokens` more tokens."""
        self._look(now_s, num_tokens)

    def ended(self, num_tokens: int, now_s: float, *, is_complete: bool) -> None:
        """An answer that had begun ends."""
        self._look(now_s, 0)
        self.num_answering -= 1
        if is_complete:
            self._tokens_per_answer.add(num_tokens, 1, FADE)

    def _look(self, now_s: float, num_tokens: int) -> None:
        seconds = now_s - self._looked_s if self.num_answering else 0.0
        fade = 0.5 ** (seconds / HALF_LIFE_S)
        self._seconds_per_answer_token.add(seconds * self.num_answering, num_tokens, fade)
        self._answers_at_once.add(seconds * self.num_answering, seconds, fade)
        self._looked_s = now_s

    # -- expectations -------------------------------------------------------------------------------------------

    @property
    def seconds_per_answer_token(self) -> float:
        """Seconds between two tokens of one answer, beside as many others as lately."""
        return self._seconds_per_answer_token.value

    def answer_s(self, min_tokens: int, max_tokens: int, num_answers: int = 1) -> float:
        """Seconds from the first token to the last of `num_answers` answers that run at once. Each is expected to be as
        long as the mean answer, within its bounds."""
        num_tokens = min(max(min_tokens, self._tokens_per_answer.value), max_tokens)
        crowd = (self.num_running + num_answers + FREE_BATCH) / (self._answers_at_once.value + FREE_BATCH)
        return num_tokens * self._seconds_per_answer_token.value * max(1.0, crowd)

    def needed_s(
        self,
        queued_s: float,
        num_tokens_to_compute: float,
        min_tokens: int,
        max_tokens: int,
        num_answers: int = 1,
    ) -> float:
        """Seconds from now to the last token of a request that would enter now; 0 if no request runs.

        queued_s: seconds until it has room. num_tokens_to_compute: tokens that its worker has to compute until the
        prompt is done, those queued before it included.
        """
        if not self.num_running:
            return 0.0
        return (
            queued_s
            + (num_tokens_to_compute + PROMPT_OVERHEAD_TOKENS) * self._seconds_per_prompt_token.value
            + self.answer_s(min_tokens, max_tokens, num_answers)
        )
