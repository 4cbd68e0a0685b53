"""The chat page in a real browser: it streams, shows which worker served the answer, and is readable on a phone.

Skipped without Chromium. With TANDEM_SCREENSHOTS=FOLDER the tests save the screenshots that docs/ uses.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import websockets
from clusters import RunningCluster

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
BROWSER_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-quic", "--remote-debugging-port=0",
)  # fmt: skip
TIMEOUT_S = 60
ANSWER_TO_THE_END = """window.bodies = []; const before = window.fetch;
window.fetch = (url, options) => {
    bodies.push(options.body);
    return before(url, { ...options, body: JSON.stringify({ ...JSON.parse(options.body), ignore_eos: true }) });
}"""
"""In the page: answers go on until the model's context is full, which takes much longer than any test needs. The model
itself may end an answer after a few tokens, before a test stops it. `bodies`: what the page has sent."""
ASK = "document.getElementById('prompt').value = %s; document.getElementById('form').requestSubmit()"

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium here (apt install chromium)")


class Page:
    """One tab, over the browser's debugging protocol."""

    def __init__(self, connection: websockets.ClientConnection) -> None:
        self._connection = connection
        self._ids = itertools.count(1)

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        await self._connection.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            answer = json.loads(await self._connection.recv())
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    async def evaluate(self, expression: str) -> Any:
        result = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def wait_for(self, condition: str) -> None:
        """Wait until `condition` holds in the page."""
        while not await self.evaluate(f"Boolean({condition})"):  # noqa: ASYNC110 - a page sends no events
            await asyncio.sleep(0.02)

    async def resize(self, width: int, height: int, *, is_mobile: bool) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2, mobile=is_mobile
        )

    async def keep_picture(self, name: str) -> None:
        if folder := os.environ.get("TANDEM_SCREENSHOTS"):
            shot = await self.call("Page.captureScreenshot", format="png")
            await asyncio.to_thread(Path(folder, name).write_bytes, base64.b64decode(shot["data"]))


@asynccontextmanager
async def browser(profile: Path, url: str) -> AsyncIterator[Page]:
    """A fresh browser that shows `url`."""
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, *BROWSER_FLAGS, f"--user-data-dir={profile}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        port = ""
        async for line in process.stderr:
            if found := re.search(rb"DevTools listening on ws://127.0.0.1:(\d+)/", line):
                port = found[1].decode()
                break
        async with httpx.AsyncClient(trust_env=False) as http:
            tabs = (await http.get(f"http://127.0.0.1:{port}/json")).json()
        tab = next(tab for tab in tabs if tab["type"] == "page")
        async with websockets.connect(tab["webSocketDebuggerUrl"], max_size=1 << 24) as connection:
            page = Page(connection)
            await page.call("Page.navigate", url=url)
            await page.wait_for(f"location.href == {json.dumps(url)} && document.readyState == 'complete'")
            yield page
    finally:
        process.terminate()
        await process.communicate()


@pytest.fixture
def cluster(real_cluster: RunningCluster) -> RunningCluster:
    return real_cluster


async def test_a_conversation(cluster: RunningCluster, tmp_path: Path) -> None:
    url = f"http://{cluster.http_address}/?temperature=0"
    async with asyncio.timeout(TIMEOUT_S), browser(tmp_path / "profile", url) as page:
        await page.resize(900, 640, is_mobile=False)
        await page.wait_for("document.getElementById('model')?.textContent.includes('smollm2')")
        for number, question in enumerate(("What is the capital of France?", "And of Italy?"), 1):
            # While the answer streams, its text must grow: note each length.
            await page.evaluate(
                f"""window.lengths = [];
                note = () => lengths.push(document.querySelector('#log .turn:last-child .text')?.textContent.length);
                new MutationObserver(note).observe(
                    document.getElementById('log'), {{ subtree: true, childList: true }});
                document.getElementById('prompt').value = {json.dumps(question)};
                document.getElementById('form').requestSubmit()"""
            )
            await page.wait_for(f"document.querySelectorAll('.assistant:not(.busy) .facts').length == {number}")
            assert await page.evaluate("new Set(lengths).size") > 2, "the answer came at once"
            facts = await page.evaluate("document.querySelector('#log .turn:last-child .facts').textContent")
            assert "first token" in facts
            assert "from cache" in facts
            assert "decode-1" in facts
        assert "tokens/s" in facts
        assert "prompt" in facts
        await page.keep_picture("chat.png")


async def test_what_a_phone_shows(cluster: RunningCluster, tmp_path: Path) -> None:
    url = f"http://{cluster.http_address}/?q=Why%20is%20the%20sky%20blue%3F&temperature=0"
    async with asyncio.timeout(TIMEOUT_S), browser(tmp_path / "profile", url) as page:
        await page.resize(390, 780, is_mobile=True)
        await page.wait_for("document.querySelectorAll('.assistant:not(.busy) .facts').length == 1")
        assert await page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "wider than the screen"
        is_seen = "(r => r.bottom <= window.innerHeight && r.width > 40)"
        for part in ("prompt", "send"):
            assert await page.evaluate(f"{is_seen}(document.getElementById('{part}').getBoundingClientRect())"), part
        await page.keep_picture("chat-phone.png")


async def test_stopping_cancels_the_request_and_errors_are_shown(cluster: RunningCluster, tmp_path: Path) -> None:
    async with asyncio.timeout(TIMEOUT_S), browser(tmp_path / "profile", f"http://{cluster.http_address}/") as page:
        await page.wait_for("document.getElementById('model')?.textContent.includes('smollm2')")
        await page.evaluate(ANSWER_TO_THE_END)
        await page.evaluate(ASK % json.dumps("Count from one to five hundred, in words."))
        await page.wait_for("document.querySelector('.assistant .text')?.textContent.length > 0")
        await page.evaluate("document.getElementById('form').requestSubmit()")
        await page.wait_for("document.querySelector('.assistant:not(.busy) .facts')?.textContent == 'stopped'")
        await asyncio.to_thread(cluster.wait_until_at_rest, 5)
        await page.evaluate(ASK % json.dumps("word " * 4000))
        await page.wait_for("document.querySelector('.facts.bad')")
        assert "2047" in await page.evaluate("document.querySelector('.facts.bad').textContent")


async def test_a_new_chat_knows_nothing_of_an_answer_that_was_still_coming(
    cluster: RunningCluster, tmp_path: Path
) -> None:
    async with asyncio.timeout(TIMEOUT_S), browser(tmp_path / "profile", f"http://{cluster.http_address}/") as page:
        await page.wait_for("document.getElementById('model')?.textContent.includes('smollm2')")
        await page.evaluate(ANSWER_TO_THE_END)
        await page.evaluate(ASK % json.dumps("Count from one to five hundred, in words."))
        await page.wait_for("document.querySelector('.assistant .text')?.textContent.length > 0")
        await page.evaluate("document.getElementById('anew').click()")
        await page.wait_for("document.getElementById('send').textContent == 'Send'")
        await page.evaluate(ASK % json.dumps("And now?"))
        await page.wait_for("document.querySelectorAll('.assistant').length == 1 && bodies.length == 2")
        assert (
            await page.evaluate("JSON.parse(bodies[1]).messages.map(message => message.content).join()") == "And now?"
        )
