"""`tandem run-batch` over real connections: every request is answered once, whatever its server says."""

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
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from batch_server import Reply, Scripted, batch, line_of, no, ok, results, running, write
from click.testing import CliRunner, Result

from tandem.batch import lines, run
from tandem.batch.lines import BatchError, result_line
from tandem.cli import main
from tandem.cli.run_batch import progress_line


@pytest.fixture
def server() -> Iterator[Scripted]:
    with running() as server:
        yield server


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(run, "LAST_WAIT_S", 0.02)


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
    """It is for the server to accept or refuse it."""
    write(tmp_path / "in", line_of("\ud800"))
    assert batch(server, tmp_path).exit_code == 0
    assert results(tmp_path).keys() == {"\ud800"}


def test_whatever_a_server_answers_is_a_line_that_the_next_run_can_read(
    server: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 50_000)
    bodies = {"nan": '{"x": NaN}', "inf": "[1e999]", "deep": "[" * 20_000 + "]" * 20_000, "html": "<p>", "é": '"é"'}
    large = {"huge": "x" * 60_000, "escaped": "\0" * 20_000}
    server.script = lambda prompt, _: (200, {}, (bodies | large)[prompt])
    write(tmp_path / "in", *(line_of(name) for name in bodies | large))
    result = batch(server, tmp_path)
    assert result.exit_code == 1
    assert "6 requests failed" in result.stderr

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
    assert "7 requests failed; their lines say why. The last: " in result.stderr
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
    """For example http redirects to https. Otherwise each line would be refused for good."""
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


def test_a_server_that_went_away_is_waited_for_but_not_for_ever(
    server: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "CONNECTS_S", 0.3)

    def script(prompt: str, before: int) -> Reply:
        if prompt == "full":
            return no(429, "full") if before < 40 else ok("at last")
        return no(503, "nobody to serve")

    server.script = script
    write(tmp_path / "in", line_of("full"), line_of("a"), line_of("b"))
    result = batch(server, tmp_path, "--retry-s", "0.1")
    assert result.exit_code == 1
    assert (
        f"{server.url} has not answered for 0 s (503: nobody to serve); run the same command to continue with the 2"
        in (result.stderr)
    )
    assert results(tmp_path).keys() == {"full"}, "one that is there and full is waited for"
    server.script = lambda prompt, _: ok(prompt)
    assert batch(server, tmp_path).exit_code == 0
    assert results(tmp_path).keys() == {"full", "a", "b"}


def test_while_somebody_has_a_connection_the_others_do_not_give_up(
    server: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "CONNECTS_S", 0.2)
    is_answered = threading.Event()

    def script(prompt: str, before: int) -> Reply:
        if prompt == "long":
            server.is_over.wait(1.0)
            is_answered.set()
        return ok(prompt) if is_answered.is_set() else no(503, "nobody to serve")

    server.script = script
    write(tmp_path / "in", line_of("long"), line_of("a"))
    result = batch(server, tmp_path, "--retry-s", "0.4")
    assert result.exit_code == 0, result.stderr
    assert server.num_asked["a"] > 5


def test_a_long_silence_before_it_went_does_not_count(server: Scripted, tmp_path: Path) -> None:
    """The requests that a server holds may take longer than the time that the client waits for a server that is
    away."""

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
    """One of the requests always tries to connect, but none waits for an answer."""

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
    assert second[0].stderr.splitlines()[-1] == f"Error: {tmp_path / 'out'}: another run is writing to it"
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
        assert said.splitlines()[-2:] == ["cancelled", "2 of 4 requests are left; run the same command to continue"]
    assert batch(server, tmp_path).exit_code == 0
    assert results(tmp_path).keys() == set("abcd")


def test_a_full_disk_takes_a_line_or_nothing_of_it(tmp_path: Path) -> None:
    """Otherwise the next run would find the beginning of a line, and write something else behind it."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    output = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT)
    try:
        run._write(output, b"whole\n")
        resource.setrlimit(resource.RLIMIT_FSIZE, (9, limits[1]))
        with pytest.raises(BatchError, match="cannot write the output: File too large"):
            run._write(output, b"another\n")
        assert (tmp_path / "out").read_bytes() == b"whole\n"
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        run._write(output, b"third\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        os.close(output)
    assert (tmp_path / "out").read_bytes() == b"whole\nthird\n"


def test_on_a_terminal_the_line_follows(server: Scripted, tmp_path: Path) -> None:
    """A thread of its own draws it."""
    ours, theirs = os.openpty()
    is_seen = threading.Event()
    said = bytearray()

    def read() -> None:
        with suppress(OSError):  # raised at the end
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
        (["--api-key", "ключ"], "--api-key must consist of visible ASCII characters"),
        (["--api-key", "a\nb"], "--api-key must consist of visible ASCII characters"),
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
    """A line is one write, in the same turn of the loop in which its answer arrives."""
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
