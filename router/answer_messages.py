"""One answer as the client gets it: tokens in, messages with their text out. Decides nothing.

delta ── delta ── … ──> last
"""

from __future__ import annotations

from protos import tandem_inference_pb2 as pb
from router.detokenizer import IncrementalDetokenizer
from router.request_events import Emit


class AnswerMessages:
    """Of one sequence of a request."""

    def __init__(
        self,
        *,
        request_id: str,
        sequence: int,
        num_prompt_tokens: int,
        detokenizer: IncrementalDetokenizer,
        num_tokens: int = 0,
    ) -> None:
        """`num_tokens` of the answer the client has, and `detokenizer` has taken in."""
        self._request_id = request_id
        self._sequence = sequence
        self._num_prompt_tokens = num_prompt_tokens
        self._detokenizer = detokenizer
        self.num_tokens = num_tokens
        """Of the answer, up to the last message."""

    def delta(self, emit: Emit) -> tuple[pb.GenerateResponse, bool]:
        """The message for new tokens, and whether a stop string ended the answer within them."""
        delta = self._detokenizer.push(emit.token_ids)
        token_ids = emit.token_ids[: delta.num_tokens]
        self.num_tokens = emit.offset + len(token_ids)
        response = pb.GenerateResponse(
            request_id=self._request_id,
            sequence=self._sequence,
            offset=emit.offset,
            token_ids=token_ids,
            text=delta.text,
            logprobs=emit.logprobs[: delta.num_tokens],
        )
        for logprobs, offset in zip(response.logprobs, delta.offsets, strict=False):
            logprobs.text_offset = offset
            for each in (logprobs.sampled, *logprobs.top):
                each.token = self._detokenizer.token_bytes(each.token_id)
        return response, delta.is_stopped

    def last(
        self, finish_reason: pb.FinishReason, *, num_cached_tokens: int, timings: pb.Timings
    ) -> pb.GenerateResponse:
        """The message that ends the answer. `num_cached_tokens`: of the prompt."""
        usage = pb.Usage(
            prompt_tokens=self._num_prompt_tokens,
            cached_tokens=num_cached_tokens,
            completion_tokens=self.num_tokens,
        )
        return pb.GenerateResponse(
            request_id=self._request_id,
            sequence=self._sequence,
            offset=self.num_tokens,
            text=self._detokenizer.finish(),
            finish_reason=finish_reason,
            usage=usage,
            timings=timings,
        )
