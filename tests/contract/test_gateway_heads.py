"""What the gateway reads before it reads a body's fields: headers, and bytes that may be no body.

Connections are real on both sides; the router's answers are scripted."""

from __future__ import annotations

import asyncio
import gzip
import re
from typing import Any

import pytest
from gateway_harness import gateway


async def test_a_body_that_begins_with_a_byte_order_mark() -> None:
    async with gateway() as (_, http):
        answer = await http.post("/v1/completions", content=b'\xef\xbb\xbf{"prompt": "a b"}')
    assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "a b ")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/tokenize"])
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_a_page_of_another_site_cannot_send_what_browsers_do_not_ask_about(path: str, kind: str) -> None:
    body, page = b'{"prompt": "a b"}', {"origin": "https://elsewhere.example"}
    async with gateway() as (router, http):
        refused = await http.post(path, content=body, headers=page | ({"content-type": kind} if kind else {}))
        assert not router.requests
        told = {"content-type": "application/json; charset=utf-8"}
        by_page = await http.post("/v1/completions", content=body, headers=page | told)
        by_curl = await http.post("/v1/completions", content=body, headers={"content-type": kind} if kind else {})
    assert (refused.status_code, refused.json()["error"]["type"]) == (415, "invalid_request_error")
    assert f"content-type: must be application/json in a request from a web page, is {kind!r}" in refused.text
    assert (by_page.status_code, by_curl.status_code) == (200, 200)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/tokenize"])
async def test_a_compressed_body_is_refused_by_its_header(path: str) -> None:
    async with gateway() as (router, http):
        body, told = gzip.compress(b'{"prompt": "a b"}'), {"content-encoding": "gzip"}
        refused = await http.post(path, content=body, headers=told)
        plain = await http.post("/v1/completions", json={"prompt": "a"}, headers={"content-encoding": "identity"})
    error = refused.json()["error"]
    assert (refused.status_code, error["type"]) == (415, "invalid_request_error")
    assert re.search("content-encoding: .*'gzip'", error["message"])
    assert (plain.status_code, len(router.requests)) == (200, 1)


@pytest.mark.parametrize(("data", "status"), [(b'{"prompt": "a', 400), (b"", 400), (b"x" * 5000, 413), (b"\xff", 400)])
async def test_bytes_that_are_no_body(data: bytes, status: int) -> None:
    async with gateway(max_body_bytes=4096) as (_, http):
        refused = await http.post("/v1/completions", content=data)
    assert refused.status_code == status
    bound = "larger than 4096 bytes, the maximum (the gateway's --max-body-bytes)"
    assert (bound in refused.json()["error"]["message"]) == (status == 413)


async def test_whose_request_it_is_says_the_header_or_else_the_body() -> None:
    header = {"x-gateway-inference-fairness-id": "tenant 1"}
    bodies: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {}, ""),
        ({"user": "u"}, {}, "u"),
        ({"user": "u", "safety_identifier": ""}, {}, "u"),
        ({"user": "u", "safety_identifier": "s"}, {}, "s"),
        ({"user": "u", "safety_identifier": "s"}, header, "tenant 1"),
        ({"user": "u"}, {"x-gateway-inference-fairness-id": (100 * "é").encode()}, 100 * "é"),
    ]
    async with gateway() as (router, http):
        for body, headers, _ in bodies:
            response = await http.post("/v1/completions", json={"prompt": ["a", "b"], **body}, headers=headers)
            assert response.status_code == 200
        chat = {"messages": [{"role": "user", "content": "hi"}], "user": "u"}
        assert (await http.post("/v1/chat/completions", json=chat)).status_code == 200
    got = [request.fairness_id for request in router.requests]
    assert got == [name for _, _, name in bodies for _ in range(2)] + ["u"]


async def test_a_name_of_a_client_that_is_too_long_is_refused_where_it_stands() -> None:
    long = 128 * "\u00e9" + "x"
    async with gateway() as (router, http):
        for body, headers, param in (
            ({"user": long}, {}, "user"),
            ({"safety_identifier": long}, {}, "safety_identifier"),
            ({}, {"x-gateway-inference-fairness-id": 257 * "x"}, "x-gateway-inference-fairness-id"),
            ({}, {"x-gateway-inference-fairness-id": long.encode()}, "x-gateway-inference-fairness-id"),
        ):
            response = await http.post("/v1/completions", json={"prompt": "a", **body}, headers=headers)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param)
            assert "must have at most 256 bytes, has 257" in error["message"]
        headers = {"x-gateway-inference-fairness-id": b"\xff"}
        no_text = await http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        assert (no_text.status_code, no_text.json()["error"]["param"]) == (400, "x-gateway-inference-fairness-id")
        no_text = await http.post("/v1/completions", json={"prompt": "a", "user": 5})
        assert (no_text.status_code, no_text.json()["error"]["param"]) == (400, "user")
    assert router.requests == []


async def test_a_head_without_end_is_not_read() -> None:
    async with gateway() as (_, http):
        reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
        writer.write(b"GET /version HTTP/1.1\r\nhost: h\r\nx: " + b"a" * (1 << 20))
        assert (await reader.readline()).split()[1] == b"400"
        writer.close()


async def test_headers_name_the_request_and_its_deadline() -> None:
    async with gateway() as (router, http):
        headers = {"x-request-id": "mine", "x-request-timeout-ms": "5000"}
        response = await http.post("/v1/completions", json={"prompt": ["a", "b"]}, headers=headers)
        assert response.headers["x-request-id"] == "mine"
        assert response.json()["id"] == "cmpl-mine"
        bad = await http.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-timeout-ms": "soon"})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "x-request-timeout-ms")
    assert sorted(request.request_id for request in router.requests) == ["mine-0", "mine-1"]
    assert all(deadline_s is not None and 0 < deadline_s < 5.2 for deadline_s in router.deadlines_s)
