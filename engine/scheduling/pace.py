"""How many prompt tokens a step may compute beside the sequences that decode in it, so that these do not stand still.

    budget = pace.num_prefill_tokens(num_waiting)        schedule with it, launch
    pace.note(…, seconds)                                and tell what it took

Learns two numbers of the machine and the model from every step, as moving averages: what a step takes that only
decodes, and what each prompt token adds. While prompts come without end, a step in sixteen only decodes, so that the
first number does not grow old. Owns nothing else; knows no clock. How a prompt is cut changes no token of any answer,
so the cut may follow the time.
"""

from __future__ import annotations

UNKNOWN_BUDGET = 64
"""Until the first prompt has been computed."""
MIN_BUDGET = 16
LONGER_FOR_EACH = 0.5
"""How much longer a step may take for each prompt that waits beside the first one."""
AT_MOST_TIMES = 4.0
"""As long, whatever waits."""
SHARE_OF_NEWS = 0.2
"""How much of each new measurement goes into the average."""
MAX_MIXED_STEPS = 15
"""In a row, before one that only decodes is measured again."""


class StepPace:
    """Used by the stepping thread alone."""

    def __init__(self, max_itl_s: float) -> None:
        """A step that decodes is to take at most `max_itl_s`, and half as long again for each further prompt that
        waits, up to four times as long: many cut small would take long, one behind the other, and keep the batch that
        decodes small. Or half as long again as without prompts if that is more, so that prompts get on where decoding
        alone takes that long. 0: whatever it takes."""
        self._max_itl_s = max_itl_s
        self._decode_s = 0.0
        self._token_s = 0.0
        self._num_mixed_steps = 0
        """Since the last one that only decoded."""

    def num_prefill_tokens(self, num_waiting: int) -> int | None:
        """For the next step, if it decodes. None: as many as there are. `num_waiting`: prompts that are still to be
        computed, or the rest of them."""
        if not self._max_itl_s:
            return None
        if not self._token_s:
            return UNKNOWN_BUDGET
        if self._num_mixed_steps >= MAX_MIXED_STEPS:
            return 0
        step_s = self._max_itl_s * min(AT_MOST_TIMES, 1 + LONGER_FOR_EACH * max(0, num_waiting - 1))
        return max(MIN_BUDGET, int(max(step_s - self._decode_s, self._decode_s / 2) / self._token_s))

    def note(self, *, num_decoding: int, num_prefill_tokens: int, seconds: float) -> None:
        """What a step computed, and how long it took."""
        self._num_mixed_steps = self._num_mixed_steps + 1 if num_decoding and num_prefill_tokens else 0
        if not num_prefill_tokens:
            # A pause of the whole process is no news of the machine, and is soon forgotten.
            news_s = min(seconds, 2 * self._decode_s or seconds)
            self._decode_s = (
                (self._decode_s + news_s) / 2 if news_s < self._decode_s else _average(self._decode_s, news_s)
            )
        elif num_prefill_tokens >= MIN_BUDGET:
            added_s = seconds - self._decode_s if num_decoding else seconds
            # What a prompt adds may drown in noise, but it is never nothing.
            self._token_s = _average(self._token_s, max(added_s, 0.1 * seconds) / num_prefill_tokens)


def _average(before: float, new: float) -> float:
    return new if not before else before + SHARE_OF_NEWS * (new - before)
