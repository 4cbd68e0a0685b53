"""The gateway with real connections on both sides. The router's answers are scripted, so that they can be anything."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx2 as httpx
import pytest
from gateway_harness import TIMEOUT_S, events_of, failing, gateway, last, tokens

from gateway.args import GatewayArgs
from gateway.errors import KINDS
from gateway.process import run_gateway
from protos import tandem_inference_pb2 as pb
from rpc.errors import (
    STATUS_CODES,
    Draining,
    InternalError,
    InvalidRequest,
    Overloaded,
    RequestExists,
    TandemError,
)
from rpc.server import Server

# -- answers ------------------------------------------------------------------------------------------------------


async def test_a_completion() -> None:
    async with gateway() as (router, http):
        response = await http.post("/v1/completions", json={"prompt": "a b c", "stop": "x", "seed": 5, "top_k": 3})
    body = response.json()
    assert response.status_code == 200
    assert (body["object"], body["model"]) == ("text_completion", "the-model")
    assert [(c["index"], c["text"], c["finish_reason"]) for c in body["choices"]] == [(0, "a b c ", "stop")]
    assert body["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6, "prompt_tokens_details": {"cached_tokens": 1},
    }  # fmt: skip
    assert body["timings"]["decode_worker"] == "d"
    params = router.requests[0].sampling_params
    assert (list(params.stop), params.seed, params.top_k, params.max_tokens) == (["x"], 5, 3, 16)
    assert not params.HasField("temperature"), "what was not given is the model's to say"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [("a b", ["a b "]), ([5, 6], ["5 6 "]), (["a", "b c"], ["a ", "b c "]), ([[7], [8, 9]], ["7 ", "8 9 "])],
    ids=["text", "token ids", "texts", "lists of token ids"],
)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_prompts_of_each_kind(prompt: Any, texts: list[str], is_stream: bool) -> None:
    async with gateway() as (_, http):
        body = {"prompt": prompt, "stream": is_stream, "stream_options": {"include_usage": True} if is_stream else None}
        response = await http.post("/v1/completions", json=body)
    if not is_stream:
        assert [choice["text"] for choice in response.json()["choices"]] == texts
        return
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"  # else nginx would buffer tokens
    *events, usage, done = events_of(response.text)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 2 * sum(len(text.split()) for text in texts)
    choices = [choice for event in events for choice in event["choices"]]
    for index, text in enumerate(texts):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == text
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["stop"]


async def test_a_chat() -> None:
    parts = [{"type": "text", "text": "How"}, {"type": "text", "text": "are you?"}]
    messages = [{"role": "system", "content": parts[:1]}, {"role": "user", "content": parts, "name": "me"}]
    async with gateway() as (router, http):
        whole = await http.post("/v1/chat/completions", json={"messages": messages, "max_completion_tokens": 9})
        stream = await http.post("/v1/chat/completions", json={"messages": messages, "stream": True, "model": "m"})
    sent = router.requests[0]
    said = [(m.role, m.content, list(m.parts)) for m in sent.chat.messages]
    assert said == [("system", "How", []), ("user", "", ["How", "are you?"])], "the router knows how to join them"
    assert sent.sampling_params.max_tokens == 9
    assert whole.json()["choices"][0]["message"] == {
            "role": "assistant", "content": "hello you ", "refusal": None, "reasoning": None,
        }  # fmt: skip
    events = events_of(stream.text)
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "hello "}, {"content": "you "}, {}]
    assert {event["model"] for event in events[:-1]} == {"m"}
    assert len({event["id"] for event in events[:-1]}) == 1
    assert not any("usage" in event for event in events[:-1]), "nobody asked for it"


async def test_usage_in_every_event_where_asked_for() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with gateway() as (_, http):
        body = {"prompt": "a b", "stream": True, "stream_options": options}
        events = events_of((await http.post("/v1/completions", json=body)).text)
    assert [event["usage"]["completion_tokens"] for event in events[:-1]] == [1, 2, 2, 2]


# -- what the router refuses, and what breaks --------------------------------------------------------------------------


def test_every_error_has_its_http_status() -> None:
    assert set(KINDS) == set(STATUS_CODES)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "type_", "retry_after"),
    [
        (Overloaded("full", retry_after_s=1.2), 429, "rate_limit_error", "2"),
        (Draining("leaving", retry_after_s=0.1), 503, "server_error", "1"),
        (InvalidRequest([("sampling_params.top_p", "must be in (0, 1], is 3")]), 400, "invalid_request_error", None),
        (InvalidRequest([("model", "must be 'the-model'")]), 404, "invalid_request_error", None),
        (InternalError("a bug"), 500, "server_error", None),
    ],
    ids=["overloaded", "draining", "parameter", "model", "bug"],
)
async def test_a_refusal_has_its_status_streamed_or_not(
    error: TandemError,
    status: int,
    type_: str,
    retry_after: str | None,
    is_stream: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tandem.resume.ANOTHER_ROUTER_S", 0.1)
    async with gateway() as (router, http):
        router.script = failing(error)
        response = await http.post("/v1/completions", json={"prompt": "a", "stream": is_stream})
    assert (response.status_code, response.headers.get("retry-after")) == (status, retry_after)
    assert response.json()["error"]["type"] == type_
    if status == 400:
        assert response.json()["error"]["param"] == "top_p"
        assert response.json()["error"]["message"] == "top_p: must be in (0, 1], is 3"


async def test_what_a_leaving_router_refuses_waits_for_its_successor() -> None:
    async with gateway() as (router, http):
        answer = router.script

        async def leaving_at_first(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
            if len(router.requests) <= 4:
                raise Draining("leaving", retry_after_s=1)
            async for message in answer(request):
                yield message

        router.script = leaving_at_first
        response = await http.post("/v1/completions", json={"prompt": "a"})
    assert (response.status_code, len(router.requests)) == (200, 5)


async def test_what_fails_in_the_middle_of_a_stream_is_its_last_event() -> None:
    """The stream has already got status 200, like all that have begun; a separate counter counts those that failed."""
    body = {"prompt": "a", "stream": True}
    async with gateway() as (router, http):
        assert (await http.post("/v1/completions", json=body)).text.endswith("[DONE]\n\n")
        router.script = failing(Draining("leaving"), after=2)
        *pieces, error = events_of((await http.post("/v1/completions", json=body)).text)
        counted = (await http.get("/metrics")).text
    assert 'tandem:gateway_requests_total{route="completions",status="200"} 2.0' in counted
    assert 'tandem:gateway_stream_errors_total{route="completions",status="503"} 1.0' in counted
    assert 'tandem:gateway_stream_errors_total{route="completions",status="500"} 0.0' in counted
    assert [piece["choices"][0]["text"] for piece in pieces] == ["a", "a"]
    assert error["error"]["message"] == "leaving"


async def test_a_stream_that_is_not_exact_is_never_shown_as_an_answer() -> None:
    async def with_a_gap(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        yield tokens(0, 1, text="a")
        yield tokens(2, 1, text="c")

    async with gateway() as (router, http):
        router.script = with_a_gap
        whole = await http.post("/v1/completions", json={"prompt": "a"})
        events = events_of((await http.post("/v1/completions", json={"prompt": "a", "stream": True})).text)
    assert whole.status_code == 500
    assert "internal server error" in events[-1]["error"]["message"]


async def test_one_prompt_that_fails_ends_the_others() -> None:
    async with gateway() as (router, http):

        async def script(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
            inner = failing(Overloaded("full")) if request.text == "b" else router.endless
            async for response in inner(request):
                yield response

        router.script = script
        response = await http.post("/v1/completions", json={"prompt": ["a", "b", "c"]})
        await router.all_closed.wait()
    assert response.status_code == 429


@pytest.mark.parametrize(
    ("is_stream", "prompts", "leave"),
    [
        (False, ["a", "b"], asyncio.StreamWriter.close),
        (False, ["a", "b"], asyncio.StreamWriter.write_eof),
        (True, ["a", "b"], asyncio.StreamWriter.close),
        (True, ["wait", "wait"], asyncio.StreamWriter.close),
    ],
    ids=["whole", "whole, and it would read on", "streamed", "before the first token"],
)
async def test_a_client_that_leaves_cancels_its_requests(
    is_stream: bool, prompts: list[str], leave: Callable[[asyncio.StreamWriter], None]
) -> None:
    async with gateway() as (router, http):
        router.script = router.endless
        body = json.dumps({"prompt": prompts, "stream": is_stream}).encode()
        host, port = http.base_url.host, http.base_url.port
        assert port is not None
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        if is_stream and "wait" not in prompts:
            await reader.readuntil(b"once")
        while router.num_open < 2:  # noqa: ASYNC110 - the script tells nobody
            await asyncio.sleep(0.01)
        leave(writer)
        async with asyncio.timeout(TIMEOUT_S / 2):
            await router.all_closed.wait()
        writer.close()
        text = (await http.get("/metrics")).text
    if not is_stream or "wait" in prompts:
        assert 'tandem:gateway_requests_total{route="completions",status="499"} 1.0' in text


async def test_a_client_that_leaves_while_it_still_sends_is_no_bug(caplog: pytest.LogCaptureFixture) -> None:
    async with gateway() as (router, http):
        host, port = http.base_url.host, http.base_url.port
        assert port is not None
        _, writer = await asyncio.open_connection(host, port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 100\r\n\r\nhalf")
        await writer.drain()
        await http.get("/version")  # the server has seen it by then
        writer.close()
        seen = 'tandem:gateway_requests_total{route="completions",status="499"} 1.0'
        while seen not in (await http.get("/metrics")).text:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert router.requests == []
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


# -- around them --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "param"),
    [("text", "prompt"), ("chat.messages[0].role", "messages[0].role"), ("sampling_params.top_k", "top_k")],
)
async def test_wrong_fields_have_the_names_that_the_client_used(field: str, param: str) -> None:
    async with gateway() as (router, http):
        router.script = failing(InvalidRequest([(field, "is wrong")]))
        error = (await http.post("/v1/completions", json={"prompt": "a"})).json()["error"]
    assert (error["param"], error["message"]) == (param, f"{param}: is wrong")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_answers_that_outlast_the_grace_end_with_the_reason(
    is_stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway(drain_grace_s=0.3) as (router, http):
        router.script = router.endless
        body = {"prompt": "a", "stream": is_stream}
        asked = asyncio.create_task(http.post("/v1/completions", json=body))
        while not router.num_open:  # noqa: ASYNC110 - the script tells nobody
            await asyncio.sleep(0.01)
        router.stop.set()
        response = await asked
        await router.all_closed.wait()
    error = events_of(response.text)[-1]["error"] if is_stream else response.json()["error"]
    assert response.status_code == (200 if is_stream else 503)
    assert (error["code"], "shutting down" in error["message"]) == ("unavailable", True)
    assert is_stream or response.headers["retry-after"] == "1"
    assert "Traceback" not in caplog.text


STOP, LENGTH = pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH


@pytest.mark.parametrize(
    ("why", "expected"),
    [({"stop_reason": "END"}, "END"), ({"stop_token_id": 7}, 7), ({"stop_token_id": 0}, 0), ({}, None)],
)
async def test_what_ended_an_answer(why: dict[str, Any], expected: str | int | None) -> None:
    async def script(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        yield tokens(0, 5, text="a")
        yield tokens(1, 7, text="")  # a stop token's text is left out
        end = last(2)
        end.MergeFrom(pb.GenerateResponse(**why))
        yield end

    body = {"stop_token_ids": [7], "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    async with gateway() as (router, http):
        router.script = script
        whole = (await http.post("/v1/chat/completions", json=body)).json()["choices"]
        streamed = await http.post("/v1/completions", json={"prompt": "a", "stop_token_ids": [7], "stream": True})
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert [choice["stop_reason"] for choice in whole] == [expected]
    *before, end = [event["choices"][0]["stop_reason"] for event in events]
    assert (before, end) == ([None], expected)


@pytest.mark.parametrize("is_in_body", [False, True])
async def test_requests_of_one_name_run_beside_each_other(is_in_body: bool) -> None:
    # A service may pass the id of its own request on with all requests that it makes for it.
    running: set[str] = set()
    are_two = asyncio.Event()

    async def script(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        if request.request_id in running:
            raise RequestExists("running")
        running.add(request.request_id)
        if len(running) == 2:
            are_two.set()
        await are_two.wait()
        yield tokens(0, 1, text="a")
        yield last(1)

    body = {"prompt": "a"} | ({"request_id": "mine"} if is_in_body else {})
    headers = {} if is_in_body else {"x-request-id": "mine"}
    async with gateway() as (router, http):
        router.script = script
        answers = await asyncio.gather(*(http.post("/v1/completions", json=body, headers=headers) for _ in "12"))
    told = [(answer.status_code, answer.headers["x-request-id"], answer.json()["id"]) for answer in answers]
    assert told == [(200, "mine", "cmpl-mine")] * 2
    assert re.fullmatch("mine mine-[0-9a-f]{8}", " ".join(sorted(running)))


@pytest.mark.parametrize("stream", [False, True])
async def test_the_answers_to_the_first_prompt_come_before_those_to_the_second(stream: bool) -> None:
    async def script(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        for sequence in range(2):
            for message in (tokens(0, 1, text=f"{request.text}{sequence}"), last(1)):
                message.sequence = sequence
                yield message

    async with gateway() as (router, http):
        router.script = script
        answer = await http.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2, "stream": stream})
    if stream:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        choices = [choice for event in events for choice in event["choices"] if choice["text"]]
    else:
        choices = answer.json()["choices"]
    assert {choice["index"]: choice["text"] for choice in choices} == {0: "a0", 1: "a1", 2: "b0", 3: "b1"}


async def test_a_name_that_stays_in_use_is_refused() -> None:
    async with gateway() as (router, http):
        router.script = failing(RequestExists("running"))
        refused = await http.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "mine"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "request_exists")
    assert len(router.requests) == 2


async def test_what_is_refused_has_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with gateway(api_key=("k",)) as (_, http):
        await http.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "mine"})
    (line,) = [vars(record) for record in caplog.records if record.getMessage() == "refused"]
    assert (line["route"], line["status"], line["request_id"]) == ("completions", 401, "mine")
    assert "the API key is missing or wrong" in line["why"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
async def test_a_request_that_its_body_names_is_refused_by_that_name(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The router logs the request under the body's name: an operator would not find the header's name there."""
    caplog.set_level("INFO")
    of_path = {"messages": [{"role": "user", "content": "a"}]} if path == "/v1/messages" else {"prompt": "a"}
    body = {"max_tokens": 1, "request_id": "named", **of_path}
    async with gateway() as (_, http):
        bad = {"x-request-id": "mine", "x-request-timeout-ms": "soon"}
        refused = await http.post(path, json=body, headers=bad)
    assert (refused.status_code, refused.headers["x-request-id"], refused.headers["request-id"]) == (
        400, "named", "named"
    )  # fmt: skip
    assert refused.json().get("request_id", "named") == "named"
    (line,) = [vars(record) for record in caplog.records if record.getMessage() == "refused"]
    assert line["request_id"] == "named"


async def test_models_health_version_page_and_metrics() -> None:
    async with gateway() as (_, http):
        models = (await http.get("/v1/models")).json()
        told = [(model["id"], model["root"], model["parent"], model["max_model_len"]) for model in models["data"]]
        assert told == [("the-model", "the-model", None, 64), ("also", "the-model", None, 64)]
        assert (await http.get("/v1/models/also")).json()["id"] == "also"
        assert (await http.get("/v1/models/other")).json()["error"]["code"] == "model_not_found"
        assert (await http.get("/health")).status_code == 200
        assert (await http.post("/ping")).status_code == 200, "as in vLLM"
        assert "version" in (await http.get("/version")).json()
        assert "<title>Tandem</title>" in (await http.get("/")).text
        assert 'tandem:gateway_requests_total{route="models",status="200"} 2.0' in (await http.get("/metrics")).text
        nowhere = await http.get("/v1/nowhere")
        assert (nowhere.status_code, nowhere.json()["error"]["code"]) == (404, "unknown_url")
        no_version = await http.post("/chat/completions", json={})
        said = "Not Found: POST /chat/completions; did you mean /v1/chat/completions?"
        assert (no_version.status_code, no_version.json()["error"]["message"]) == (404, said)
        no_method = await http.get("/v1/completions")
        assert (no_method.status_code, no_method.headers["allow"]) == (405, "POST")
        assert no_method.json()["error"]["message"] == "Method Not Allowed: GET /v1/completions; use POST"
        paths = ("/", "/health", "/ping", "/load", "/metrics", "/v1/models")
        assert [(await http.head(path)).status_code for path in paths] == [200] * 6
        assert (await http.get("/v1/models")).headers["x-request-id"]
        described = (await http.get("/openapi.json")).json()
        posted = [path for path, of in described["paths"].items() if "post" in of]
        assert posted == [
            "/v1/completions",
            "/v1/chat/completions",
            "/v1/responses",
            "/v1/responses/input_tokens",
            "/v1/messages",
            "/v1/messages/count_tokens",
            "/tokenize",
            "/detokenize",
        ]
        named = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(described)))
        assert {"ChatRequest", "Message", "ResponseRequest", "CallItem"} <= named
        assert named <= described["components"]["schemas"].keys()


async def test_the_load_is_what_is_being_answered() -> None:
    """A stream counts until it has ended, in whatever way."""
    async with gateway() as (router, http):
        router.script = router.endless
        assert (await http.get("/load")).json() == {"server_load": 0}
        async with AsyncExitStack() as streams:
            all_lines = []  # keeps the iterators alive: a freed iterator closes its stream
            for number in (1, 2):
                begun = http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True})
                all_lines.append((await streams.enter_async_context(begun)).aiter_lines())
                assert (await anext(all_lines[-1])).startswith("data: ")
                assert (await http.get("/load")).json() == {"server_load": number}
        await router.all_closed.wait()
        assert (await http.get("/load")).json() == {"server_load": 0}


async def test_without_a_router_it_says_so() -> None:
    async with gateway() as (_, http), httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as other:
        assert (await http.get("/health")).status_code == 200
        stop, announced = asyncio.Event(), asyncio.get_running_loop().create_future()
        args = GatewayArgs(router=("127.0.0.1:1",), listen="127.0.0.1:0")
        running = asyncio.create_task(run_gateway(args, stop, announce=announced.set_result))
        url = f"http://{await announced}"
        assert (await other.get(f"{url}/health")).status_code == 503
        assert (await other.get(f"{url}/ping")).status_code == 503
        refused = await other.post(f"{url}/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert refused.headers["retry-after"] == "1"
        assert "127.0.0.1:1" not in (await other.get(f"{url}/health")).text, "where it looks is nobody's business"
        stop.set()
        await running


async def test_before_another_server_of_ours_it_says_that_it_is_no_router() -> None:
    server = Server("127.0.0.1:0")
    address = await server.start()
    stop, announced = asyncio.Event(), asyncio.get_running_loop().create_future()
    args = GatewayArgs(router=(address,), listen="127.0.0.1:0")
    running = asyncio.create_task(run_gateway(args, stop, announce=announced.set_result))
    async with httpx.AsyncClient(base_url=f"http://{await announced}", timeout=TIMEOUT_S, trust_env=False) as http:
        assert (await http.get("/health")).status_code == 503
        refused = await http.post("/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, "not a router" in refused.json()["error"]["message"]) == (500, True)
    stop.set()
    await running
    await server.drain(0)
