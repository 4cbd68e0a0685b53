"""Failpoints act as often as they are told to."""

from __future__ import annotations

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
