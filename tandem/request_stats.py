"""When a request came and had its tokens: vLLM's `RequestOutput.metrics`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class RequestStateStats:
    """Of all answers to a prompt together. Times that end in `_ts` are those of `time.monotonic`, in seconds; 0: not
    yet."""

    arrival_time: float
    """When the request came, in seconds since the epoch."""
    queued_ts: float
    """When it came."""
    first_token_ts: float = 0.0
    """When its first token had been computed, of whichever answer."""
    last_token_ts: float = 0.0
    """When its latest tokens had been computed."""
    first_token_latency: float = 0.0
    """Seconds from its arrival to its first token."""
    num_generation_tokens: int = 0

    def note_tokens(self, num: int, now_s: float) -> None:
        """Note that `num` tokens have been computed, at `now_s` on the monotonic clock."""
        if not num:
            return
        if not self.num_generation_tokens:
            self.first_token_ts, self.first_token_latency = now_s, now_s - self.queued_ts
        self.last_token_ts = now_s
        self.num_generation_tokens += num
