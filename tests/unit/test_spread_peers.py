"""Which peer code without an event loop calls: the next that serves, by an answer that is asked for now and then."""

from __future__ import annotations

import time
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health_pb2

from rpc import spread_channel
from rpc.spread_channel import BlockingSpreadChannel, _Peer

SERVICE = "tandem.v1.Inference"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Unavailable(grpc.RpcError):  # type: ignore[misc]
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("status", [SERVING, NOT_SERVING, None], ids=["serving", "not serving", "unavailable"])
def test_a_peer_is_not_asked_before_every_call(status: int | None) -> None:
    peer = _Peer("127.0.0.1:1", SERVICE, None)
    num_asked = 0

    def check(question: health_pb2.HealthCheckRequest, timeout: float) -> health_pb2.HealthCheckResponse:
        nonlocal num_asked
        num_asked += 1
        assert question.service == SERVICE
        if status is None:
            raise Unavailable
        return health_pb2.HealthCheckResponse(status=status)

    peer._check = check
    assert [peer.is_serving(time.monotonic() + 60) for _ in range(3)] == [status == SERVING] * 3
    assert num_asked == 1
    peer.channel.close()


def test_choosing_a_peer_is_a_part_of_the_time_that_a_call_has(monkeypatch: pytest.MonkeyPatch) -> None:
    channel, now_s, left_s = BlockingSpreadChannel("127.0.0.1:1", service=SERVICE), [1000.0], list[float | None]()
    monkeypatch.setattr(spread_channel, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    def choose(turn: int, until_s: float) -> int:
        assert until_s == 1001  # as long as connecting may take
        now_s[0] += 0.75
        return 0

    monkeypatch.setattr(channel, "_choose", choose)
    call = channel._calling([lambda request, timeout: left_s.append(timeout)])
    for timeout_s in (5.0, None, 1.0):
        now_s[0] = 1000.0
        call(b"", timeout=timeout_s)
    assert left_s == [4.25, None, 0.25]
    channel.close()


@pytest.mark.parametrize(
    ("are_serving", "chosen"),
    [([True] * 3, [0, 1, 2, 0]), ([False, True, False], [1] * 4), ([False] * 3, [0, 1, 2, 0])],
)
def test_peers_that_serve_take_turns_and_if_none_does_all_do(
    are_serving: list[bool], chosen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = BlockingSpreadChannel("ipv4:127.0.0.1:1,127.0.0.1:2,127.0.0.1:3", service=SERVICE)
    is_serving = dict(zip(channel._peers, are_serving, strict=True))
    monkeypatch.setattr(_Peer, "is_serving", lambda peer, until_s: is_serving[peer])
    assert [channel._choose(turn, time.monotonic()) for turn in range(4)] == chosen
    channel.close()
