"""Requests that only ask for the tokens of a prompt, beside those that want an answer. No network."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

import grammar_cases

from protos import tandem_inference_pb2 as pb
from router.model_info import GenerationDefaults, ModelInfo
from router.policy import PolicyConfig
from router.served_model import Texts
from router.text.tokenizer import ASYNC_ENCODE_CHARS, Tokenizer
from router.tokenizer_servicer import TokenizerServicer
from router.validation.prompt import TextPrompt, tokenize_prompt
from router.worker_pool import WorkerPool

MODEL = ModelInfo(
    served_model_name="m",
    max_model_len=2048,
    vocab_size=100,
    eos_token_ids=frozenset(),
    has_chat_template=False,
    defaults=GenerationDefaults(),
)
LONG = ASYNC_ENCODE_CHARS + 1


class Slow(Tokenizer):
    """Slow to encode texts that begin with "b"."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.may_end = threading.Event()

    def encode(self, text: str, *args: Any) -> list[int]:
        if text.startswith("b"):
            self.may_end.wait(60)
        return super().encode(text, *args)


async def test_however_many_are_counted_a_prompt_does_not_wait_for_them() -> None:
    tokenizer = Slow(grammar_cases.tokenizer())
    pool = WorkerPool(router_id="r", policy=PolicyConfig(), on_change=lambda: None)
    servicer = TokenizerServicer(texts=Texts(MODEL, tokenizer, None), pool=pool, max_request_bytes=10_000)
    request, context = pb.TokenizeRequest(text=LONG * "b"), cast(Any, None)
    counted = [asyncio.create_task(servicer.Tokenize(request, context)) for _ in range(50)]
    await asyncio.sleep(0)
    try:
        async with asyncio.timeout(10):
            prompt = await tokenize_prompt(TextPrompt(LONG * "a"), tokenizer, None)
    finally:
        tokenizer.may_end.set()
    assert prompt.token_ids == tokenizer.encode(LONG * "a")
    assert all(list(each.token_ids) == tokenizer.encode(LONG * "b") for each in await asyncio.gather(*counted))
