"""One client sends forty requests at once, another sends two: these wait for a few of the forty, not for all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from clusters import RunningCluster

from engine.engine_args import EngineArgs
from tandem.client import AsyncClient

NUM_FLOOD = 40


async def test_a_flood_of_one_client_keeps_another_waiting_for_a_few_of_it_alone(
    start_cluster: Callable[..., RunningCluster], few_layers: Path
) -> None:
    """The worker has memory for two requests at a time."""
    cluster = start_cluster(
        "--model", str(few_layers), "--aggregated", "--decode", "1", "--max-model-len", "128", "--num-kv-blocks", "20"
    )
    assert [worker.record.load.num_free_seqs for worker in cluster.workers()] == [EngineArgs.max_num_seqs]
    answered: list[str] = []
    is_under_way = asyncio.Event()
    async with AsyncClient(cluster.address) as client:

        async def ask(number: int, fairness_id: str) -> None:
            prompt = [(number * 131 + 17 * i) % 40_000 + 50 for i in range(100)]
            await client.generate(prompt, max_tokens=28, temperature=0, ignore_eos=True, fairness_id=fairness_id)
            answered.append(fairness_id)
            is_under_way.set()

        flood = [asyncio.create_task(ask(number, "many")) for number in range(NUM_FLOOD)]
        await is_under_way.wait()  # by now all the others wait
        num_before = answered.count("many")
        await asyncio.gather(ask(NUM_FLOOD, "two"), ask(NUM_FLOOD + 1, "two"))
        # These were running when the two came, plus one for each of the two: three or four, if nothing is delayed.
        assert answered.count("many") - num_before <= NUM_FLOOD // 4, answered
        for task in flood:
            task.cancel()
        await asyncio.wait(flood)
    cluster.wait_until_at_rest()
