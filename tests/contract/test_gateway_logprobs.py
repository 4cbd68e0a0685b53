"""How likely tokens were, in OpenAI's two ways of saying it, and how it is asked for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from gateway_harness import events_of, gateway, last, tokens

from protos import tandem_inference_pb2 as pb


def told(offset: int, *entries: tuple[bytes, float], text: str = "") -> pb.GenerateResponse:
    """A token for each text and number, and beside each the one alternative "x"."""
    message = tokens(offset, *range(offset, offset + len(entries)), text=text)
    for number, (token, logprob) in enumerate(entries, offset):
        sampled = pb.Logprob(token_id=number, logprob=logprob, rank=2, token=token)
        top = [pb.Logprob(token_id=99, logprob=-0.25, rank=1, token=b"x")]
        message.logprobs.add(sampled=sampled, top=top, text_offset=7 * number)
    return message


async def tell(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
    """The parts of a character come without text; a token that cannot be has no finite number."""
    yield told(0, (b" h", -1.5))
    yield told(1, (b"\xc3", -2.5), (b"\xa9", float("-inf")), text=" h\u00e9")
    yield last(3)


async def test_logprobs_of_chats() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 1}
    x = {"token": "x", "logprob": -0.25, "bytes": [120]}
    content = [
        {"token": " h", "logprob": -1.5, "bytes": [32, 104], "top_logprobs": [x]},
        {"token": "\ufffd", "logprob": -2.5, "bytes": [0xC3], "top_logprobs": [x]},
        {"token": "\ufffd", "logprob": -9999.0, "bytes": [0xA9], "top_logprobs": [x]},
    ]
    async with gateway() as (router, http):
        router.script = tell
        [choice] = (await http.post("/v1/chat/completions", json=body)).json()["choices"]
        *events, _ = events_of((await http.post("/v1/chat/completions", json=body | {"stream": True})).text)
    assert choice["logprobs"] == {"content": content, "refusal": None}
    assert {request.sampling_params.logprobs for request in router.requests} == {1}
    streamed = [event["choices"][0]["logprobs"] for event in events]
    assert [entry for each in streamed if each for entry in each["content"]] == content
    assert streamed[-1] is None, "the end has no token"


async def test_logprobs_of_completions() -> None:
    body = {"prompt": "a", "logprobs": 1}
    expected = {
        "tokens": [" h", "bytes:\\xc3", "bytes:\\xa9"],
        "token_logprobs": [-1.5, -2.5, -9999.0],
        "top_logprobs": [
            {"x": -0.25, " h": -1.5}, {"x": -0.25, "bytes:\\xc3": -2.5}, {"x": -0.25, "bytes:\\xa9": -9999.0}
        ],
        "text_offset": [0, 7, 14],
    }  # fmt: skip
    async with gateway() as (router, http):
        router.script = tell
        [choice] = (await http.post("/v1/completions", json=body)).json()["choices"]
        *events, _ = events_of((await http.post("/v1/completions", json=body | {"stream": True})).text)
    assert choice["logprobs"] == expected
    streamed = [each for event in events if (each := event["choices"][0]["logprobs"])]
    assert {name: [item for each in streamed for item in each[name]] for name in expected} == expected


@pytest.mark.parametrize(
    ("asked", "travels"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"top_logprobs": 0}, None)],
)
async def test_how_a_chat_asks_for_logprobs(asked: dict[str, Any], travels: int | None) -> None:
    async with gateway() as (router, http):
        body = {"messages": [{"role": "user", "content": "hi"}], **asked}
        answer = (await http.post("/v1/chat/completions", json=body)).json()
    [request] = router.requests
    assert (request.sampling_params.logprobs if request.sampling_params.HasField("logprobs") else None) == travels
    assert answer["choices"][0]["logprobs"] is None, "this router has none"


async def test_alternatives_without_logprobs_are_refused() -> None:
    async with gateway() as (_, http):
        body = {"messages": [{"role": "user", "content": "hi"}], "top_logprobs": 2}
        response = await http.post("/v1/chat/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "top_logprobs")
    assert "is of no use without logprobs: true" in response.json()["error"]["message"]
