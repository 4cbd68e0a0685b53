"""How the gateway reads bodies of requests: what it refuses by name, and what it accepts (test_gateway_heads.py: what
comes before).

Connections are real on both sides; the router's answers are scripted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gateway_harness import failing, gateway
from pydantic import ValidationError

from gateway import asked
from gateway.asked import Body
from gateway.errors import refusal_of_body
from gateway.requests import ChatRequest, CompletionRequest, StreamOptions
from gateway.responses.request import ResponseRequest
from gateway.tokens import DetokenizeRequest, TokenizeRequest
from router.validation import prompt, tools
from rpc.errors import InvalidRequest


@pytest.mark.parametrize(
    ("body", "param", "complaint"),
    [
        ({}, "prompt", "must be given"),
        ({"prompt": 5}, "prompt", "must be a text, token ids, or a list of either, is 5"),
        ({"prompt": None}, "prompt", "must be a text, token ids, or a list of either, is null"),
        ({"prompt": []}, "prompt", "must be 1 to 256 prompts, has 0"),
        ({"prompt": [1, "a"]}, "prompt", "cannot be mixed with anything else"),
        ({"prompt": [True]}, "prompt", "entry 0 is neither: true"),
        ({"prompt": "a", "n": 0}, "n", "at least 1"),
        ({"prompt": "a", "n": 129}, "n", "at most 128"),
        ({"prompt": ["a", "b", "c"], "n": 100}, "n", "must be at most 85 with 3 prompts (256 choices in all), is 100"),
        ({"prompt": "a", "best_of": 2}, "best_of", "is not supported; only n, 1, is allowed"),
        ({"prompt": "a", "best_of": 3, "n": 2}, "best_of", "is not supported; only n, 2, is allowed"),
        ({"prompt": "a", "best_of": True}, "best_of", "is not supported; only n, 1, is allowed"),
        ({"prompt": "a", "return_token_ids": 1}, "return_token_ids", "true or false"),
        ({"prompt": "a", "truncation_side": "right"}, "truncation_side", 'is not supported; only "left" is allowed'),
        ({"prompt": "a", "truncate_prompt_tokens": 0.5}, "truncate_prompt_tokens", "a whole number"),
        ({"prompt": "a", "use_beam_search": 0}, "use_beam_search", "is not supported; only false is allowed"),
        ({"prompt": "a", "logprobs": True}, "logprobs", "a whole number"),
        ({"prompt": "a", "max_tokens": "many"}, "max_tokens", "a whole number"),
        ({"prompt": "a", "seed": 1 << 63}, "seed", "at most"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "a whole number"),
        ({"prompt": "a", "stream_options": {"include": 1}}, "stream_options.include", "not a known parameter"),
        ({"prompt": "a", "kv_transfer_params": {}}, "kv_transfer_params", "is not supported"),
        ({"prompt": "a", "mm_payload": "none"}, "mm_payload", "not a known parameter"),
        ({"prompt": "a", "stop[]": "b"}, "stop[]", "stop[]: is not a known parameter"),
        ({"prompt": "a", "temperature": "NaN is none"}, "temperature", "number"),
        ({"prompt": "a", "logprobs": -1}, "logprobs", "at least 0"),
        ({"prompt": "a", "n": True}, "n", "a whole number"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens", "a whole number"),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens", "a whole number"),
        ({"prompt": "a", "stream": "yes"}, "stream", "true or false"),
        ({"prompt": "a", "stream_options": {"include_usage": "x"}}, "stream_options.include_usage", 'is "x"'),
        ({"prompt": "a", "logit_bias": {"9" * 5000: 1}}, "logit_bias.999", "must be a whole number"),
        ({"prompt": "a", "request_id": "abc\n"}, "request_id", "must be at most 100 printable ASCII"),
        ({"prompt": "a", "request_id": "\u65e5\u672c"}, "request_id", "must be at most 100 printable ASCII"),
    ],
)
async def test_a_body_that_is_wrong_is_refused_by_name(body: dict[str, Any], param: str, complaint: str) -> None:
    async with gateway() as (router, http):
        response = await http.post("/v1/completions", json=body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith(param)
    assert complaint in error["message"]
    assert router.requests == []


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ResponseRequest, {"input": [1, 2, 3]}),
        (ResponseRequest, {"input": [{"role": "user", "content": [{"type": "input_text"}] * 3}]}),
        (ResponseRequest, {"input": "a", "tools": [1, 2, 3]}),
        (ResponseRequest, {"input": "a", "include": [1, 2, 3]}),
        (ChatRequest, {"messages": [1, 2, 3]}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "text"}] * 3}]}),
        (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [1, 2, 3]}]}),
        (ChatRequest, {"messages": [{"role": "user", "content": "a"}], "tools": [1, 2, 3]}),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": [-1, -2, -3]}),
        (CompletionRequest, {"prompt": "a", "stop": [1, 2, 3]}),
        (TokenizeRequest, {"messages": [1, 2, 3]}),
        (TokenizeRequest, {"prompt": "a", "tools": [1, 2, 3]}),
        (DetokenizeRequest, {"tokens": [-1, -2, -3]}),
    ],
)
def test_a_list_is_read_until_something_in_it_is_wrong(kind: type[Body], body: dict[str, Any]) -> None:
    """Reporting every error in a list of a million would take minutes, and gigabytes."""
    with pytest.raises(ValidationError) as caught:
        kind.read(json.dumps(body).encode())
    wrong = [error for error in caught.value.errors() if error["loc"] != ("stop", "str")]  # the alternative of a text
    assert len(wrong) == 1


HI = {"role": "user", "content": "a"}
WRONG = {str(number): "x" for number in range(1000)}
TOOL = {"type": "function", "name": "f"}


@pytest.mark.parametrize(
    ("kind", "body", "place"),
    [
        (CompletionRequest, {"prompt": "a", "logit_bias": WRONG}, "logit_bias.0"),
        (CompletionRequest, {"prompt": "a", **WRONG}, "0"),
        (CompletionRequest, {"prompt": "a", "stream_options": WRONG}, "stream_options.0"),
        (CompletionRequest, {"prompt": "a", "response_format": {"type": "text", **WRONG}}, "response_format.0"),
        (ChatRequest, {"messages": [HI | WRONG]}, "messages[0].0"),
        (
            ChatRequest,
            {"messages": [HI], "tools": [{"type": "function", "function": {"name": "f"}, **WRONG}]},
            "tools[0].0",
        ),
        (ResponseRequest, {"input": "a", "metadata": dict.fromkeys(WRONG, 5)}, "metadata.0"),
        (ResponseRequest, {"input": [HI | WRONG]}, "input[0].0"),
        (ResponseRequest, {"input": "a", "tools": [TOOL | WRONG]}, "tools[0].0"),
        (ResponseRequest, {"input": "a", "text": WRONG}, "text.0"),
        (TokenizeRequest, {"prompt": "a", **WRONG}, "0"),
    ],
)
def test_an_object_is_read_until_something_in_it_is_wrong(kind: type[Body], body: dict[str, Any], place: str) -> None:
    """Like lists: reporting every error in 4 MB took two seconds, in which no other client was answered."""
    with pytest.raises(ValidationError) as caught:
        kind.read(json.dumps(body).encode())
    assert caught.value.error_count() <= 100
    assert refusal_of_body(caught.value).param == place


async def test_all_of_a_large_object_is_read() -> None:
    biases = {number: float(number) for number in range(300)}
    async with gateway() as (router, http):
        body = {"prompt": "a", "logit_bias": {str(number): bias for number, bias in biases.items()}}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        refused = await http.post("/v1/completions", json=body | {"logit_bias": body["logit_bias"] | {"-1": 2}})
        assert refused.json()["error"]["param"].startswith("logit_bias.-1")
    [request] = router.requests
    assert request.sampling_params.logit_bias == biases


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (
            [{"type": "image_url", "image_url": {"url": "x"}}],
            "may only have parts of type 'text', has one of type 'image",
        ),
        (5, "must be a text, or a list of parts of type 'text'"),
    ],
)
async def test_what_a_message_may_be_is_said(content: Any, complaint: str) -> None:
    async with gateway() as (_, http):
        body = {"messages": [{"role": "user", "content": content}]}
        error = (await http.post("/v1/chat/completions", json=body)).json()["error"]
    assert error["param"] == "messages[0].content"
    assert complaint in error["message"]


@pytest.mark.parametrize(
    ("message", "param", "complaint"),
    [
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text"}]},
            "content[1].text",
            "must be given",
        ),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "content[0].text", "a text"),
        ({"role": "user"}, "content", "must be given with role 'user': a text, or a list of parts"),
        ({"role": "system", "content": None}, "content", "must be given with role 'system'"),
        ({"role": "x", "content": "a"}, "role", "must be one of system, developer, user, assistant, tool, function"),
        ({"content": "a"}, "role", "must be given"),
    ],
)
async def test_what_is_wrong_with_a_message_is_said_where_it_is(
    message: dict[str, Any], param: str, complaint: str
) -> None:
    async with gateway() as (router, http):
        error = (await http.post("/v1/chat/completions", json={"messages": [message]})).json()["error"]
    assert error["param"] == f"messages[0].{param}"
    assert complaint in error["message"]
    assert router.requests == []


async def test_messages_that_clients_send_may_lack_what_they_do_not_say() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": None},
        {"role": "assistant", "content": None},
        {"role": "user", "content": ""},
    ]
    async with gateway() as (router, http):
        assert (await http.post("/v1/chat/completions", json={"messages": messages})).status_code == 200
    assert [message.content for message in router.requests[0].chat.messages] == ["be brief", "hi", "", "", "", ""]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_null_is_absent_in_every_optional_field(path: str) -> None:
    body = CompletionRequest if path == "completions" else ChatRequest
    optional = {name: None for name, field in body.model_fields.items() if not field.is_required()}
    needed = {"prompt": "a"} if path == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    options = dict.fromkeys(StreamOptions.model_fields)
    async with gateway() as (router, http):
        for nulls in (optional, {"stream": True, "stream_options": options}):
            response = await http.post(f"/v1/{path}", json=needed | nulls)
            assert response.status_code == 200, response.text
        assert (await http.post(f"/v1/{path}", json=needed)).status_code == 200
    for request in router.requests:
        request.sampling_params.ClearField("seed")  # chosen by the client, so that a resumed answer continues alike
    assert router.requests[0].sampling_params == router.requests[2].sampling_params


async def test_a_bound_of_tokens_has_the_name_that_was_given() -> None:
    wrong = InvalidRequest([("sampling_params.max_tokens", "must be at least 1, is 0")])
    async with gateway() as (router, http):
        router.script = failing(wrong)
        body = {"messages": [{"role": "user", "content": "a"}]}
        errors = [
            (await http.post("/v1/chat/completions", json=body | {name: 0})).json()["error"]
            for name in ("max_completion_tokens", "max_tokens")
        ]
    assert [(error["param"], error["message"]) for error in errors] == [
        ("max_completion_tokens", "max_completion_tokens: must be at least 1, is 0"),
        ("max_tokens", "max_tokens: must be at least 1, is 0"),
    ]


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("chat.tools", "must have distinct names, 'max_tokens' is given twice"),
        ("chat.tool_name", "must be one of the tools, is 'set_max_tokens'"),
        ("chat.tools[0].parameters", "cannot be enforced: properties.max_tokens: no value fits it, but it is required"),
        (
            "chat.tools[0].parameters",
            """cannot be enforced: properties: "it's max_tokens" cannot be an argument's name""",
        ),
        ("chat.tools[0].name", "must be 1 to 64 letters, is 'max_tokens of \\'a\\' model'"),
        ("sampling_params.structured_outputs", "regex: cannot parse max_tokens( for the structured_outputs"),
    ],
)
async def test_words_of_the_client_are_said_as_they_are(field: str, said: str) -> None:
    """Also if they contain our field names, which are translated to the client's names elsewhere."""
    body = {"messages": [HI], "max_completion_tokens": 5, "response_format": {"type": "json_object"}}
    asked = {"input": "a", "max_output_tokens": 5, "text": {"format": {"type": "json_object"}}}
    async with gateway() as (router, http):
        router.script = failing(InvalidRequest([(field, said)]))
        chat = (await http.post("/v1/chat/completions", json=body)).json()["error"]
        response = (await http.post("/v1/responses", json=asked)).json()["error"]
        router.script = failing(InvalidRequest([("sampling_params.min_tokens", "at most max_tokens=5, is 9")]))
        of_ours = (await http.post("/v1/chat/completions", json=body)).json()["error"]
    assert [error["message"] for error in (chat, response)] == [
        f"{error['param']}: {said}" for error in (chat, response)
    ]
    assert of_ours["message"] == "min_tokens: at most max_completion_tokens=5, is 9"


LONG = "u" * 100_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("v1/completions", {"prompt": "a", LONG: 1}),
        ("v1/completions", {"prompt": "a", "logit_bias": {LONG: 1}}),
        ("v1/completions", {"prompt": "a", "stream_options": {LONG: 1}}),
        ("v1/completions", {"prompt": "a", "structured_outputs": {LONG: 1}}),
        ("v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": LONG}]}]}),
        ("v1/responses", {"input": "a", "metadata": {LONG: 1}}),
        (f"v1/models/{LONG[:50_000]}", {}),
    ],
)
async def test_a_complaint_is_short_whatever_is_wrong(path: str, body: dict[str, Any]) -> None:
    """It was once twice as long as the body."""
    async with gateway() as (_, http):
        refused = await http.post(f"/{path}", json=body)
    assert refused.status_code in (400, 405)
    assert len(refused.content) < 1000
    assert "uuuuu" in refused.json()["error"]["message"]


async def test_neutral_values_and_what_has_no_effect_are_let_through() -> None:
    body = {
        "messages": [{"role": "user", "content": "hi", "cache_control": {"type": "ephemeral"}}],
        "n": 1, "logprobs": False, "tools": [], "tool_choice": "auto",
        "response_format": {"type": "text"}, "user": "me", "metadata": {"a": "b"}, "parallel_tool_calls": True,
        "add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False, "detokenize": True,
        "return_token_ids": False, "length_penalty": 1.0, "use_beam_search": False, "include_reasoning": True,
        "verbosity": "medium", "prompt_cache_retention": "in_memory",
    }  # fmt: skip
    async with gateway() as (_, http):
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
        body = {
            "prompt": "a", "add_special_tokens": True, "spaces_between_special_tokens": True, "bad_words": [],
            "truncation_side": "left", "thinking_token_budget": -1, "watermarking": False, "vllm_xargs": {},
            "logprob_token_ids": [], "stream_interval": 1, "session_id": "s", "routed_experts_prompt_start": 0,
        }  # fmt: skip
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        body = {"prompt": "a", "spaces_between_special_tokens": False}
        body |= {"structured_outputs": {"json": {}, "disable_any_whitespace": True}}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        body = {"input": "a", "enable_response_messages": False, "previous_input_messages": None}
        assert (await http.post("/v1/responses", json=body)).status_code == 200


def test_all_of_the_best_answers_are_all_answers() -> None:
    for given in (b"", b', "best_of": 1', b', "best_of": 3'):
        assert CompletionRequest.read(b'{"prompt": "a", "n": 3%s}' % given).num_answers == 3


async def test_what_nobody_knows_may_be_null() -> None:
    async with gateway() as (router, http):
        body = {"prompt": "a", "logit_bias": {"7": 2}}
        nulls = {"kv_transfer_params": None, "vllm_xargs": None, "guided_json": None}
        assert (await http.post("/v1/completions", json=body | nulls)).status_code == 200
        refused = await http.post("/v1/completions", json=body | nulls | {"max_tokens": "many"})
        assert refused.json()["error"]["param"] == "max_tokens"
        refused = await http.post("/v1/completions", json=body | {"stream_options": {"include": None}})
        assert refused.json()["error"]["param"] == "stream_options.include"
    assert router.requests[0].sampling_params.logit_bias == {7: 2.0}


async def test_numbers_may_be_whole_ones_and_biases_have_names() -> None:
    async with gateway() as (router, http):
        body = {"prompt": "a", "temperature": 1, "logit_bias": {"7": 2}, "stop": ["x"], "prompt_cache_key": "k"}
        body |= {"priority": -3, "cache_salt": "tenant 1"}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        refused = await http.post("/v1/completions", json=body | {"cache_salt": ""})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")
    assert router.requests[0].sampling_params.logit_bias == {7: 2.0}
    assert router.requests[0].sampling_params.priority == -3
    assert router.requests[0].cache_salt == "tenant 1"


MANY = {
    "/v1/chat/completions": ("messages", {"role": "user", "content": "a"}, 8192, {}),
    "/v1/messages": ("messages", {"role": "user", "content": "a"}, 8192, {"max_tokens": 1}),
    "/v1/responses": ("input", {"role": "user", "content": "a"}, 32768, {}),
    "/tokenize": ("messages", {"role": "user", "content": "a"}, 8192, {}),
}


@pytest.mark.parametrize("path", MANY)
async def test_of_more_messages_than_a_router_takes_none_is_looked_at(path: str) -> None:
    """A body has room for a hundred thousand messages, which would block the event loop, and all streams, for
    seconds."""
    name, message, most, others = MANY[path]
    tool = {"type": "function", "name": "f", "function": {"name": "f"}, "input_schema": {}}
    async with gateway() as (router, http):
        many = await http.post(path, json={name: [message] * (most + 1), **others})
        assert many.status_code == 400
        told = many.json()["error"]
        assert told.get("param", name) == name
        assert f"must have at most {most} entries" in told["message"]
        if path != "/tokenize":
            fields = {"/v1/chat/completions": ("type", "function"), "/v1/responses": ("type", "name")}
            own = {field: tool[field] for field in fields.get(path, ("name", "input_schema"))}
            refused = await http.post(path, json={name: [message], "tools": [own] * 129, **others})
            assert "tools: must have at most 128 entries" in refused.json()["error"]["message"]
    assert router.requests == []


def test_what_a_router_takes_the_gateway_takes() -> None:
    assert (asked.MAX_MESSAGES, asked.MAX_TOOLS) == (prompt.MAX_CHAT_MESSAGES, tools.MAX_TOOLS)


@pytest.mark.parametrize(
    ("path", "field", "is_target"),
    [
        ("/v1/completions", "max_tokens", True),
        ("/v1/chat/completions", "max_tokens", True),
        ("/v1/chat/completions", "max_completion_tokens", True),
        ("/v1/responses", "max_output_tokens", True),
        ("/v1/messages", "max_tokens", False),
    ],
)
async def test_an_answer_may_be_shorter_where_clients_expect_that(path: str, field: str, is_target: bool) -> None:
    """Anthropic's clients expect a refusal, which tells them how much room there is."""
    said: dict[str, Any] = {"/v1/completions": {"prompt": "a"}, "/v1/responses": {"input": "a"}}.get(
        path, {"messages": [{"role": "user", "content": "a"}]}
    )
    async with gateway() as (router, http):
        assert (await http.post(path, json=said | {field: 9})).status_code == 200
    [request] = router.requests
    params = request.sampling_params
    assert (params.max_tokens, params.is_max_tokens_target) == (9, is_target)


async def test_no_logprobs_may_be_asked_for_as_it_is_described() -> None:
    async with gateway() as (_, http):
        described = (await http.get("/openapi.json")).json()
        answer = await http.post("/v1/completions", json={"prompt": "a", "logprobs": False})
    assert answer.status_code == 200, answer.text
    may_be = described["components"]["schemas"]["CompletionRequest"]["properties"]["logprobs"]["anyOf"]
    number = {"type": "integer", "minimum": 0, "maximum": 20}
    assert may_be == [number, {"type": "boolean", "const": False}, {"type": "null"}]
