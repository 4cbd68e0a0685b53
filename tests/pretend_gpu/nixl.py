"""The real NIXL, which is told that a pretended GPU's memory is the host's, as it truly is. The agents, their threads
and the calls of them are real; what UCX does for a GPU's memory is not shown."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kv_transfer import nixl_agent
from pretend_gpu.devices import used
from pretend_gpu.races import Accesses, Timeline, places_of_rows
from pretend_gpu.streams import host

_import_real_nixl = nixl_agent._import_nixl


def import_nixl(accesses: Accesses, pools: Mapping[int, torch.Tensor]) -> Any:
    """Replaces `kv_transfer.nixl_agent._import_nixl`. `pools`: the process' own, by address."""
    api = _import_real_nixl()

    class Agent(api.nixl_agent):  # type: ignore[misc, name-defined]
        _pool: tuple[torch.Tensor, int]
        """The pool's memory, and how many rows (a block of one layer) it has."""
        _writes: dict[int, tuple[Any, Timeline]]
        """The rows that each write reads, and its timeline, by handle."""

        def register_memory(self, regions: Any, memory: str) -> Any:
            used()  # in the calling thread's context
            self._writes = {}
            return super().register_memory(regions, _where(memory))

        def prep_xfer_dlist(self, agent_name: str, rows: Any, memory: str) -> Any:
            [[address, _, _, _, num_rows]] = rows.tolist()
            if agent_name == "NIXL_INIT_AGENT":
                self._pool = pools[address], num_rows
            return super().prep_xfer_dlist(agent_name, rows, _where(memory))

        def make_prepped_xfer(self, how: str, local: Any, src: Any, remote: Any, dst: Any) -> Any:
            handle = super().make_prepped_xfer(how, local, src, remote, dst)
            self._writes[id(handle)] = src, Timeline("NIXL")
            return handle

        def transfer(self, handle: Any) -> str:
            rows, timeline = self._writes[id(handle)]
            memory, num_rows = self._pool
            timeline.follow(host.seen)
            places = places_of_rows(memory.view(torch.uint8).view(num_rows, -1), np.array(rows))
            accesses.touch(memory, places, "a write to a peer", is_written=False, timeline=timeline)
            return self._noted(handle, super().transfer(handle))

        def check_xfer_state(self, handle: Any) -> str:
            return self._noted(handle, super().check_xfer_state(handle))

        def _noted(self, handle: Any, state: str) -> str:
            if state == "DONE" and (write := self._writes.pop(id(handle), None)):
                host.follow(write[1].mark())
            return state

    return SimpleNamespace(**vars(api) | {"nixl_agent": Agent})


def _where(memory: str) -> str:
    assert memory == "VRAM"
    return "DRAM"
