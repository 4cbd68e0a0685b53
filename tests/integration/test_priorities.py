"""Urgent requests go first if the operator allows clients to set priorities; the log names priority and client."""

from __future__ import annotations

import asyncio
import logging
from hashlib import blake2b
from pathlib import Path

import pytest
from tiny_cluster import run_tiny_cluster, wait_for

PROMPT = [70, 71, 72]


@pytest.mark.parametrize(
    ("policy", "order"), [("priority", ["urgent", "plain"]), ("fcfs", ["plain", "urgent"])], ids=["priority", "fcfs"]
)
async def test_priorities_count_where_they_are_let(
    policy: str,
    order: list[str],
    redis_url: str,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The worker computes one request at a time."""
    caplog.set_level(logging.INFO, "router.outcome")
    answered: list[str] = []
    async with run_tiny_cluster(redis_url, tiny_model, monkeypatch, scheduling_policy=policy) as cluster:
        await cluster.start_decode_worker("d", tiny_model)
        await cluster.wait_for_workers("d")
        before = cluster.client.stream(PROMPT, max_tokens=4000, ignore_eos=True)
        await anext(before)

        async def ask(name: str, priority: int) -> None:
            await cluster.client.generate(
                PROMPT, request_id=name, max_tokens=1, priority=priority, fairness_id="ada@example.org"
            )
            answered.append(name)

        async def num_queued(number: int) -> None:
            async def is_so() -> bool:
                return (await cluster.client.status()).num_queued_requests == number

            await wait_for(is_so, f"{number} wait")

        asked = [asyncio.create_task(ask("plain", 0))]
        await num_queued(1)
        asked.append(asyncio.create_task(ask("urgent", -5)))
        await num_queued(2)
        await before.aclose()
        await asyncio.gather(*asked)
    assert answered == order
    lines = {each.request_id: vars(each) for each in caplog.records if each.message == "done"}  # type: ignore[attr-defined]
    assert [lines[name].get("priority") for name in ("plain", "urgent")] == [None, -5 if policy == "priority" else None]
    digest = blake2b(b"ada@example.org", digest_size=8).hexdigest()
    assert {lines[name]["fairness_id_hash"] for name in order} == {digest}
    assert "ada@" not in str(list(map(vars, caplog.records)))
