"""Decides by its tokens when an answer ends: at a stop token, at the request's `max_tokens`, or at `max_model_len`."""

from __future__ import annotations

from engine.outputs import FinishReason
from engine.scheduling.sequence import Sequence


class StopRule:
    """One per engine. Looks at tokens only, so that every engine ends an answer at the same token."""

    def __init__(self, *, max_model_len: int, eos_token_ids: frozenset[int]) -> None:
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids

    def finish_reason(self, seq: Sequence, length: int) -> FinishReason | None:
        """Return why the sequence ends after its first `length` tokens, or None if it does not."""
        params, token_id = seq.sampling_params, seq.token_ids[length - 1]
        if length - seq.num_prompt_tokens >= params.min_tokens:
            is_eos = token_id in self._eos_token_ids and not params.ignore_eos
            if is_eos or token_id in params.stop_token_ids:
                return FinishReason.STOP
        return FinishReason.LENGTH if self.num_left(seq, length) <= 0 else None

    def num_left(self, seq: Sequence, length: int) -> int:
        """How many tokens may follow the first `length` tokens of `seq`."""
        return min(seq.num_prompt_tokens + seq.sampling_params.max_tokens, self._max_model_len) - length
