"""What an engine step gives back: new tokens of each request, with vLLM's names."""

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
    """The model computed no numbers to choose a token by, or to tell of the prompt, or the grammar could not say what
    may come next."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely the model found a token where it might stand, before bias, penalties and temperature."""

    token_id: int
    logprob: float
    """Natural logarithm of its probability."""
    rank: int
    """Among the whole vocabulary; 1 is the likeliest, the lower id comes first among equals."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of one position of an answer, or of a prompt."""

    sampled: Logprob
    """Of the token that stands there."""
    top: list[Logprob]
    """The likeliest ones, in order, as many as were asked for; that one is not always among them."""


def has_numbers(logprobs: Iterable[TokenLogprobs]) -> bool:
    """Not where the model computed none for a position: then all that is told of it is NaN."""
    return not any(isnan(each.sampled.logprob) for each in logprobs)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step added to a request, which is one sequence: several answers to a prompt are as many requests."""

    request_id: str
    offset: int
    """Position of `token_ids[0]` in the answer."""
    token_ids: list[int]
    finish_reason: FinishReason | None
    """None: it goes on, or is held."""
    num_cached_tokens: int
    """Of the prompt, found in the prefix cache."""
    waited_s: float
    """From the request's arrival until its first step."""
    logprobs: list[TokenLogprobs] | None = None
    """For each of `token_ids`. None where the request does not ask."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """For each token of the prompt but the first. With the answer's first token, where the request asks."""
    grammar_error: str = ""
    """Why it could not, with `FinishReason.ERROR`. Empty: it was not that."""
    held_block_ids: tuple[int, ...] = ()
    """Of a prefill-only request: the blocks of its tokens, kept until it is aborted."""

    def joined(self, later: RequestOutput) -> RequestOutput:
        """This and what a later step added, as one."""
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
