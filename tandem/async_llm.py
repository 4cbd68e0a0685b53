"""Generation in this process for asyncio programs: no services, no Redis, no network. The API is vLLM's `AsyncLLM`.

    llm = AsyncLLM(model="smollm2-135m-instruct")
    async for output in llm.generate("The capital of France is", SamplingParams(max_tokens=8), request_id="1"):
        print(output.outputs[0].text)
    llm.shutdown()

Owns an engine and the thread that steps it. Its answers are the same as those of `LLM.generate` and of a cluster.

    AsyncLLM(...)  blocks while the model is loaded, on any thread; an event loop need not run yet
    first use      binds it to the running event loop
    shutdown       or the end of `async with`: the thread has ended, requests under way raise `EngineDeadError`
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from engine.async_llm_engine import AsyncLLMEngine, EngineDeadError
from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from tandem.async_loras import AsyncLoRAs
from tandem.async_requests import AsyncRequests
from tandem.lora_request import LoRARequest
from tandem.offline_answer import OfflineRequest, RequestOutput
from tandem.offline_inputs import OfflineInputs
from tandem.prompts import Prompt
from tandem.sampling_params import RequestOutputKind, SamplingParams
from tandem.vllm_settings import no_such_method

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["AsyncEngineArgs", "AsyncLLM", "EngineDeadError"]

AsyncEngineArgs = EngineArgs
"""vLLM's name."""


class AsyncLLM:
    """A model in this process, for any number of tasks of one event loop. Arguments and their errors are `LLM`'s.

    Raises `RuntimeError` if it is used on another event loop than at first, and `EngineDeadError` once its engine has
    failed or it was shut down.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = EngineArgs.model,
        *,
        generation_config: str | None = None,
        override_generation_config: Mapping[str, Any] | str | None = None,
        **engine_args: Any,
    ) -> None:
        self._inputs = OfflineInputs("AsyncLLM", model, generation_config, override_generation_config, engine_args)
        config = self.config = self._inputs.config
        self.engine = AsyncLLMEngine(lambda: LLMEngine(config))
        """The engine. Callers may read its `stats`; `call` runs a function between its steps."""
        # The thread ends by `shutdown`, or when this object is garbage, or before the interpreter ends: if the thread
        # were within torch then, the process would crash.
        weakref.finalize(self, self.engine.close_blocking)
        self.engine.wait_until_made()
        self._requests = AsyncRequests(self.engine)
        self._loras = AsyncLoRAs(self.engine, config.lora_modules) if config.lora_room.num else None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._names = count()

    if not TYPE_CHECKING:  # else any name would seem to be an attribute

        def __getattr__(self, name: str) -> NoReturn:
            raise no_such_method("AsyncLLM", name)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        return cls(**{entry.name: getattr(engine_args, entry.name) for entry in fields(EngineArgs)})

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Yield the answers to one prompt as they are generated, as `sampling_params.output_kind` says; by default,
        each output has everything so far. A reader that is slower than the engine misses outputs, but no tokens. The
        last output has `finished` set.

        `prompt`, `lora_request` and `tokenization_kwargs`: as for `LLM.generate`, but only one; `sampling_params`: None
        for the model's defaults. Raises `ValueError` for what cannot be served, and for a `request_id` that is in use.
        Leaving the loop, or cancelling the task, aborts the request; use `contextlib.aclosing` if a `break` must abort
        it at once.
        """
        self._bind()
        request = self._requests.open(request_id)
        try:
            loaded = {} if self._loras is None else self._loras.folders
            # Tokenizing a long prompt takes milliseconds.
            read = await asyncio.to_thread(
                self._read, request_id, prompt, sampling_params, lora_request, loaded, tokenization_kwargs
            )
            answers, kind = read
            request.take(answers, kind)
            if lora_request is not None and self._loras is not None:
                answers.mean(await self._loras.bring(lora_request, loaded, request))
            await self._requests.begin(request)
            is_finished = False
            while not is_finished:
                output = await request.next()
                is_finished = output.finished
                yield output
        finally:
            self._requests.leave(request)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort one request, or several: each ends with what it has so far, and finish_reason "abort". Their blocks are
        free when this returns. Unknown ids are ignored."""
        self._bind()
        await self._requests.abort([request_id] if isinstance(request_id, str) else request_id)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """See `LLM.get_tokenizer`."""
        return self._inputs.callers_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """See `LLM.get_default_sampling_params`."""
        return self._inputs.default_sampling_params()

    async def reset_prefix_cache(self) -> bool:
        """See `LLM.reset_prefix_cache`."""
        self._bind()
        return await self.engine.call(LLMEngine.forget_prefixes)

    @property
    def is_running(self) -> bool:
        """Whether it can generate."""
        return not self._requests.why_ended

    @property
    def is_stopped(self) -> bool:
        return not self.is_running

    @property
    def errored(self) -> bool:
        """Whether it cannot generate any more; as in vLLM, this is also true after `shutdown`."""
        return not self.is_running

    @property
    def dead_error(self) -> EngineDeadError:
        """The error that requests raise while this is `errored`."""
        return EngineDeadError(self._requests.why_ended)

    async def check_health(self) -> None:
        """Raise `EngineDeadError` if it cannot generate any more."""
        if self.errored:
            raise self.dead_error

    def shutdown(self) -> None:
        """End the thread after the engine's running step, and wait for it. May be called on any thread, and repeatedly.
        Requests under way raise `EngineDeadError`. The model's memory is free once this `AsyncLLM` is garbage."""
        why = "this AsyncLLM was shut down"
        self._requests.why_ended = self._requests.why_ended or why
        if self._loop is None or self._loop is _running_loop():
            self._requests.end(why)
        else:
            with suppress(RuntimeError):  # that loop is closed: its tasks will never run again
                self._loop.call_soon_threadsafe(self._requests.end, why)
        self.engine.close_blocking()

    async def __aenter__(self) -> Self:
        self._bind()
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)

    # -- inside -------------------------------------------------------------------------------------------------

    def _bind(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self.engine.bind(on_step=self._requests.on_step, on_failure=self._requests.on_failure)
            self._loop = loop
        if self._loop is not loop:
            raise RuntimeError("this AsyncLLM was first used on another event loop: make one for each loop")

    def _read(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        lora_request: LoRARequest | None,
        loaded: Mapping[str, Path],
        tokenization_kwargs: Mapping[str, Any] | None,
    ) -> tuple[OfflineRequest, RequestOutputKind]:
        asked = self._inputs.tokenization(tokenization_kwargs)
        (params,) = self._inputs.params_of_each(sampling_params, 1)
        (lora_name,) = self._inputs.lora_name_of_each(lora_request, 1, loaded)
        read = self._inputs.read("prompt", prompt, params, asked)
        # A unique name, so that late outputs of an aborted request are never taken for those of one with the same id.
        name = str(next(self._names))
        answers = OfflineRequest(request_id, read, params, lora_name, self._inputs.tokenizer, name=name)
        return answers, params.output_kind


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
