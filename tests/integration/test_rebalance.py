"""A stream that moves to a worker with less to do goes on with the same tokens, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_cluster import Cluster, wait_for

from protos import tandem_inference_pb2 as pb
from tandem.tables import not_at_rest

PROMPT = [(13 * i) % 30_000 + 70 for i in range(100)]
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "seeded": {"temperature": 0.9, "seed": 5, "top_p": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    "held to a grammar": {"temperature": 1.0, "seed": 7, "structured_outputs": {"regex": "([a-z]{3} ){900}"}},
}


async def start_both(cluster: Cluster, model: Path) -> None:
    await cluster.start_decode_worker("d", model, max_num_seqs=8)
    await cluster.start_prefill_worker("p", model, max_num_seqs=8)
    await cluster.wait_for_workers("d", "p")


def move_whenever_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, a stream that may move does, however fast its workers are."""
    monkeypatch.setattr("router.moves._is_slow", lambda *_: True)
    monkeypatch.setattr("router.moves._gains", lambda *_: True)


async def is_at_rest(cluster: Cluster) -> bool:
    return not not_at_rest(await cluster.client.audit())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", SAMPLINGS)
async def test_the_same_tokens(
    tiny_cluster: Cluster, tiny_model: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await start_both(tiny_cluster, tiny_model)
    sampling = {**SAMPLINGS[name], "max_tokens": 300, "ignore_eos": name != "held to a grammar"}
    expected = await tiny_cluster.client.generate(PROMPT, **sampling)
    assert (expected.timings.decode_worker, expected.timings.mode) != ("p", pb.MODE_STAY)
    move_whenever_possible(monkeypatch)
    answer = await tiny_cluster.client.generate(PROMPT, **sampling)
    assert (answer.timings.decode_worker, answer.timings.mode) == ("p", pb.MODE_STAY), "it has moved"
    assert (answer.timings.attempts, answer.timings.moves) == (1, 1), "nothing has failed"
    assert (answer.token_ids, answer.text) == (expected.token_ids, expected.text)
    assert len(answer.logprobs) == len(expected.logprobs)
    assert answer.finish_reason == expected.finish_reason
    await wait_for(lambda: is_at_rest(tiny_cluster), "nothing is left at the decode worker")


@pytest.mark.slow
async def test_several_answers_move_each_for_itself(
    tiny_cluster: Cluster, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await start_both(tiny_cluster, tiny_model)
    sampling = {"temperature": 0.9, "seed": 5, "max_tokens": 300, "ignore_eos": True}
    expected = await tiny_cluster.client.generate_n(PROMPT, 3, **sampling)
    move_whenever_possible(monkeypatch)
    answers = await tiny_cluster.client.generate_n(PROMPT, 3, **sampling)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    assert "p" in {answer.timings.decode_worker for answer in answers}
    await wait_for(lambda: is_at_rest(tiny_cluster), "nothing is left at the decode worker")


async def test_a_client_that_leaves_as_it_moves_leaves_nothing(
    tiny_cluster: Cluster, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await start_both(tiny_cluster, tiny_model)
    move_whenever_possible(monkeypatch)
    for num_tokens in range(1, 8):
        received = 0
        stream = tiny_cluster.client.stream(PROMPT, max_tokens=500, temperature=0.0, ignore_eos=True)
        async for message in stream:
            received += len(message.token_ids)
            if received >= num_tokens:
                break
        await stream.aclose()
    await wait_for(lambda: is_at_rest(tiny_cluster), "every block is free or cached")
