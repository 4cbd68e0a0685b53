"""The parts of benchmarks/gpu.py that push KV, and what benchmarks/transfer.py measures for them, at toy sizes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import receivers_for_gpu as receivers

from benchmarks import gpu, transfer
from benchmarks.gpu_parts import floors, push
from benchmarks.gpu_parts.rows import Row
from benchmarks.gpu_parts.runner import Setting

pytestmark = pytest.mark.usefixtures("one_thread")


def test_what_is_pushed_arrives_and_a_receiver_that_lies_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"min_mib": 1, "max_mib": 1, "layers": 4, "block_kib": 4, "repeats": 1}
    monkeypatch.setattr(transfer, "NUM_LATENCY_PUSHES", 3)
    large, small = asyncio.run(transfer.measure("local", options))
    assert (large["mib"], large["num_wrong_digests"], large["num_repaired_blocks"]) == (1.0, 0, 0)
    assert large["data_gb_s"] > 0
    assert small["one_block_p50_ms"] > 0

    async def nothing(*_: object) -> float:
        return 1.0

    for name in ("write_s", "transfer_s"):  # nothing is sent: the receiver keeps its own content
        monkeypatch.setattr(transfer, name, nothing)
    large, _ = asyncio.run(transfer.measure("local", options))
    assert large["num_wrong_digests"] == 4 * 64


async def ask_a_receiver(block_id: int) -> None:
    async with transfer.running("grpc", ("grpc", transfer.MIB, 4, 4, "cpu")) as (_, far):
        far.grant([0])
        far.digests([block_id])


@pytest.mark.parametrize(
    ("serves", "block_id", "problem"),
    [
        (receivers.well, 10**6, "the receiving process failed: IndexError: index 1000000 is out of bounds"),
        (receivers.without_memory, 0, "the receiving process failed: RuntimeError: no memory"),
        (receivers.dying, 0, "the receiving process ended with -9"),
    ],
    ids=["asked for what is not there", "at its start", "killed"],
)
def test_what_a_receiving_process_died_of_is_said(
    monkeypatch: pytest.MonkeyPatch, serves: Callable[..., None], block_id: int, problem: str
) -> None:
    monkeypatch.setattr(transfer, "serve", serves)
    with pytest.raises(RuntimeError, match=problem):
        asyncio.run(ask_a_receiver(block_id))


def test_a_push_that_stands_still_is_told_before_its_part_is_ended() -> None:
    limits_s = [part.limit_s for part in gpu.PARTS if part.name.startswith("push")]
    assert len(limits_s) == 3
    assert min(limits_s) / 3 >= transfer.LEASE_S


def test_pushes_as_lists_are_tried_and_may_be_refused(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str | None]] = []

    def pushed(transport: str, what: str, *_: object, **__: object) -> Iterator[Row]:
        seen.append((what, os.environ.get(push.LISTS_VARIABLE)))
        yield Row(what=what, value=1.0, unit="GB/s")
        if what != push.NIXL_PUSH:
            raise RuntimeError("there is\nno such call")

    monkeypatch.setattr(push, "require", lambda *_: None)
    monkeypatch.setattr(push, "pushed", pushed)
    rows = list(push.measure_nixl(replace(setting, device="cuda")))
    assert seen == [(push.NIXL_PUSH, None), (push.NIXL_LISTS, "y")]
    assert [row.what for row in rows] == [push.NIXL_PUSH, push.NIXL_LISTS, push.NIXL_LISTS]
    assert rows[-1].note == "does not run: RuntimeError: there is no such call"
    assert push.LISTS_VARIABLE not in os.environ


def test_a_push_as_rows(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    async def measured(transport: str, options: dict[str, int], device: str) -> list[dict[str, Any]]:
        assert (transport, options["max_mib"], device) == ("grpc", setting.sizes.push_mib, "cpu")
        return [
            {"mib": 4.0, "data_gb_s": 5.0, "total_gb_s": 4.0, "total_ms": 1.0, "num_wrong_digests": 2,
             "num_repaired_blocks": 0},
            {"one_block_p50_ms": 0.5, "one_block_p99_ms": 0.9},
        ]  # fmt: skip

    monkeypatch.setattr(transfer, "measure", measured)
    known = {floors.TO_HOST: 50.0, floors.TO_DEVICE: 40.0}
    rows = list(push.measure_grpc(Setting(device="cpu", is_tiny=True, results=setting.results, known=known)))
    assert (rows[0].value, rows[0].limit, rows[0].share) == (5.0, 40.0, 0.125)
    assert [row.is_wrong for row in rows] == [False, False, True, False]
