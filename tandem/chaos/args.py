"""The settings of `tandem chaos`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.engine_args import EngineArgs
from engine.lora.modules import check_lora_folder, parse_lora_modules
from router.policy import PolicyConfig
from tandem.chaos.asked import DEADLINE_S
from tandem.chaos.exchanged import adapters_in

ENGINE: dict[str, Any] = {"num_kv_blocks": 256, "kv_offloading_size": 0.2, "max_model_len": 2048}
"""Default settings of the workers, with so few blocks that some KV must move to host memory and back."""
POLICY: dict[str, Any] = {"learn_costs": False}
"""Default settings of the routers' choices, so that KV travels, which the faults are to break."""
LEAST_DEADLINE_S = 20
"""A request that hangs must be seen before its blocks are called a leak (`soak.REST_TIMEOUT_S`)."""


@dataclass(frozen=True, kw_only=True)
class SoakArgs:
    """The settings of a soak. Raises `ValueError` naming the flag."""

    seconds: float = 60.0
    seed: int = 1
    deadline_s: float = DEADLINE_S
    """Of each request."""
    num_prefill: int = 2
    num_decode: int = 2
    num_routers: int = 1
    num_gateways: int = 1
    transport: str = "grpc"
    lora_dir: str = ""
    """Folder of adapters that are exchanged for one another. Empty: none are."""
    engine: EngineArgs = field(default_factory=lambda: EngineArgs(**ENGINE))
    """The workers' engine. Requests select its adapters."""
    is_offloading_given: bool = False
    """Whether `engine.kv_offloading_size` must be as it is. Otherwise it is 0 for a model that cannot have it."""
    policy: PolicyConfig = field(default_factory=lambda: PolicyConfig(**POLICY))

    def __post_init__(self) -> None:
        if not 5 <= self.seconds <= 86_400:
            raise ValueError(f"--seconds must be in [5, 86400], is {self.seconds:g}")
        if not LEAST_DEADLINE_S <= self.deadline_s <= 3600:
            raise ValueError(f"--deadline-s must be in [{LEAST_DEADLINE_S}, 3600], is {self.deadline_s:g}")
        for flag, value in (("--prefill", self.num_prefill), ("--decode", self.num_decode)):
            if not 2 <= value <= 16:
                raise ValueError(f"{flag} must be in [2, 16]: one fails, another goes on; is {value}")
        for flag, value in (("--routers", self.num_routers), ("--gateways", self.num_gateways)):
            if not 1 <= value <= 16:
                raise ValueError(f"{flag} must be in [1, 16], is {value}")
        stay = parse_lora_modules(self.engine.lora_modules)
        for name, folder in stay.items():
            try:
                check_lora_folder(name, folder)
            except ValueError as error:
                raise ValueError(f"--lora-modules: {error}") from error
        exchanged = self.adapters_to_exchange()
        if both := sorted(stay.keys() & exchanged.keys()):
            raise ValueError(f"--lora-dir and --lora-modules must not have the same name; both have {both[0]!r}")
        if exchanged and 0 < self.engine.max_loras < self.max_loras:
            raise ValueError(
                f"--max-loras must be at least {self.max_loras}, to exchange {len(exchanged)} adapters without "
                f"refusing requests for them, or left out; is {self.engine.max_loras}"
            )

    @property
    def max_loras(self) -> int:
        """Adapters that a worker has room for: with less, those that leave keep others of their name away."""
        num = len(self.adapters_to_exchange())
        return max(self.engine.max_loras, 2 * num + 2 if num else 0)

    def adapters_to_exchange(self) -> dict[str, Path]:
        """The folders of the adapters to exchange, by name."""
        return adapters_in(Path(self.lora_dir).expanduser()) if self.lora_dir else {}
