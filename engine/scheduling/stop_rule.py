"""When an answer ends by its tokens: at a stop token, at its request's `max_tokens`, or where the context is full."""

from __future__ import annotations

from engine.outputs import FinishReason
from engine.scheduling.sequence import Sequence


class StopRule:
    """Of one engine. Decides by tokens alone, so that any engine ends an answer at the same one."""

    def __init__(self, *, max_model_len: int, eos_token_ids: frozenset[int]) -> None:
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids

    def finish_reason(self, seq: Sequence, length: int) -> FinishReason | None:
        """Whether the sequence ends with the last of its first `length` tokens."""
        params, token_id = seq.sampling_params, seq.token_ids[length - 1]
        if length - seq.num_prompt_tokens >= params.min_tokens:
            is_eos = token_id in self._eos_token_ids and not params.ignore_eos
            if is_eos or token_id in params.stop_token_ids:
                return FinishReason.STOP
        return FinishReason.LENGTH if self.num_left(seq, length) <= 0 else None

    def num_left(self, seq: Sequence, length: int) -> int:
        """Tokens that may come after its first `length` ones."""
        return min(seq.num_prompt_tokens + seq.sampling_params.max_tokens, self._max_model_len) - length
