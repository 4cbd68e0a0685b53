"""Flags of a worker process, in addition to those of its engine (`engine.engine_args.EngineArgs`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kv_transfer import TRANSPORTS
from registry.keys import check_name
from rpc import failpoints
from rpc.entrypoint import ServiceArgs
from rpc.flag_numbers import number
from rpc.flag_texts import check_address, check_choice
from rpc.server import is_any_host


@dataclass(frozen=True, kw_only=True)
class WorkerArgs(ServiceArgs):
    """How a worker is reached, and how long it considers silent peers alive.

    Raises `ValueError` naming the field and its bound.
    """

    advertise: str = field(
        default="",
        metadata={
            "help": "HOST:PORT at which routers and other workers reach this worker. Default: the address it listens "
            "on. Required with --listen 0.0.0.0:PORT, which is not reachable from elsewhere."
        },
    )
    worker_id: str = field(
        default="", metadata={"help": "Unique name of this worker. Default: its role and a random suffix."}
    )
    transport: str = field(
        default="grpc",
        metadata={
            "help": "Transport for KV blocks between workers: grpc (works anywhere), ipc (writes into the other "
            "worker's memory; same machine only) or nixl (NVIDIA's NIXL: RDMA, NVLink, shared memory)."
        },
    )
    lease_ms: int = number(
        10_000,
        "Lease of a router, in milliseconds. A router that has sent nothing for this long is considered dead, and its "
        "requests and memory on this worker are freed. If the engine is stuck in a step for this long, routers move "
        "their requests to other workers, if there are any.",
        least=200,
        most=3_600_000,
    )
    lora_dir: str = field(
        default="",
        metadata={
            "help": "Folder of LoRA adapters to load at run time, each a folder in PEFT's layout whose name requests "
            "give as their model. It is checked every three seconds: added adapters are loaded, replaced ones "
            "reloaded, removed ones unloaded. Needs --max-loras."
        },
    )
    drain_grace_s: float = number(30.0, "Seconds that running requests have to finish after SIGTERM.", least=0)
    engine_iteration_timeout_s: float = number(
        300.0,
        "Maximum duration of one engine step, in seconds. If a step takes longer, as on a GPU that hangs, the process "
        "exits and its requests continue on other workers. 0: no limit.",
        least=1,
        zero="no limit",
    )
    failpoints: str = field(
        default="",
        metadata={"help": "For tests: inject failures. POINT=ACTION, several separated by commas (rpc/failpoints.py)."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ssl_certfile and not self.ssl_ca_certs:
            raise ValueError("ssl_certfile needs ssl_ca_certs: a worker requires a certificate of its callers")
        failpoints.parse(self.failpoints)
        self._check_advertise()
        if self.worker_id:
            check_name("worker_id", self.worker_id)
        check_choice("transport", self.transport, TRANSPORTS)

    def _check_advertise(self) -> None:
        """Refuse a wildcard address, at which others would reach themselves."""
        where = self.advertise or self.listen
        host, port = check_address("advertise", where)
        if is_any_host(host):
            raise ValueError(
                "advertise must be HOST:PORT at which routers and other workers reach this one, "
                f"not {where!r}, which is not reachable from elsewhere"
            )
        if self.advertise and not port:
            raise ValueError(f"advertise must name the port at which others reach this worker, is {where!r}")


def check_lora_dir(lora_dir: str, max_loras: int) -> None:
    """Raise `ValueError` if the folder does not exist, or the engine has no room for its adapters."""
    if lora_dir and not max_loras:
        raise ValueError("lora_dir needs room for adapters: also give max_loras, the maximum number of them at once")
    if max_loras and not lora_dir:
        raise ValueError(
            "max_loras is room for adapters that are added from lora_dir, which is empty: leave max_loras out, or "
            f"give lora_dir (those of lora_modules take no room), is {max_loras}"
        )
    if lora_dir and not Path(lora_dir).expanduser().is_dir():
        raise ValueError(f"lora_dir: there is no folder {lora_dir}")
