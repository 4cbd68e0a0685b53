"""A client's deadline passes in each phase of its request: the client gets the error in time, and all work stops.

Each test sees the request in its phase before the deadline; otherwise it would stay there for many seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import wait_until
from fragile_cluster import LEASE_MS, FragileCluster, fresh_prompts

from rpc.errors import DeadlinePassed, Overloaded, TandemError

POINTS = ("decode.reserved", "prefill.opened", "prefill.before_commit")
"""Each failpoint holds the first request that reaches it until after that request's deadline. The next request gets to
the next point."""
HELD_S = 8
DEADLINE_S = 1.5
LATE_S = 4.0
"""A client must get the error within this time after its deadline. Allows for a machine that stands still; much shorter
than the time until anything else would end the request."""
SOON_S = 2.0
"""Within this time after the error, all blocks must be free or cached."""
SLOW_S = 0.2
"""Added to each step so that a prompt takes seconds, however fast the machine is."""


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that slows the prefill worker down."""
    return tmp_path_factory.mktemp("slowed") / "seconds"


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, redis_server: Any, model_folder: Path, slow: Path
) -> Iterator[FragileCluster]:
    """A cluster whose workers compute one request at a time, and prompts in small chunks."""

    def held(role: str) -> list[str]:
        return ["--failpoints", ",".join(f"{point}=delay:{HELD_S}" for point in POINTS if point.startswith(role))]

    running = FragileCluster.start(
        tmp_path_factory.mktemp("chaos"), redis_url=redis_server.url, model=model_folder,
        worker_flags=["--max-num-seqs", "1", "--prefill-chunk-tokens", "64"],
        flags={"prefill-1": held("prefill"), "decode-1": held("decode")}, slowed={"prefill-1": slow},
    )  # fmt: skip
    for point in POINTS:
        pass_deadline(running, lambda _, point=point: running.num_reached(point) == 1, f"held at {point}")  # type: ignore[misc]
    yield running
    running.close()


class Asked:
    """A request for a long answer, which a thread of its own reads to the end."""

    def __init__(self, cluster: FragileCluster, prompt: list[int], timeout_s: float | None, max_tokens: int) -> None:
        self.received: list[int] = []
        self.error: TandemError | None = None
        self.seconds = 0.0
        self._sampling: Any = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, "timeout_s": timeout_s}
        self._thread = threading.Thread(target=self._read, args=(cluster, prompt))
        self._thread.start()

    def _read(self, cluster: FragileCluster, prompt: list[int]) -> None:
        start_s = time.monotonic()
        try:
            with cluster.client() as client:
                for chunk in client.stream(prompt, **self._sampling):
                    self.received += chunk.token_ids
        except TandemError as error:
            self.error = error
        self.seconds = time.monotonic() - start_s

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join(60)
        assert self.is_over


def pass_deadline(
    cluster: FragileCluster,
    is_there: Callable[[Asked], bool],
    phase: str,
    *,
    prompt: list[int] | None = None,
    max_tokens: int = 1500,
) -> Asked:
    """Send a request, wait until `is_there` sees it in its `phase`, and let its deadline pass."""
    asked = Asked(cluster, prompt or fresh_prompts(1)[0][:64], DEADLINE_S, max_tokens)
    wait_until(lambda: is_there(asked), DEADLINE_S, phase, lambda: asked.error)
    assert not asked.is_over, f"not {phase} at its deadline"
    check_end(asked, DEADLINE_S)
    cluster.wait_until_at_rest(SOON_S)
    cluster.wait_until_at_rest()  # by now the router knows, too; else it would plan the next request differently
    return asked


def begin(cluster: FragileCluster, deadline_s: float) -> Asked:
    """Return a request that is decoding. If the router does not know yet that its workers are idle, it refuses the
    request, because the long answer could not be complete in time: then send it again."""
    for _ in range(5):
        asked = Asked(cluster, fresh_prompts(1)[0][:64], deadline_s, 1500)
        wait_until(lambda asked=asked: len(asked.received) > 2 or asked.is_over, deadline_s, "decoding")  # type: ignore[misc]
        if not isinstance(asked.error, Overloaded):
            break
    assert len(asked.received) > 2, asked.error
    return asked


def check_end(asked: Asked, deadline_s: float) -> None:
    asked.wait()
    assert isinstance(asked.error, DeadlinePassed), asked.error
    assert deadline_s <= asked.seconds + 0.01 < deadline_s + LATE_S


def test_with_memory_reserved_or_the_kv_pushed_and_not_committed(cluster: FragileCluster) -> None:
    """The fixture has let a deadline pass at each of these points; here we only check that each was reached once."""
    assert [cluster.num_reached(point) for point in POINTS] == [1, 1, 1]


def test_while_prefilling(cluster: FragileCluster, slow: Path) -> None:
    prompt = [token for prompt in fresh_prompts(12) for token in prompt]

    def is_prefilling(_: Asked) -> bool:
        return cluster.num_running("prefill-1") > 0

    slow.write_text(str(SLOW_S))
    try:
        asked = pass_deadline(cluster, is_prefilling, "prefilling", prompt=prompt, max_tokens=100)
    finally:
        slow.unlink()
    assert not asked.received


def test_while_pushing(cluster: FragileCluster) -> None:
    cluster.proxy("decode-1").drip(100_000)
    try:
        asked = pass_deadline(cluster, lambda asked: len(asked.received) == 1, "pushing")
    finally:
        cluster.heal()
    assert len(asked.received) == 1, "its KV had arrived"


def test_while_decoding(cluster: FragileCluster) -> None:
    pass_deadline(cluster, lambda asked: len(asked.received) > 2, "decoding")


def test_while_it_waits_for_room(cluster: FragileCluster) -> None:
    """A request that has not begun is refused shortly before its deadline, so that the client can try again later or
    elsewhere."""
    other, num_before = begin(cluster, 4 * LEASE_MS / 1000), cluster.num_found_silent("prefill-1")
    cluster.proxy("prefill-1").freeze()  # else this worker would take the request
    try:
        cluster.wait_until_found_silent("prefill-1", num_before)
        asked = Asked(cluster, fresh_prompts(1)[0][:64], DEADLINE_S, 2)
        asked.wait()
        assert isinstance(asked.error, Overloaded)
        assert "no worker had room in time" in asked.error.message
        assert asked.error.retry_after_s is not None
        assert DEADLINE_S / 4 < asked.seconds < DEADLINE_S
        assert not other.is_over
    finally:
        cluster.heal()
    other.wait()
    with cluster.client() as client:
        assert client.status().num_queued_requests == 0
    cluster.wait_until_at_rest()


def test_while_an_answer_that_has_begun_waits_for_a_worker(cluster: FragileCluster) -> None:
    """The request's worker is cut off and there is no other one. As its answer has begun, the request waits on."""
    deadline_s, num_before = 2.5 * LEASE_MS / 1000, cluster.num_found_silent("decode-1")
    asked = begin(cluster, deadline_s)
    cluster.proxy("decode-1").freeze()
    try:
        cluster.wait_until_found_silent("decode-1", num_before)
        assert not asked.is_over
        check_end(asked, deadline_s)
    finally:
        cluster.heal()
    cluster.wait_until_at_rest()
