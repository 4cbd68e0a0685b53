"""How much trying again all requests of a router may do together. Pure: no clock, no I/O.

A worker that dies takes hundreds of streams with it, and each must go on elsewhere: the first retry of a request is
free, and so is the first after each attempt that brought its client something, so that what is done for nothing is at
most as much as what is not. What fails twice in a row fails for a reason that others have too: each further retry costs
a token of one bucket, which answers fill again. Where nothing is answered it runs dry, and requests end with
their second failure instead of bringing a sick cluster many times its work.

    full ──retries after futile ones: a token each──> less ──> empty: those retries are refused
      └<────────── each answer: a tenth of a token ──┘<────────┘

The bucket, its size and what an answer puts back are those of gRPC's retry throttling (gRFC A6, "Throttling Retry
Attempts and Hedged RPCs"). There every failure takes a token, and retries stop at half of the bucket; here only a retry
that is not free takes one, and they stop where it is empty.
"""

from __future__ import annotations

CAPACITY = 100
"""Tokens in a full bucket, as which it starts."""
ANSWERS_PER_TOKEN = 10


class RetryBudget:
    """One per router, shared by its requests."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        if capacity < 0:
            raise ValueError(f"capacity must be at least 0, is {capacity}")
        # Counted in what one answer puts back, so that ten answers are exactly a token.
        self._max_parts = capacity * ANSWERS_PER_TOKEN
        self._num_parts = self._max_parts

    @property
    def num_tokens(self) -> int:
        """Retries, beyond first ones, that are left."""
        return self._num_parts // ANSWERS_PER_TOKEN

    def take(self, num_futile: int) -> bool:
        """Whether a request that has failed `num_futile` times in a row may be tried again; its price is taken."""
        assert num_futile > 0
        if num_futile == 1:
            return True
        if self._num_parts < ANSWERS_PER_TOKEN:
            return False
        self._num_parts -= ANSWERS_PER_TOKEN
        return True

    def note_answer(self) -> None:
        """A request has been answered to its end."""
        self._num_parts = min(self._num_parts + 1, self._max_parts)
