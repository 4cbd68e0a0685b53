"""What an engine step gives back: new tokens of each request, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    """The model computed no numbers to choose a token by."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """New tokens of one sequence of a request."""

    index: int
    """Which of the request's n sequences."""
    offset: int
    """Position of `token_ids[0]` in the answer."""
    token_ids: list[int]
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step added to a request."""

    request_id: str
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    """Of the prompt, found in the prefix cache."""
    is_finished: bool
    waited_s: float
    """From the request's arrival until its first step."""
    held_block_ids: tuple[int, ...] = ()
    """Of a prefill-only request: the blocks of its tokens, kept until released."""
