"""How the gateway reports errors to its clients: with codes for programs, and sentences for people."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError
from validation_cases import MODEL, text_request

from gateway.errors import Refusal, refusal_of, refusal_of_any, refusal_of_body
from gateway.messages.errors import error_of
from gateway.requests import ChatRequest, CompletionRequest
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
        ({"max_tokens": -1}, "max_tokens: Input should be greater than or equal to 0, is -1"),
        ({"max_tokens": "5"}, "max_tokens: Input should be a valid integer, is a text"),
        ({"stop": 5}, "stop: Input should be a valid string, or Input should be a valid array, is 5"),
        ({"messages": "secret"}, "messages: Input should be a valid array, is a text"),
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
