"""An HTTP server that answers each request of a batch as a test wants, and helpers that run a batch against it."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from tandem.cli import main

Reply = tuple[int, dict[str, str], Any] | None
"""Status, headers and body; None: the server closes the connection without an answer."""


def ok(text: str) -> Reply:
    return 200, {}, {"choices": [{"text": text}], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}


def no(status: int, message: str, **headers: str) -> Reply:
    return status, {name.replace("_", "-"): value for name, value in headers.items()}, {"error": {"message": message}}


class Scripted(ThreadingHTTPServer):
    """Answers each request with what `script` returns for its prompt and the number of times it was asked before."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: Callable[[str, int], Reply] = lambda prompt, _: ok(f"to {prompt}")
        self.asked: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        """Path, body and headers of each request."""
        self.models: Reply = (200, {}, {"data": []})
        self.drips = False
        """Whether the server sends its answers one byte at a time, ten bytes a second."""
        self.is_over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def num_asked(self) -> Counter[str]:
        return Counter(body["prompt"] for _, body, _ in self.asked)


class Handler(BaseHTTPRequestHandler):
    server: Scripted
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._reply(self.server.models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        before = self.server.num_asked[body["prompt"]]
        self.server.asked.append((self.path, body, dict(self.headers)))
        self._reply(self.server.script(body["prompt"], before))

    def _reply(self, reply: Reply) -> None:
        if reply is None:
            self.close_connection = True
            return
        status, headers, body = reply
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.server.drips and self.command == "POST":
            for place in range(len(data)):
                self.wfile.write(data[place : place + 1])
                if self.server.is_over.wait(0.1):
                    break
        else:
            self.wfile.write(data)


@contextmanager
def running() -> Iterator[Scripted]:
    server = Scripted()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.is_over.set()
        server.shutdown()
        thread.join()
        server.server_close()


def line_of(custom_id: str, **body: Any) -> dict[str, Any]:
    body = {"prompt": custom_id, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def write(path: Path, *requests: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return path


def batch(server: Scripted, folder: Path, *flags: str) -> Result:
    files = ("-i", str(folder / "in"), "-o", str(folder / "out"))
    return CliRunner().invoke(main, ["run-batch", *files, "--base-url", server.url, *flags])


def results(folder: Path) -> dict[str, Any]:
    """Return the results by id, and check that each id has exactly one line."""
    read = [json.loads(line) for line in (folder / "out").read_text().splitlines()]
    found = {each["custom_id"]: each for each in read}
    assert len(found) == len(read)
    return found
