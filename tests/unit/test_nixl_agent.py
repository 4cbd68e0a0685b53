"""The thread of the NIXL agent, with a stand-in for NIXL that does nothing."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kv_transfer import HostPool, KVLayout, PeerUnreachable, nixl_agent
from kv_transfer.errors import TransferError
from kv_transfer.nixl_agent import NixlAgent, RemotePool
from kv_transfer.nixl_peer import NixlCopying, NixlPeerPool
from kv_transfer.transfer import Terms, Transfer
from protos import tandem_kv_transfer_pb2 as pb

LAYOUT = KVLayout(num_layers=1, num_blocks=2, block_size=4, num_kv_heads=1, head_dim=8, dtype="bfloat16")


class WatchedPool(HostPool):
    def __init__(self, heard: list[tuple[str, int]]) -> None:
        super().__init__(LAYOUT, np.zeros((1, 2, LAYOUT.block_bytes), dtype=np.uint8))
        self._heard = heard

    def bind_thread(self) -> None:
        self._heard.append(("bound", threading.get_ident()))


class Agent:
    """NIXL's agent."""

    def __init__(self, *_: object) -> None:
        pass

    def get_agent_metadata(self) -> bytes:
        return b"metadata"

    def __getattr__(self, name: str) -> Any:
        return lambda *_: SimpleNamespace(release=lambda: None)


class NixlError(Exception):
    pass


def remote_pool(name: str = "receiver", num_blocks: int = 2) -> RemotePool:
    return RemotePool(name, SimpleNamespace(release=lambda: None), num_blocks)


def peer_pool(agent: NixlAgent) -> NixlPeerPool:
    return NixlPeerPool("receiver", remote_pool(num_blocks=4), post=agent.post, close=lambda: None)


def replace_nixl(monkeypatch: pytest.MonkeyPatch, agent: type[Agent]) -> None:
    bindings = SimpleNamespace(error=NixlError)
    api = SimpleNamespace(nixlBind=bindings, nixl_agent=agent, nixl_agent_config=lambda **_: None)
    monkeypatch.setattr(nixl_agent, "_import_nixl", lambda: api)


def test_its_thread_is_bound_to_the_memory_before_nixl_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX looks for the CUDA context of the calling thread when it opens its devices."""
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
            is_late.set()  # as if this process stopped here, and went on a lease later
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
        remote=remote_pool(), is_cancelled=lambda: False,
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
    copying = peer_pool(agent).copy(ROWS, lambda: until_s[0])
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
    copying = peer_pool(agent).copy(ROWS, lambda: -math.inf)
    with pytest.raises(PeerUnreachable, match="did not end in its time"):
        copying.synchronize()
    agent.close()
    assert begun == []


def test_a_call_that_nobody_waits_for_any_more_does_not_end_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example the call of a connection that is given up while this worker closes."""
    replace_nixl(monkeypatch, Agent)
    agent = NixlAgent("sender", WatchedPool([]))
    may_go_on = threading.Event()
    agent.call(may_go_on.wait)
    assert agent.call(lambda: None).cancel()
    may_go_on.set()
    closing = threading.Thread(target=agent.close, daemon=True)
    closing.start()
    closing.join(5)
    assert not closing.is_alive()


class Peers:
    """Transfers to several peers, and how they ended."""

    def __init__(self) -> None:
        self.ended: dict[str, TransferError | None] = {}
        self._has_changed = threading.Condition()

    def transfer(self, name: str, remote: RemotePool, patience_s: float = 5.0) -> Transfer:
        def end(_: int, error: TransferError | None) -> None:
            with self._has_changed:
                self.ended[name] = error
                self._has_changed.notify_all()

        terms = Terms(
            remote=remote, is_cancelled=lambda: False, late_at_s=lambda: math.inf, on_end=end, patience_s=patience_s
        )
        return Transfer(terms, 0, [0], [1])

    def wait_for(self, *names: str) -> None:
        with self._has_changed:
            assert self._has_changed.wait_for(lambda: self.ended.keys() >= set(names), 5)


def test_a_write_that_failed_ends_those_to_its_peer_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    has_failed = threading.Event()

    class FailingAgent(Agent):
        def make_prepped_xfer(self, _: str, _ours: object, _src: Any, theirs: Any, _dst: Any) -> object:
            return SimpleNamespace(release=lambda: None, peer=theirs)

        def transfer(self, _: object) -> str:
            return "PROC"

        def check_xfer_state(self, handle: Any) -> str:
            return "PROC" if not has_failed.is_set() else "ERR" if handle.peer is bad.descriptors else "DONE"

    replace_nixl(monkeypatch, FailingAgent)
    agent = NixlAgent("sender", WatchedPool([]))
    bad, good, peers = remote_pool("bad"), remote_pool("good"), Peers()
    for name, remote in (("one", bad), ("two", bad), ("three", good)):
        agent.post(peers.transfer(name, remote))
    has_failed.set()
    peers.wait_for("one", "two", "three")
    agent.post(peers.transfer("four", bad))
    peers.wait_for("four")
    assert [str(peers.ended[name]) for name in ("one", "two")] == ["bad: a write failed"] * 2
    assert peers.ended["three"] is None
    assert isinstance(peers.ended["four"], PeerUnreachable)
    agent.close()


def test_the_agent_of_a_write_that_was_given_up_is_not_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX would go on sending what it has of that write."""
    made: list[StuckAgent] = []
    called: list[StuckAgent] = []

    class StuckAgent(Agent):
        def __init__(self, *_: object) -> None:
            made.append(self)

        def add_remote_agent(self, _: bytes) -> str:
            called.append(self)
            return "receiver"

        def transfer(self, _: object) -> str:
            called.append(self)
            return "PROC" if self is made[0] else "DONE"

        def check_xfer_state(self, _: object) -> str:
            called.append(self)
            return "PROC"

    replace_nixl(monkeypatch, StuckAgent)
    agent, peers = NixlAgent("sender", WatchedPool([])), Peers()
    endpoint = pb.NixlEndpoint(agent_metadata=b"metadata", base_address=1, memory="DRAM")
    remote = agent.add_remote("receiver", endpoint, 2).result(5)
    agent.post(peers.transfer("given up", remote, patience_s=0.0))
    agent.post(peers.transfer("beside it", remote_pool("another")))
    peers.wait_for("given up", "beside it")
    assert all(isinstance(error, PeerUnreachable) for error in peers.ended.values())
    called.clear()
    agent.post(peers.transfer("again", agent.add_remote("receiver", endpoint, 2).result(5)))
    peers.wait_for("again")
    assert peers.ended["again"] is None
    assert len(made) == 2
    assert set(called) == {made[1]}
    agent.close()


def test_an_agent_that_could_not_be_made_anew_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Perhaps memory cannot be registered a second time: nothing of the half-made agent is used."""

    made: list[NarrowAgent] = []

    class NarrowAgent(Agent):
        def __init__(self, *_: object) -> None:
            made.append(self)

        def add_remote_agent(self, _: bytes) -> str:
            return "receiver"

        def register_memory(self, *_: object) -> object:
            if len(made) == 2:
                raise NixlError("no memory can be locked")
            return object()

        def make_prepped_xfer(self, _: str, ours: Any, *_rest: object) -> object:
            return SimpleNamespace(release=ours.release)

        def transfer(self, _: object) -> str:
            return "PROC" if self is made[0] else "DONE"

        def check_xfer_state(self, _: object) -> str:
            return "PROC"

    replace_nixl(monkeypatch, NarrowAgent)
    agent, peers = NixlAgent("sender", WatchedPool([])), Peers()
    endpoint = pb.NixlEndpoint(agent_metadata=b"metadata", base_address=1, memory="DRAM")
    agent.post(peers.transfer("given up", agent.add_remote("receiver", endpoint, 2).result(5), patience_s=0.0))
    peers.wait_for("given up")
    with pytest.raises(PeerUnreachable, match="no memory can be locked"):
        agent.add_remote("receiver", endpoint, 2).result(5)
    agent.post(peers.transfer("again", agent.add_remote("receiver", endpoint, 2).result(5)))
    peers.wait_for("again")
    assert peers.ended["again"] is None
    agent.close()


def test_an_agent_that_does_not_end_well_is_not_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[StubbornAgent] = []

    class StubbornAgent(Agent):
        def __init__(self, *_: object) -> None:
            made.append(self)

        def add_remote_agent(self, _: bytes) -> str:
            return "receiver"

        def deregister_memory(self, *_: object) -> None:
            raise NixlError("busy")

        def transfer(self, _: object) -> str:
            return "PROC" if self is made[0] else "DONE"

        def check_xfer_state(self, _: object) -> str:
            return "PROC"

    replace_nixl(monkeypatch, StubbornAgent)
    agent, peers = NixlAgent("sender", WatchedPool([])), Peers()
    endpoint = pb.NixlEndpoint(agent_metadata=b"metadata", base_address=1, memory="DRAM")
    agent.post(peers.transfer("given up", agent.add_remote("receiver", endpoint, 2).result(5), patience_s=0.0))
    peers.wait_for("given up")
    agent.post(peers.transfer("again", agent.add_remote("receiver", endpoint, 2).result(5)))
    peers.wait_for("again")
    assert peers.ended["again"] is None
    agent.close()


def test_a_receiver_that_closes_while_it_is_written_to_logs_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """When a sender's stream broke, the agent waits as long as the stream's blocks are in use."""
    replace_nixl(monkeypatch, Agent)
    agent = NixlAgent("receiver", WatchedPool([]))
    agent.enter_push()
    agent.call(agent._tear_down).result(5)
    agent.call(lambda: None).result(5)  # a turn later
    agent.close()
    assert caplog.records == []


def test_a_peer_that_stands_still_holds_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    class HalfStuckAgent(Agent):
        def make_prepped_xfer(self, _: str, _ours: object, _src: Any, theirs: Any, _dst: Any) -> object:
            return SimpleNamespace(release=lambda: None, peer=theirs)

        def transfer(self, handle: Any) -> str:
            return "PROC" if handle.peer is stuck.descriptors else "DONE"

        def check_xfer_state(self, _: object) -> str:
            return "PROC"

    replace_nixl(monkeypatch, HalfStuckAgent)
    monkeypatch.setattr(nixl_agent, "MAX_BYTES_IN_FLIGHT", {"DRAM": 4 * LAYOUT.block_bytes})
    agent, peers = NixlAgent("sender", WatchedPool([])), Peers()
    stuck, good = remote_pool("stuck"), remote_pool("good")
    for number in range(8):
        agent.post(peers.transfer(f"stuck {number}", stuck))
    agent.post(peers.transfer("good", good))
    peers.wait_for("good")
    assert peers.ended == {"good": None}
    assert stuck.num_bytes_in_flight == 2 * LAYOUT.block_bytes
    agent.close()
    assert all(isinstance(peers.ended[f"stuck {number}"], PeerUnreachable) for number in range(8))


def test_peers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    has_all = threading.Event()

    class BusyAgent(Agent):
        def make_prepped_xfer(self, _: str, _ours: object, _src: Any, theirs: Any, _dst: Any) -> object:
            return SimpleNamespace(release=lambda: None, peer=theirs)

        def transfer(self, handle: Any) -> str:
            begun.append(names[id(handle.peer)])
            if len(begun) == 9:
                has_all.set()
            return "PROC"

        def check_xfer_state(self, _: object) -> str:
            return "DONE"

    replace_nixl(monkeypatch, BusyAgent)
    monkeypatch.setattr(nixl_agent, "MAX_BYTES_IN_FLIGHT", {"DRAM": 2 * LAYOUT.block_bytes})
    agent, peers = NixlAgent("sender", WatchedPool([])), Peers()
    remotes = [remote_pool(name) for name in "abc"]
    names = {id(remote.descriptors): remote.agent_name for remote in remotes}
    may_go_on = threading.Event()
    agent.call(may_go_on.wait)
    for remote in remotes:
        for number in range(3):
            agent.post(peers.transfer(f"{remote.agent_name}{number}", remote))
    may_go_on.set()
    assert has_all.wait(5)
    agent.close()
    assert "".join(begun) == "abcabcabc"
