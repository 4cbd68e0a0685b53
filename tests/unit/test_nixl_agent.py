"""The NIXL agent's thread, over a NIXL that does nothing."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kv_transfer import HostPool, KVLayout, nixl_agent
from kv_transfer.nixl_agent import NixlAgent

LAYOUT = KVLayout(num_layers=1, num_blocks=2, block_size=4, num_kv_heads=1, head_dim=8, dtype="bfloat16")


class WatchedPool(HostPool):
    def __init__(self, heard: list[tuple[str, int]]) -> None:
        super().__init__(LAYOUT, np.zeros((1, 2, LAYOUT.block_bytes), dtype=np.uint8))
        self._heard = heard

    def bind_thread(self) -> None:
        self._heard.append(("bound", threading.get_ident()))


def test_its_thread_is_bound_to_the_memory_before_nixl_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX looks for the calling thread's CUDA context already when it opens its devices."""
    heard: list[tuple[str, int]] = []

    class Agent:
        def __init__(self, *_: object) -> None:
            heard.append(("made", threading.get_ident()))

        def get_agent_metadata(self) -> bytes:
            return b"metadata"

        def __getattr__(self, name: str) -> Any:
            return lambda *_: SimpleNamespace(release=lambda: None)

    api = SimpleNamespace(nixlBind=SimpleNamespace(), nixl_agent=Agent, nixl_agent_config=lambda **_: None)
    monkeypatch.setattr(nixl_agent, "_import_nixl", lambda: api)
    agent = NixlAgent("sender", WatchedPool(heard))
    assert [what for what, _ in heard] == ["bound", "made"]
    assert {thread for _, thread in heard} == {agent.call(threading.get_ident).result()}
    assert agent.call(threading.get_ident).result() != threading.get_ident()
    agent.close()
