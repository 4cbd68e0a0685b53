"""Flags of a worker process, beside those of its engine (`engine.config.EngineArgs`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_transfer import TRANSPORTS
from registry.keys import check_name
from rpc import failpoints
from rpc.entrypoint import ServiceArgs
from rpc.flag_numbers import number
from rpc.server import split_address


@dataclass(frozen=True, kw_only=True)
class WorkerArgs(ServiceArgs):
    """How a worker is reached and how long it believes in silent peers.

    Raises `ValueError` naming the field and its bound.
    """

    advertise: str = field(
        default="", metadata={"help": "HOST:PORT that others reach this worker at. Default: where it listens."}
    )
    worker_id: str = field(default="", metadata={"help": "Name of this worker. Default: its role and a random part."})
    transport: str = field(
        default="grpc",
        metadata={
            "help": "How KV travels: grpc (anywhere), ipc (into the other worker's memory, on one machine), nixl (by "
            "NVIDIA's NIXL: RDMA, NVLink, shared memory)."
        },
    )
    lease_ms: int = number(
        10_000,
        "A router that is silent for this long is taken for dead; what it owns here is freed. An engine that stands "
        "still within a step for this long is left by routers that have another worker.",
        least=200,
        most=3_600_000,
    )
    drain_grace_s: float = number(30.0, "On SIGTERM, how long running requests may take to finish.", least=0)
    engine_iteration_timeout_s: float = number(
        300.0,
        "A step of the engine that takes longer ends the process, and its requests go on elsewhere: a GPU that hangs "
        "cannot be helped from within. 0: wait for ever.",
        least=1,
        zero="wait for ever",
    )
    failpoints: str = field(
        default="", metadata={"help": "For tests: fail on purpose, POINT=ACTION with commas (rpc/failpoints.py)."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ssl_certfile and not self.ssl_ca_certs:
            raise ValueError("ssl_certfile needs ssl_ca_certs: a worker asks whoever calls it for a certificate")
        failpoints.parse(self.failpoints)
        if self.advertise:
            split_address(self.advertise)
        if self.worker_id:
            check_name("worker_id", self.worker_id)
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}, is {self.transport!r}")
