"""Turns one answer's tokens into the messages that the client gets. Decides nothing.

delta ── delta ── … ──> last
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from protos import tandem_inference_pb2 as pb
from router.asked_answer import AskedAnswer
from router.request_events import Emit
from router.text.tool_calls import Span, Told


class AnswerMessages:
    """The messages of one sequence of a request."""

    def __init__(self, asked: AskedAnswer) -> None:
        self._request_id = asked.request_id
        self._sequence = asked.sequence
        self._prompt_token_ids = asked.prompt_token_ids
        self._detokenizer = asked.detokenizer
        self._reader = asked.reader
        self._tells_prompt = asked.sampling_params.HasField("prompt_logprobs")
        """Whether the message with the answer's first token carries the prompt's logprobs."""
        self._with_prompt_token_ids = asked.with_prompt_token_ids
        self._eos_token_id = asked.eos_token_id
        self._has_begun = False
        self.num_tokens = len(asked.resumption.token_ids)
        """Tokens of the answer in all messages so far."""
        self._last_token_id = asked.resumption.token_ids[-1] if asked.resumption.token_ids else None

    def delta(self, emit: Emit) -> tuple[pb.GenerateResponse, bool]:
        """The message for new tokens, and whether a stop string ended the answer within them."""
        delta = self._detokenizer.push(emit.token_ids)
        token_ids = emit.token_ids[: delta.num_tokens]
        self.num_tokens = emit.offset + len(token_ids)
        self._last_token_id = token_ids[-1] if token_ids else self._last_token_id
        told = self._told(delta.text)
        response = pb.GenerateResponse(
            request_id=self._request_id,
            sequence=self._sequence,
            offset=emit.offset,
            token_ids=token_ids,
            text=told.content,
            reasoning=told.reasoning,
            tool_calls=told.calls or None,  # an empty list instead of None would take a third of the time here
            logprobs=emit.logprobs[: delta.num_tokens] or None,
        )
        if emit.logprobs:
            for logprobs, offset in zip(response.logprobs, delta.offsets, strict=False):
                logprobs.text_offset = offset
                self._name_tokens(logprobs)
        if not self._has_begun:
            self._has_begun = True
            response.prompt_tokens = len(self._prompt_token_ids)
        if self._with_prompt_token_ids and not emit.offset:
            response.prompt_token_ids.extend(self._prompt_token_ids)
        if self._tells_prompt and not emit.offset:
            first = pb.TokenLogprobs(sampled=pb.Logprob(token_id=self._prompt_token_ids[0]))
            response.prompt_logprobs.extend((first, *emit.prompt_logprobs))
            self._name_prompt(response.prompt_logprobs)
        return response, delta.is_stopped

    def _name_prompt(self, prompt_logprobs: Iterable[pb.TokenLogprobs]) -> None:
        """Set the bytes that the prompt's tokens stand for, and where their text begins."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # counts a character when it is complete
        num_chars = 0
        for logprobs in prompt_logprobs:
            logprobs.text_offset = num_chars
            self._name_tokens(logprobs)
            num_chars += len(decoder.decode(logprobs.sampled.token))

    def _name_tokens(self, logprobs: pb.TokenLogprobs) -> None:
        for each in (logprobs.sampled, *logprobs.top):
            each.token = self._detokenizer.token_bytes(each.token_id)

    def last(
        self, finish_reason: pb.FinishReason, *, num_cached_tokens: int, timings: pb.Timings
    ) -> pb.GenerateResponse:
        """The message that ends the answer. `num_cached_tokens`: tokens of the prompt that were cached."""
        told = self._told(self._detokenizer.finish())
        thoughts: Sequence[Span] = ()
        if self._reader is not None:
            told.add(self._reader.finish(is_whole=finish_reason == pb.FINISH_REASON_STOP))
            thoughts = self._reader.thoughts
        usage = pb.Usage(
            prompt_tokens=len(self._prompt_token_ids),
            cached_tokens=num_cached_tokens,
            completion_tokens=self.num_tokens,
            reasoning_tokens=sum(self._detokenizer.num_tokens_in(*thought) for thought in thoughts),
        )
        return pb.GenerateResponse(
            request_id=self._request_id,
            sequence=self._sequence,
            offset=self.num_tokens,
            text=told.content,
            reasoning=told.reasoning,
            tool_calls=told.calls,
            finish_reason=finish_reason,
            usage=usage,
            timings=timings,
            stop_reason=self._detokenizer.stop,
            stop_token_id=self._stop_token_id(finish_reason),
        )

    def _stop_token_id(self, finish_reason: pb.FinishReason) -> int | None:
        """The token that ended the answer. None: no token did, or it is the model's own end-of-sequence token."""
        is_stopped_by_token = finish_reason == pb.FINISH_REASON_STOP and not self._detokenizer.stop
        return self._last_token_id if is_stopped_by_token and self._last_token_id != self._eos_token_id else None

    def _told(self, text: str) -> Told:
        """Split the answer's next text into content, thoughts and tool calls."""
        return Told(text) if self._reader is None else self._reader.push(text)
