"""How clients set a model's reasoning effort over HTTP, and what the gateway tells the router."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gateway_harness import failing, gateway

from rpc.errors import InvalidRequest

THINKS, DOES_NOT_THINK = ({"enable_thinking": thinks, "thinking": thinks} for thinks in (True, False))
THINK_OF: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
EFFORTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("chat/completions", {"reasoning_effort": "low"}, {"reasoning_effort": "low", **THINKS}),
    ("chat/completions", {"reasoning_effort": "none"}, {"reasoning_effort": "none", **DOES_NOT_THINK}),
    (
        "chat/completions",
        {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False, "x": 1}},
        {"reasoning_effort": "high", **THINKS, "enable_thinking": False, "x": 1},
    ),
    ("responses", {"reasoning": {"effort": "xhigh", "summary": "auto"}}, {"reasoning_effort": "xhigh", **THINKS}),
    ("messages", {"output_config": {"effort": "max"}}, {"reasoning_effort": "max"}),
    (
        "messages",
        {"output_config": {"effort": "low"}, "thinking": {"type": "disabled"}},
        {"reasoning_effort": "low", **DOES_NOT_THINK},
    ),
]


@pytest.mark.parametrize(("route", "body", "variables"), EFFORTS)
async def test_how_much_to_think_is_said_to_the_template(
    route: str, body: dict[str, Any], variables: dict[str, Any]
) -> None:
    hi = [{"role": "user", "content": "a"}]
    said = {"input": hi} if route == "responses" else {"messages": hi, "max_tokens": 4}
    async with gateway() as (router, http):
        answer = await http.post(f"/v1/{route}", json={**said, **body})
    assert answer.status_code == 200, answer.text
    assert json.loads(router.requests[-1].chat.template_kwargs) == variables


@pytest.mark.parametrize(
    ("route", "body", "expected"),
    [
        ("chat/completions", {"thinking_token_budget": 0}, 0),
        ("chat/completions", {"thinking_token_budget": -1}, -1),
        ("chat/completions", {}, None),
        ("responses", {"thinking_token_budget": 7}, 7),
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, 1024),
        ("messages", {"thinking": {"type": "adaptive", "budget_tokens": 1024}}, None),
        ("messages", {"thinking": {"type": "disabled"}}, None),
    ],
)
async def test_for_how_long_to_think_is_said_to_the_router(
    route: str, body: dict[str, Any], expected: int | None
) -> None:
    said = {"input": "a"} if route == "responses" else THINK_OF
    async with gateway() as (router, http):
        answer = await http.post(f"/v1/{route}", json={**said, **body})
    assert answer.status_code == 200, answer.text
    params = router.requests[-1].sampling_params
    assert params.HasField("thinking_token_budget") == (expected is not None)
    assert params.thinking_token_budget == (expected or 0)
    assert params.is_thinking_token_budget_target == (expected is not None and route == "messages")


@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        ("chat/completions", {"thinking_token_budget": -2}, "thinking_token_budget"),
        ("chat/completions", {"thinking_token_budget": 1 << 31}, "thinking_token_budget"),
        ("chat/completions", {"thinking_token_budget": 1.5}, "thinking_token_budget"),
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 1 << 31}}, "thinking.budget_tokens"),
    ],
)
async def test_no_such_budget(route: str, body: dict[str, Any], field: str) -> None:
    async with gateway() as (_, http):
        answer = await http.post(f"/v1/{route}", json={**THINK_OF, **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        ("chat/completions", {"thinking_token_budget": 3}, "thinking_token_budget"),
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 3}}, "thinking.budget_tokens"),
    ],
)
async def test_a_budget_that_bounds_nothing_is_refused_in_the_bodys_words(
    route: str, body: dict[str, Any], field: str
) -> None:
    async with gateway() as (router, http):
        router.script = failing(InvalidRequest([("sampling_params.thinking_token_budget", "cannot be used")]))
        answer = await http.post(f"/v1/{route}", json={**THINK_OF, **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == f"{field}: cannot be used"


@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        ("chat/completions", {"reasoning_effort": "much"}, "reasoning_effort"),
        ("responses", {"reasoning": {"effort": 3}}, "reasoning.effort"),
        ("responses", {"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ("messages", {"output_config": {"effort": "much"}}, "output_config.effort"),
    ],
)
async def test_no_such_effort(route: str, body: dict[str, Any], field: str) -> None:
    hi = [{"role": "user", "content": "a"}]
    said = {"input": hi} if route == "responses" else {"messages": hi, "max_tokens": 4}
    async with gateway() as (_, http):
        answer = await http.post(f"/v1/{route}", json={**said, **body})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith(f"{field}: ")
    assert "'none', 'minimal', 'low'" in message or "is allowed" in message
