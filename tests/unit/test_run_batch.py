"""`tandem run-batch` over real connections, to a server that does what a test says; and what its files may be."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tandem.batch import lines, run
from tandem.batch.lines import BatchError, read_done, read_requests, result_line
from tandem.cli import main
from tandem.cli.run_batch import progress_line

Reply = tuple[int, dict[str, str], Any] | None
"""Status, headers and body; None: the connection is cut."""


def ok(text: str) -> Reply:
    return 200, {}, {"choices": [{"text": text}], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}


def no(status: int, message: str, **headers: str) -> Reply:
    return status, {name.replace("_", "-"): value for name, value in headers.items()}, {"error": {"message": message}}


class Scripted(ThreadingHTTPServer):
    """Answers each request as `script` says, which is given its prompt and how often it was asked before."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: Callable[[str, int], Reply] = lambda prompt, _: ok(f"to {prompt}")
        self.asked: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        """Path, body and headers of each."""
        self.models: Reply = (200, {}, {"data": []})

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
        self.wfile.write(data)


@pytest.fixture
def server() -> Iterator[Scripted]:
    server = Scripted()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(run, "LAST_WAIT_S", 0.02)


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
    """By id. Each has one line."""
    read = [json.loads(line) for line in (folder / "out").read_text().splitlines()]
    found = {each["custom_id"]: each for each in read}
    assert len(found) == len(read)
    return found


# -- files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "must be a JSON object, is list"),
        ({"custom_id": 7}, "custom_id must be a string of 1 to 512 characters, is 7"),
        ({"custom_id": ""}, 'custom_id must be a string of 1 to 512 characters, is ""'),
        ({"custom_id": "x" * 513}, "custom_id must be a string of 1 to 512 characters"),
        ({"custom_id": "1"}, "custom_id '1' is that of line 1, too"),
        ({"method": "GET"}, 'method must be "POST", is "GET"'),
        ({"url": "/v1/embeddings"}, "url must be one of /v1/chat/completions, /v1/completions, /v1/responses, is"),
        ({"url": ["x"]}, "url must be one of"),
        ({"body": None}, "body must be an object, is null"),
        ({"body": {"stream": True}}, "body.stream must be false: an answer is one line"),
    ],
)
def test_a_wrong_line_is_named_before_anything_is_asked(
    server: Scripted, tmp_path: Path, line: Any, problem: str
) -> None:
    text = line if isinstance(line, str) else json.dumps(line_of("2") | line)
    (tmp_path / "in").write_text(f"{json.dumps(line_of('1'))}\n\n{text}\n")
    result = batch(server, tmp_path)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith(f"Error: {tmp_path / 'in'}:3: ")
    assert problem in result.stderr
    assert server.asked == []


def test_a_line_without_an_end_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / "in"
    path.write_bytes(b"x" * (3 << 20))
    with pytest.raises(BatchError, match=r"in:1: must be at most 1 MiB long"):
        list(read_requests(path))


def test_a_last_line_that_was_being_written_is_none(tmp_path: Path) -> None:
    path = tmp_path / "out"
    whole = result_line("1", 200, "a", {"text": "\u2028\n"}) + result_line("2", 400, "b", "no")
    for cut in (1, 20):
        path.write_bytes(whole + result_line("3", 200, "c", {})[:cut])
        assert read_done(path) == ({"1", "2"}, len(whole))


def test_a_file_that_is_something_else_is_left_alone(server: Scripted, tmp_path: Path) -> None:
    write(tmp_path / "in", line_of("1"))
    for text in ("a letter\n", '{"name": 1}\n', "[1]\n"):
        (tmp_path / "out").write_text(text)
        result = batch(server, tmp_path)
        assert (result.exit_code, (tmp_path / "out").read_text()) == (1, text)
    (tmp_path / "out").unlink()
    result = CliRunner().invoke(main, ["run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "in")])
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (
        2, "Error: --output-file must be another file than --input-file",
    )  # fmt: skip
    assert server.asked == []


def test_files_that_cannot_be_opened_are_named(server: Scripted, tmp_path: Path) -> None:
    result = batch(server, tmp_path)
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (
        1, f"Error: {tmp_path / 'in'}: No such file or directory",
    )  # fmt: skip
    result = CliRunner().invoke(main, ["run-batch", "-i", str(tmp_path / "in"), "-o", "/nowhere/out"])
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (1, "Error: /nowhere/out: No such file or directory")


# -- answers -----------------------------------------------------------------------------------------------------


def test_each_request_has_one_line_and_is_asked_as_it_stands(server: Scripted, tmp_path: Path) -> None:
    urgent = line_of("b", priority=-3, max_tokens=4) | {"url": "/v1/chat/completions"}
    write(tmp_path / "in", line_of("a"), urgent)
    result = batch(server, tmp_path, "--api-key", "sesame", "--request-timeout-s", "90", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == {
        "num_requests": 2, "num_before": 0, "num_answered": 2, "num_failed": 0, "num_retries": 0,
        "num_prompt_tokens": 6, "num_output_tokens": 4, "last_failure": "",
    }  # fmt: skip
    asked = {body["prompt"]: (path, body) for path, body, _ in server.asked}
    assert asked == {
        "a": ("/v1/completions", {"prompt": "a", "priority": 1}),
        "b": ("/v1/chat/completions", {"prompt": "b", "priority": -3, "max_tokens": 4}),
    }
    ids = set()
    for _, _, headers in server.asked:
        assert headers["authorization"] == "Bearer sesame"
        assert headers["x-request-timeout-ms"] == "90000"
        ids.add(headers["x-request-id"])
    found = results(tmp_path)
    assert found.keys() == {"a", "b"}
    assert {each["response"]["request_id"] for each in found.values()} == ids
    for name, each in found.items():
        assert each["response"]["status_code"] == 200
        assert each["response"]["body"]["choices"] == [{"text": f"to {name}"}]
        assert each["error"] is None


def test_without_a_priority_a_server_that_knows_none_is_sent_none(server: Scripted, tmp_path: Path) -> None:
    write(tmp_path / "in", line_of("a"))
    assert batch(server, tmp_path, "--priority", "0").exit_code == 0
    assert [body for _, body, _ in server.asked] == [{"prompt": "a"}]


def test_what_is_refused_for_now_is_asked_again_and_what_is_refused_for_good_is_not(
    server: Scripted, tmp_path: Path
) -> None:
    def script(prompt: str, before: int) -> Reply:
        match prompt:
            case "full":
                return no(429, "the queue is full", retry_after="0.01") if before < 3 else ok("at last")
            case "away":
                return no(503, "nobody to serve") if before < 2 else ok("at last")
            case "cut":
                return None if before < 2 else ok("at last")
            case "proxy":
                return (502, {}, "<html>Bad Gateway</html>") if before < 1 else ok("at last")
            case _:
                return no(int(prompt), "not so") if prompt != "599" else (599, {}, "no JSON")

    server.script = script
    for_good = ("400", "404", "413", "500", "504", "599")
    for_now = {"full": 4, "away": 3, "cut": 3, "proxy": 2}
    write(tmp_path / "in", *(line_of(name) for name in (*for_now, *for_good)))
    result = batch(server, tmp_path)
    assert result.exit_code == 1
    assert "6 requests were refused; their lines have another status_code than 200, the last: " in result.stderr
    assert server.num_asked == {**for_now, **dict.fromkeys(for_good, 1)}
    found = {name: each["response"] for name, each in results(tmp_path).items()}
    for name in for_now:
        assert (found[name]["status_code"], found[name]["body"]["choices"]) == (200, [{"text": "at last"}])
    for name in for_good:
        assert found[name]["status_code"] == int(name)
    assert found["400"]["body"] == {"error": {"message": "not so"}}
    assert found["599"]["body"] == "no JSON"


def test_the_same_command_goes_on_with_what_is_missing(server: Scripted, tmp_path: Path) -> None:
    write(tmp_path / "in", *(line_of(name) for name in "abcd"))
    (tmp_path / "out").write_bytes(
        result_line("b", 200, "1", {}) + result_line("d", 400, "2", {}) + b'{"custom_id": "c'
    )
    result = batch(server, tmp_path)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(f"4 of 4 requests have a line in {tmp_path / 'out'}, 2 of them before; 6 tokens in")
    assert server.num_asked == {"a": 1, "c": 1}
    assert results(tmp_path).keys() == set("abcd")
    server.asked.clear()
    assert batch(server, tmp_path).exit_code == 0
    assert server.asked == []


def test_as_many_at_once_as_may_be(server: Scripted, tmp_path: Path) -> None:
    together, running = threading.Barrier(3), Counter[int]()

    def script(prompt: str, _: int) -> Reply:
        together.wait(30)
        running[together.n_waiting] += 1
        return ok(prompt)

    server.script = script
    write(tmp_path / "in", *(line_of(str(number)) for number in range(9)))
    result = batch(server, tmp_path, "--max-concurrency", "3")
    assert result.exit_code == 0, result.stderr
    assert sum(running.values()) == 9, "three were there together, three times"


def test_a_key_that_is_wrong_is_no_line_s_fault(server: Scripted, tmp_path: Path) -> None:
    write(tmp_path / "in", line_of("a"))
    server.models = no(401, "who are you?")
    for _ in range(2):
        result = batch(server, tmp_path)
        assert (result.exit_code, result.stderr.splitlines()[-1]) == (
            1, f"Error: {server.url} requires a key: give it with --api-key KEY or OPENAI_API_KEY",
        )  # fmt: skip
        assert (tmp_path / "out").read_bytes() == b""
        server.models, server.script = (200, {}, {}), lambda *_: no(403, "not you")


def test_a_server_that_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    write(tmp_path / "in", line_of("a"))
    away = Scripted()
    away.server_close()
    result = batch(away, tmp_path)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith(f"Error: no server answers at {away.url} (")


def test_a_server_that_went_away_is_waited_for_but_not_for_ever(server: Scripted, tmp_path: Path) -> None:
    def script(prompt: str, before: int) -> Reply:
        if prompt == "full":
            return no(429, "full") if before < 40 else ok("at last")
        return no(503, "nobody to serve")

    server.script = script
    write(tmp_path / "in", line_of("full"), line_of("a"), line_of("b"))
    result = batch(server, tmp_path, "--retry-s", "0.1")
    assert result.exit_code == 1
    assert f"{server.url} has not answered for 0 s (503: nobody to serve); the same command goes on with the 2" in (
        result.stderr
    )
    assert results(tmp_path).keys() == {"full"}, "one that is there and full is waited for"
    server.script = lambda prompt, _: ok(prompt)
    assert batch(server, tmp_path).exit_code == 0
    assert results(tmp_path).keys() == {"full", "a", "b"}


def test_two_runs_do_not_write_to_one_output(server: Scripted, tmp_path: Path) -> None:
    write(tmp_path / "in", line_of("a"))
    second: list[Result] = []

    def script(prompt: str, _: int) -> Reply:
        second.append(batch(server, tmp_path))
        return ok(prompt)

    server.script = script
    assert batch(server, tmp_path).exit_code == 0
    assert second[0].stderr.splitlines()[-1] == f"Error: {tmp_path / 'out'}: another run writes to it"
    assert results(tmp_path).keys() == {"a"}


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_it_what_was_answered_is_kept(server: Scripted, tmp_path: Path, how: signal.Signals) -> None:
    stuck = threading.Event()

    def script(prompt: str, before: int) -> Reply:
        if prompt == "c" and not before:
            stuck.set()
            is_over.wait(30)
        return ok(prompt)

    is_over = threading.Event()
    server.script = script
    write(tmp_path / "in", *(line_of(name) for name in "abcd"))
    files = ("-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--max-concurrency", "1")
    command = [sys.executable, "-m", "tandem", "run-batch", *files, "--base-url", server.url]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert stuck.wait(30)
        process.send_signal(how)
        _, said = process.communicate(timeout=30)
    is_over.set()
    assert results(tmp_path).keys() == {"a", "b"}
    if how is signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 130, said
        assert said.splitlines()[-2:] == ["cancelled", "2 of 4 are left; the same command goes on with them"]
    assert batch(server, tmp_path).exit_code == 0
    assert results(tmp_path).keys() == set("abcd")


def test_a_full_disk_takes_a_line_or_nothing_of_it(tmp_path: Path) -> None:
    """Else the next run would find the beginning of one, and something else behind it."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    output = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT)
    try:
        run._write(output, b"whole\n")
        resource.setrlimit(resource.RLIMIT_FSIZE, (9, limits[1]))
        with pytest.raises(OSError, match="File too large"):
            run._write(output, b"another\n")
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        run._write(output, b"third\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        os.close(output)
    assert (tmp_path / "out").read_bytes() == b"whole\nthird\n"


def test_how_it_goes_is_a_line() -> None:
    progress = run.BatchProgress(
        num_requests=10, num_before=2, num_answered=3, num_failed=1, num_running=4, num_waiting=1,
        num_output_tokens=500, last_refusal="429: full", last_failure="400: no",
    )  # fmt: skip
    assert progress_line(progress, 10.0) == (
        "10 s  6/10 ended, 3 running, 1 waiting (429: full), 1 failed (400: no), 50 tokens/s"
    )
    assert progress.num_left == 4


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--base-url", "127.0.0.1:8000"], "--base-url must begin with http:// or https://, is '127.0.0.1:8000'"),
        (["--max-concurrency", "0"], "'--max-concurrency': 0 is not in the range 1<=x<=4096."),
        (["--retry-s", "nan"], "'--retry-s': nan is not a number"),
    ],
)
def test_wrong_usage_is_one_sentence(tmp_path: Path, flags: list[str], problem: str) -> None:
    files = ["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(main, ["run-batch", *files, *flags])
    assert result.exit_code == 2
    assert problem in result.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_an_answer_that_comes_while_the_run_is_cancelled_is_kept_or_asked_again(
    server: Scripted, tmp_path: Path
) -> None:
    """A line is one write, in the same turn of the loop in which its answer is there."""
    write(tmp_path / "in", *(line_of(str(number)) for number in range(40)))
    args = run.BatchArgs(
        input_file=tmp_path / "in", output_file=tmp_path / "out", base_url=server.url, max_concurrency=7
    )

    async def cancelled_soon() -> None:
        progress = run.BatchProgress()
        running = asyncio.create_task(run.answer_all(args, progress))
        while progress.num_answered < 5:  # noqa: ASYNC110 - a run tells nobody
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert len(results(tmp_path)) == progress.num_answered

    asyncio.run(cancelled_soon())
    assert batch(server, tmp_path).exit_code == 0
    assert len(results(tmp_path)) == 40
