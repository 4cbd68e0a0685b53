"""`tandem.v1.Inference`: admits a request, has it prepared, runs it, streams its answers, and reports how it ended.

Decides nothing about workers, and does nothing with tokens except count them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import grpc

from protos import tandem_inference_pb2 as pb
from protos.tandem_inference_pb2_grpc import InferenceServicer as InferenceServicerBase
from router.asked_answer import names_at_workers
from router.lifecycle import Lifecycle
from router.open_requests import OpenRequests
from router.outcome import Outcome, reason_of
from router.parts import RouterParts
from router.prepared import prepare
from router.request_spans import request_spans
from router.sequences import Sequences
from router.served_model import ServedModel, Texts
from router.validation.grammar_checker import GrammarChecker
from router.validation.request import MAX_REQUEST_ID_CHARS, ValidatedRequest, check_size, validate
from router.validation.unknown_fields import check_known_fields
from rpc.errors import DeadlinePassed, Draining, TandemError
from rpc.metadata import ACCEPTED_KEY
from rpc.tracing import OpenSpan, Tracing, Untraced, trace_headers_of


class InferenceServicer(InferenceServicerBase):  # type: ignore[misc]
    """One per router process."""

    def __init__(
        self,
        *,
        texts: Texts,
        parts: RouterParts,
        max_request_bytes: int,
        takes_priorities: bool = True,
        tracing: Tracing | None = None,
    ) -> None:
        """`takes_priorities`: whether clients may say that they are more urgent than others."""
        self._texts = texts
        self._parts = parts
        self._max_request_bytes = max_request_bytes
        self._takes_priorities = takes_priorities
        self._tracing = tracing or Untraced()
        self._model = ServedModel(texts.model, parts.pool.decode_records)
        self._grammars = GrammarChecker()
        self._is_draining = False
        self.open_requests = OpenRequests()

    async def drain(self) -> None:
        """Refuse new requests; return when the last open one has ended."""
        self._is_draining = True
        await self.open_requests.wait_until_empty()

    async def close(self) -> None:
        """Close at once: running requests are lost."""
        await self._grammars.close()

    # -- RPCs ---------------------------------------------------------------------------------------------------

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        span = self._tracing.begin("llm_request", trace_headers_of(context.invocation_metadata() or ()))
        arrived_s = time.monotonic()
        try:
            validated = self._admit(request)
        except TandemError as error:
            self._note_refusal(request, error, span)
            raise
        outcome = Outcome(validated, arrived_s)
        try:
            await context.send_initial_metadata(((ACCEPTED_KEY, "1"),))
            remaining_s = context.time_remaining()
            deadline_s = None if remaining_s is None else arrived_s + remaining_s
            answers = self._answers(validated, arrived_s, deadline_s)
            # The stream is closed here, before the request's id is free again.
            async with aclosing(answers if remaining_s is None else _until_deadline(answers, remaining_s)) as responses:
                async for response in responses:
                    outcome.note(response)
                    yield response
        except Exception as error:
            outcome.error = error
            raise
        finally:
            self._note_end(outcome, self.open_requests.leave(validated.request_id), span)

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:  # noqa: N802
        return pb.AbortResponse(was_running=self.open_requests.abort(request.request_id))

    async def GetModelInfo(  # noqa: N802
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        return self._model.now().to_proto()

    # -- one request --------------------------------------------------------------------------------------------

    def _admit(self, request: pb.GenerateRequest) -> ValidatedRequest:
        """Check the request and open it (`open_requests`). Raises the error for which it is refused."""
        check_size(request, self._max_request_bytes)
        if self._is_draining:
            raise Draining("this router is shutting down; retry at another router", retry_after_s=1.0)
        check_known_fields(request)
        model = self._model.now()
        if not model.max_model_len or not (model.knows_workers or model.has_name(request.model)):
            # Only workers know how long a prompt may be, and which adapters exist.
            self._parts.pool.require_decode_worker()
        validated = validate(request, model)
        if not self._takes_priorities:
            validated.sampling_params.ClearField("priority")
        self.open_requests.enter(validated.request_id, names_at_workers(validated.request_id, validated.num_sequences))
        return validated

    async def _answers(
        self, validated: ValidatedRequest, arrived_s: float, deadline_s: float | None
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        pool = self._parts.pool
        prepared = await prepare(validated, self._model.now(), self._texts, self._grammars, pool)
        lifecycles: list[Lifecycle] = []
        for index in validated.open_sequences:
            asked = await prepared.answer(index, pool, arrived_s=arrived_s, deadline_s=deadline_s)
            after = lifecycles[0] if lifecycles else None
            lifecycles.append(Lifecycle(self._parts, asked, after=after))
        sequences = Sequences(lifecycles, is_streaming=validated.is_streaming)
        self.open_requests.begin(validated.request_id, sequences)
        async with aclosing(sequences.run()) as responses:
            async for response in responses:
                yield response

    # -- reports ------------------------------------------------------------------------------------------------

    def _note_refusal(self, request: pb.GenerateRequest, error: TandemError, span: OpenSpan) -> None:
        self._parts.metrics.failed(reason_of(error))
        refused = {"error.type": reason_of(error), "tandem.outcome": "failed"}
        span.end({**refused, "gen_ai.request.id": request.request_id[:MAX_REQUEST_ID_CHARS]}, error=str(error))

    def _note_end(self, outcome: Outcome, sequences: Sequences | None, span: OpenSpan) -> None:
        attempts = {} if sequences is None else sequences.attempts
        outcome.log(attempts)
        outcome.count(self._parts.metrics)
        if span.is_recorded:
            span.end(
                outcome.trace_attributes(self._texts.model.served_model_name),
                error="" if outcome.error is None else str(outcome.error),
                children=request_spans(outcome.arrived_s, attempts),
            )


async def _until_deadline(
    responses: AsyncGenerator[pb.GenerateResponse, None], remaining_s: float
) -> AsyncGenerator[pb.GenerateResponse, None]:
    """Yield `responses`. Raises `DeadlinePassed` when the client's time is up. Closes `responses` either way. gRPC
    itself gives up a message that is on its way to the client at the deadline."""
    ends_s = asyncio.get_running_loop().time() + remaining_s
    async with aclosing(responses):
        while True:
            try:
                async with asyncio.timeout_at(ends_s) as deadline:
                    response = await anext(responses, None)
            except TimeoutError:
                if not deadline.expired():
                    raise
                raise DeadlinePassed("the request's deadline passed before its answer was complete") from None
            if response is None:
                return
            yield response
