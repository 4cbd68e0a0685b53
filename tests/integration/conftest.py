"""Clusters that live as long as one module's tests, and the reference answers, made once per run."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from clusters import RunningCluster, run_cluster
from reference import Reference
from reference import references as make_references


@pytest.fixture(scope="module")
def start_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., RunningCluster]]:
    """Start clusters that live until the module's tests are done."""
    with ExitStack() as stack:

        def start(*flags: str) -> RunningCluster:
            return stack.enter_context(run_cluster(tmp_path_factory.mktemp("cluster") / "log", *flags))

        yield start


@pytest.fixture
def tiny_model(tmp_path: Path, model_folder: Path) -> Path:
    from tiny_cluster import make_model

    return make_model(tmp_path / "model", model_folder / "tokenizer.json")


@pytest_asyncio.fixture
async def tiny_cluster(redis_url: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """A cluster of `tests/tiny_cluster.py` with a router and no workers."""
    from tiny_cluster import run_tiny_cluster  # imports torch, which other tests need not wait for

    async with run_tiny_cluster(redis_url, tiny_model, monkeypatch) as cluster:
        yield cluster


@pytest.fixture
async def impatient_cluster(redis_url: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """The same, but the router soon gives up a stream that no worker can continue."""
    from tiny_cluster import run_tiny_cluster

    async with run_tiny_cluster(redis_url, tiny_model, monkeypatch, worker_wait_s=1.0) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def references(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Reference]:
    """Made once, even if several processes share the tests, because it takes ten seconds."""
    folder = tmp_path_factory.getbasetemp()
    made = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "references.json"
    with made.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            made.write_text(json.dumps([astuple(reference) for reference in make_references(model_folder)]))
    rows = json.loads(made.read_text())
    return [Reference(name, tuple(prompt), tuple(answer)) for name, prompt, answer in rows]
