"""Beam search of an offline `LLM`: finds likely answers to a prompt by continuing the best few at a time.

    start ──> alive ── how likely is each next token? ──> the likeliest beam_width live on ──> alive … best
                                                     └──> those that end there are kept apart ────────┘

The algorithm is that of vLLM (`vllm/entrypoints/generate/beam_search`), which has it from transformers' `generate`:

- Each beam is continued by its 2 * beam_width likeliest tokens. A continuation whose token ends the answer is complete;
  of all other continuations of a prompt's beams, the beam_width likeliest live on. Twice as many tokens are considered
  so that there are enough continuations even if every beam may end.
- A beam's score is the sum of its logprobs, divided by its number of tokens to the power of length_penalty. The
  prompt's tokens count; the token that ends the answer does not. The search returns the best beam_width of the answers
  that have ended and of those alive when max_tokens are used up.
- The search stops earlier once no continuation can be among the best. This does not change the result.

`BeamSearch` decides, and knows no engine; `BeamSearches` asks the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from operator import itemgetter
from typing import TypeAlias

from rich.progress import Progress

from engine.config import ModelConfig
from router.text.tokenizer import Tokenizer
from tandem.checks import is_whole
from tandem.lora_request import LoRARequest
from tandem.offline_answer import Logprob, RequestOutput
from tandem.prompts import ReadPrompt, TokensPrompt
from tandem.sampling_params import BeamSearchParams

__all__ = ["BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence"]

Ask: TypeAlias = Callable[[list[ReadPrompt], list[str]], list[RequestOutput]]
"""From prompts, and the names of their adapters, to an answer of one token to each, with logprobs."""


@dataclass(kw_only=True)
class BeamSearchSequence:
    """A prompt and one answer to it."""

    orig_prompt: TokensPrompt
    tokens: list[int]
    """The prompt's tokens and the answer's, including the one that ended it."""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    """For each of the answer's tokens: by id, the logprobs of the likeliest tokens in its place."""
    lora_request: LoRARequest | None = None
    cum_logprob: float = 0.0
    """Sum of the logprobs of the answer's tokens."""
    text: str | None = None
    """Text of all tokens, the prompt's included."""
    finish_reason: str | None = None
    """ "stop" or "length"."""
    stop_reason: int | str | None = None
    """The token that ended the answer, if one did."""


@dataclass
class BeamSearchOutput:
    """The best answers to a prompt, the best one first."""

    sequences: list[BeamSearchSequence]


class BeamSearch:
    """The search for one prompt."""

    def __init__(
        self,
        prompt: ReadPrompt,
        params: BeamSearchParams,
        *,
        max_model_len: int,
        end_token_ids: Collection[int],
        lora_name: str = "",
    ) -> None:
        """`params` have been checked. Raises `ValueError` for a prompt that leaves no room for an answer."""
        num_tokens = len(prompt.token_ids)
        if not 1 <= num_tokens < max_model_len:
            bound = f"must have at least 1 and fewer than max_model_len={max_model_len}"
            raise ValueError(f"{prompt.name}: prompt_token_ids {bound}, has {num_tokens}")
        self.lora_name = lora_name
        self.alive = [
            BeamSearchSequence(
                orig_prompt=_as_given(prompt),
                tokens=prompt.token_ids,
                lora_request=LoRARequest(lora_name) if lora_name else None,
            )
        ]
        self._prompt = prompt
        self._width, self._length_penalty = params.beam_width, params.length_penalty
        self._end_token_ids = frozenset() if params.ignore_eos else frozenset(end_token_ids)
        self._ended: list[BeamSearchSequence] = []
        """The best answers that have ended, the best one first."""
        self.num_steps = 0
        """Tokens of each beam that is alive, without the prompt's."""
        self._max_steps = min(params.max_tokens, max_model_len - num_tokens)

    @property
    def is_over(self) -> bool:
        if not self.alive or self.num_steps == self._max_steps:
            return True
        return len(self._ended) == self._width and self._score(self._ended[-1]) >= self._best_to_come()

    def prompts(self) -> list[ReadPrompt]:
        """The beams whose next tokens `advance` needs, as prompts."""
        return [replace(self._prompt, text=None, token_ids=beam.tokens) for beam in self.alive]

    def advance(self, likely: Sequence[dict[int, Logprob]]) -> None:
        """Continue the beams by one token. `likely`: for each beam that is alive, its likeliest next tokens."""
        grown = [
            (beam.cum_logprob + each.logprob, token_id, beam, next_tokens)
            for beam, next_tokens in zip(self.alive, likely, strict=True)
            for token_id, each in next_tokens.items()
        ]
        grown.sort(key=itemgetter(0), reverse=True)
        ended = [_child(*each, ends=True) for each in grown if each[1] in self._end_token_ids]
        living = (each for each in grown if each[1] not in self._end_token_ids)
        self.alive = [_child(*each) for each in islice(living, self._width)]
        self._ended = self._best_of(self._ended + ended)
        self.num_steps += 1

    def best(self) -> list[BeamSearchSequence]:
        """The best answers, once the search is over."""
        return self._best_of(self._ended + [replace(beam, finish_reason="length") for beam in self.alive])

    def _best_of(self, sequences: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        return sorted(sequences, key=self._score, reverse=True)[: self._width]

    def _score(self, sequence: BeamSearchSequence) -> float:
        return self._score_of(sequence.cum_logprob, len(sequence.tokens) - (sequence.finish_reason == "stop"))

    def _score_of(self, cum_logprob: float, num_tokens: int) -> float:
        return cum_logprob / math.pow(num_tokens, self._length_penalty)

    def _best_to_come(self) -> float:
        """An upper bound of all future scores: the sum of logprobs only falls, and the divisor grows or shrinks
        monotonically with the length."""
        likeliest, num_tokens = self.alive[0].cum_logprob, len(self.alive[0].tokens)
        most_tokens = num_tokens + self._max_steps - self.num_steps
        return max(self._score_of(likeliest, num_tokens), self._score_of(likeliest, most_tokens))


def _child(
    cum_logprob: float, token_id: int, beam: BeamSearchSequence, next_tokens: dict[int, Logprob], *, ends: bool = False
) -> BeamSearchSequence:
    return replace(
        beam,
        tokens=[*beam.tokens, token_id],
        logprobs=[*beam.logprobs, next_tokens],
        cum_logprob=cum_logprob,
        finish_reason="stop" if ends else None,
        stop_reason=token_id if ends else None,
    )


def _as_given(prompt: ReadPrompt) -> TokensPrompt:
    given: TokensPrompt = {"prompt_token_ids": prompt.token_ids}
    if prompt.text is not None:
        given["prompt"] = prompt.text
    if prompt.cache_salt:
        given["cache_salt"] = prompt.cache_salt
    return given


class BeamSearches:
    """The searches for the prompts of one call."""

    def __init__(
        self,
        prompts: Sequence[ReadPrompt],
        lora_names: Sequence[str],
        params: BeamSearchParams,
        model: ModelConfig,
    ) -> None:
        """`params` have been checked. Raises `ValueError` as `BeamSearch` does."""
        self._skips_special_tokens = params.skip_special_tokens
        self._searches = [
            BeamSearch(
                prompt,
                params,
                max_model_len=model.max_model_len,
                end_token_ids=model.eos_token_ids,
                lora_name=lora_name,
            )
            for prompt, lora_name in zip(prompts, lora_names, strict=True)
        ]

    def run(self, ask: Ask, concurrency_limit: int | None, progress: Progress | None) -> None:
        """Run all searches, one token of each at a time, and at most `concurrency_limit` searches at once."""
        waiting = iter(self._searches)
        running: list[BeamSearch] = []
        limit = len(self._searches) if concurrency_limit is None else concurrency_limit
        task = progress.add_task("prompts", total=len(self._searches), num_tokens=0) if progress else None
        while running := [*running, *islice(waiting, limit - len(running))]:
            _step(running, ask)
            if progress is not None and task is not None:
                num_tokens = sum(search.num_steps for search in self._searches)
                progress.update(task, completed=sum(search.is_over for search in self._searches), num_tokens=num_tokens)
            running = [search for search in running if not search.is_over]

    def outputs(self, tokenizer: Tokenizer) -> list[BeamSearchOutput]:
        return [BeamSearchOutput([self._with_text(each, tokenizer) for each in s.best()]) for s in self._searches]

    def _with_text(self, sequence: BeamSearchSequence, tokenizer: Tokenizer) -> BeamSearchSequence:
        return replace(sequence, text=tokenizer.decode(sequence.tokens, self._skips_special_tokens))


def _step(searches: Sequence[BeamSearch], ask: Ask) -> None:
    prompts = [search.prompts() for search in searches]
    lora_names = [search.lora_name for search in searches for _ in search.alive]
    answers = iter(ask(list(chain.from_iterable(prompts)), lora_names))
    for search, own in zip(searches, prompts, strict=True):
        search.advance([_likely(prompt, next(answers)) for prompt in own])


def _likely(prompt: ReadPrompt, answer: RequestOutput) -> dict[int, Logprob]:
    """The likeliest next tokens. Raises `RuntimeError` if the model cannot say them."""
    if error := answer.outputs[0].error:
        raise RuntimeError(f"{prompt.name}: {error}")
    logprobs = answer.outputs[0].logprobs
    assert logprobs is not None, "they were asked for"
    return logprobs[0]


def check_beam_search(params: object, concurrency_limit: object) -> None:
    """Raise `ValueError` naming what is wrong."""
    if not isinstance(params, BeamSearchParams):
        example = "BeamSearchParams(beam_width=4, max_tokens=64)"
        raise ValueError(f"params must be BeamSearchParams, as {example}, is {params!r:.80}")
    params.check()
    if concurrency_limit is not None and not (is_whole(concurrency_limit) and concurrency_limit >= 1):  # type: ignore[operator]
        raise ValueError(f"concurrency_limit must be a whole number, at least 1, or None, is {concurrency_limit!r:.80}")
