"""How long a request would take now, whoever computes it, learned from those before it: what requests are refused by
that could not meet their deadline (`deadline`). Pure: times are passed in, in seconds.

    computing the prompt  computed ───────────────────> what a token takes at a worker, those before it there included
    answering             answering, emitted, ended ──> what a token takes, and how many answer meanwhile

Every figure is a mean in which older parts count less. What nobody has seen yet counts as no time at all: nobody is
refused on a guess, and where nothing runs, a request is always tried, so that a figure that has gone wrong corrects
itself. (How long it waits for room before is the queue's to know: `queue_pace`. Which worker is the best: `costs`.)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from router.fading import FADE, FadingRatio

HALF_LIFE_S = 2.0
"""Of what was learned from time that passed, in seconds in which something was going on."""
PROMPT_OVERHEAD_TOKENS = 64
"""A prompt costs as much as so many tokens before its first one: else what tiny ones take would be held against long
ones."""
PRIOR_TOKENS = 2048.0
"""So many tokens are believed to have cost nothing, at first: one tiny prompt that met a pause is no measure of long
ones, and what refuses them would never be corrected by them."""
FREE_BATCH = 8
"""A step for so few answers takes hardly longer than for one; from there on it grows with their number."""


@dataclass(slots=True)
class Forecast:
    """Of one router."""

    num_running: int = 0
    """Requests that have entered and not ended."""
    num_answering: int = 0
    """Of them those with a first token, and a worker."""
    _looked_s: float = 0.0
    """Up to when answers are counted."""
    _seconds_per_prompt_token: FadingRatio = field(default_factory=lambda: FadingRatio(0.0, PRIOR_TOKENS))
    _seconds_per_answer_token: FadingRatio = field(default_factory=FadingRatio)
    """Of one answer among others."""
    _answers_at_once: FadingRatio = field(default_factory=FadingRatio)
    _tokens_per_answer: FadingRatio = field(default_factory=FadingRatio)

    # -- what happens -------------------------------------------------------------------------------------------

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A prompt's first token came so long after its worker was told. `num_tokens`: its own, and those before it."""
        self._seconds_per_prompt_token.add(seconds, num_tokens + PROMPT_OVERHEAD_TOKENS, FADE)

    def answering(self, now_s: float) -> None:
        """An answer has begun, or goes on."""
        self._look(now_s, 0)
        self.num_answering += 1

    def interrupted(self, now_s: float) -> None:
        """An answer waits for another worker, which is no measure of how fast workers are. `answering`: it goes on."""
        self._look(now_s, 0)
        self.num_answering -= 1

    def emitted(self, num_tokens: int, now_s: float) -> None:
        """Tokens of answers that had begun."""
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

    # -- what is to be expected ---------------------------------------------------------------------------------

    @property
    def seconds_per_answer_token(self) -> float:
        """Of an answer, among those that there are."""
        return self._seconds_per_answer_token.value

    def answer_s(self, min_tokens: int, max_tokens: int, num_answers: int = 1) -> float:
        """From the first token to the last of so many answers at once. Each is as long as answers are, within its
        bounds."""
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
        """From now to the last token of a request that would enter now; 0 where nothing runs.

        queued_s: until it has room. num_tokens_to_compute: at its worker until its prompt is, those before it included.
        """
        if not self.num_running:
            return 0.0
        return (
            queued_s
            + (num_tokens_to_compute + PROMPT_OVERHEAD_TOKENS) * self._seconds_per_prompt_token.value
            + self.answer_s(min_tokens, max_tokens, num_answers)
        )
