"""Routes of vLLM's server that are not here: the error says what to use."""

from __future__ import annotations

import pytest
from gateway_harness import gateway

from gateway.routes_of_vllm import INSTEAD


async def test_each_says_what_to_use_and_none_is_served() -> None:
    async with gateway() as (router, http):
        for path, instead in INSTEAD.items():
            response = await http.post(path, json={})
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (404, "unknown_url"), path
            assert error["message"] == f"Not Found: POST {path}; {instead}"
    assert router.requests == []


@pytest.mark.parametrize("path", ["/v1/embeddings/", "/v1/embeddings"])
async def test_a_last_slash_makes_no_difference(path: str) -> None:
    async with gateway() as (_, http):
        response = await http.post(path, json={"input": "a"}, follow_redirects=True)
    assert "only models that generate text are served" in response.json()["error"]["message"]
