"""`tandem.v1.Inference`: the front door. Validates, tokenises, runs the life cycle of each answer, streams.

Owns the running requests by id, for Abort and for draining. Does not decide anything about workers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial

import grpc

from protos import tandem_inference_pb2 as pb
from protos.tandem_inference_pb2_grpc import InferenceServicer as InferenceServicerBase
from router.asked_answer import AskedAnswer
from router.lifecycle import Cluster, Lifecycle, require_worker
from router.model_info import ModelInfo
from router.outcome import Outcome, reason_of
from router.request_events import Stopped
from router.request_spans import request_spans
from router.request_state import AttemptNumbers
from router.sequences import Sequences, names_at_workers, params_of_sequence
from router.served_model import ServedModel, Texts
from router.text.bad_words import bad_words_token_ids
from router.text.detokenizer import IncrementalDetokenizer, StopStrings
from router.text.harmony import Harmony
from router.text.reasoning import AnswerReader, Reasoning, reasoning_of
from router.text.tool_calls import call_id
from router.validation.grammar_checker import GrammarChecker
from router.validation.prompt import tokenize_prompt
from router.validation.request import (
    MAX_REQUEST_ID_CHARS,
    ValidatedRequest,
    check_prompt_length,
    check_size,
    compile_grammar,
    validate,
)
from router.validation.resumption import NOTHING, BegunAnswer, Resumption, kind_name, resumption_of
from router.validation.sampling import resolve_sampling
from router.validation.tools import AskedTools
from rpc.errors import DeadlinePassed, Draining, NoWorker, RequestExists, TandemError
from rpc.metadata import ACCEPTED_KEY
from rpc.tracing import Tracing, Untraced, trace_headers_of


class InferenceServicer(InferenceServicerBase):  # type: ignore[misc]
    """One per router process."""

    def __init__(
        self,
        *,
        texts: Texts,
        cluster: Cluster,
        max_request_bytes: int,
        takes_priorities: bool = True,
        tracing: Tracing | None = None,
    ) -> None:
        """`takes_priorities`: whether clients may say that they are more urgent than others."""
        self._texts = texts
        self._cluster = cluster
        self._max_request_bytes = max_request_bytes
        self._takes_priorities = takes_priorities
        self._tracing = tracing or Untraced()
        self._running: dict[str, Sequences | None] = {}
        """By request id; None while the prompt is being tokenised."""
        self._names: set[str] = set()
        """By which workers know the answers that are being made."""
        self._to_abort: set[str] = set()
        """Of those being tokenised: aborted already."""
        self._numbers = AttemptNumbers()
        self._model = ServedModel(texts.model)
        self._is_draining = False
        self._grammars = GrammarChecker()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running(self) -> list[Lifecycle]:
        """Life cycles of the answers that are being made."""
        return [each for sequences in self._running.values() if sequences is not None for each in sequences.lifecycles]

    async def drain(self) -> None:
        """Refuse new requests; return when the last running one has ended."""
        self._is_draining = True
        await self._is_idle.wait()

    async def close(self) -> None:
        """What runs is lost."""
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
            self._cluster.metrics.failed(reason_of(error))
            refused = {"error.type": reason_of(error), "tandem.outcome": "failed"}
            span.end({**refused, "gen_ai.request.id": request.request_id[:MAX_REQUEST_ID_CHARS]}, error=str(error))
            raise
        request_id = validated.request_id
        names = names_at_workers(request_id, validated.num_sequences)
        self._running[request_id] = None
        self._names.update(names)
        self._is_idle.clear()
        outcome = Outcome(
            request_id,
            arrived_s,
            len(validated.open_sequences),
            validated.lora_name,
            validated.sampling_params,
            validated.fairness_id,
        )
        outcome.num_resumed_tokens = sum(len(begun.token_ids) for begun in validated.begun.values())
        try:
            await context.send_initial_metadata(((ACCEPTED_KEY, "1"),))
            remaining_s = context.time_remaining()
            deadline_s = None if remaining_s is None else arrived_s + remaining_s
            answer = self._answer(validated, names, arrived_s, deadline_s)
            # Closed here, before its id is free again.
            async with aclosing(answer if remaining_s is None else _until_deadline(answer, remaining_s)) as responses:
                async for response in responses:
                    outcome.note(response)
                    yield response
        except Exception as error:
            outcome.error = error
            raise
        finally:
            sequences = self._running.pop(request_id)
            self._names.difference_update(names)
            self._to_abort.discard(request_id)
            if not self._running:
                self._is_idle.set()
            attempts = {} if sequences is None else sequences.attempts
            outcome.log(attempts)
            outcome.count(self._cluster.metrics)
            if span.is_recorded:
                span.end(
                    outcome.trace_attributes(self._texts.model.served_model_name),
                    error="" if outcome.error is None else str(outcome.error),
                    children=request_spans(arrived_s, attempts),
                )

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:  # noqa: N802
        if request.request_id not in self._running:
            return pb.AbortResponse(was_running=False)
        sequences = self._running[request.request_id]
        if sequences is None:
            self._to_abort.add(request.request_id)
        else:
            sequences.stop(Stopped())
        return pb.AbortResponse(was_running=True)

    async def GetModelInfo(  # noqa: N802
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        return self._model.now(self._cluster.pool.decode_records()).to_proto()

    # -- one request --------------------------------------------------------------------------------------------

    def _admit(self, request: pb.GenerateRequest) -> ValidatedRequest:
        """Raises why it is refused at the door."""
        check_size(request, self._max_request_bytes)
        if self._is_draining:
            raise Draining("this router is leaving; ask another", retry_after_s=1.0)
        model = self._model.now(self._cluster.pool.decode_records())
        if not model.max_model_len:
            require_worker(self._cluster.pool)  # only a worker knows how long a prompt may be
        validated = validate(request, model)
        if not self._takes_priorities:
            validated.sampling_params.ClearField("priority")
        names = names_at_workers(validated.request_id, validated.num_sequences)
        if validated.request_id in self._running or not self._names.isdisjoint(names):
            raise RequestExists(f"request_id {validated.request_id!r} is running; choose another, or leave it empty")
        return validated

    async def _answer(
        self, validated: ValidatedRequest, names: list[str], arrived_s: float, deadline_s: float | None
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        model = self._model.now(self._cluster.pool.decode_records())
        prompt = await tokenize_prompt(
            validated.prompt,
            self._texts.tokenizer,
            self._texts.chat_template,
            max_model_len=model.max_model_len,
            num_kept=validated.num_kept_tokens(model),
        )
        prompt_token_ids = prompt.token_ids
        check_prompt_length(validated, len(prompt_token_ids), model)
        require_worker(self._cluster.pool)
        asked = validated.asked_tools
        grammar = await compile_grammar(validated.sampling_params, self._grammars, asked)
        thinks = model.reasoning_parser if validated.is_chat else ""
        reasoning = reasoning_of(
            thinks, prompt.thought_opened_by, has_form=bool(grammar), is_within=prompt.is_within_thought
        )
        grammar = self._grammar(grammar, asked, reasoning)
        params = resolve_sampling(validated.sampling_params, model, len(prompt_token_ids))
        stops = StopStrings(params.stop)  # thousands of states: one for all answers
        bad_words = bad_words_token_ids(params.bad_words, self._texts.tokenizer.encode_plain)
        lifecycles: list[Lifecycle] = []
        for index in validated.open_sequences:
            detokenizer = self._detokenizer(prompt_token_ids, params, model, stops, asked, reasoning)
            own = params_of_sequence(params, index)
            ids = partial(call_id, own.seed, prompt_token_ids, is_short=asked.has_short_ids)
            calls = asked.reader(ids, has_form=bool(grammar))
            reader = reasoning.reader(calls)
            asked_answer = AskedAnswer(
                request_id=validated.request_id,
                name=names[index],
                sequence=index,
                num_answers=1 if lifecycles else len(validated.open_sequences),
                prompt_token_ids=prompt_token_ids,
                sampling_params=own,
                grammar=grammar,
                bad_words=bad_words,
                cache_salt=validated.cache_salt,
                lora_name=validated.lora_name,
                fairness_id=validated.fairness_id,
                with_prompt_token_ids=validated.with_prompt_token_ids and index == 0,
                detokenizer=detokenizer,
                reader=reader,
                resumption=await self._resumption(
                    validated.begun.get(index), params, model, len(prompt_token_ids), detokenizer, reader
                ),
                arrived_s=arrived_s,
                deadline_s=deadline_s,
            )
            after = lifecycles[0] if lifecycles else None
            lifecycles.append(Lifecycle(self._cluster, asked_answer, numbers=self._numbers, after=after))
        sequences = Sequences(lifecycles, is_streaming=validated.is_streaming)
        self._running[validated.request_id] = sequences
        if validated.request_id in self._to_abort:
            sequences.stop(Stopped())
        async with aclosing(sequences.run()) as responses:
            async for response in responses:
                yield response

    def _grammar(self, form: str, asked: AskedTools, reasoning: Reasoning | Harmony) -> str:
        """Of all that an answer says whose calls, or content, `form` holds. Empty: no form. `form` was checked as text:
        of tokens by number nothing is known there."""
        added_ids = self._texts.tokenizer.added_ids
        if asked.holds:
            form = asked.grammar(added_ids(asked.words)).text
        return reasoning.grammar(form, tokens=added_ids(reasoning.words), is_calls=asked.holds)

    def _detokenizer(
        self,
        prompt_token_ids: list[int],
        params: pb.SamplingParams,
        model: ModelInfo,
        stops: StopStrings,
        asked: AskedTools,
        reasoning: Reasoning | Harmony,
    ) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(
            self._texts.tokenizer,
            prompt_token_ids=prompt_token_ids,
            stop=stops,
            stop_token_ids=_stop_token_ids(params, model),
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            shown_token_ids=self._texts.tokenizer.hidden_ids((*asked.words, *reasoning.words)),
            min_tokens=params.min_tokens,
        )

    async def _resumption(
        self,
        begun: BegunAnswer | None,
        params: pb.SamplingParams,
        model: ModelInfo,
        num_prompt_tokens: int,
        detokenizer: IncrementalDetokenizer,
        reader: AnswerReader | None,
    ) -> Resumption:
        if begun is None or not begun.token_ids:
            return NOTHING
        return await asyncio.to_thread(  # milliseconds for every hundred tokens
            resumption_of,
            begun,
            self._compat_digest_of(begun.worker_kind),
            detokenizer,
            reader,
            max_tokens=min(params.max_tokens, model.max_model_len - num_prompt_tokens),
            stop_token_ids=_stop_token_ids(params, model),
        )

    def _compat_digest_of(self, worker_kind: str) -> str:
        """Of the workers that a client knows by this name. Raises `NoWorker` where none of them is here."""
        if not worker_kind:
            return ""
        for handle in self._cluster.pool.handles:
            if kind_name(handle.record.compat_digest) == worker_kind:
                return handle.record.compat_digest
        raise NoWorker("no worker of the kind that began this answer is available", retry_after_s=1.0)


def _stop_token_ids(params: pb.SamplingParams, model: ModelInfo) -> set[int]:
    return {*params.stop_token_ids, *(() if params.ignore_eos else model.eos_token_ids)}


async def _until_deadline(
    responses: AsyncGenerator[pb.GenerateResponse, None], remaining_s: float
) -> AsyncGenerator[pb.GenerateResponse, None]:
    """`responses`, or `DeadlinePassed` when the client's time is up. Closes them either way. A message that is on its
    way to the client then is gRPC's to give up."""
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
