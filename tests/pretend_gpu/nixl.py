"""NIXL itself, which is told that a pretended GPU's memory is the host's: that it is. Its agents are real ones, as are
their threads and what they are asked; what UCX does for a GPU's memory is not seen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kv_transfer import nixl_agent
from pretend_gpu.devices import used

_import_real_nixl = nixl_agent._import_nixl


def import_nixl() -> Any:
    """In the place of `kv_transfer.nixl_agent._import_nixl`."""
    api = _import_real_nixl()

    class Agent(api.nixl_agent):  # type: ignore[misc, name-defined]
        def register_memory(self, regions: Any, memory: str) -> Any:
            used()  # in the calling thread's context
            return super().register_memory(regions, _where(memory))

        def prep_xfer_dlist(self, agent_name: str, rows: Any, memory: str) -> Any:
            return super().prep_xfer_dlist(agent_name, rows, _where(memory))

    return SimpleNamespace(**vars(api) | {"nixl_agent": Agent})


def _where(memory: str) -> str:
    assert memory == "VRAM"
    return "DRAM"
