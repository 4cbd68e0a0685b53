"""`tandem drain`: a worker takes no new requests, finishes those that it has, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import redis
from click.testing import CliRunner, Result
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tiny_cluster import Cluster, wait_for

from rpc.channel import open_channel
from tandem.cli import main
from tandem.tables import not_at_rest

if TYPE_CHECKING:
    from tests.conftest import RedisServer

PROMPT = [70, 71, 72]
NUM_TOKENS = 1500
"""Of the long answer: it takes longer than a second worker to start."""


async def drain(cluster: Cluster, *arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, main, ["drain", "--router", cluster.address, *arguments])


async def test_a_worker_that_is_drained_finishes_what_it_has_and_leaves(
    tiny_cluster: Cluster, tiny_model: Path
) -> None:
    leaving = asyncio.create_task(tiny_cluster.run_decode_worker("first", tiny_model))
    await tiny_cluster.wait_for_workers("first")
    tokens: list[int] = []

    async def read() -> None:
        async for message in tiny_cluster.client.stream(
            PROMPT, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True
        ):
            tokens.extend(message.token_ids)
        assert message.timings.attempts == 1

    reading = asyncio.create_task(read())

    async def has_begun() -> bool:
        return len(tokens) > 0

    await wait_for(has_begun, "the stream has begun")
    await tiny_cluster.start_decode_worker("second", tiny_model)
    await tiny_cluster.wait_for_workers("first", "second")
    asked = await drain(tiny_cluster, "first", "--json")
    told = json.loads(asked.stdout)
    assert (told["worker_id"], told["has_left"], told["load"]["num_running"]) == ("first", False, 1)
    assert "no other decode worker" not in asked.stderr
    waiting = asyncio.create_task(drain(tiny_cluster, "first", "--wait"))
    anew = await tiny_cluster.client.generate(PROMPT, max_tokens=4, temperature=0.0, ignore_eos=True)
    assert anew.timings.decode_worker == "second"
    assert not reading.done(), "what began before goes on meanwhile"
    await reading
    assert len(tokens) == NUM_TOKENS
    assert tokens[:4] == anew.token_ids
    assert await leaving == 0
    said = await waiting
    assert said.exit_code == 0, said.output
    first, *_, last = said.output.splitlines()
    assert (first, last) == ("first: draining; 1 running, 0 waiting", "first: has left")

    await tiny_cluster.wait_for_workers("second")
    assert not_at_rest(await tiny_cluster.client.audit()) == []
    with redis.Redis.from_url(tiny_cluster.redis) as keys:
        assert list(keys.scan_iter("*first*")) == []
        assert keys.smembers("tandem:workers") == {b"second"}
    unknown = await drain(tiny_cluster, "first", "--wait")
    assert (unknown.exit_code, unknown.output) == (1, "Error: no worker 'first'; there are: second\n")
    last_one = await drain(tiny_cluster, "second", "--json")
    assert last_one.stderr == (
        "second: no other decode worker takes requests. Until one does, new requests are refused; answers that are not "
        "finished after the worker's --drain-grace-s wait for one, and fail after the router's --worker-wait-s.\n"
    )


async def test_a_worker_is_ready_when_redis_knows_of_it(
    tiny_cluster: Cluster, tiny_model: Path, own_redis_server: RedisServer
) -> None:
    """A rollout waits until the worker is ready. Before Redis knows the worker, no router can find it; afterwards
    routers know it even if Redis is down."""
    own_redis_server.stop()
    worker = await replace(tiny_cluster, redis=own_redis_server.url).start_decode_worker("first", tiny_model)
    async with open_channel(worker._address) as channel:
        health = health_pb2_grpc.HealthStub(channel)

        async def is_ready() -> bool:
            answer = await health.Check(health_pb2.HealthCheckRequest(service="tandem.v1.Worker"))
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

        async def has_tried_again() -> bool:
            return worker._has_told and not worker._registration.is_reachable

        await wait_for(has_tried_again, "Redis was asked, and is away")
        assert not await is_ready()
        own_redis_server.start()
        await wait_for(is_ready, "Redis knows it")
        own_redis_server.stop()
        await wait_for(has_tried_again, "Redis is away again")
        assert await is_ready()
