"""A decode worker dies in the middle of an answer: the stream goes on elsewhere, with the tokens it would have had."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from clusters import RunningCluster

from protos import tandem_worker_pb2 as worker_pb
from tandem.client import Client

PROMPT = [(13 * i) % 30_000 + 70 for i in range(75)]
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "seed": 11, "top_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.4},
}


@pytest.fixture(scope="module")
def cluster(start_cluster: Callable[..., RunningCluster]) -> RunningCluster:
    return start_cluster("--decode", "2", "--dtype", "float32", "--max-model-len", "1024", "--kv-cache-gib", "0.2")


@pytest.mark.parametrize("name", list(SAMPLINGS))
def test_the_stream_goes_on_at_the_next_position(cluster: RunningCluster, name: str) -> None:
    sampling = {**SAMPLINGS[name], "max_tokens": 60, "ignore_eos": True}
    with Client(cluster.address) as client:
        expected = client.generate(PROMPT, **sampling)  # type: ignore[arg-type]
        received: list[int] = []
        for chunk in client.stream(PROMPT, **sampling):  # type: ignore[arg-type]
            received += chunk.token_ids  # the client itself refuses gaps and repetitions
            if len(received) == 20:
                os.kill(serving_decode_worker(cluster), signal.SIGKILL)
            last = chunk
    assert last.timings.attempts > 1
    assert received == expected.token_ids
    cluster.wait_until_at_rest(60)


def serving_decode_worker(cluster: RunningCluster) -> int:
    """Pid of the decode worker that runs something."""
    return next(
        worker.record.pid
        for worker in cluster.workers()
        if worker.record.role == worker_pb.ROLE_DECODE and worker.record.load.num_running
    )
