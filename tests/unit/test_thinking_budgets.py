"""How long an answer may think, in the tokens of each kind of model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grammar_cases
import pytest
import tokenizers
from validation_cases import MODEL, violations_of

from protos import tandem_inference_pb2 as pb
from protos.tandem_worker_pb2 import ThinkingBudget
from router.prepared import PreparedRequest
from router.served_model import Texts
from router.text.tokenizer import Tokenizer
from router.validation.prompt import TokenizedPrompt
from router.validation.request import validate
from rpc.errors import InvalidRequest

WORDS = [
    "a",
    "<think>",
    "</think>",
    "[THINK]",
    "[/THINK]",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "analysis",
    "<|start|>",
    "<|channel>",
    "<channel|>",
    "thought",
]
HARMONY = "openai_gptoss"


def asked(**params: Any) -> pb.GenerateRequest:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="Hi")])
    return pb.GenerateRequest(chat=chat, sampling_params=pb.SamplingParams(**params))


def word_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_tokens([tokenizers.AddedToken(word, normalized=False) for word in WORDS])
    return backend


async def budget_of(
    parser: str, opened: str = "", backend: tokenizers.Tokenizer | None = None, **params: Any
) -> ThinkingBudget | None:
    model = replace(MODEL, reasoning_parser=parser)
    texts = Texts(model, Tokenizer(backend or word_level()), None)
    prepared = PreparedRequest(validate(asked(**params), model), model, texts, TokenizedPrompt([0, 1], opened))
    answer = await prepared.answer(0, None, arrived_s=0.0)  # type: ignore[arg-type]
    return answer.thinking_budget


async def test_in_the_tokens_of_each_kind_of_model() -> None:
    asks: dict[str, Any] = {"thinking_token_budget": 5}
    think = {"num_tokens": 5, "end_token_id": 2, "begin_token_ids": [1]}
    assert await budget_of("qwen3", **asks) == ThinkingBudget(**think)
    assert await budget_of("deepseek_r1", "<think>", **asks) == ThinkingBudget(**think, has_begun=True)
    assert await budget_of("mistral", **asks) == ThinkingBudget(num_tokens=5, end_token_id=4, begin_token_ids=[3])
    label = {"num_tokens": 5, "end_token_id": 11, "begin_token_ids": [10, 12]}
    assert await budget_of("gemma4", **asks) == ThinkingBudget(**label), "white space is no token here"
    harmony = {
        "num_tokens": 5, "end_token_id": 7, "begin_token_ids": [5, 8, 6], "may_repeat": True,
        "other_end_token_ids": [9, 5],
    }  # fmt: skip
    assert await budget_of(HARMONY, **asks) == ThinkingBudget(**harmony)
    opened = "<|channel|>analysis<|message|>"
    assert await budget_of(HARMONY, opened, **asks) == ThinkingBudget(**harmony, has_begun=True)
    assert await budget_of(HARMONY, "<|channel|>final<|message|>", **asks) == ThinkingBudget(**harmony)


async def test_white_space_may_come_before_a_thought_that_the_prompt_has_not_begun() -> None:
    """The model's tokens have white space in pieces of several lengths."""
    backend = grammar_cases.tokenizer()
    backend.add_tokens([tokenizers.AddedToken(word, normalized=False) for word in WORDS[1:]])
    spaces = {token_id for text in (" ", "  ", "\n", "\t", "\r") for token_id in backend.encode(text).ids}
    asks: dict[str, Any] = {"backend": backend, "thinking_token_budget": 5}
    found = await budget_of("qwen3", **asks)
    assert found is not None
    assert spaces <= set(found.space_token_ids)
    assert not backend.decode(list(found.space_token_ids)).strip()
    for parser, opened in (("qwen3", "<think>"), (HARMONY, "")):
        none = await budget_of(parser, opened, **asks)
        assert none is not None
        assert not none.space_token_ids


async def test_no_budget_where_nothing_is_thought_or_bounded() -> None:
    assert await budget_of("", thinking_token_budget=5) is None
    assert await budget_of("qwen3", thinking_token_budget=-1) is None
    assert await budget_of("qwen3") is None
    zero = await budget_of("qwen3", "<think>", thinking_token_budget=0)
    assert zero is not None
    assert zero.num_tokens == 0


async def test_a_word_of_several_tokens_bounds_nothing() -> None:
    with pytest.raises(InvalidRequest) as caught:
        await budget_of("granite", thinking_token_budget=5)
    [wrong] = caught.value.violations
    assert wrong.field == "sampling_params.thinking_token_budget"
    assert "ends its reasoning with 'Here is my response:', which is not one token" in wrong.description
    assert await budget_of("granite", thinking_token_budget=-1) is None


async def test_a_target_that_cannot_be_kept_bounds_nothing() -> None:
    target: dict[str, Any] = {"thinking_token_budget": 5, "is_thinking_token_budget_target": True}
    kept = await budget_of("qwen3", **target)
    assert kept is not None
    assert kept.num_tokens == 5
    assert await budget_of("granite", **target) is None
    assert await budget_of("qwen3", **target, allowed_token_ids=[5]) is None


def test_what_cannot_be_combined() -> None:
    wrong = violations_of(asked(thinking_token_budget=3, allowed_token_ids=[5]))
    assert list(wrong) == ["sampling_params.allowed_token_ids"]
    assert "thinking_token_budget" in wrong["sampling_params.allowed_token_ids"]
    validate(asked(thinking_token_budget=-1, allowed_token_ids=[5]), MODEL)
    validate(pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(thinking_token_budget=-1)), MODEL)
