"""Limits how many prompt tokens a step computes beside decoding sequences, so that their tokens keep coming.

    budget = pace.num_prefill_tokens(num_waiting)        schedule with it, launch
    pace.note(…, seconds)                                and report how long the step took

Learns two moving averages from the steps: how long a step that only decodes takes, and how much time each prompt token
adds. While prompts never stop coming, one step in sixteen only decodes, which keeps the first average up to date. Owns
nothing else and reads no clock. Since the way a prompt is cut changes no token of any answer, it may depend on time.
"""

from __future__ import annotations

UNKNOWN_BUDGET = 64
"""The budget until the first prompt has been computed."""
MIN_BUDGET = 16
LONGER_FOR_EACH = 0.5
"""By which share a step may take longer for each waiting prompt after the first."""
AT_MOST_TIMES = 4.0
"""Upper bound of the factor by which waiting prompts lengthen a step."""
SHARE_OF_NEWS = 0.2
"""Weight of a new measurement in the moving average."""
MAX_MIXED_STEPS = 15
"""Mixed steps in a row before a step that only decodes is measured again."""


class StepPace:
    """Used by the stepping thread alone."""

    def __init__(self, max_itl_s: float) -> None:
        """A step that decodes should take at most `max_itl_s`, plus half of that for each further waiting prompt, up to
        four times as long: if many prompts were cut small, they would take long one after the other and keep the
        decoding batch small. If decoding alone takes most of that time, prompts may add half of the decoding time, so
        that they make progress. 0: no limit."""
        self._max_itl_s = max_itl_s
        self._decode_s = 0.0
        self._token_s = 0.0
        self._num_mixed_steps = 0
        """Mixed steps since the last step that was not mixed."""

    def num_prefill_tokens(self, num_waiting: int) -> int | None:
        """Return the budget of the next step, if that step decodes; None: no limit. `num_waiting`: prompts that are not
        computed, or not completely."""
        if not self._max_itl_s:
            return None
        if not self._token_s:
            return UNKNOWN_BUDGET
        if self._num_mixed_steps >= MAX_MIXED_STEPS:
            return 0
        step_s = self._max_itl_s * min(AT_MOST_TIMES, 1 + LONGER_FOR_EACH * max(0, num_waiting - 1))
        return max(MIN_BUDGET, int(max(step_s - self._decode_s, self._decode_s / 2) / self._token_s))

    def note(self, *, num_decoding: int, num_prefill_tokens: int, seconds: float) -> None:
        """Record what a step computed and how long it took."""
        self._num_mixed_steps = self._num_mixed_steps + 1 if num_decoding and num_prefill_tokens else 0
        if not num_prefill_tokens:
            # A pause of the whole process says nothing about the machine, so outliers are cut and soon outweighed.
            news_s = min(seconds, 2 * self._decode_s or seconds)
            self._decode_s = (
                (self._decode_s + news_s) / 2 if news_s < self._decode_s else _average(self._decode_s, news_s)
            )
        elif num_prefill_tokens >= MIN_BUDGET:
            added_s = seconds - self._decode_s if num_decoding else seconds
            # Noise may hide what a prompt adds, but it is never zero.
            self._token_s = _average(self._token_s, max(added_s, 0.1 * seconds) / num_prefill_tokens)


def _average(before: float, new: float) -> float:
    return new if not before else before + SHARE_OF_NEWS * (new - before)
