"""Which files `tandem run-batch` accepts, and what it says of the others."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batch_server import Reply, Scripted, batch, line_of, ok, results, running, write
from click.testing import CliRunner

from tandem.batch import lines
from tandem.batch.lines import BatchError, read_done, read_requests, result_line
from tandem.cli import main


@pytest.fixture
def server() -> Iterator[Scripted]:
    with running() as server:
        yield server


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "must be a JSON object, is list"),
        ({"custom_id": 7}, "custom_id must be a string of 1 to 512 characters, is 7"),
        ({"custom_id": ""}, 'custom_id must be a string of 1 to 512 characters, is ""'),
        ({"custom_id": "x" * 513}, "custom_id must be a string of 1 to 512 characters"),
        ({"custom_id": "1"}, "custom_id '1' is already used in line 1"),
        ({"method": "GET"}, 'method must be "POST", is "GET"'),
        ({"url": "/v1/embeddings"}, "url must be one of /v1/chat/completions, /v1/completions, /v1/responses, is"),
        ({"url": ["x"]}, "url must be one of"),
        ({"body": None}, "body must be an object, is null"),
        ({"body": {"prompt": float("nan")}}, "body must be JSON: "),
        ('{"custom_id":"2","method":"POST","url":"/v1/completions","body":{"x":1e999}}', "body must be JSON: "),
        ({"body": {"stream": True}}, "body.stream must be false: answers of a batch are not streamed"),
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


def test_an_output_that_was_edited_by_hand_keeps_its_answers(server: Scripted, tmp_path: Path) -> None:
    """Some editors leave no line end, and blank lines."""
    write(tmp_path / "in", *(line_of(name) for name in "123"))
    path = tmp_path / "out"
    first, second = result_line("1", 200, "a", {"x": 1}), result_line("2", 200, "b", {})
    path.write_bytes(first + b"\n" + second.rstrip(b"\n"))
    assert read_done(path) == ({"1", "2"}, len(first) + len(second))
    result = batch(server, tmp_path)
    assert result.exit_code == 0, result.output
    assert len(server.asked) == 1
    kept, blank, also_kept, new = path.read_bytes().splitlines(keepends=True)
    assert (kept, blank, also_kept) == (first, b"\n", second)
    assert json.loads(new)["custom_id"] == "3"


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
    """Not even its last line. A file of requests is no output either, as when the two flags are swapped."""
    write(tmp_path / "in", line_of("1"))
    (tmp_path / "out").write_text(text)
    result = batch(server, tmp_path)
    assert (result.exit_code, (tmp_path / "out").read_text()) == (1, text)
    assert f"Error: {tmp_path / 'out'}:1: is not a line of a batch output" in result.stderr
    assert server.asked == []


def test_a_wrong_input_leaves_the_output_as_it_is(server: Scripted, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("{")
    cut = result_line("1", 200, "a", {})[:30]
    (tmp_path / "out").write_bytes(cut)
    assert batch(server, tmp_path).exit_code == 1
    assert (tmp_path / "out").read_bytes() == cut


def test_what_is_no_file_is_refused(server: Scripted, tmp_path: Path) -> None:
    """The command reads the input twice, and the output before it writes it: a pipe would be empty, or block for
    ever."""
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
