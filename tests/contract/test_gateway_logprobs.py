"""Logprobs in OpenAI's two formats (chats, completions), and how clients ask for them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from gateway_harness import events_of, gateway, last, tokens

from gateway import run
from protos import tandem_inference_pb2 as pb


def told(offset: int, *entries: tuple[bytes, float], text: str = "") -> pb.GenerateResponse:
    """Return a message with a token for each (text, logprob), each with the one alternative "x"."""
    message = tokens(offset, *range(offset, offset + len(entries)), text=text)
    for number, (token, logprob) in enumerate(entries, offset):
        sampled = pb.Logprob(token_id=number, logprob=logprob, rank=2, token=token)
        top = [pb.Logprob(token_id=99, logprob=-0.25, rank=1, token=b"x")]
        message.logprobs.add(sampled=sampled, top=top, text_offset=7 * number)
    return message


async def tell(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
    """A part of a character comes without text; an impossible token has an infinite logprob."""
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


async def test_tokens_of_logprobs_may_be_named_by_their_ids() -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 1}
    by_id = {"return_tokens_as_token_ids": True}
    async with gateway() as (router, http):
        router.script = tell
        [of_chat] = (await http.post("/v1/chat/completions", json=chat | by_id)).json()["choices"]
        body = {"prompt": "a", "logprobs": 1, **by_id}
        [of_completion] = (await http.post("/v1/completions", json=body)).json()["choices"]
    content = of_chat["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["token_id:0", "token_id:1", "token_id:2"]
    assert [entry["bytes"] for entry in content] == [[32, 104], [0xC3], [0xA9]]
    assert content[0]["top_logprobs"] == [{"token": "token_id:99", "logprob": -0.25, "bytes": [120]}]
    assert of_completion["logprobs"]["tokens"] == ["token_id:0", "token_id:1", "token_id:2"]
    assert of_completion["logprobs"]["top_logprobs"][0] == {"token_id:99": -0.25, "token_id:0": -1.5}


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
    assert "needs logprobs: true" in response.json()["error"]["message"]


# -- the prompt's ---------------------------------------------------------------------------------------------------

PROMPT = "<s> \u00e9t"


def of_prompt() -> list[pb.TokenLogprobs]:
    """Logprobs of a prompt: its start token, a character in two tokens, a letter; all but the first with two
    alternatives."""
    tokens = [b"<s>", b" \xc3", b"\xa9", b"t"]
    told = []
    for number, (token, offset) in enumerate(zip(tokens, (0, 3, 4, 5), strict=True)):
        sampled = pb.Logprob(token_id=40 + number, token=token)
        told.append(pb.TokenLogprobs(sampled=sampled, text_offset=offset))
        if number:
            sampled.logprob, sampled.rank = -float(number), 3
            x = pb.Logprob(token_id=91, logprob=-0.5, rank=1, token=b"x")
            y = pb.Logprob(token_id=92, logprob=-1.0, rank=2, token=b"y")
            told[-1] = pb.TokenLogprobs(sampled=sampled, top=[x, y], text_offset=offset)
    return told


async def tell_prompt_too(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
    async for message in tell(request):
        if not message.offset and request.sampling_params.HasField("prompt_logprobs"):
            message.prompt_logprobs.extend(of_prompt())
        if request.sampling_params.max_tokens != 1:
            yield message
    if request.sampling_params.max_tokens == 1:
        message = tokens(0, 0, text=" h")
        message.prompt_logprobs.extend(of_prompt())
        yield message
        yield last(1)


X = {"x": -0.5}
ECHOED: dict[str, list[Any]] = {
    "tokens": ["<s>", "bytes:\\x20\\xc3", "bytes:\\xa9", "t"],
    "token_logprobs": [None, -1.0, -2.0, -3.0],
    "top_logprobs": [None, X | {"bytes:\\x20\\xc3": -1.0}, X | {"bytes:\\xa9": -2.0}, X | {"t": -3.0}],
}


@pytest.mark.parametrize(
    ("prompt", "hidden"), [(PROMPT, 0), ([40, 41, 42, 43], 0), (" \u00e9t", 3)], ids=["text", "ids", "no beginning"]
)
async def test_an_echo_begins_with_the_prompt(prompt: str | list[int], hidden: int) -> None:
    body = {"prompt": prompt, "echo": True, "logprobs": 1}
    async with gateway() as (router, http):
        router.script = tell_prompt_too
        [choice] = (await http.post("/v1/completions", json=body)).json()["choices"]
        *events, _ = events_of((await http.post("/v1/completions", json=body | {"stream": True})).text)
        [alone] = (await http.post("/v1/completions", json=body | {"max_tokens": 0, "min_tokens": 2})).json()["choices"]
        whole = (await http.post("/v1/completions", json={"prompt": prompt, "echo": True, "max_tokens": 0})).json()
    text = PROMPT[hidden:]
    assert choice["text"] == text + " h\u00e9"
    told = choice["logprobs"]
    assert told["tokens"] == [*ECHOED["tokens"], " h", "bytes:\\xc3", "bytes:\\xa9"]
    assert told["token_logprobs"] == [*ECHOED["token_logprobs"], -1.5, -2.5, -9999.0]
    assert told["top_logprobs"][:4] == ECHOED["top_logprobs"]
    offsets = [max(0, offset - hidden) for offset in (0, 3, 4, 5)]
    assert told["text_offset"] == [*offsets, len(text), len(text) + 7, len(text) + 14]
    pieces = [event["choices"][0] for event in events]
    assert "".join(piece["text"] for piece in pieces) == choice["text"]
    streamed = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
    assert {name: [item for each in streamed for item in each[name]] for name in told} == told
    assert (alone["text"], alone["finish_reason"]) == (text, "length")
    assert alone["logprobs"] == {name: values[:4] for name, values in told.items()}
    assert whole["choices"][0]["text"] == text
    assert whole["choices"][0]["logprobs"] is None
    assert whole["usage"]["completion_tokens"] == 0
    asked = [request.sampling_params for request in router.requests]
    assert [(params.prompt_logprobs, params.max_tokens) for params in asked] == [(1, 16), (1, 16), (1, 1), (0, 1)]
    assert not any(params.min_tokens for params in asked)
    assert asked[-1].HasField("prompt_logprobs") == isinstance(prompt, list), "a text is known"


async def test_a_streamed_echo_alone_has_the_prompts_ids() -> None:
    body = {"prompt": PROMPT, "echo": True, "max_tokens": 0, "return_token_ids": True}

    async def answer(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        first = tokens(0, 7, text="x")
        first.prompt_token_ids.extend([40, 41])
        yield first
        yield last(1)

    async with gateway() as (router, http):
        router.script = answer
        whole = (await http.post("/v1/completions", json=body)).json()
        *events, _ = events_of((await http.post("/v1/completions", json=body | {"stream": True})).text)
    assert whole["choices"][0]["prompt_token_ids"] == [40, 41]
    pieces = [choice for event in events for choice in event["choices"]]
    assert [piece["prompt_token_ids"] for piece in pieces if "prompt_token_ids" in piece] == [[40, 41]]
    assert "".join(piece["text"] for piece in pieces) == PROMPT


async def test_an_echo_stands_before_each_of_several_choices() -> None:
    """The prompt's logprobs come only with the first choice."""

    async def tell_two(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        for sequence in (0, 1):
            message = tokens(0, 7 + sequence, text="ab"[sequence])
            message.sequence = sequence
            if not sequence:
                message.prompt_logprobs.extend(of_prompt())
            yield message
        for sequence in (0, 1):
            end = last(1)
            end.sequence = sequence
            yield end

    body = {"prompt": PROMPT, "echo": True, "n": 2, "prompt_logprobs": 2}
    async with gateway() as (router, http):
        router.script = tell_two
        choices = (await http.post("/v1/completions", json=body)).json()["choices"]
        del body["prompt_logprobs"]
        *events, _ = events_of((await http.post("/v1/completions", json=body | {"stream": True})).text)
    assert [choice["text"] for choice in choices] == [PROMPT + "a", PROMPT + "b"]
    assert choices[0]["prompt_logprobs"] == choices[1]["prompt_logprobs"]
    texts = ["", ""]
    for event in events:
        for piece in event["choices"]:
            texts[piece["index"]] += piece["text"]
    assert texts == [PROMPT + "a", PROMPT + "b"]


async def test_prompt_logprobs_in_vllms_words() -> None:
    def entry(logprob: float, rank: int, text: str) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": text}

    top = {"91": entry(-0.5, 1, "x"), "92": entry(-1.0, 2, "y")}
    expected = [
        None,
        {"41": entry(-1.0, 3, " \ufffd"), **top},
        {"42": entry(-2.0, 3, "\ufffd"), **top},
        {"43": entry(-3.0, 3, "t"), **top},
    ]
    chat = {"messages": [{"role": "user", "content": "hi"}], "prompt_logprobs": 2}
    async with gateway() as (router, http):
        router.script = tell_prompt_too
        whole = (await http.post("/v1/chat/completions", json=chat)).json()
        completion = (await http.post("/v1/completions", json={"prompt": "a", "prompt_logprobs": 2})).json()
        refused = await http.post("/v1/chat/completions", json=chat | {"stream": True})
    assert whole["prompt_logprobs"] == completion["choices"][0]["prompt_logprobs"] == expected
    assert "prompt_logprobs" not in completion
    assert [request.sampling_params.prompt_logprobs for request in router.requests] == [2, 2]
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")


async def test_what_an_echo_asks_for_is_not_told_of_prompt_logprobs() -> None:
    body = {"prompt": PROMPT, "echo": True, "logprobs": 2, "prompt_logprobs": 1}
    async with gateway() as (router, http):
        router.script = tell_prompt_too
        [choice] = (await http.post("/v1/completions", json=body)).json()["choices"]
        body |= {"logprobs": 1, "prompt_logprobs": 2}
        [other] = (await http.post("/v1/completions", json=body)).json()["choices"]
    assert [len(each) for each in choice["prompt_logprobs"][1:]] == [2, 2, 2]
    assert [len(each) for each in choice["logprobs"]["top_logprobs"][1:4]] == [3, 3, 3]
    assert [len(each) for each in other["prompt_logprobs"][1:]] == [3, 3, 3]
    assert other["logprobs"]["top_logprobs"][:4] == ECHOED["top_logprobs"]
    assert [request.sampling_params.prompt_logprobs for request in router.requests] == [2, 2]


async def test_all_that_is_told_of_prompts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each choice repeats the prompt: 4 tokens, 3 of them with 2 alternatives, are 10 numbers."""
    monkeypatch.setattr(run, "MAX_PROMPT_NUMBERS", 19)
    body = {"prompt": PROMPT, "echo": True, "logprobs": 2, "max_tokens": 0}
    async with gateway() as (router, http):
        router.script = tell_prompt_too
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        refused = [
            await http.post("/v1/completions", json=body | more)
            for more in ({"n": 2}, {"prompt": [PROMPT, PROMPT]}, {"n": 2, "stream": True})
        ]
    for answer in refused:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logprobs")
        assert "makes more than 19 numbers for the prompts of all choices" in answer.json()["error"]["message"]


async def test_a_text_that_is_cut_is_echoed_as_it_was_used() -> None:
    body = {"prompt": "ab" + PROMPT, "echo": True, "truncate_prompt_tokens": 4}
    async with gateway() as (router, http):
        router.script = tell_prompt_too
        [choice] = (await http.post("/v1/completions", json=body)).json()["choices"]
        [uncut] = (await http.post("/v1/completions", json={"prompt": PROMPT, "echo": True})).json()["choices"]
    assert choice["text"] == uncut["text"]


async def test_a_prompts_last_half_of_a_character_is_the_answers() -> None:
    async def finish_it(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        message = tokens(0, 7, text="\u00e9")
        message.prompt_logprobs.add(sampled=pb.Logprob(token_id=5, token=b"caf\xc3"))
        yield message
        yield last(1)

    async with gateway() as (router, http):
        router.script = finish_it
        [choice] = (await http.post("/v1/completions", json={"prompt": [5], "echo": True})).json()["choices"]
    assert choice["text"] == "caf\u00e9"


async def test_an_echo_that_was_aborted_before_it_was_computed_has_an_end() -> None:
    async def abort(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        yield last(0, finish_reason=pb.FINISH_REASON_ABORT)

    async with gateway() as (router, http):
        router.script = abort
        body = {"prompt": [5, 6], "echo": True, "logprobs": 1}
        [choice] = (await http.post("/v1/completions", json=body)).json()["choices"]
        *events, _ = events_of((await http.post("/v1/completions", json=body | {"stream": True})).text)
    assert (choice["text"], choice["logprobs"], choice["finish_reason"]) == ("", None, "abort")
    assert events[-1]["choices"][0]["finish_reason"] == "abort"
