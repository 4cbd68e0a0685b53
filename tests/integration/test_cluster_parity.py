"""A whole cluster gives transformers' tokens: over each transport, aggregated, chunked, batched, from caches."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from clusters import RunningCluster, run_cluster
from reference import NUM_TOKENS, Reference

from protos import tandem_inference_pb2 as pb
from tandem.client import Client

FLOAT32 = ("--dtype", "float32", "--max-model-len", "2048", "--kv-cache-gib", "0.4")
NUM_SHORT_TOKENS = 64
BLOCK_SIZE = 16
GUESSING = ("--speculative-config", '{"num_speculative_tokens": 4, "prompt_lookup_min": 1}')
ARRANGEMENTS = {
    "grpc": ("--transport", "grpc", *GUESSING),
    "aggregated": ("--aggregated", *GUESSING),
    "chunked": ("--transport", "nixl", "--prefill-chunk-tokens", "64", "--no-enable-prefix-caching"),
    # So few blocks that running requests cannot grow: only short prompts fit.
    "preempted": ("--transport", "ipc", "--num-kv-blocks", "33", "--max-model-len", "512"),
}

TRANSPORTS = {"chunked": "nixl", "preempted": "ipc"}
"""The transports of arrangements that do not use grpc."""


SLOW = ("aggregated", "chunked", "preempted")
"""Covered elsewhere, too: test_cli.py has a lone decode worker, and beside a prefill worker it prefills short prompts
the same way; test_engine_parity.py and test_exact_bfloat16.py test chunks and preemptions of engines;
test_one_sided_faults.py tests KV over NIXL and ipc, with faults."""
KINDS = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in ARRANGEMENTS]


@pytest.fixture(scope="module", params=KINDS)
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    with run_cluster(tmp_path_factory.mktemp("cluster") / "log", *FLOAT32, *ARRANGEMENTS[request.param]) as running:
        yield running
    assert " ERROR " not in running.log.read_text(), "nothing goes wrong from start to end"


def arrangement_of(request: pytest.FixtureRequest) -> str:
    return str(request.node.callspec.params["cluster"])


def fitting(references: list[Reference], arrangement: str) -> list[Reference]:
    """The references that fit into the arrangement's pool."""
    if arrangement != "preempted":
        return references
    return [reference for reference in references if len(reference.prompt_token_ids) <= NUM_SHORT_TOKENS]


def num_preemptions(cluster: RunningCluster) -> int:
    return sum(worker.num_preemptions for worker in cluster.workers())


def ask_all(cluster: RunningCluster, references: list[Reference], *, num_at_once: int) -> list[object]:
    """Return the answers to `references`, in order; each must be that of transformers."""
    with Client(cluster.address) as client, ThreadPoolExecutor(num_at_once) as threads:

        def ask(reference: Reference) -> object:
            return client.generate(
                list(reference.prompt_token_ids), temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True
            )

        answers = list(threads.map(ask, references))
    wrong = [
        reference.name
        for reference, answer in zip(references, answers, strict=True)
        if tuple(answer.token_ids) != reference.answer_token_ids  # type: ignore[attr-defined]
    ]
    assert not wrong
    return answers


def test_same_tokens(cluster: RunningCluster, references: list[Reference], request: pytest.FixtureRequest) -> None:
    arrangement = arrangement_of(request)
    # Only some here; all of them together below. One of these is longer than a block, so that the test below certainly
    # finds a cached block.
    fits = fitting(references, arrangement)
    chosen = [*fits[::5], next(each for each in fits if len(each.prompt_token_ids) > BLOCK_SIZE)]
    answers = ask_all(cluster, chosen, num_at_once=4)
    modes = {answer.timings.mode for answer in answers}  # type: ignore[attr-defined]
    if arrangement == "aggregated":
        assert modes == {pb.MODE_LOCAL}
        return
    assert modes >= {pb.MODE_LOCAL, pb.MODE_DISAGGREGATED}
    moved = {
        answer.timings.kv_transfer.transport  # type: ignore[attr-defined]
        for answer in answers
        if answer.timings.mode == pb.MODE_DISAGGREGATED  # type: ignore[attr-defined]
    }
    assert moved == {TRANSPORTS.get(arrangement, "grpc")}


_drawn: dict[str, list[list[int]]] = {}
"""The answers to the same seeded requests, by arrangement."""


@pytest.mark.slow  # test_exact_bfloat16.py covers seeded sampling for one arrangement
def test_same_draws_everywhere(
    cluster: RunningCluster, references: list[Reference], request: pytest.FixtureRequest
) -> None:
    """Seeded sampling with penalties and filters does not depend on which worker computes what."""
    chosen = [reference for reference in references if 16 <= len(reference.prompt_token_ids) <= NUM_SHORT_TOKENS][:6]
    with Client(cluster.address) as client, ThreadPoolExecutor(6) as threads:

        def ask(seed: int) -> list[int]:
            return client.generate(
                list(chosen[seed].prompt_token_ids),
                max_tokens=16,
                temperature=0.9,
                top_p=0.95,
                top_k=200,
                repetition_penalty=1.1,
                presence_penalty=0.3,
                seed=seed,
                ignore_eos=True,
            ).token_ids

        _drawn[arrangement_of(request)] = list(threads.map(ask, range(len(chosen))))
    first = next(iter(_drawn.values()))
    assert _drawn[arrangement_of(request)] == first
    assert len({tuple(answer) for answer in first}) == len(chosen)


@pytest.mark.slow
def test_same_tokens_with_many_at_once_from_caches(
    cluster: RunningCluster, references: list[Reference], request: pytest.FixtureRequest
) -> None:
    arrangement = arrangement_of(request)
    wanted = (fitting(references, arrangement) * 2)[: 32 if arrangement in ("grpc", "preempted") else 14]
    answers = ask_all(cluster, wanted, num_at_once=32)
    for _ in range(5):  # whether the pool runs out while they grow is chance
        if arrangement == "preempted" and not num_preemptions(cluster):
            ask_all(cluster, wanted, num_at_once=32)
    cached = [answer.usage.cached_tokens for answer in answers]  # type: ignore[attr-defined]
    if arrangement == "chunked":
        assert not any(cached)
    elif arrangement != "preempted":
        assert any(cached)
    else:
        assert num_preemptions(cluster) > 0
    cluster.wait_until_at_rest()
