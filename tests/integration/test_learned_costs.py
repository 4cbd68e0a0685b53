"""The router learns how long KV transfers take, and stops prefilling short prompts on another worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from clusters import RunningCluster

from protos import tandem_inference_pb2 as pb
from tandem.client import Client


@pytest.mark.slow
def test_short_prompts_are_moved_until_it_is_known_what_that_takes(
    start_cluster: Callable[..., RunningCluster], few_layers: Path
) -> None:
    cluster = start_cluster(
        "--model", str(few_layers), "--learn-costs", "--max-model-len", "512", "--kv-cache-gib", "0.05"
    )
    prompts = [[(number * 131 + 7 * i) % 30_000 + 70 for i in range(24)] for number in range(10)]
    with Client(cluster.address) as client:
        modes = [client.generate(prompt, max_tokens=4, ignore_eos=True).timings.mode for prompt in prompts]
    assert modes[0] == pb.MODE_DISAGGREGATED, "nothing was known yet"
    assert pb.MODE_LOCAL in modes
    assert pb.MODE_STAY not in modes
    cluster.wait_until_at_rest()
