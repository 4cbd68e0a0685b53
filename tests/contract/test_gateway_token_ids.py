"""vLLM's return_token_ids, and usage from the first event on, in streams and whole answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from gateway_harness import events_of, gateway, last, tokens

from gateway import run
from protos import tandem_inference_pb2 as pb

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
PROMPT_IDS = [5, 6, 7]


async def tell(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
    """Send two tokens for each choice, the first without text. The prompt's tokens come with the first choice."""
    for sequence in range(max(1, request.sampling_params.n)):
        first = tokens(0, 8)
        first.prompt_tokens = len(PROMPT_IDS)
        if request.with_prompt_token_ids and not sequence:
            first.prompt_token_ids.extend(PROMPT_IDS)
        for message in (first, tokens(1, 9, text="a"), last(2)):
            message.sequence = sequence
            yield message


@pytest.mark.parametrize("n", [1, 2])
async def test_of_completions(n: int) -> None:
    body = {"prompt": ["a", "b"], "n": n, "return_token_ids": True}
    async with gateway() as (router, http):
        router.script = tell
        whole = (await http.post("/v1/completions", json=body)).json()
        *events, _ = events_of((await http.post("/v1/completions", json=body | {"stream": True})).text)
        plain = (await http.post("/v1/completions", json=body | {"return_token_ids": False})).json()
    assert [(each["prompt_token_ids"], each["token_ids"]) for each in whole["choices"]] == [
        (PROMPT_IDS, [8, 9])
    ] * 2 * n
    for index in range(2 * n):
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert [choice["token_ids"] for choice in mine] == [[8], [9], []]
        assert [choice.get("prompt_token_ids") for choice in mine] == [PROMPT_IDS, None, None]
    assert "token_ids" not in plain["choices"][0]
    assert not router.requests[-1].with_prompt_token_ids


@pytest.mark.parametrize("n", [1, 2])
async def test_of_chats(n: int) -> None:
    body = {**CHAT, "n": n, "return_token_ids": True}
    async with gateway() as (router, http):
        router.script = tell
        whole = (await http.post("/v1/chat/completions", json=body)).json()
        *events, _ = events_of((await http.post("/v1/chat/completions", json=body | {"stream": True})).text)
    assert whole["prompt_token_ids"] == PROMPT_IDS
    assert [choice["token_ids"] for choice in whole["choices"]] == [[8, 9]] * n
    for index in range(n):
        mine = [event for event in events if event["choices"][0]["index"] == index]
        assert [event.get("prompt_token_ids") for event in mine] == [PROMPT_IDS, None, None, None]
        assert [event["choices"][0].get("token_ids") for event in mine] == [None, [8], [9], []]


async def test_an_answer_that_ends_before_it_begins_has_none() -> None:
    async def abort(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        yield last(0, finish_reason=pb.FINISH_REASON_ABORT)

    body = {"prompt": "a", "return_token_ids": True}
    async with gateway() as (router, http):
        router.script = abort
        [choice] = (await http.post("/v1/completions", json=body)).json()["choices"]
        [event, _] = events_of((await http.post("/v1/completions", json=body | {"stream": True})).text)
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([], [])
    assert event["choices"][0]["token_ids"] == []


async def test_all_ids_of_prompts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MAX_PROMPT_TOKEN_IDS", 6)
    body = {**CHAT, "return_token_ids": True}
    async with gateway() as (router, http):
        router.script = tell
        assert (await http.post("/v1/chat/completions", json=body | {"n": 2})).status_code == 200
        refused = (await http.post("/v1/chat/completions", json=body | {"n": 3})).json()["error"]
    assert refused["param"] == "return_token_ids"
    assert "would return more than 6 prompt token ids in all choices" in refused["message"]


@pytest.mark.parametrize(("route", "body"), [("completions", {"prompt": "a"}), ("chat/completions", CHAT)])
async def test_usage_has_the_prompt_from_the_first_event_on(route: str, body: dict[str, Any]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with gateway() as (router, http):
        router.script = tell
        asked = {**body, "n": 2, "stream": True, "stream_options": options}
        *events, _ = events_of((await http.post(f"/v1/{route}", json=asked)).text)
    assert {event["usage"]["prompt_tokens"] for event in events} == {3}
    assert all(event["usage"]["total_tokens"] == 3 + event["usage"]["completion_tokens"] for event in events)
    assert [event["usage"]["completion_tokens"] for event in events[: len(events) // 2]][-3:] == [1, 2, 2]


async def test_what_is_asked_of_a_prompt_reaches_the_router() -> None:
    async with gateway() as (router, http):
        for body in ({"truncate_prompt_tokens": -1, "add_special_tokens": False}, {}):
            assert (await http.post("/v1/completions", json={"prompt": "a", **body})).status_code == 200
        assert (await http.post("/v1/chat/completions", json={**CHAT, "truncate_prompt_tokens": 9})).status_code == 200
        refused = await http.post("/v1/responses", json={"input": "a", "truncate_prompt_tokens": 9})
    cut, plain, chat = router.requests
    assert (cut.truncate_prompt_tokens, cut.HasField("add_special_tokens"), cut.add_special_tokens) == (-1, True, False)
    assert not plain.HasField("truncate_prompt_tokens")
    assert not plain.HasField("add_special_tokens")
    assert chat.truncate_prompt_tokens == 9
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "truncate_prompt_tokens")
