"""The outputs of an engine step: new tokens of each request, with vLLM's names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from math import isnan


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    """The model computed NaN for the next token or for the prompt's logprobs, or the grammar failed."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """The model's log probability of a token at some position, before bias, penalties and temperature."""

    token_id: int
    logprob: float
    """Natural logarithm of the token's probability."""
    rank: int
    """Rank within the vocabulary; 1 is the likeliest, and among equal ones the lower id comes first."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The logprobs at one position of an answer or a prompt."""

    sampled: Logprob
    """Of the token at this position."""
    top: list[Logprob]
    """The likeliest tokens, in order, as many as were requested; may not include `sampled`."""


def has_numbers(logprobs: Iterable[TokenLogprobs]) -> bool:
    """Whether no logprob is NaN, as all are at a position for which the model computed NaN."""
    return not any(isnan(each.sampled.logprob) for each in logprobs)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step added to a request. A request is one sequence: n answers to a prompt are n requests."""

    request_id: str
    offset: int
    """Position of `token_ids[0]` in the answer."""
    token_ids: list[int]
    finish_reason: FinishReason | None
    """None: the request goes on, or is held."""
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    waited_s: float
    """Time from the request's arrival to its first step."""
    logprobs: list[TokenLogprobs] | None = None
    """For each of `token_ids`. None if not requested."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """For each token of the prompt but the first. Comes with the answer's first token, if requested."""
    grammar_error: str = ""
    """With `FinishReason.ERROR`: why the grammar failed. Empty: it did not."""
    held_block_ids: tuple[int, ...] = ()
    """For a prefill-only request: the blocks of its tokens, held until it is aborted."""

    def joined(self, later: RequestOutput) -> RequestOutput:
        """Join this output and a later one."""
        return replace(
            later,
            offset=self.offset,
            token_ids=[*self.token_ids, *later.token_ids],
            logprobs=None if self.logprobs is None else [*self.logprobs, *(later.logprobs or ())],
            prompt_logprobs=self.prompt_logprobs,
        )

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def error(self) -> str:
        """Why there is no next token, with `FinishReason.ERROR`; otherwise empty."""
        if self.finish_reason is not FinishReason.ERROR:
            return ""
        return self.grammar_error or "the model's numbers for the next token are not numbers"
