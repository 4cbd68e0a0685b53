"""Prefixes that any worker has cached are found, used, and not transferred again."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from clusters import RunningCluster, wait_until

from protos import tandem_inference_pb2 as pb
from tandem.answer import Answer
from tandem.client import Client


@pytest.fixture(scope="module")
def cluster(start_cluster: Callable[..., RunningCluster], few_layers: Path) -> RunningCluster:
    sizes = ("--max-model-len", "2048", "--num-kv-blocks", "400", "--kv-offloading-size", "0.1")
    return start_cluster("--model", str(few_layers), "--prefill", "2", "--decode", "1", *sizes)


def tokens(seed: int, count: int) -> list[int]:
    return [(seed * 1009 + 37 * i) % 40_000 + 60 for i in range(count)]


def ask(cluster: RunningCluster, prompt: list[int], cache_salt: str | None = None) -> Answer:
    with Client(cluster.address) as client:
        return client.generate(prompt, max_tokens=4, temperature=0, ignore_eos=True, cache_salt=cache_salt)


def ask_until_found(
    cluster: RunningCluster, make_prompt: Callable[[int], list[int]], cache_salt: str | None = None
) -> Answer:
    """The index lags behind the engine: send requests (with a new prompt each time) until a prefix is found."""
    answers: list[Answer] = []

    def is_found() -> bool:
        answers.append(ask(cluster, make_prompt(len(answers)), cache_salt))
        return answers[-1].usage.cached_tokens > 0

    wait_until(is_found, 10, "a cached prefix is found", lambda: answers[-1])
    return answers[-1]


def ask_at_each_prefill_worker(cluster: RunningCluster) -> list[tuple[list[int], Answer]]:
    """Return a prompt that each of the two prefill workers has computed, with the answer. A quick worker computes both
    prompts of a pair: send pairs until each has computed one."""
    found: dict[str, tuple[list[int], Answer]] = {}
    seeds = count(1)

    def have_both() -> bool:
        prompts = [tokens(next(seeds), 320) for _ in range(2)]
        with ThreadPoolExecutor(2) as threads:
            for prompt, answer in zip(prompts, threads.map(partial(ask, cluster), prompts), strict=True):
                found.setdefault(answer.timings.prefill_worker, (prompt, answer))
        return len(found) == 2

    wait_until(have_both, 20, "each prefill worker has computed a prompt", lambda: sorted(found))
    return list(found.values())


def test_a_longer_prompt_goes_where_its_beginning_was_computed(cluster: RunningCluster) -> None:
    for beginning, first in ask_at_each_prefill_worker(cluster):
        assert first.timings.mode == pb.MODE_DISAGGREGATED
        assert first.usage.cached_tokens == 0
        second = ask_until_found(cluster, partial(continued, beginning))
        assert second.timings.mode == pb.MODE_DISAGGREGATED
        assert second.timings.prefill_worker == first.timings.prefill_worker
        assert second.usage.cached_tokens == 320
        # The decode worker had the beginning too, so only the rest travelled.
        assert second.timings.kv_transfer.num_cached_blocks == 20
        assert second.timings.kv_transfer.num_blocks == 6


def continued(beginning: list[int], turn: int) -> list[int]:
    """`beginning` with a different ending in each turn."""
    return beginning + tokens(1000 + turn, 90)


def test_a_prompt_that_the_decode_worker_has_stays_there(cluster: RunningCluster) -> None:
    prompt = tokens(50, 200)
    ask(cluster, prompt)
    answer = ask_until_local(cluster, prompt)
    assert answer.usage.cached_tokens == 192
    assert not answer.timings.HasField("kv_transfer")
    cluster.wait_until_at_rest()


def ask_until_local(cluster: RunningCluster, prompt: list[int], salt: str | None = None) -> Answer:
    """Ask until the decode worker is known to have the prompt; that the prefill worker has it may be known sooner."""
    answers: list[Answer] = []

    def is_local() -> bool:
        answers.append(ask(cluster, prompt, salt))
        return answers[-1].timings.mode == pb.MODE_LOCAL

    wait_until(is_local, 10, "the decode worker's prefix is used", lambda: answers[-1])
    return answers[-1]


def test_prefixes_are_shared_by_those_of_one_salt_alone(cluster: RunningCluster) -> None:
    """A prompt that one tenant has cached is computed anew for another, and each tenant finds its own again."""
    prompt = tokens(60, 320)
    ask(cluster, prompt, "one")
    mine = ask_until_local(cluster, prompt, "one")
    for salt in ("two", None):
        theirs = ask(cluster, prompt, salt)
        assert (theirs.usage.cached_tokens, theirs.timings.mode) == (0, pb.MODE_DISAGGREGATED)
        assert theirs.timings.kv_transfer.num_cached_blocks == 0
        assert theirs.token_ids == mine.token_ids
    assert ask_until_local(cluster, prompt, "two").usage.cached_tokens == mine.usage.cached_tokens
    cluster.wait_until_at_rest()


def test_prefix_hits_are_counted(cluster: RunningCluster) -> None:
    assert sum(worker.num_prefix_hits_tokens for worker in cluster.workers()) > 0
    assert sum(worker.num_prefix_queries_tokens for worker in cluster.workers()) > 0


def test_a_prompt_whose_logprobs_are_asked_for_is_moved_though_it_is_cached(cluster: RunningCluster) -> None:
    """The whole prompt is computed: the decode worker's cached blocks only save the transfer."""
    prompt = tokens(77, 320)
    ask(cluster, prompt)
    cached = ask_until_local(cluster, prompt)
    with Client(cluster.address) as client:
        told = client.generate(prompt, max_tokens=4, temperature=0, ignore_eos=True, prompt_logprobs=0)
    assert told.timings.mode == pb.MODE_DISAGGREGATED
    assert (told.usage.cached_tokens, len(told.prompt_logprobs)) == (0, 320)
    assert told.timings.kv_transfer.num_cached_blocks > 0
    assert told.token_ids == cached.token_ids
    cluster.wait_until_at_rest()


@pytest.mark.slow
def test_what_gave_way_to_others_is_found_in_host_memory(cluster: RunningCluster) -> None:
    """The decode worker loads the prefix from host memory, so it is not transferred; nor does the prefill worker
    compute it, from whichever memory it has it by then."""
    prompt = tokens(88, 320)
    first = ask(cluster, prompt)
    assert first.timings.mode == pb.MODE_DISAGGREGATED

    def num_loaded() -> dict[str, int]:
        return {worker.record.worker_id: worker.num_loaded_tokens for worker in cluster.workers()}

    def is_copied() -> bool:
        return not any(worker.record.load.host_blocks.num_saving for worker in cluster.workers())

    before, decode_worker = num_loaded(), first.timings.decode_worker
    # More than the decode worker's pool has room for; but in small groups, because a prompt evicts blocks without a
    # copy rather than wait.
    for group in range(15):
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(partial(ask, cluster), [tokens(100 + 4 * group + i, 320) for i in range(4)]))
        wait_until(is_copied, 10, "blocks are copied to host memory")
    again = ask(cluster, continued(prompt, 1))
    assert again.timings.mode == pb.MODE_DISAGGREGATED
    assert again.usage.cached_tokens == 320
    assert again.timings.kv_transfer.num_cached_blocks == 20
    assert num_loaded()[decode_worker] >= before[decode_worker] + 320
    assert ask(cluster, prompt).token_ids == first.token_ids
    cluster.wait_until_at_rest()
