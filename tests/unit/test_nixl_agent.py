"""The NIXL agent's thread, over a NIXL that does nothing."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kv_transfer import HostPool, KVLayout, PeerUnreachable, nixl_agent
from kv_transfer.nixl_agent import NixlAgent, NixlCopying, NixlPeerPool, RemotePool
from kv_transfer.transfer import Terms, Transfer

LAYOUT = KVLayout(num_layers=1, num_blocks=2, block_size=4, num_kv_heads=1, head_dim=8, dtype="bfloat16")


class WatchedPool(HostPool):
    def __init__(self, heard: list[tuple[str, int]]) -> None:
        super().__init__(LAYOUT, np.zeros((1, 2, LAYOUT.block_bytes), dtype=np.uint8))
        self._heard = heard

    def bind_thread(self) -> None:
        self._heard.append(("bound", threading.get_ident()))


class Agent:
    """NIXL's."""

    def __init__(self, *_: object) -> None:
        pass

    def get_agent_metadata(self) -> bytes:
        return b"metadata"

    def __getattr__(self, name: str) -> Any:
        return lambda *_: SimpleNamespace(release=lambda: None)


def replace_nixl(monkeypatch: pytest.MonkeyPatch, agent: type[Agent]) -> None:
    api = SimpleNamespace(nixlBind=SimpleNamespace(), nixl_agent=agent, nixl_agent_config=lambda **_: None)
    monkeypatch.setattr(nixl_agent, "_import_nixl", lambda: api)


def test_its_thread_is_bound_to_the_memory_before_nixl_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX looks for the calling thread's CUDA context already when it opens its devices."""
    heard: list[tuple[str, int]] = []

    class HeardAgent(Agent):
        def __init__(self, *_: object) -> None:
            heard.append(("made", threading.get_ident()))

    replace_nixl(monkeypatch, HeardAgent)
    agent = NixlAgent("sender", WatchedPool(heard))
    assert [what for what, _ in heard] == ["bound", "made"]
    assert {thread for _, thread in heard} == {agent.call(threading.get_ident).result()}
    assert agent.call(threading.get_ident).result() != threading.get_ident()
    agent.close()


def test_a_write_under_way_that_is_late_is_released_before_nixl_can_go_on_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[str] = []
    is_late, has_ended = threading.Event(), threading.Event()

    class BusyAgent(Agent):
        def make_prepped_xfer(self, *_: object) -> object:
            return SimpleNamespace(release=lambda: heard.append("released"))

        def transfer(self, _: object) -> str:
            is_late.set()  # this process is stopped now, and goes on a lease later
            return "PROC"

        def check_xfer_state(self, _: object) -> str:
            heard.append("asked")
            return "PROC"

    def end(_: int, __: object) -> None:
        heard.append("ended")
        has_ended.set()

    replace_nixl(monkeypatch, BusyAgent)
    agent = NixlAgent("sender", WatchedPool([]))
    terms = Terms(
        remote=RemotePool("receiver", None, 2), is_cancelled=lambda: False,
        late_at_s=lambda: -math.inf if is_late.is_set() else math.inf, on_end=end, patience_s=5.0,
    )  # fmt: skip
    agent.post(Transfer(terms, 0, [0], [1]))
    assert has_ended.wait(5)
    agent.close()
    assert heard == ["released", "ended"]


ROWS = np.array([[1, 0], [3, 2]])


def test_a_copy_that_is_late_under_way_is_given_up_and_never_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[object] = []
    until_s = [math.inf]

    class BusyAgent(Agent):
        def make_prepped_xfer(self, _: str, _ours: object, src: Any, _theirs: object, dst: Any) -> object:
            heard.append((src.tolist(), dst.tolist()))
            return SimpleNamespace(release=lambda: heard.append("released"))

        def transfer(self, _: object) -> str:
            until_s[0] = -math.inf
            return "PROC"

        def check_xfer_state(self, _: object) -> str:
            heard.append("asked")
            return "PROC"

    replace_nixl(monkeypatch, BusyAgent)
    agent = NixlAgent("sender", WatchedPool([]))
    copying = NixlPeerPool(agent, RemotePool("receiver", None, 4)).copy(ROWS, lambda: until_s[0])
    with pytest.raises(PeerUnreachable, match="receiver: a write did not end in its time"):
        copying.synchronize()
    agent.close()
    assert heard == [([1, 0], [3, 2]), "released"]


def test_a_copy_that_was_late_stays_so_whatever_is_heard_after_that() -> None:
    until_s = [math.inf]
    copying = NixlCopying("receiver", lambda: until_s[0])
    assert not copying.is_late()
    until_s[0] = -math.inf
    assert copying.is_late()
    until_s[0] = math.inf
    assert copying.is_late()
    copying.end(1, None)
    with pytest.raises(PeerUnreachable):
        copying.synchronize()


def test_a_copy_that_is_late_before_it_begins_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[object] = []

    class HeardAgent(Agent):
        def transfer(self, handle: object) -> str:
            begun.append(handle)
            return "DONE"

    replace_nixl(monkeypatch, HeardAgent)
    agent = NixlAgent("sender", WatchedPool([]))
    copying = NixlPeerPool(agent, RemotePool("receiver", None, 4)).copy(ROWS, lambda: -math.inf)
    with pytest.raises(PeerUnreachable, match="did not end in its time"):
        copying.synchronize()
    agent.close()
    assert begun == []
