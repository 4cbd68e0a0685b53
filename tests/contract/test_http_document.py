"""docs/http.md names what the gateway accepts, and nothing else."""

from __future__ import annotations

import re
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import get_args

from fastapi.routing import APIRoute

from gateway.app import create_app
from gateway.headers import ANSWERED_ID_HEADER, FAIRNESS_HEADER, REQUEST_ID_HEADER, TIMEOUT_HEADER
from gateway.models import Models
from gateway.requests import ChatRequest, CompletionRequest
from gateway.responses.request import ResponseRequest

PAGE = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
VALUES = {"json_object", "json_schema", "regex", "choice", "grammar", "structural_tag"}
"""Words in the tables that are values of fields, not fields."""


def rows_below(heading: str) -> list[list[str]]:
    """Return the cells of the first table below the heading, without its header row."""
    lines = PAGE[PAGE.index(heading) :].splitlines()
    table = dropwhile(lambda line: not line.startswith("|"), lines)
    _, _, *rows = takewhile(lambda line: line.startswith("|"), table)
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]


def code_in(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def is_refused(model: type[ChatRequest | CompletionRequest | ResponseRequest], name: str) -> bool:
    """Whether the field accepts only values without effect (made by `gateway.asked.only`)."""
    return "only.<locals>" in repr(model.model_fields[name].metadata)


def test_routes() -> None:
    named = set()
    for route, *_ in rows_below("# The HTTP API"):
        method, paths = route.split(" ", 1)[0].strip("`"), code_in(route)
        named |= {(method, path.removeprefix(f"{method} ").replace("NAME", "{model:path}")) for path in paths}
    app = create_app(Models({}))
    there = {
        (method, route.path)
        for route in app.routes
        if isinstance(route, APIRoute)
        for method in route.methods - {"HEAD"}
    }
    assert named == there


def test_fields() -> None:
    named = [word for _, *cells in rows_below("## What a request may say") for cell in cells for word in code_in(cell)]
    words = {word for word in named if word not in VALUES}
    taken = {
        name
        for model in get_args(ChatRequest | CompletionRequest)
        for name in model.model_fields
        if not is_refused(model, name)
    }
    assert words == taken


def test_fields_that_the_responses_api_has_not() -> None:
    named = code_in(PAGE[PAGE.index("The Responses API has the same") :].split(". ", 1)[0])
    rows = rows_below("## What a request may say")
    openais, vllms = ({word for row in rows for word in code_in(row[column])} for column in (1, 2))
    words = {"n"} | vllms - openais - VALUES
    taken = {name for name in ResponseRequest.model_fields if not is_refused(ResponseRequest, name)}
    assert set(named) == words - taken


def test_headers() -> None:
    named = {word.lower() for header, _ in rows_below("## Headers") for word in code_in(header)}
    assert {REQUEST_ID_HEADER, TIMEOUT_HEADER, FAIRNESS_HEADER, "traceparent"} <= named
    assert f"`{ANSWERED_ID_HEADER}`" in PAGE.lower()
