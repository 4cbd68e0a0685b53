"""Limits how often all requests of a router together may be tried again. Pure: no clock, no I/O.

A worker that dies takes hundreds of streams with it, and each must go on elsewhere. So the first retry of a request is
free, and so is the first one after each attempt that brought its client tokens: futile attempts are then at most as
many as useful ones. A request that fails twice in a row probably fails for a reason that others share. So each further
retry costs a token of one bucket, which completed answers refill. If nothing is answered, the bucket runs dry, and
requests end with their second failure instead of multiplying a sick cluster's work.

    full ──retries after futile ones: a token each──> less ──> empty: those retries are refused
      └<────────── each answer: a tenth of a token ──┘<────────┘

The bucket, its size and what an answer puts back are those of gRPC's retry throttling (gRFC A6, "Throttling Retry
Attempts and Hedged RPCs"). There every failure takes a token, and retries stop at half of the bucket; here only a retry
that is not free takes one, and they stop where it is empty.
"""

from __future__ import annotations

CAPACITY = 100
"""Tokens in a full bucket. It starts full."""
ANSWERS_PER_TOKEN = 10


class RetryBudget:
    """One per router, shared by its requests."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        if capacity < 0:
            raise ValueError(f"capacity must be at least 0, is {capacity}")
        # Counted in parts: one answer puts one part back, so that ten answers make exactly one token.
        self._max_parts = capacity * ANSWERS_PER_TOKEN
        self._num_parts = self._max_parts

    @property
    def num_tokens(self) -> int:
        """How many retries that are not free are left."""
        return self._num_parts // ANSWERS_PER_TOKEN

    def take(self, num_futile: int) -> bool:
        """Whether a request that has failed `num_futile` times in a row may be tried again. If so, takes the token that
        this costs, unless the retry is free."""
        assert num_futile > 0
        if num_futile == 1:
            return True
        if self._num_parts < ANSWERS_PER_TOKEN:
            return False
        self._num_parts -= ANSWERS_PER_TOKEN
        return True

    def note_answer(self) -> None:
        """A request has been answered completely: put back a tenth of a token."""
        self._num_parts = min(self._num_parts + 1, self._max_parts)
