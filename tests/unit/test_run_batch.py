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
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
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
        self.drips = False
        """Answers byte by byte, ten of them a second."""
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


@pytest.fixture
def server() -> Iterator[Scripted]:
    server = Scripted()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.is_over.set()
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
        ({"body": {"prompt": float("nan")}}, "body must be JSON: "),
        ('{"custom_id":"2","method":"POST","url":"/v1/completions","body":{"x":1e999}}', "body must be JSON: "),
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


@pytest.mark.parametrize(
    "text",
    ["one line without an end", '{"name": 1}', json.dumps(line_of("9")) + "\n", json.dumps(line_of("9"))],
)
def test_nothing_is_taken_from_a_file_that_is_something_else(server: Scripted, tmp_path: Path, text: str) -> None:
    """Not even its last line; and a file of requests is no output, as where the two were swapped."""
    write(tmp_path / "in", line_of("1"))
    (tmp_path / "out").write_text(text)
    result = batch(server, tmp_path)
    assert (result.exit_code, (tmp_path / "out").read_text()) == (1, text)
    assert f"Error: {tmp_path / 'out'}:1: is no line of an output" in result.stderr
    assert server.asked == []


def test_a_wrong_input_leaves_the_output_as_it_is(server: Scripted, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("{")
    cut = result_line("1", 200, "a", {})[:30]
    (tmp_path / "out").write_bytes(cut)
    assert batch(server, tmp_path).exit_code == 1
    assert (tmp_path / "out").read_bytes() == cut


def test_what_is_no_file_is_refused(server: Scripted, tmp_path: Path) -> None:
    """The input is read twice, the output before it is written: a pipe would be empty, or waited for without end."""
    write(tmp_path / "in", line_of("1"))
    os.mkfifo(tmp_path / "pipe")
    for given, out, named in (("pipe", "out", "pipe"), ("in", "pipe", "pipe"), ("in", "/dev/null", "/dev/null")):
        files = ["-i", str(tmp_path / given), "-o", str(tmp_path / out)]
        result = CliRunner().invoke(main, ["run-batch", *files, "--base-url", server.url])
        assert (result.exit_code, result.stderr.splitlines()[-1]) == (
            1, f"Error: {tmp_path / named}: must be a regular file",
        )  # fmt: skip
    assert server.asked == []


def test_one_file_that_is_not_there_yet_is_not_both(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["run-batch", "-i", str(tmp_path / "x"), "-o", str(tmp_path / "x")])
    assert result.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_an_input_that_has_lost_lines_since_it_was_checked_is_said(server: Scripted, tmp_path: Path) -> None:
    write(tmp_path / "in", *(line_of(str(number)) for number in range(500)))
    num_bytes = sum(map(len, (tmp_path / "in").read_bytes().splitlines(keepends=True)[:400]))

    def script(prompt: str, _: int) -> Reply:
        os.truncate(tmp_path / "in", num_bytes)
        return ok(prompt)

    server.script = script
    result = batch(server, tmp_path)
    assert result.exit_code == 1
    assert len(results(tmp_path)) == 400
    assert f"Error: {tmp_path / 'in'}: has changed since it was checked" in result.stderr


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


def test_half_a_character_is_sent_as_it_came(server: Scripted, tmp_path: Path) -> None:
    """What a server says of it is for the server to say."""
    write(tmp_path / "in", line_of("\ud800"))
    assert batch(server, tmp_path).exit_code == 0
    assert results(tmp_path).keys() == {"\ud800"}


def test_whatever_a_server_answers_is_a_line_that_the_next_run_can_read(
    server: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 50_000)
    bodies = {"nan": '{"x": NaN}', "inf": "[1e999]", "deep": "[" * 5000 + "]" * 5000, "html": "<p>", "é": '"é"'}
    large = {"huge": "x" * 60_000, "escaped": "\0" * 20_000}
    server.script = lambda prompt, _: (200, {}, (bodies | large)[prompt])
    write(tmp_path / "in", *(line_of(name) for name in bodies | large))
    result = batch(server, tmp_path)
    assert result.exit_code == 1
    assert "6 requests have no answer" in result.stderr

    def no_constant(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    for line in (tmp_path / "out").read_text().splitlines():
        each = json.loads(line, parse_constant=no_constant)
        if each["custom_id"] in large:
            assert each["response"] is None
            assert each["error"]["code"] == "answer_too_large"
        else:
            assert each["response"]["body"] in (bodies[each["custom_id"]], "é")
    server.asked.clear()
    assert batch(server, tmp_path).exit_code == 0
    assert server.asked == []


def test_an_answer_that_cannot_be_decoded_is_asked_for_again(server: Scripted, tmp_path: Path) -> None:
    server.script = lambda _, before: ok("x") if before else (200, {"content-encoding": "gzip"}, "not so")
    write(tmp_path / "in", line_of("a"))
    assert batch(server, tmp_path).exit_code == 0
    assert server.num_asked == {"a": 2}


def test_an_answer_that_comes_drop_by_drop_has_a_deadline_too(
    server: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "ANSWER_MARGIN_S", 0.2)
    server.drips = True
    server.script = lambda prompt, _: ok(prompt)
    write(tmp_path / "in", line_of("a"))
    result = batch(server, tmp_path, "--request-timeout-s", "1", "--retry-s", "0")
    assert result.exit_code == 1
    assert "no answer within 1 s" in result.stderr


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
                return no(int(prompt), "not so") if prompt not in no_json else (int(prompt), {}, "no JSON")

    server.script = script
    no_json = ("200", "599")
    for_good = ("400", "404", "413", "500", "504", *no_json)
    for_now = {"full": 4, "away": 3, "cut": 3, "proxy": 2}
    write(tmp_path / "in", *(line_of(name) for name in (*for_now, *for_good)))
    result = batch(server, tmp_path)
    assert result.exit_code == 1
    assert "7 requests have no answer, and their lines say why; the last: " in result.stderr
    assert server.num_asked == {**for_now, **dict.fromkeys(for_good, 1)}
    found = {name: each["response"] for name, each in results(tmp_path).items()}
    for name in for_now:
        assert (found[name]["status_code"], found[name]["body"]["choices"]) == (200, [{"text": "at last"}])
    for name in for_good:
        assert found[name]["status_code"] == int(name)
    assert found["400"]["body"] == {"error": {"message": "not so"}}
    assert found["599"]["body"] == found["200"]["body"] == "no JSON"


def test_the_same_command_goes_on_with_what_is_missing(server: Scripted, tmp_path: Path) -> None:
    write(tmp_path / "in", *(line_of(name) for name in "abcd"))
    (tmp_path / "out").write_bytes(
        result_line("b", 200, "1", {}) + result_line("d", 400, "2", {}) + result_line("c", 200, "3", {})[:50]
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


def test_a_server_that_refers_to_another_is_asked_nothing(server: Scripted, tmp_path: Path) -> None:
    """As http does to https: else each line would be refused for good."""
    write(tmp_path / "in", line_of("a"))
    server.models = (301, {"location": "https://elsewhere/v1/models"}, "")
    result = batch(server, tmp_path)
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (
        1, f"Error: {server.url} refers to https://elsewhere/v1/models: name the server itself with --base-url",
    )  # fmt: skip
    assert server.asked == []


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


def test_a_long_silence_before_it_went_does_not_count(server: Scripted, tmp_path: Path) -> None:
    """All that it holds may take longer than it is waited for when it is away."""

    def script(prompt: str, before: int) -> Reply:
        if not before:
            together.wait(30)
            server.is_over.wait(0.5)
            return None
        return ok(prompt)

    together = threading.Barrier(2)
    server.script = script
    write(tmp_path / "in", line_of("a"), line_of("b"))
    result = batch(server, tmp_path, "--retry-s", "0.4")
    assert result.exit_code == 0, result.stderr
    assert results(tmp_path).keys() == {"a", "b"}


def test_one_that_does_not_even_take_connections_is_away(server: Scripted, tmp_path: Path) -> None:
    """Somebody tries at any moment, then, and nobody waits for an answer."""

    async def silent(_: Any) -> Any:
        await asyncio.sleep(0.2)
        raise httpx2.ConnectTimeout("")

    args = run.BatchArgs(
        input_file=tmp_path / "in", output_file=tmp_path / "out", base_url=server.url, max_concurrency=50, retry_s=1.0
    )
    write(tmp_path / "in", *(line_of(str(number)) for number in range(50)))
    transport = httpx2.MockTransport(silent)
    running = run._Run(
        args,
        lambda: httpx2.AsyncClient(base_url=server.url, transport=transport),
        -1,
        run.BatchProgress(num_requests=50),
    )

    async def tried() -> None:
        with pytest.raises(run.ServerAway, match="has not answered for"):
            async with asyncio.timeout(20):
                await running.run(set())

    asyncio.run(tried())


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
        with pytest.raises(BatchError, match="the output cannot be written: File too large"):
            run._write(output, b"another\n")
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        run._write(output, b"third\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        os.close(output)
    assert (tmp_path / "out").read_bytes() == b"whole\nthird\n"


def test_on_a_terminal_the_line_follows(server: Scripted, tmp_path: Path) -> None:
    """It is drawn by a thread of its own."""
    ours, theirs = os.openpty()
    is_seen = threading.Event()
    said = bytearray()

    def read() -> None:
        with suppress(OSError):  # its end
            while piece := os.read(ours, 4096):
                said.extend(piece)
                if b"0/1 ended, 1 running" in said:
                    is_seen.set()

    def script(prompt: str, _: int) -> Reply:
        assert is_seen.wait(30)
        return ok(prompt)

    server.script = script
    write(tmp_path / "in", line_of("a"))
    command = [
        sys.executable, "-m", "tandem", "run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"),
        "--base-url", server.url, "--request-timeout-s", "60",
    ]  # fmt: skip
    reader = threading.Thread(target=read)
    reader.start()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, env=environment) as process:
        os.close(theirs)
        assert process.wait(60) == 0, said.decode()
    reader.join(30)
    os.close(ours)
    assert is_seen.is_set()
    assert b"Traceback" not in said


def test_nobody_has_to_watch(server: Scripted, tmp_path: Path) -> None:
    write(tmp_path / "in", line_of("a"))
    files = ("-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--base-url", server.url)
    command = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-m", "tandem", "run-batch", *files]
    assert subprocess.run(command, check=False, stdout=subprocess.DEVNULL, timeout=60).returncode == 0
    assert results(tmp_path).keys() == {"a"}


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
        (["--base-url", "http://[::1"], "--base-url: "),
        (["--base-url", "http://127.0.0.1:99999"], "--base-url: "),
        (["--base-url", "http:///v1"], "--base-url must name a host, is 'http:///v1'"),
        (["--api-key", "ключ"], "--api-key must be of visible ASCII characters"),
        (["--api-key", "a\nb"], "--api-key must be of visible ASCII characters"),
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
