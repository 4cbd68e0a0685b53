"""Who may use a gateway: API keys and allowed origins; and the key that the gateway sends to a router."""

from __future__ import annotations

import pytest
from gateway_harness import events_of, gateway

from gateway.args import GatewayArgs


def test_a_key_that_no_header_can_carry_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="api_key must consist of visible ASCII characters"):
        GatewayArgs(api_key=("a", "s\u00e9cret"))
    with pytest.raises(ValueError, match="api_key must not be empty"):
        GatewayArgs(api_key=("a", ""))


async def test_a_key_where_one_is_asked_for() -> None:
    async with gateway(api_key=("secret",)) as (_, http):
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret2"}):
            refused = await http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        allowed = await http.post("/v1/completions", json={"prompt": "a"}, headers={"authorization": "Bearer secret"})
        assert allowed.status_code == 200
        lower = await http.post("/v1/completions", json={"prompt": "a"}, headers={"authorization": "bearer secret"})
        assert lower.status_code == 200
        assert (await http.get("/health")).status_code == 200


async def test_any_of_several_keys(caplog: pytest.LogCaptureFixture) -> None:
    """So that a key can be replaced while both are in use."""
    caplog.set_level("DEBUG")
    async with gateway(api_key=("older", "newer")) as (_, http):
        for key, status in (("older", 200), ("newer", 200), ("older newer", 401), ("old", 401)):
            for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
                assert (await http.get("/v1/models", headers=headers)).status_code == status, headers
    assert "older" not in caplog.text + repr(GatewayArgs(api_key=("older",)))


async def test_a_router_that_asks_for_a_key(caplog: pytest.LogCaptureFixture) -> None:
    """The gateway sends the router's key itself; a wrong one is reported as a server error, not as the client's."""
    asked = {"prompt": "a b", "stream": True}
    async with gateway(router_keys=("r1", "r2"), router_api_key="r2 r3", api_key=("c",)) as (router, http):
        answer = await http.post("/v1/completions", json=asked, headers={"authorization": "Bearer c"})
        assert events_of(answer.text)[-1] == "[DONE]"
        refused = await http.post("/v1/completions", json=asked, headers={"authorization": "Bearer r2"})
        assert refused.status_code == 401
    assert len(router.requests) == 1
    async with gateway(router_keys=("r1",), router_api_key="r2") as (router, http):
        for refused in (await http.post("/v1/completions", json=asked), await http.get("/v1/models")):
            assert (refused.status_code, refused.json()["error"]["message"]) == (
                500, "the router does not accept this gateway's API key"
            )  # fmt: skip
        assert (await http.get("/health")).status_code == 500, "no request could be answered"
    assert not router.requests
    assert "the router does not accept the key of --router-api-key" in caplog.text
    assert "r2" not in caplog.text + repr(GatewayArgs(router_api_key="r2"))


async def test_pages_of_other_origins_where_they_are_allowed() -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    ours, another = {"origin": "https://chat.example"}, {"origin": "https://another.example"}
    key, prompt = {"authorization": "Bearer secret"}, {"prompt": "a", "stream": True}
    async with gateway(allowed_origins='["https://chat.example"]', api_key=("secret",)) as (_, http):
        may = await http.options("/v1/chat/completions", headers=ours | asked)
        assert (may.status_code, may.headers["access-control-allow-origin"]) == (200, "https://chat.example")
        assert may.headers["access-control-allow-headers"] == "authorization,content-type"
        answer = await http.post("/v1/completions", headers=ours | key, json=prompt)
        assert events_of(answer.text)[-1] == "[DONE]"
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"
        refused = await http.post("/v1/completions", headers=ours, json=prompt)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://chat.example")
        assert (await http.options("/v1/chat/completions", headers=another | asked)).status_code == 400
        unseen = await http.post("/v1/completions", headers=another | key, json=prompt)
        assert "access-control-allow-origin" not in unseen.headers
    async with gateway() as (_, http):
        assert (await http.options("/v1/chat/completions", headers=ours | asked)).status_code == 405
        unseen = await http.post("/v1/completions", headers=ours, json=prompt)
        assert "access-control-allow-origin" not in unseen.headers


@pytest.mark.parametrize(
    "origins",
    ["", "*", '"*"', "https://a.b", '["https://a.b/"]', '["a.b"]', '["https://A.b"]', "[1]", '["*", "a"]', "{}"],
)
def test_origins_that_no_browser_sends_are_refused(origins: str) -> None:
    with pytest.raises(ValueError, match="allowed_origins must be a JSON list of origins such as"):
        GatewayArgs(allowed_origins=origins)
