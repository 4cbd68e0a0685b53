"""Clusters of real processes for tests: run `tandem up`, from its ready line until it has drained."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import psutil

from protos import tandem_worker_pb2 as pb
from rpc.errors import Unreachable
from tandem.client import Client
from tandem.tables import not_at_rest

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class RunningCluster:
    """A `tandem up` of this test run."""

    address: str
    pid: int
    log: Path
    http_address: str = ""

    def workers(self) -> list[pb.WorkerStatus]:
        with Client(self.address) as client:
            return list(client.status().workers)

    def audit_problems(self) -> list[str]:
        """Return an audit's problems: wrong block counts, silent workers, blocks neither free nor cached; or that the
        router is being started again."""
        with Client(self.address) as client:
            try:
                return not_at_rest(client.audit())
            except Unreachable as error:
                return [error.message]

    def wait_until_at_rest(self, timeout_s: float = 15.0) -> None:
        """Wait until every block of every worker is free or cached and the audit finds no problem."""
        wait_until(lambda: not self.audit_problems(), timeout_s, "every block free or cached", self.audit_problems)

    def services(self) -> dict[str, psutil.Process]:
        """Return the running child processes by name: "redis", "router", "gateway", "prefill-1", …"""
        found = {}
        for child in psutil.Process(self.pid).children():
            with suppress(psutil.NoSuchProcess):  # the child has ended, reaped or not
                if name := service_name(" ".join(child.cmdline())):
                    found[name] = child
        return found


def service_name(command_line: str) -> str:
    """The service with this command line. Empty for a child before its exec: it still shows its parent's line."""
    for pattern in (r"--worker-id (\S+)", r"-m (router|gateway)\b", r"unixsocket.*/(redis)\.sock"):
        if found := re.search(pattern, command_line):
            return found[1]
    return ""


@contextmanager
def run_cluster(
    log: Path, *flags: str, python: str = sys.executable, env: Mapping[str, str] = MappingProxyType({})
) -> Iterator[RunningCluster]:
    """Run `tandem up` with `flags`; fail unless it is ready in time and exits 0 after SIGTERM. `env` is added to our
    own environment."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("TANDEM_", "REDIS_"))}
    environment = {**ours, **env}
    # A small model computes a prompt faster than its KV is transferred, so learned costs would avoid transfers, which
    # the tests need.
    command = [python, "-m", "tandem", "up", "--listen", "127.0.0.1:0", "--no-learn-costs", *flags]
    if "--http-port" not in flags:
        command.append("--no-http")
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
        assert process.stdout is not None
        try:
            is_readable, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
            line = process.stdout.readline().strip() if is_readable else ""
            assert line.startswith("ready grpc="), f"no ready line with {flags}:\n{log.read_text()[-4000:]}"
            address, _, http_address = line.removeprefix("ready grpc=").partition(" http=")
            yield RunningCluster(address, process.pid, log, http_address)
            process.send_signal(signal.SIGTERM)
            assert process.wait(STOP_TIMEOUT_S) == 0, f"exit code {process.returncode}:\n{log.read_text()[-4000:]}"
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            process.stdout.close()


def wait_until(
    condition: Callable[[], bool], timeout_s: float, what: str, describe: Callable[[], object] = lambda: ""
) -> None:
    """Poll `condition` until it holds; after `timeout_s` seconds, fail with a message that names `what`."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what}. {describe()}"
        time.sleep(0.02)
