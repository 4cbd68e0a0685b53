"""`tandem.v1.Tokenizer`: turns prompts into tokens, and tokens into text. Asks no worker."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from protos import tandem_inference_pb2 as pb
from protos.tandem_inference_pb2_grpc import TokenizerServicer as TokenizerServicerBase
from router.served_model import ServedModel, Texts
from router.validation.prompt import tokenize_prompt
from router.validation.request import check_size
from router.validation.tokens import check_num_bytes, check_num_tokens, prompt_to_tokenize, token_ids_to_read
from router.validation.unknown_fields import check_known_fields
from router.worker_pool import WorkerPool

NUM_THREADS = max(1, (os.cpu_count() or 1) // 2)
"""Threads for long texts, which may take seconds. Prompts of Generate use other threads, so they do not wait for
these."""


class TokenizerServicer(TokenizerServicerBase):  # type: ignore[misc]
    """One per router process, which closes it."""

    def __init__(self, *, texts: Texts, pool: WorkerPool, max_request_bytes: int) -> None:
        self._texts = texts
        self._max_request_bytes = max_request_bytes
        self._model = ServedModel(texts.model, pool.decode_records)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenizer")

    async def Tokenize(  # noqa: N802
        self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.TokenizeResponse:
        check_size(request, self._max_request_bytes)
        check_known_fields(request)
        model = self._model.now()
        prompt = prompt_to_tokenize(request, model)
        tokenizer, template = self._texts.tokenizer, self._texts.chat_template
        token_ids = (await tokenize_prompt(prompt, tokenizer, template, threads=self._threads)).token_ids
        check_num_tokens(request, len(token_ids))
        tokens: Sequence[str] = ()
        if request.with_tokens:  # a long list takes as long as tokenizing did
            tokens = await self._in_thread(tokenizer.tokens, token_ids)
        return pb.TokenizeResponse(token_ids=token_ids, max_model_len=model.max_model_len, tokens=tokens)

    async def Detokenize(  # noqa: N802
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        check_size(request, self._max_request_bytes)
        check_known_fields(request)
        token_ids = token_ids_to_read(request, self._model.now())
        text = await self._in_thread(self._texts.tokenizer.decode, token_ids, request.skip_special_tokens)
        check_num_bytes(text)
        return pb.DetokenizeResponse(text=text)

    def close(self) -> None:
        """Drop the texts that still wait for a thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
