"""An offline caller's answers: their types, and how the engine's steps build them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.outputs import FinishReason, TokenLogprobs
from engine.outputs import RequestOutput as StepOutput
from router.asked_answer import names_at_workers
from router.seeds import drawn_seed
from router.text.bad_words import bad_words_token_ids
from router.text.detokenizer import IncrementalDetokenizer
from router.text.structured_outputs import grammar_of, texts_in
from router.text.tokenizer import Tokenizer
from tandem.lora_request import LoRARequest
from tandem.prompts import ReadPrompt
from tandem.request_stats import RequestStateStats
from tandem.sampling_params import SamplingParams

if TYPE_CHECKING:
    from engine.llm_engine import LLMEngine


@dataclass(frozen=True, kw_only=True)
class Logprob:
    """How likely the model found a token, before bias, penalties and temperature."""

    logprob: float
    """Natural logarithm of its probability."""
    rank: int
    """Its rank in the whole vocabulary; 1 is the likeliest."""
    decoded_token: str
    """Its text by itself; U+FFFD for a part of a character."""


@dataclass(kw_only=True)
class CompletionOutput:
    """One answer."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    """ "stop", "length", "abort", or "error" (there is no next token, and `error` says why). None: not finished yet."""
    stop_reason: int | str | None
    """The stop string or token that ended the answer, if one did, unless it is the model's own end (the tokenizer's
    `eos_token`)."""
    logprobs: list[dict[int, Logprob]] | None
    """For each token, by id: the sampled token and as many of the likeliest as requested. None: not requested."""
    cumulative_logprob: float | None
    """Sum of the logprobs of the sampled tokens."""
    error: str = ""
    lora_request: LoRARequest | None = None
    """The adapter that generated the answer."""

    def finished(self) -> bool:
        return bool(self.finish_reason)


@dataclass(kw_only=True)
class RequestOutput:
    """One prompt and its answers."""

    request_id: str
    prompt: str | None
    """None if only token ids were given."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    """Tokens of the prompt that were found in the prefix cache."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    """For each of the prompt's tokens, as `CompletionOutput.logprobs`; None for the first token. None: not requested,
    or contained in an earlier delta."""
    lora_request: LoRARequest | None = None
    metrics: RequestStateStats | None = None


class OfflineRequest:
    """One prompt, and its answers while they are generated."""

    def __init__(
        self,
        request_id: str,
        prompt: ReadPrompt,
        params: SamplingParams,
        lora_name: str,
        tokenizer: Tokenizer,
        *,
        name: str = "",
    ) -> None:
        """`name`: the engine's name for the request, if that is not its id."""
        self._request_id = request_id
        self.prompt = prompt
        drawn = drawn_seed()
        names = names_at_workers(name or request_id, params.n)
        self._stats = RequestStateStats(arrival_time=time.time(), queued_ts=time.monotonic())
        self.answers = [
            OfflineAnswer(name, index, prompt, params, drawn, lora_name, tokenizer, self._stats)
            for index, name in enumerate(names)
        ]
        self.answers[0].others = self.answers[1:]
        self._has_told_prompt = False
        """Whether `delta` has returned the prompt's logprobs."""

    @property
    def is_finished(self) -> bool:
        return all(answer.is_finished for answer in self.answers)

    def mean(self, lora_digest: str) -> None:
        """Fix which adapter of that name the request uses: the one with this digest."""
        for answer in self.answers:
            answer.lora_digest = lora_digest

    def output(self) -> RequestOutput:
        """Everything so far of all answers."""
        return self._output([answer.output() for answer in self.answers], self.answers[0].prompt_logprobs)

    def delta(self) -> RequestOutput:
        """What has come since the last call; contains only answers that have something new."""
        prompt_logprobs = None if self._has_told_prompt else self.answers[0].prompt_logprobs
        self._has_told_prompt = self._has_told_prompt or prompt_logprobs is not None
        return self._output(
            [delta for answer in self.answers if (delta := answer.delta()) is not None], prompt_logprobs
        )

    def _output(
        self, outputs: list[CompletionOutput], prompt_logprobs: list[dict[int, Logprob] | None] | None
    ) -> RequestOutput:
        return RequestOutput(
            request_id=self._request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            outputs=outputs,
            finished=self.is_finished,
            num_cached_tokens=self.answers[0].num_cached_tokens,
            prompt_logprobs=prompt_logprobs,
            lora_request=self.answers[0].lora_request,
            metrics=replace(self._stats),
        )


class OfflineAnswer:
    """One answer while it is generated."""

    def __init__(
        self,
        name: str,
        index: int,
        prompt: ReadPrompt,
        params: SamplingParams,
        drawn_seed: int,
        lora_name: str,
        tokenizer: Tokenizer,
        stats: RequestStateStats,
    ) -> None:
        """`name`: the engine's name for the answer. `stats`: those of its request, with other answers."""
        self._stats = stats
        self.lora_name, self.lora_digest = lora_name, ""
        self.lora_request = LoRARequest(lora_name) if lora_name else None
        self.name = name
        self.prompt = prompt
        words = bad_words_token_ids(params.bad_words or (), tokenizer.encode_plain)
        self.engine_params = replace(
            params.for_engine(drawn_seed, index, bad_words_token_ids=words), thinking_budget=prompt.thinking_budget
        )
        form = None if params.structured_outputs is None else params.structured_outputs.to_proto()
        tokens = {} if form is None else tokenizer.added_in(texts_in(form))
        if form is not None and tokens:
            self.engine_params = replace(self.engine_params, grammar=grammar_of(form, tokens))
        if index:  # the first answer reports them
            self.engine_params = replace(self.engine_params, prompt_logprobs=None)
        self.others: list[OfflineAnswer] = []
        """The other answers to the prompt, which wait until this one has its first token."""
        self.is_finished = False
        self.token_ids: list[int] = []
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._index = index
        self._includes_stop = params.include_stop_str_in_output
        self._text = ""
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None
        self._eos_token_id = None if self.engine_params.ignore_eos else tokenizer.eos_token_id
        self._error = ""
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self._cumulative_logprob = 0.0
        self._told = (0, 0, False)
        """What `delta` has returned so far: characters, tokens, and whether the answer is finished."""
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            prompt_token_ids=prompt.token_ids,
            stop=params.stop_strings,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            shown_token_ids=tokenizer.hidden_ids(tokens),
            min_tokens=params.min_tokens,
        )

    def add_to(self, engine: LLMEngine) -> None:
        """Add the answer to the engine. Raises `ValueError` for what the engine can never run."""
        engine.add_request(
            self.name, self.prompt.token_ids, self.engine_params,
            cache_salt=self.prompt.cache_salt, lora_name=self.lora_name, lora_digest=self.lora_digest,
        )  # fmt: skip

    def advance(
        self, output: StepOutput, add: Callable[[OfflineAnswer], object], abort: Callable[[str], object]
    ) -> None:
        """Take in a step's new tokens. `add` and `abort` tell the engine what follows from them."""
        is_first_news = not self.token_ids
        self.take(output)
        if is_first_news:  # the prompt is in the prefix cache now, so it is not computed again for the others
            for other in self.others:
                add(other)
        if self.is_finished and not output.is_finished:  # ended by a stop string, which the engine does not know
            abort(self.name)

    def take(self, output: StepOutput) -> None:
        """Take in a step's new tokens."""
        if self.is_finished:
            return  # ended by a stop string in an earlier output of this step
        assert output.offset == len(self.token_ids), "the engine's tokens are contiguous"
        if not self.token_ids:
            self.num_cached_tokens = output.num_cached_tokens
            if output.prompt_logprobs is not None:
                self.prompt_logprobs = [None, *map(self._by_token_id, output.prompt_logprobs)]
        is_silent = output.finish_reason is FinishReason.STOP and not self._includes_stop
        delta = self._detokenizer.push(output.token_ids[:-1] if is_silent else output.token_ids)
        self._text += delta.text
        num_tokens = len(output.token_ids) if delta.stop is None else delta.num_tokens
        self.token_ids += output.token_ids[:num_tokens]
        self._stats.note_tokens(num_tokens, time.monotonic())
        if self._logprobs is not None:
            told = (output.logprobs or [])[:num_tokens]
            self._logprobs += map(self._by_token_id, told)
            for each in told:  # one by one: sums of sums would differ in their last bits by how many come at once
                self._cumulative_logprob += each.sampled.logprob
        if delta.stop is not None:
            self._finish("stop", delta.stop)
            return
        if output.finish_reason is not None:
            self._error = output.error
            last = self.token_ids[-1] if output.finish_reason is FinishReason.STOP else None
            self._finish(output.finish_reason.value, None if last == self._eos_token_id else last)

    def _finish(self, reason: str, stop: int | str | None) -> None:
        self._text += self._detokenizer.finish()
        self._finish_reason, self._stop_reason = reason, stop
        self.is_finished = True

    def abort(self) -> None:
        """End the answer here, unless it has ended."""
        if not self.is_finished:
            self._finish("abort", None)

    def output(self) -> CompletionOutput:
        """Everything so far."""
        return self._output_from(0, 0)

    def delta(self) -> CompletionOutput | None:
        """What has come since the last call. None: nothing."""
        told, self._told = self._told, (len(self._text), len(self.token_ids), self.is_finished)
        return None if told == self._told else self._output_from(told[0], told[1])

    def _output_from(self, char: int, token: int) -> CompletionOutput:
        return CompletionOutput(
            index=self._index,
            text=self._text[char:],
            token_ids=self.token_ids[token:],
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            logprobs=None if self._logprobs is None else self._logprobs[token:],
            cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
            error=self._error,
            lora_request=self.lora_request,
        )

    def _by_token_id(self, logprobs: TokenLogprobs) -> dict[int, Logprob]:
        return {
            each.token_id: Logprob(
                logprob=each.logprob,
                rank=each.rank,
                decoded_token=self._detokenizer.token_bytes(each.token_id).decode(errors="replace"),
            )
            for each in (logprobs.sampled, *logprobs.top)
        }
