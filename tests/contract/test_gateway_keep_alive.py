"""A stream without a token for a while sends signs of life, because proxies cut silent connections."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator
from typing import Any

import httpx2 as httpx
import pytest
from gateway_harness import TIMEOUT_S, Router, failing, gateway, last, tokens

from gateway.handlers import PAGE
from protos import tandem_inference_pb2 as pb
from rpc.errors import NoWorker, Overloaded, TandemError

SOON_S = 0.05
COMMENT, PING = [": keep-alive"], ["event: ping", 'data: {"type":"ping"}']
HI = [{"role": "user", "content": "Hi"}]
ROUTES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("/v1/completions", {"prompt": "a"}, COMMENT),
    ("/v1/chat/completions", {"messages": HI}, COMMENT),
    ("/v1/responses", {"input": "a"}, COMMENT),
    ("/v1/messages", {"messages": HI, "max_tokens": 9, "model": "the-model"}, PING),
]
READ = """
  const response = new Response(': keep-alive\\n\\ndata: {"a":1}\\n\\n: keep-alive\\n\\ndata: [DONE]\\n\\n');
  (async () => { for await (const event of eventsOf(response)) console.log(JSON.stringify(event)); })();
"""
of_each_route = pytest.mark.parametrize(("path", "body", "sign"), ROUTES, ids=[path for path, _, _ in ROUTES])


class Slow:
    """A router's answer, each of whose messages waits for a call of `let_go`."""

    def __init__(self, router: Router, error: TandemError | None = None) -> None:
        self._may = asyncio.Semaphore(0)
        self._error = error
        router.script = self._script

    def let_go(self) -> None:
        self._may.release()

    async def _script(self, request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        for message in (tokens(0, 1, text="one "), tokens(1, 2, text="two"), last(2)):
            await self._may.acquire()
            if self._error is not None:
                raise self._error
            yield message


class Blocks:
    """Reads the blocks of an event stream as they come."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.aiter_lines()
        self.seen: list[list[str]] = []

    async def next(self) -> list[str]:
        """Return the lines of the next block."""
        block: list[str] = []
        async for line in self._lines:
            if not line:
                break
            block.append(line)
        self.seen.append(block)
        return block

    async def until(self, wanted: list[str]) -> None:
        while await self.next() != wanted:
            assert self.seen[-1], f"{wanted} did not come"

    async def rest(self) -> None:
        while await self.next():
            pass
        self.seen.pop()


def said(blocks: Blocks, sign: list[str]) -> list[Any]:
    """Return the stream's data, without the signs of life."""
    datas = [block[-1].removeprefix("data: ") for block in blocks.seen if block != sign]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]


@of_each_route
async def test_a_stream_is_never_silent_for_long(path: str, body: dict[str, Any], sign: list[str]) -> None:
    """Neither before its first token nor between two tokens."""
    async with gateway(sse_keep_alive_s=SOON_S) as (router, http):
        slow = Slow(router)
        for _ in range(3):
            slow.let_go()
        fast = Blocks(await http.post(path, json={**body, "stream": True}))
        await fast.rest()
        async with http.stream("POST", path, json={**body, "stream": True}) as response:
            assert (response.status_code, response.headers["x-request-id"] != "") == (200, True)
            assert response.headers["content-type"].startswith("text/event-stream")
            blocks = Blocks(response)
            await blocks.until(sign)
            await blocks.until(sign)
            slow.let_go()
            while "one " not in "".join(blocks.seen[-1]):
                await blocks.next()
            await blocks.until(sign)
            slow.let_go()
            slow.let_go()
            await blocks.rest()
    assert list(map(_without_names, said(blocks, sign))) == list(map(_without_names, said(fast, sign)))


def _without_names(event: Any) -> str:
    """Return the event as text, without generated ids and times."""
    return re.sub(r'"[a-z]+[_-][0-9a-f]{8}[^"]*"|"created(_at)?": \d+', "", json.dumps(event))


@of_each_route
async def test_an_error_after_a_sign_of_life_is_the_last_event(
    path: str, body: dict[str, Any], sign: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The status 200 does not show the error to operators: the log and a separate counter do."""
    caplog.set_level("INFO")
    async with gateway(sse_keep_alive_s=SOON_S) as (router, http):
        slow = Slow(router, NoWorker("nobody is there", retry_after_s=3))
        async with http.stream("POST", path, json={**body, "stream": True}) as response:
            blocks = Blocks(response)
            await blocks.until(sign)
            slow.let_go()
            await blocks.rest()
        await router.all_closed.wait()
        counted = (await http.get("/metrics")).text
    assert response.status_code == 200
    route = {"/v1/chat/completions": "chat"}.get(path, path.removeprefix("/v1/"))
    assert f'tandem:gateway_requests_total{{route="{route}",status="200"}} 1.0' in counted
    assert f'tandem:gateway_stream_errors_total{{route="{route}",status="503"}} 1.0' in counted
    logged = [record for record in caplog.records if record.getMessage() == "stream failed"]
    assert [(each.why, each.status, each.request_id) for each in logged] == [  # type: ignore[attr-defined]
        ("nobody is there", 503, response.headers["x-request-id"])
    ]
    end = said(blocks, sign)[-1]
    error = end["response"]["error"] if path == "/v1/responses" else end["error"]
    assert error["message"] == "nobody is there"
    assert end.get("type") == {"/v1/responses": "response.failed", "/v1/messages": "error"}.get(path)


@pytest.mark.parametrize("keep_alive_s", [0, TIMEOUT_S])
async def test_an_error_before_has_its_status(keep_alive_s: float) -> None:
    async with gateway(sse_keep_alive_s=keep_alive_s) as (router, http):
        router.script = failing(Overloaded("full", retry_after_s=1.2))
        response = await http.post("/v1/completions", json={"prompt": "a", "stream": True})
    assert (response.status_code, response.headers["retry-after"]) == (429, "2")


async def test_a_client_that_leaves_before_the_first_token_cancels_its_request() -> None:
    async with gateway(sse_keep_alive_s=SOON_S) as (router, http):
        router.script = router.endless
        async with http.stream("POST", "/v1/responses", json={"input": "wait", "stream": True}) as response:
            await Blocks(response).until(COMMENT)
            assert router.num_open == 1
        async with asyncio.timeout(TIMEOUT_S / 2):
            await router.all_closed.wait()
        assert (await http.get("/load")).json() == {"server_load": 0}


async def test_a_gateway_that_leaves_says_so_where_no_token_has_come() -> None:
    async with gateway(sse_keep_alive_s=SOON_S, drain_grace_s=0.0) as (router, http):
        router.script = router.endless
        async with http.stream("POST", "/v1/completions", json={"prompt": "wait", "stream": True}) as response:
            blocks = Blocks(response)
            await blocks.until(COMMENT)
            router.stop.set()
            await blocks.rest()
    assert said(blocks, COMMENT)[-1]["error"]["code"] == "unavailable"


@pytest.mark.skipif(not shutil.which("node"), reason="no Node.js here")
async def test_the_chat_page_reads_on() -> None:
    found = re.search(r"^async function\* eventsOf.*?^}$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None
    node = await asyncio.create_subprocess_exec("node", "-e", found[0] + READ, stdout=asyncio.subprocess.PIPE)
    assert (await node.communicate())[0] == b'{"a":1}\n'
