"""Fifty requests at once on one prefill and two decode workers: each ends once, with no token lost or repeated."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from clusters import RunningCluster

from protos import tandem_inference_pb2 as pb
from tandem.client import AsyncClient

NUM_REQUESTS = 50


@pytest.mark.slow
async def test_requests_of_mixed_lengths(start_cluster: Callable[..., RunningCluster]) -> None:
    cluster = start_cluster("--prefill", "1", "--decode", "2", "--max-model-len", "1024", "--num-kv-blocks", "160")
    numbers = random.Random(7)
    shapes = [(numbers.choice([1, 9, 16, 17, 40, 90]), numbers.randint(1, 24)) for _ in range(NUM_REQUESTS)]

    async with AsyncClient(cluster.address) as client:

        async def ask(number: int, num_prompt_tokens: int, max_tokens: int) -> tuple[int, pb.Timings]:
            prompt = [(number * 131 + i * 17) % 40_000 + 50 for i in range(num_prompt_tokens)]
            num_ends = num_tokens = 0
            async for message in client.stream(prompt, max_tokens=max_tokens, seed=number, ignore_eos=True):
                assert message.offset == num_tokens
                num_tokens += len(message.token_ids)
                if message.finish_reason:
                    num_ends += 1
                    timings = message.timings
            assert num_ends == 1
            assert num_tokens == max_tokens
            return num_tokens, timings

        results = await asyncio.gather(*(ask(number, *shape) for number, shape in enumerate(shapes)))

    assert len(results) == NUM_REQUESTS
    # The prefill worker may keep some requests, too: that is chance.
    workers = {timings.decode_worker for _, timings in results if timings.mode != pb.MODE_STAY}
    assert workers == {"decode-1", "decode-2"}
    assert {timings.mode for _, timings in results} >= {pb.MODE_DISAGGREGATED, pb.MODE_LOCAL}
    for _, timings in results:
        parts = timings.queue_ms + timings.prefill_ms + timings.transfer_ms + timings.decode_ms
        assert abs(parts - timings.total_ms) < 0.01
        assert min(timings.queue_ms, timings.prefill_ms, timings.transfer_ms, timings.decode_ms) >= 0
    cluster.wait_until_at_rest()
