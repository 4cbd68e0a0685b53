"""How the gateway reports errors to its clients: with codes for programs, and sentences for people."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from pydantic import ValidationError
from validation_cases import MODEL, text_request

from gateway.asked import Body
from gateway.errors import Refusal, refusal_of, refusal_of_any, refusal_of_body
from gateway.messages.errors import error_of
from gateway.messages.request import MessageRequest
from gateway.requests import ChatRequest, CompletionRequest
from gateway.responses.request import ResponseRequest
from gateway.tokens import DetokenizeRequest, TokenizeRequest
from router.validation.request import check_prompt_length, validate
from rpc.errors import InvalidRequest, Unreachable


def refusal(num_prompt_tokens: int, **params: Any) -> Refusal:
    """The router's refusal of a prompt of that length, as the gateway reports it."""
    with pytest.raises(InvalidRequest) as caught:
        check_prompt_length(validate(text_request(**params), MODEL), num_prompt_tokens, MODEL)
    return refusal_of(caught.value)


def test_what_does_not_fit_the_context_has_the_code_that_clients_look_for() -> None:
    for told in (refusal(100), refusal(40, max_tokens=61)):
        assert (told.kind.status, told.kind.code) == (400, "context_length_exceeded")
        assert told.message.startswith("This model's maximum context length is 100 tokens. ")
    with pytest.raises(InvalidRequest) as caught:
        validate(text_request(max_tokens=100), MODEL)
    assert refusal_of(caught.value).kind.code == "context_length_exceeded"
    assert refusal(0).kind.code is None
    named = InvalidRequest(violations=[("model", "must be 'm', is 'a (the context of 5'")])
    assert refusal_of(named).kind.code == "model_not_found"


def test_anthropics_clients_are_told_in_the_words_that_they_shorten_by() -> None:
    too_long, beside = (error_of(each, "r")["error"] for each in (refusal(100), refusal(40, max_tokens=61)))
    assert too_long["message"].startswith("prompt is too long. ")
    assert beside["message"].startswith("input length and `max_tokens` exceed context limit: 40 + 61 > 100. ")
    with pytest.raises(InvalidRequest) as caught:  # refused for the answer's length alone
        validate(text_request(max_tokens=100), MODEL)
    assert "prompt is too long" not in error_of(refusal_of(caught.value), "r")["error"]["message"]


def test_where_a_router_should_be_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    why = "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.1.2.3:50051: Failed to connect"
    told = refusal_of_any(Unreachable(why), "r")
    assert (told.kind.status, told.message) == (503, "no router can be reached now; retry later")
    assert told.headers == {"retry-after": "1"}
    [record] = caplog.records
    assert (record.levelname, record.__dict__["why"]) == ("WARNING", why)


CHAT = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_tokens": -1}, "max_tokens: must be at least 1, is -1"),
        ({"max_tokens": "5"}, 'max_tokens: must be a whole number, is "5"'),
        ({"max_tokens": 1 << 31}, "max_tokens: must be at most 2147483647, is 2147483648"),
        ({"n": 129}, "n: must be at most 128, is 129"),
        ({"stream": "yes"}, 'stream: must be true or false, is "yes"'),
        ({"temperature": [1]}, "temperature: must be a number, is an array"),
        ({"reasoning_effort": "much"}, "reasoning_effort: must be 'none', 'minimal', 'low', 'medium', 'high', 'xhigh' "
         'or \'max\', is "much"'),
        ({"logit_bias": {"a": 1}}, 'logit_bias.a: must be a whole number, is "a"'),
        ({"stop": 5}, "stop: must be a text or an array, is 5"),
        ({"messages": "secret"}, "messages: must be an array, is a text"),
        ({"messages": []}, "messages: must not be empty"),
        ({"messages": [{"role": "user", "content": "a"}] * 8193},
         "messages: must have at most 8192 entries, has 8193"),
        ({"cache_salt": "a" * 129}, "cache_salt: must have at most 128 characters, has 129"),
        ({"request_id": "a b"}, "request_id: must be at most 100 printable ASCII characters, none of them a space, is "
         "'a b'"),
        ({"response_format": {}}, "response_format.type: must be given"),
        ({"tool_choice": "x"}, 'tool_choice: must be "none", "auto", "required" or {"type": "function", "function": '
         '{"name": …}}, is "x"'),
        ({"messages": [{"role": "user", "content": 5}]},
         "messages[0].content: must be a text, or a list of parts of type 'text', is 5"),
        ({"stream_options": {"include_usage": True}}, "stream_options: needs stream: true"),
        ({"prompt": "a"}, "prompt: is not a known parameter of this route; a body with prompt goes to POST "
         "/v1/completions"),
        ({"temprature": 1}, "temprature: is not a known parameter; did you mean temperature?"),
        ({"stream_options": {"include_use": True}},
         "stream_options.include_use: is not a known parameter; did you mean include_usage?"),
        ({"colour": "red"}, "colour: is not a known parameter"),
        ({"enable_thinking": False}, "enable_thinking: is not a known parameter; "
         'use chat_template_kwargs: {"enable_thinking": ...} instead'),
        ({"guided_regex": "a"}, "guided_regex: is not a known parameter; "
         'use structured_outputs: {"regex": ...} instead'),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_body_is_said_with_what_was_given(body: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ChatRequest.read(json.dumps(CHAT | body).encode())
    assert refusal_of_body(caught.value).message == message


def test_names_of_any_length_are_unknown_at_once() -> None:
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.read(json.dumps({"prompt": "a", "temperature" * 10_000: 1}).encode())
    assert refusal_of_body(caught.value).message.endswith("is not a known parameter")


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        (ChatRequest, "{}", "messages: must be given"),
        (ChatRequest, '{"prompt": "a"}', "messages: must be given; a body with prompt goes to POST /v1/completions"),
        (CompletionRequest, '{"messages": []}',
         "prompt: must be given; a body with messages goes to POST /v1/chat/completions"),
        (TokenizeRequest, "{}", "exactly one of prompt and messages must be given"),
        (ChatRequest, "[]", "the body must be an object, is an array"),
        (ChatRequest, "{", "the body must be JSON: EOF while parsing an object at line 1 column 1"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_whole_body(route: type[Body], body: str, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        route.read(body.encode())
    assert refusal_of_body(caught.value).message == message


def test_options_of_streams_that_ask_for_nothing_need_no_stream() -> None:
    for body in (
        {"stream_options": None},
        {"stream_options": {}},
        {"stream_options": {"include_usage": True}, "stream": True},
    ):
        ChatRequest.read(json.dumps(CHAT | body).encode())


BODIES = [
    (ChatRequest, CHAT), (CompletionRequest, {"prompt": "a"}), (ResponseRequest, {"input": "a"}),
    (MessageRequest, CHAT | {"max_tokens": 5, "model": "m"}), (TokenizeRequest, {"prompt": "a"}),
    (DetokenizeRequest, {"tokens": [1]}),
]  # fmt: skip
WRONG = [5, -5, 1.5, 1 << 40, True, "secret", "", [], [5], [[]], [{}], {}, {"a": 1}]


@pytest.mark.parametrize(("route", "right"), BODIES)
def test_every_field_is_refused_in_the_same_words(route: type[Body], right: dict[str, Any]) -> None:
    """No error in a library's words, and each names its field."""
    num_refused = 0
    for name, entry in route.model_fields.items():
        for value in WRONG:
            field = entry.alias or name
            try:
                route.read(json.dumps(right | {field: value}).encode())
            except ValidationError as error:
                told, num_refused = refusal_of_body(error), num_refused + 1
                assert told.param is None or told.param.startswith(field)
                assert not re.search(r"[Ii]nput should|[Ff]ield required|Value error|should", told.message), (
                    told.message
                )
    assert num_refused > len(route.model_fields)
