"""The lines of OpenAI's batch files: those of the input, which are checked, and those of the output, which record what
is done.

    {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {…}}                      input
    {"id": "batch_req_…", "custom_id": "1", "response": {"status_code", "request_id", "body"}, "error": null}  output

Both are read line by line, since a file may be larger than the memory. An incomplete line at the end of the output was
being written when its run was killed, and does not count. Both must be regular files: a pipe can be read only once, and
the input is read twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
MAX_LINE_BYTES = 64 << 20
"""For lines of both files. By default, a gateway does not accept such a large body."""
MAX_ID_CHARS = 512
_OUTPUT_BEGIN = b'{"id":"batch_req_'
"""The beginning of each line of an output."""


class BatchError(Exception):
    """The message names the file and the line, and says what is wrong there."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of the input."""

    custom_id: str
    url: str
    body: dict[str, Any]


def read_requests(path: Path) -> Iterator[BatchRequest]:
    """Yield the requests of the whole input, in order. Raises `BatchError` at the first line that is invalid or repeats
    an id."""
    seen: dict[str, int] = {}
    for number, line in _lines(path):
        if not line.strip():
            continue
        request = _checked(path, number, line)
        if (earlier := seen.setdefault(request.custom_id, number)) != number:
            raise BatchError(f"{path}:{number}: custom_id {request.custom_id!r} is already used in line {earlier}")
        yield request


def read_done(path: Path) -> tuple[set[str], int]:
    """The ids in an output, and the size of its complete lines in bytes. A last line without a line end, which editors
    may leave, counts if it is complete. Raises `BatchError` if a line is not one of an output: nothing may be appended
    to another file, or cut from it."""
    done: set[str] = set()
    whole = 0
    for number, line in _lines(path):
        custom_id: object = ""
        if line.strip() and (line.endswith(b"\n") or _is_complete(line)):
            fields = _object(path, number, line)
            custom_id = fields.get("custom_id")
            is_ours = isinstance(custom_id, str) and "response" in fields
        else:
            is_ours = not line.strip() or line.startswith(_OUTPUT_BEGIN[: len(line)])
        if not is_ours:
            raise BatchError(f"{path}:{number}: is not a line of a batch output: name another file with --output-file")
        if custom_id or line.endswith(b"\n"):
            done |= {str(custom_id)} if custom_id else set()
            whole += len(line)
    return done, whole


def _is_complete(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def check_regular(path: Path) -> None:
    """Raise `BatchError` if `path` is no regular file. Call this before opening it: opening a pipe waits until another
    process opens it, too."""
    if path.exists() and not path.is_file():
        raise BatchError(f"{path}: must be a regular file")


def result_line(custom_id: str, status_code: int, request_id: str, body: Any) -> bytes:
    """One line of the output. `body` is the server's answer, or its error. Raises `ValueError` or `RecursionError` if
    it cannot be written as JSON."""
    response = {"status_code": status_code, "request_id": request_id, "body": body}
    return _output_line(custom_id, request_id, response, None)


def error_line(custom_id: str, request_id: str, code: str, message: str) -> bytes:
    """One line of the output for a request without a response."""
    return _output_line(custom_id, request_id, None, {"code": code, "message": message})


def _output_line(custom_id: str, request_id: str, response: Any, error: Any) -> bytes:
    line = {"id": f"batch_req_{request_id}", "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines with their numbers, counted from one."""
    check_regular(path)
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise BatchError(f"{path}:{number}: must be at most {MAX_LINE_BYTES >> 20} MiB long")
                yield number, line
    except OSError as error:
        raise BatchError(f"{path}: {error.strerror}") from error


def _object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BatchError(f"{path}:{number}: is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BatchError(f"{path}:{number}: must be a JSON object, is {type(value).__name__}")
    return value


def _checked(path: Path, number: int, line: bytes) -> BatchRequest:
    fields = _object(path, number, line)
    custom_id, method, url, body = (fields.get(name) for name in ("custom_id", "method", "url", "body"))
    problem = ""
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_CHARS:
        problem = f"custom_id must be a string of 1 to {MAX_ID_CHARS} characters, is {_short(custom_id)}"
    elif method != "POST":
        problem = f'method must be "POST", is {_short(method)}'
    elif url not in URLS:
        problem = f"url must be one of {', '.join(URLS)}, is {_short(url)}"
    elif not isinstance(body, dict):
        problem = f"body must be an object, is {_short(body)}"
    elif body.get("stream"):
        problem = "body.stream must be false: answers of a batch are not streamed"
    else:
        problem = _why_no_json(body)
    if problem:
        raise BatchError(f"{path}:{number}: {problem}")
    assert isinstance(custom_id, str)
    assert isinstance(body, dict)
    return BatchRequest(custom_id, str(url), body)


def _why_no_json(body: dict[str, Any]) -> str:
    """Why `body` is not JSON; empty if it is. Python also parses NaN, and numbers that are too large."""
    try:
        json.dumps(body, allow_nan=False)
    except (ValueError, RecursionError) as error:
        return f"body must be JSON: {error}"
    return ""


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:60] + "…"
