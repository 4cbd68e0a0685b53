"""How many prompt tokens a step may compute beside the sequences that decode in it, so that these do not stand still.

    budget = pace.num_prefill_tokens        schedule with it, execute
    pace.note(…, seconds)                   and tell what it took

Learns two numbers of the machine and the model from every step, as moving averages: what a step takes that only
decodes, and what each prompt token adds. Owns nothing else; knows no clock. How a prompt is cut changes no token of any
answer, so the cut may follow the time.
"""

from __future__ import annotations

UNKNOWN_BUDGET = 64
"""Until the first prompt has been computed."""
MIN_BUDGET = 16
SHARE_OF_NEWS = 0.2
"""How much of each new measurement goes into the average."""


class StepPace:
    """Used by the stepping thread alone."""

    def __init__(self, max_itl_s: float) -> None:
        """A step that decodes is to take at most `max_itl_s`; or half as long again as without prompts if that is more,
        so that prompts get on where decoding alone takes that long. 0: whatever it takes."""
        self._max_itl_s = max_itl_s
        self._decode_s = 0.0
        self._token_s = 0.0

    @property
    def num_prefill_tokens(self) -> int | None:
        """For the next step, if it decodes. None: as many as there are."""
        if not self._max_itl_s:
            return None
        if not self._token_s:
            return UNKNOWN_BUDGET
        return max(MIN_BUDGET, int(max(self._max_itl_s - self._decode_s, self._decode_s / 2) / self._token_s))

    def note(self, *, num_decoding: int, num_prefill_tokens: int, seconds: float) -> None:
        """What a step computed, and how long it took."""
        if not num_prefill_tokens:
            self._decode_s = _average(self._decode_s, seconds)
        elif num_prefill_tokens >= MIN_BUDGET:
            added_s = seconds - self._decode_s if num_decoding else seconds
            # What a prompt adds may drown in noise, but it is never nothing.
            self._token_s = _average(self._token_s, max(added_s, 0.1 * seconds) / num_prefill_tokens)


def _average(before: float, new: float) -> float:
    return new if not before else before + SHARE_OF_NEWS * (new - before)
