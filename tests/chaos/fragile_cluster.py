"""A cluster whose processes a test can kill or stop one by one, with each worker behind a proxy that can misbehave.

    client ─> router ─> [FaultyProxy] ─> worker          prefill worker ─KV─> [FaultyProxy] ─> decode worker

The services, the model and the transfers are real. Owns its processes and proxies; `close` ends them all.
"""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from certificates import Certificate
from clusters import START_TIMEOUT_S, STOP_TIMEOUT_S, wait_until
from ports import lasting_port

from protos import tandem_worker_pb2 as pb
from tandem.chaos.proxy import FaultyProxy
from tandem.client import Client
from tandem.tables import not_at_rest

LEASE_MS = 2000
SAMPLING: dict[str, Any] = {
    "max_tokens": 64, "temperature": 0.8, "seed": 5, "repetition_penalty": 1.1, "ignore_eos": True,
}  # fmt: skip
PROMPT_TOKENS = 160

_random = random.Random(3)


def fresh_prompts(number: int = 4, num_tokens: int = PROMPT_TOKENS) -> list[list[int]]:
    """Return prompts that no cache has, so that their KV must be transferred."""
    return [[_random.randrange(100, 40_000) for _ in range(num_tokens)] for _ in range(number)]


def slowed_by(file: Path, command: Sequence[str]) -> list[str]:
    """Turn a worker's command into that of a worker which `file` slows down."""
    at = command.index("-m")
    return [*command[:at], str(Path(__file__).with_name("slowed_worker.py")), str(file), *command[at + 1 :]]


def ask(cluster: FragileCluster, prompts: list[list[int]], router: int = 1) -> list[list[int]]:
    """Send all prompts at once; return the answers. The client fails on gaps and repetitions in a stream."""
    with cluster.client(router) as client, ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(lambda prompt: client.generate(prompt, **SAMPLING).token_ids, prompts))


@dataclass
class Service:
    """A process of the cluster, and the proxy in front of it (workers only)."""

    command: list[str]
    log: Path
    proxy: FaultyProxy | None = None
    process: subprocess.Popen[str] | None = None
    address: str = ""
    listens: str = "grpc"

    def start(self, *flags: str) -> None:
        """Start the process and wait until it listens. A killed worker comes back behind the same proxy, as a new
        incarnation."""
        self.launch(*flags)
        self.wait_until_listening()

    def launch(self, *flags: str) -> None:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("TANDEM_", "REDIS_"))}
        env |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        with self.log.open("a") as stderr:
            self.process = subprocess.Popen(
                [*self.command, *flags], stdout=subprocess.PIPE, stderr=stderr, text=True, env=env
            )

    def wait_until_listening(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        is_readable, _, _ = select.select([self.process.stdout], [], [], START_TIMEOUT_S)
        line = self.process.stdout.readline().strip() if is_readable else ""
        begin = f"listening {self.listens}="
        assert line.startswith(begin), f"{self.command}:\n{self.log.read_text()[-4000:]}"
        self.address = line.removeprefix(begin)

    def restart(self) -> None:
        """Start the process again after its end. A router keeps its address, since its clients would not learn a new
        one."""
        self.start()

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        if number is signal.SIGKILL:
            self.process.wait()

    def close(self) -> None:
        if self.process is not None:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGCONT)
                self.process.terminate()
                try:
                    self.process.wait(STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    self.process.kill()
                    self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
        if self.proxy is not None:
            self.proxy.close()


@dataclass
class FragileCluster:
    """`services` by name: "router-1", "prefill-1", "decode-1" …"""

    services: dict[str, Service] = field(default_factory=dict)
    tls: Certificate | None = None

    @classmethod
    def start(
        cls,
        folder: Path,
        *,
        redis_url: str,
        model: Path,
        num_routers: int = 1,
        num_prefill: int = 1,
        num_decode: int = 1,
        seed: int = 0,
        worker_flags: Sequence[str] = (),
        flags: Mapping[str, Sequence[str]] = MappingProxyType({}),
        slowed: Mapping[str, Path] = MappingProxyType({}),
        tls: Certificate | None = None,
    ) -> FragileCluster:
        """Start all processes and wait until they can serve.

        worker_flags: for all workers; `flags`: for some, by name.
        slowed: by name, files through which tests slow workers down (`slowed_worker`).
        tls: what all processes and clients present and trust.
        """
        self = cls(tls=tls)
        shared = ["--redis", redis_url, "--model", str(model), "--drain-grace-s", "5"]
        if tls is not None:
            shared += tls.flags
        shared.append("--listen")
        engine = ["--num-threads", "1", "--kv-cache-gib", "0.2", "--max-model-len", "2048", "--lease-ms", str(LEASE_MS)]
        names = [f"prefill-{i + 1}" for i in range(num_prefill)] + [f"decode-{i + 1}" for i in range(num_decode)]
        try:
            for number, name in enumerate(names):
                service = Service([], folder / f"{name}.log")
                service.proxy = FaultyProxy(lambda service=service: service.address, seed + number)
                module = f"{name.split('-')[0]}_service"
                ours = ["--worker-id", name, "--advertise", service.proxy.address]
                command = [module, *ours, *shared, "127.0.0.1:0", *engine]
                self._launch(name, service, [*command, *worker_flags, *flags.get(name, ())], slowed.get(name))
            for service in self.services.values():  # all load their models at the same time
                service.wait_until_listening()
            for number in range(1, num_routers + 1):
                router = Service([], folder / f"router-{number}.log")
                command = ["router", *shared, f"127.0.0.1:{lasting_port()}", "--no-learn-costs"]
                self._launch(f"router-{number}", router, command)
                router.wait_until_listening()
                self.wait_for_workers(number)
        except BaseException:
            self.close()
            raise
        return self

    def _launch(self, name: str, service: Service, command: Sequence[str], slowed: Path | None = None) -> None:
        service.command = [sys.executable, "-P", "-m", *command]
        if slowed is not None:
            service.command = slowed_by(slowed, service.command)
        self.services[name] = service
        service.launch()

    def client(self, router: int = 1, *, resume_s: float = 0) -> Client:
        """Return a client whose calls fail when its router is lost, unless `resume_s` is given."""
        address = self.services[f"router-{router}"].address
        return Client(address, tls=self.tls and self.tls.client, resume_s=resume_s)

    def wait_for_workers(self, router: int) -> None:
        """Wait until that router has a session with every worker."""
        num_workers = sum(service.proxy is not None for service in self.services.values())
        with self.client(router) as client:
            wait_until(
                lambda: sum(w.num_sessions > 0 for w in client.status().workers) == num_workers, 30, "all joined"
            )

    def proxy(self, name: str) -> FaultyProxy:
        proxy = self.services[name].proxy
        assert proxy is not None
        return proxy

    def num_found_silent(self, worker: str) -> int:
        """Return how often, by their logs, routers have given up a session with `worker` because it was silent for a
        lease. Not counted: sessions that end later, by the resumed worker itself, gRPC's pings or the registry."""
        return self.num_sessions_lost(worker, "the worker has sent nothing")

    def num_sessions_lost(self, worker: str, why: str) -> int:
        """Return how many sessions with `worker` the routers lost, by their logs, for a reason that begins so."""
        logs = [service.log.read_text() for name, service in self.services.items() if name.startswith("router")]
        return sum(log.count(f'session lost worker={worker} why="{why}') for log in logs)

    def wait_until_found_silent(self, worker: str, num_before: int) -> None:
        what = f"{worker} is taken for dead, since it says nothing"
        wait_until(lambda: self.num_found_silent(worker) > num_before, 5 * LEASE_MS / 1000, what)

    def num_reached(self, point: str) -> int:
        """Return how often, by their logs, processes have reached that failpoint while it was armed."""
        return sum(service.log.read_text().count(f" failpoint point={point} ") for service in self.services.values())

    def heal(self) -> None:
        for service in self.services.values():
            if service.proxy is not None:
                service.proxy.heal()

    def failed_attempts(self) -> list[str]:
        """Return the lines of the routers' logs about failed attempts, router by router, oldest first."""
        logs = [service.log.read_text() for name, service in self.services.items() if name.startswith("router")]
        return [line for log in logs for line in log.splitlines() if "attempt failed" in line]

    def num_running(self, worker: str) -> int:
        """Return how many requests the worker computes; 0 if the router has lost it, for example because the whole
        machine stood still."""
        found = self.workers().get(worker)
        return found.record.load.num_running if found is not None else 0

    def workers(self) -> dict[str, pb.WorkerStatus]:
        with self.client() as client:
            return {worker.record.worker_id: worker for worker in client.status().workers}

    def problems(self) -> list[str]:
        """Return an audit's problems: wrong block counts, silent workers, blocks neither free nor cached."""
        with self.client() as client:
            return not_at_rest(client.audit())

    def wait_until_at_rest(self, timeout_s: float = 30.0) -> None:
        wait_until(lambda: not self.problems(), timeout_s, "every block free or cached", self.problems)

    def close(self) -> None:
        for service in reversed(self.services.values()):
            service.close()
