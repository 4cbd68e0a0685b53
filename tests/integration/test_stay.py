"""The decode worker has no memory left: an idle prefill worker keeps requests and decodes them, too, with the same
tokens. The dtype is bfloat16, as in production."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from clusters import RunningCluster, wait_until

from protos import tandem_inference_pb2 as pb
from protos import tandem_worker_pb2 as worker_pb
from tandem.client import Client

PROMPT = [(13 * i) % 30_000 + 70 for i in range(300)]
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "seed": 11, "top_p": 0.9, "repetition_penalty": 1.2},
}


@pytest.fixture(scope="module")
def cluster(start_cluster: Callable[..., RunningCluster]) -> RunningCluster:
    """One long request fills the decode worker; half of the prefill worker's pool has room for one that stays. The
    lease is longer than any step takes on a busy machine: two seconds were once too short."""
    return start_cluster("--max-model-len", "1024", "--num-kv-blocks", "64", "--lease-ms", "5000")


@contextmanager
def full_decode_worker(client: Client) -> Iterator[None]:
    """Within this context the decode worker has no room for `PROMPT`: at most 17 blocks, of the 19 needed. The request
    that fills it is as long as the pool allows, so that it does not end before the test does."""
    other = [(131 + 7 * i) % 30_000 + 70 for i in range(740)]
    stream = client.stream(other, max_tokens=270, temperature=0, ignore_eos=True)
    next(stream)
    next(stream)  # the first token comes from the prefill worker
    try:
        yield
    finally:
        stream.close()


def prefill_worker(cluster: RunningCluster) -> worker_pb.WorkerStatus:
    return next(worker for worker in cluster.workers() if worker.record.role == worker_pb.ROLE_PREFILL)


# Greedy is the simplest: if the draw at each position is right, so is the greedy choice.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "greedy" else ()) for name in SAMPLINGS]
)
def test_the_prefill_worker_goes_on_with_the_same_tokens(cluster: RunningCluster, name: str) -> None:
    sampling = {**SAMPLINGS[name], "max_tokens": 40, "ignore_eos": True, "logprobs": 2}
    with Client(cluster.address) as client:
        expected = client.generate(PROMPT, **sampling)  # type: ignore[arg-type]
        assert expected.timings.mode != pb.MODE_STAY
        with full_decode_worker(client):
            answer = client.generate(PROMPT, **sampling)  # type: ignore[arg-type]
    assert answer.timings.mode == pb.MODE_STAY
    assert (answer.timings.decode_worker, answer.timings.prefill_worker) == ("prefill-1", "")
    assert answer.token_ids == expected.token_ids
    assert answer.logprobs == expected.logprobs
    cluster.wait_until_at_rest()


def test_prompts_are_computed_for_others_while_requests_stay(cluster: RunningCluster) -> None:
    with Client(cluster.address) as client:
        with full_decode_worker(client):
            staying = client.stream(PROMPT, max_tokens=100, temperature=0, ignore_eos=True)
            received = list(next(staying).token_ids)
        other = client.generate(PROMPT[1:], max_tokens=4, temperature=0)
        for chunk in staying:
            received += chunk.token_ids
            last = chunk
    assert other.timings.mode == pb.MODE_DISAGGREGATED
    assert last.timings.mode == pb.MODE_STAY
    assert len(received) == 100
    cluster.wait_until_at_rest()


def test_who_leaves_frees_what_stayed(cluster: RunningCluster) -> None:
    with Client(cluster.address) as client, full_decode_worker(client):
        num_before = prefill_worker(cluster).num_generation_tokens
        staying = client.stream(PROMPT, max_tokens=200, temperature=0, ignore_eos=True)
        next(staying)
        next(staying)  # the first decoded token: the request stays
        assert prefill_worker(cluster).record.load.num_running == 1
        staying.close()
        wait_until(lambda: not prefill_worker(cluster).record.load.num_running, 20, "nothing runs there any more")
        assert 2 <= prefill_worker(cluster).num_generation_tokens - num_before < 200, "the answer came to its end"
    cluster.wait_until_at_rest()


@pytest.mark.slow
def test_a_stream_that_stayed_goes_on_elsewhere_when_its_worker_dies(cluster: RunningCluster) -> None:
    # So many tokens that the worker is killed before it has computed them all, however busy the machine is.
    sampling = {"temperature": 0.0, "max_tokens": 240, "ignore_eos": True}
    with Client(cluster.address) as client:
        expected = client.generate(PROMPT, **sampling).token_ids  # type: ignore[arg-type]
        with full_decode_worker(client):
            staying = client.stream(PROMPT, **sampling)  # type: ignore[arg-type]
            received = [token_id for _ in range(10) for token_id in next(staying).token_ids]
            worker = prefill_worker(cluster).record
            os.kill(worker.pid, signal.SIGKILL)
        for chunk in staying:
            received += chunk.token_ids
            last = chunk
    assert received == expected
    assert (last.timings.attempts, last.timings.mode) == (2, pb.MODE_LOCAL)
    cluster.wait_until_at_rest(60)
