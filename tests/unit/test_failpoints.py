"""Failpoints act as often as they are told to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rpc import failpoints
from rpc.errors import InternalError


@pytest.mark.parametrize(("times", "num"), [("", 1), ("*1", 1), ("*3", 3)])
async def test_a_point_acts_so_often_and_then_no_more(times: str, num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_armed", {})
    failpoints.arm(f"decode.generate=fail{times}")
    for _ in range(num):
        with pytest.raises(InternalError, match=r"failpoint decode\.generate"):
            await failpoints.reach("decode.generate")
    for _ in range(3):
        await failpoints.reach("decode.generate")
        await failpoints.reach("decode.reserved")


def test_what_services_reach_are_the_points() -> None:
    """A name that is none would never fail, and nobody would notice."""
    root = Path(failpoints.__file__).parents[1]
    reached = {
        name: file.parent.name
        for service in ("prefill_service", "decode_service", "worker_service")
        for file in (root / service).glob("*.py")
        for name in re.findall(r"""await reach\(["'](.+?)["']\)""", file.read_text())
    }
    assert reached.keys() == failpoints.POINTS.keys()
    assert all(service == f"{name.partition('.')[0]}_service" for name, service in reached.items())
