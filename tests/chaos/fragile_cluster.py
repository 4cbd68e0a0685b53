"""A cluster of single processes, each worker behind a proxy that a test makes misbehave, or kills with its process.

    client ─> router ─> [FaultyProxy] ─> worker          prefill worker ─KV─> [FaultyProxy] ─> decode worker

The real services, the real model, real bytes. Owns its processes and proxies; `close` ends them all.
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
    """That no cache has seen, so that KV travels."""
    return [[_random.randrange(100, 40_000) for _ in range(num_tokens)] for _ in range(number)]


def slowed_by(file: Path, command: Sequence[str]) -> list[str]:
    """A worker's command, of a worker that `file` slows down."""
    at = command.index("-m")
    return [*command[:at], str(Path(__file__).with_name("slowed_worker.py")), str(file), *command[at + 1 :]]


def ask(cluster: FragileCluster, prompts: list[list[int]], router: int = 1) -> list[list[int]]:
    """All at once. The client itself refuses gaps and repetitions."""
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
        """Until it listens. A worker that was killed comes back behind the same proxy, as another incarnation."""
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
        """After its end. A router comes back where it was: its clients do not learn of another address."""
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
        """All processes, ready to serve. `worker_flags` are for all workers, `flags` for some by name. `slowed`: the
        files by which tests slow some down (`slowed_worker`). `tls`: what each process shows and trusts, and clients,
        too."""
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
            for service in self.services.values():  # they load at the same time
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
        """That hears of it when its router is lost, unless `resume_s`."""
        address = self.services[f"router-{router}"].address
        return Client(address, tls=self.tls and self.tls.client, resume_s=resume_s)

    def wait_for_workers(self, router: int) -> None:
        """Until that router has a session with every worker."""
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
        """How often routers have given up a session with it since they heard nothing for a lease, by their logs. What
        the worker ends itself when it is back, gRPC's pings and the registry find out later: that does not count."""
        return self.num_sessions_lost(worker, "the worker has sent nothing")

    def num_sessions_lost(self, worker: str, why: str) -> int:
        """By routers, for a reason that begins so, by their logs."""
        logs = [service.log.read_text() for name, service in self.services.items() if name.startswith("router")]
        return sum(log.count(f'session lost worker={worker} why="{why}') for log in logs)

    def wait_until_found_silent(self, worker: str, num_before: int) -> None:
        what = f"{worker} is taken for dead, since it says nothing"
        wait_until(lambda: self.num_found_silent(worker) > num_before, 5 * LEASE_MS / 1000, what)

    def num_reached(self, point: str) -> int:
        """How often processes have come to that failpoint, armed, by their logs."""
        return sum(service.log.read_text().count(f" failpoint point={point} ") for service in self.services.values())

    def heal(self) -> None:
        for service in self.services.values():
            if service.proxy is not None:
                service.proxy.heal()

    def failed_attempts(self) -> list[str]:
        """What routers' logs say of them, the last ones last."""
        logs = [service.log.read_text() for name, service in self.services.items() if name.startswith("router")]
        return [line for log in logs for line in log.splitlines() if "attempt failed" in line]

    def num_running(self, worker: str) -> int:
        """What it computes; 0 where a router has lost it, as when all of a machine stands still for a moment."""
        found = self.workers().get(worker)
        return found.record.load.num_running if found is not None else 0

    def workers(self) -> dict[str, pb.WorkerStatus]:
        with self.client() as client:
            return {worker.record.worker_id: worker for worker in client.status().workers}

    def problems(self) -> list[str]:
        """What an audit finds: books that do not balance, workers that do not answer, blocks that are not at rest."""
        with self.client() as client:
            return not_at_rest(client.audit())

    def wait_until_at_rest(self, timeout_s: float = 30.0) -> None:
        wait_until(lambda: not self.problems(), timeout_s, "every block free or cached", self.problems)

    def close(self) -> None:
        for service in reversed(self.services.values()):
            service.close()
