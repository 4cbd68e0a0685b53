"""The error names every wrong field of a request, with its bound."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from validation_cases import GREEDY, MODEL, text_request, violations_of

from engine import sampling_params as engine_sampling
from protos import tandem_inference_pb2 as pb
from router.text.chat_template import ChatMessage
from router.validation import request as validation_of_requests
from router.validation import sampling
from router.validation.prompt import (
    MAX_CHAT_MESSAGES,
    ChatPrompt,
    TextPrompt,
    TokenIdsPrompt,
)
from router.validation.request import check_size, validate
from rpc.errors import InvalidRequest

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("params", "field", "description"),
    [
        ({"n": 0}, "n", "must be in [1, 128], is 0"),
        ({"n": 129}, "n", "must be in [1, 128], is 129"),
        ({"temperature": -0.5}, "temperature", "must be at least 0 and finite, is -0.5"),
        ({"temperature": NAN}, "temperature", "must be at least 0 and finite, is nan"),
        ({"temperature": INF}, "temperature", "must be at least 0 and finite, is inf"),
        ({"top_p": 0}, "top_p", "must be in (0, 1], is 0"),
        ({"top_p": 1.5}, "top_p", "must be in (0, 1], is 1.5"),
        ({"top_p": NAN}, "top_p", "must be in (0, 1], is nan"),
        ({"top_k": -2}, "top_k", "must be -1 or more, is -2"),
        ({"min_p": -0.25}, "min_p", "must be in [0, 1], is -0.25"),
        ({"min_p": 2}, "min_p", "must be in [0, 1], is 2"),
        ({"presence_penalty": 2.5}, "presence_penalty", "must be in [-2, 2], is 2.5"),
        ({"frequency_penalty": -2.5}, "frequency_penalty", "must be in [-2, 2], is -2.5"),
        ({"frequency_penalty": NAN}, "frequency_penalty", "must be in [-2, 2], is nan"),
        ({"repetition_penalty": 0}, "repetition_penalty", "must be in (0, 2], is 0"),
        ({"repetition_penalty": 2.5}, "repetition_penalty", "must be in (0, 2], is 2.5"),
        ({"max_tokens": 0}, "max_tokens", "must be at least 1, is 0"),
        ({"max_tokens": 100}, "max_tokens", "must be at most 99 (the context of 100 minus 1 for the prompt), is 100"),
        ({"min_tokens": 100}, "min_tokens", "must be at most 99 (the context of 100 minus 1 for the prompt), is 100"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens", "must be at most max_tokens=3, is 4"),
        ({"stop": ["x"] * 17}, "stop", "must have at most 16 strings, has 17"),
        ({"stop": ["ok", ""]}, "stop[1]", "must be 1 to 256 characters long, is 0"),
        ({"stop": ["é" * 257]}, "stop[0]", "must be 1 to 256 characters long, is 257"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids", "must have at most 64 ids, has 65"),
        ({"stop_token_ids": [1, 1000]}, "stop_token_ids", "ids must be below the vocabulary's size 1000, is 1000 at 1"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias", "must have at most 1024 entries, has 1025"),
        (
            {"allowed_token_ids": [5, 1000]},
            "allowed_token_ids",
            "ids must be below the vocabulary's size 1000, is 1000 at 1",
        ),
        ({"allowed_token_ids": [5] * 4097}, "allowed_token_ids", "must have at most 4096 ids, has 4097"),
        (
            {"allowed_token_ids": [2, 7], "stop_token_ids": [7], "min_tokens": 3},
            "allowed_token_ids",
            "must have an id that does not end the answer, because of min_tokens=3",
        ),
        (
            {"allowed_token_ids": [5], "structured_outputs": pb.StructuredOutputs(regex="a")},
            "allowed_token_ids",
            "cannot be combined with structured_outputs: together they may leave no allowed token",
        ),
        ({"bad_words": ["a"] * 257}, "bad_words", "must have at most 256 words, has 257"),
        ({"bad_words": ["a", " "]}, "bad_words[1]", "must be 1 to 256 characters long, not all of them spaces, has 1"),
        (
            {"bad_words": ["a" * 257]},
            "bad_words[0]",
            "must be 1 to 256 characters long, not all of them spaces, has 257",
        ),
        (
            {"bad_words": ["a"], "allowed_token_ids": [5]},
            "bad_words",
            "cannot be combined with allowed_token_ids: together they may leave no allowed token",
        ),
        (
            {"bad_words": ["a"], "structured_outputs": pb.StructuredOutputs(regex="a")},
            "bad_words",
            "cannot be combined with structured_outputs: together they may leave no allowed token",
        ),
        ({"logit_bias": {5: 100.5}}, "logit_bias[5]", "must be in [-100, 100], is 100.5"),
        ({"logit_bias": {5: NAN}}, "logit_bias[5]", "must be in [-100, 100], is nan"),
        ({"logit_bias": {1000: 1.0}}, "logit_bias", "ids must be below the vocabulary's size 1000, is 1000 at 0"),
        ({"logprobs": 21}, "logprobs", "must be in [0, 20], is 21"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "must be in [0, 20], is 21"),
        ({"thinking_token_budget": -2}, "thinking_token_budget", "must be -1 or more, is -2"),
        (
            {"thinking_token_budget": 0},
            "thinking_token_budget",
            "is only for chats: reasoning is told apart from the answer by the chat template",
        ),
    ],
)
def test_sampling_parameters_out_of_bounds(params: dict[str, Any], field: str, description: str) -> None:
    model = replace(MODEL, vocab_size=2000) if len(params.get("logit_bias", ())) > 1000 else MODEL
    assert violations_of(text_request(**params), model) == {f"sampling_params.{field}": description}


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "seed": -(2**63)},
        {"temperature": 100, "top_p": 1e-6, "top_k": 2**31 - 1, "min_p": 1, "repetition_penalty": 2},
        {"presence_penalty": -2, "frequency_penalty": 2, "max_tokens": 99, "min_tokens": 99, "logprobs": 20},
        {"allowed_token_ids": [2, 999], "min_tokens": 1},
        {"allowed_token_ids": [2]},
        {"stop": ["x" * 256] * 16, "stop_token_ids": [999] * 64, "logit_bias": {999: -100, 0: 100}},
    ],
)
def test_bounds_themselves_are_allowed(params: dict[str, Any]) -> None:
    validate(text_request(**params), MODEL)


@pytest.mark.parametrize(
    ("request_fields", "field", "description"),
    [
        ({}, "prompt", "must be given: one of text, token_ids and chat"),
        ({"text": ""}, "text", "must not be empty"),
        ({"token_ids": pb.TokenIds()}, "token_ids", "must not be empty"),
        (
            {"token_ids": pb.TokenIds(ids=[1] * 100)},
            "token_ids",
            "must be at most 99 tokens (a context of 100, 1 for the answer), has 100",
        ),
        (
            {"token_ids": pb.TokenIds(ids=[1, 1000, 4294967295])},
            "token_ids",
            "ids must be below the vocabulary's size 1000, is 1000 at 1",
        ),
        ({"chat": pb.Chat()}, "chat.messages", "must not be empty"),
        (
            {"chat": pb.Chat(messages=[pb.ChatMessage(role="user"), pb.ChatMessage(content="x")])},
            "chat.messages[1].role",
            "must not be empty",
        ),
        ({"text": "x", "model": "other"}, "model", "must be 'smol' or empty, is 'other'"),
        ({"text": "x", "request_id": "i" * 129}, "request_id", "must be at most 128 characters, has 129"),
        (
            {"text": "x", "request_id": "a\nb"},
            "request_id",
            "must consist of printable characters, has U+000A at 1",
        ),
        ({"text": "x", "request_id": "\u202e"}, "request_id", "must consist of printable characters, has U+202E at 0"),
        ({"text": "x", "cache_salt": "s" * 129}, "cache_salt", "must be at most 128 characters, has 129"),
        ({"text": "x", "fairness_id": "é" * 128 + "x"}, "fairness_id", "must have at most 256 bytes, has 257"),
        ({"text": "x", "worker_kind": "k" * 65}, "worker_kind", "must be at most 64 characters, has 65"),
        (
            {"text": "x", "sampling_params": GREEDY, "output_token_ids": [5, 1000]},
            "output_token_ids",
            "ids must be below the vocabulary's size 1000, is 1000 at 1",
        ),
        (
            {"text": "x", "sampling_params": GREEDY, "output_token_ids": [5] * 100},
            "output_token_ids",
            "must have at most 99 ids (the context of 100), has 100",
        ),
        (
            {"text": "x", "sampling_params": pb.SamplingParams(seed=3, max_tokens=2), "output_token_ids": [5, 6, 7]},
            "output_token_ids",
            "must have at most max_tokens=2 ids, has 3",
        ),
        (
            {"text": "x", "sampling_params": pb.SamplingParams(seed=3, n=2), "output_token_ids": [5]},
            "sampling_params.n",
            "must be 1 with output_token_ids, is 2: to continue several answers, use answers_so_far",
        ),
        (
            {"text": "x", "output_token_ids": [5]},
            "sampling_params.seed",
            "must be given with output_token_ids, unless temperature is 0: the seed that the tokens were drawn with",
        ),
        (
            {"text": "x", "sampling_params": pb.SamplingParams(seed=-1), "output_token_ids": [5]},
            "sampling_params.seed",
            "must be given with output_token_ids, unless temperature is 0: the seed that the tokens were drawn with",
        ),
    ],
)
def test_requests_that_cannot_be_served(request_fields: dict[str, Any], field: str, description: str) -> None:
    assert violations_of(pb.GenerateRequest(**request_fields)) == {field: description}


def test_a_chat_needs_a_template() -> None:
    request = pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="x")]))
    violations = violations_of(request, replace(MODEL, has_chat_template=False))
    assert violations == {"chat": "model 'smol' has no chat template: give text or token_ids"}


def test_all_violations_are_told_at_once() -> None:
    request = pb.GenerateRequest(
        request_id="\t",
        model="other",
        sampling_params=pb.SamplingParams(temperature=-1, top_p=2, max_tokens=0, stop=[""], logit_bias={1: 101}),
    )
    assert set(violations_of(request)) == {
        "request_id",
        "model",
        "prompt",
        "sampling_params.temperature",
        "sampling_params.top_p",
        "sampling_params.max_tokens",
        "sampling_params.stop[0]",
        "sampling_params.logit_bias[1]",
    }


def test_a_valid_request_is_taken_over() -> None:
    text = validate(pb.GenerateRequest(text="hi", request_id="r 1", model="smol", stream=False), MODEL)
    assert (text.request_id, text.prompt, text.is_streaming, text.prompt_field) == (
        "r 1",
        TextPrompt("hi"),
        False,
        "text",
    )
    ids = validate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 99)), MODEL)
    assert (ids.prompt, ids.is_streaming, ids.prompt_field) == (TokenIdsPrompt((5,) * 99), True, "token_ids")
    chat = validate(pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="x")])), MODEL)
    assert (chat.prompt, chat.prompt_field) == (ChatPrompt((ChatMessage(role="user", content="x"),)), "chat")
    assert len({text.request_id, ids.request_id, chat.request_id}) == 3
    assert re.fullmatch("[0-9a-f]{32}", ids.request_id)
    whose = [validate(pb.GenerateRequest(text="hi", fairness_id=name), MODEL).fairness_id for name in ("", "é" * 128)]
    assert whose == ["", "é" * 128]


def test_limits_are_those_of_the_engine_and_of_the_proto() -> None:
    assert sampling.MAX_STOP_TOKEN_IDS == engine_sampling.MAX_STOP_TOKEN_IDS
    assert sampling.MAX_LOGIT_BIAS == engine_sampling.MAX_LOGIT_BIAS
    assert sampling.MAX_ALLOWED_TOKEN_IDS == engine_sampling.MAX_ALLOWED_TOKEN_IDS
    assert 2 * sampling.MAX_BAD_WORDS == engine_sampling.MAX_BAD_WORDS
    proto = (Path(pb.__file__).parent / "tandem_inference.proto").read_text()
    proto = re.sub(r"\n *// ", " ", proto)  # a sentence of a comment may go over several lines
    for phrase in (
        f"At most {validation_of_requests.MAX_REQUEST_ID_CHARS} printable characters",
        f"at most {sampling.MAX_STOP_STRINGS}, each of 1 to {sampling.MAX_STOP_CHARS} characters",
        f"at most {sampling.MAX_STOP_TOKEN_IDS}\n",
        f"at most {sampling.MAX_LOGIT_BIAS} entries",
        f"At most {sampling.MAX_ALLOWED_TOKEN_IDS}.",
        f"At most {sampling.MAX_BAD_WORDS}, each of 1 to {sampling.MAX_BAD_WORD_CHARS} characters",
    ):
        assert phrase in proto


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.GenerateRequest(text="é" * 600, model="m" * 100), "text"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[300] * 600)), "token_ids"),
        (pb.GenerateRequest(text="x", sampling_params=pb.SamplingParams(stop=["x" * 100] * 20)), "sampling_params"),
        (pb.GenerateRequest(text="x", request_id="i" * 1001), "request_id"),
        (pb.GenerateRequest(text="x", output_token_ids=[300] * 600), "output_token_ids"),
    ],
)
def test_a_message_that_is_too_large_is_named_by_what_takes_most(request_: pb.GenerateRequest, field: str) -> None:
    check_size(request_, request_.ByteSize())
    with pytest.raises(
        InvalidRequest, match=f"{request_.ByteSize()} bytes, the maximum is 1000 .the router.s --max-message-bytes"
    ) as caught:
        check_size(request_, 1000)
    assert [violation.field for violation in caught.value.violations] == [field]


def test_too_many_chat_messages_are_refused_unread() -> None:
    message = pb.ChatMessage(role="user", content="x")
    request = pb.GenerateRequest(chat=pb.Chat(messages=[message] * (MAX_CHAT_MESSAGES + 1)))
    assert violations_of(request) == {"chat.messages": "must have at most 8192 messages, has 8193"}


def test_a_model_is_asked_for_by_its_name_or_its_adapters() -> None:
    served = replace(MODEL, lora_names=("poet", "sql"))
    name = MODEL.served_model_name
    for asked, adapter in (("", ""), (name, ""), ("poet", "poet"), ("sql", "sql")):
        assert validate(pb.GenerateRequest(text="x", model=asked), served).lora_name == adapter
    expected = f"must be {name!r}, one of its adapters ('poet', 'sql') or empty, is 'x'"
    assert violations_of(pb.GenerateRequest(text="x", model="x"), served) == {"model": expected}
    assert violations_of(pb.GenerateRequest(text="x", model="sql"), MODEL) == {
        "model": f"must be {name!r} or empty, is 'sql'"
    }
    many = replace(MODEL, lora_names=tuple(f"a{i}" for i in range(9)))
    [said] = violations_of(pb.GenerateRequest(text="x", model="y" * 300), many).values()
    assert "'a7', …) or empty" in said
    assert said.endswith("y" * 128 + "'")
