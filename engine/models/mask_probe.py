"""Observes the masks of transformers' code, in the step that transformers_probe.py watches: a mask is the function that
says which token sees which, and no numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from engine.models.recurrent_probe import CannotServeError


class _Mask(torch.Tensor):
    """What was made from it, by any operation, is another mask; except all of it, which Gemma 4's code takes."""

    function: Callable[..., Any] | None = None
    window: int | None = None

    def __getitem__(self, index: Any) -> torch.Tensor:
        part: torch.Tensor = super().__getitem__(index)
        return self if part.shape == self.shape else part


def watched_mask(*, batch_size: int, q_length: int, kv_length: int, mask_function: Any, **_rest: Any) -> torch.Tensor:
    mask = torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool, device="meta").as_subclass(_Mask)
    mask.function = mask_function
    return mask


def window_of(mask_function: Callable[..., Any], num_positions: int) -> int:
    """The sliding window of a mask, which transformers gives as a function of (sequence, head, query's position, key's
    position).

    0: a token sees all before it. Examines only positions at which a window would show. Raises `CannotServeError` if
    the mask is neither of them.
    """
    keys = torch.arange(num_positions)
    zero = torch.tensor(0)

    def seen(query: int) -> torch.Tensor:
        return torch.as_tensor(mask_function(zero, zero, torch.tensor(query), keys)).expand(num_positions)

    last = num_positions - 1
    num_seen = int(seen(last).sum())
    window = 0 if num_seen == num_positions else num_seen
    first_seen = window or num_positions
    for query in {0, 1, first_seen - 1, min(first_seen, last), min(first_seen + 1, last), num_positions // 2, last}:
        expected = keys <= query
        if window:
            expected &= keys > query - window
        if not torch.equal(seen(query), expected):
            raise CannotServeError("a token sees tokens other than all, or the last few, of those before it")
    return window
