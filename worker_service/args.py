"""Flags of a worker process, in addition to those of its engine (`engine.config.EngineArgs`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_transfer import TRANSPORTS
from registry.keys import check_name
from rpc import failpoints
from rpc.entrypoint import ServiceArgs
from rpc.flag_numbers import number
from rpc.server import is_any_host, split_address


@dataclass(frozen=True, kw_only=True)
class WorkerArgs(ServiceArgs):
    """How a worker is reached, and how long it considers silent peers alive.

    Raises `ValueError` naming the field and its bound.
    """

    advertise: str = field(
        default="",
        metadata={
            "help": "HOST:PORT at which others reach this worker. Default: the address it listens on. Required with "
            "--listen 0.0.0.0:PORT, at which others would reach themselves."
        },
    )
    worker_id: str = field(default="", metadata={"help": "Name of this worker. Default: its role and a random suffix."})
    transport: str = field(
        default="grpc",
        metadata={
            "help": "How KV travels: grpc (anywhere), ipc (straight into the other worker's memory, on one "
            "machine) or nixl (NVIDIA's NIXL: RDMA, NVLink, shared memory)."
        },
    )
    lease_ms: int = number(
        10_000,
        "A router that is silent for this long is considered dead, and what it owns on this worker is freed. A "
        "worker whose engine is stuck in a step for this long is left by routers that have another one.",
        least=200,
        most=3_600_000,
    )
    lora_dir: str = field(
        default="",
        metadata={
            "help": "Folder of further LoRA adapters, each a folder in PEFT's layout with the name that requests give. "
            "It is looked at every three seconds: adapters that are put there, exchanged or removed come and go while "
            "the worker runs. Needs --max-loras."
        },
    )
    drain_grace_s: float = number(30.0, "How long running requests may take to finish after SIGTERM.", least=0)
    engine_iteration_timeout_s: float = number(
        300.0,
        "If a step of the engine takes longer than this, the process ends and its requests continue elsewhere: a "
        "GPU that hangs cannot be recovered from within the process. 0: wait for ever.",
        least=1,
        zero="wait for ever",
    )
    failpoints: str = field(
        default="",
        metadata={"help": "For tests: fail on purpose. POINT=ACTION, several separated by commas (rpc/failpoints.py)."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ssl_certfile and not self.ssl_ca_certs:
            raise ValueError("ssl_certfile needs ssl_ca_certs: a worker asks whoever calls it for a certificate")
        failpoints.parse(self.failpoints)
        self._check_advertise()
        if self.worker_id:
            check_name("worker_id", self.worker_id)
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}, is {self.transport!r}")

    def _check_advertise(self) -> None:
        """Refuse a wildcard address, at which others would reach themselves."""
        where = self.advertise or self.listen
        try:
            host, port = split_address(where)
        except ValueError as error:
            raise ValueError(f"advertise: {error}") from error
        if is_any_host(host):
            raise ValueError(
                "advertise must be HOST:PORT at which routers and other workers reach this one, "
                f"not {where!r}, at which each would reach itself"
            )
        if self.advertise and not port:
            raise ValueError(f"advertise must name the port at which others reach this worker, is {where!r}")
