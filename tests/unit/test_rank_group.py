"""What ranks compute together, through real groups between threads: sums whose bits depend on their elements alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.tensor_parallel import group as group_module
from engine.tensor_parallel.group import RankGroup

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def together(num_ranks: int, folder: Path, call: Callable[[RankGroup], Any]) -> list[Any]:
    """What `call` returns on each rank, in the order of ranks."""
    with ThreadPoolExecutor(num_ranks) as threads:
        return list(
            threads.map(lambda rank: call(RankGroup(rank, num_ranks, "cpu", folder / "meeting")), range(num_ranks))
        )


def terms(num_ranks: int, *axes: int, dtype: torch.dtype) -> torch.Tensor:
    """Terms of very different sizes, so that adding them in another order gives other bits."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_ranks, *axes, generator=generator)
    return (x * torch.exp2(torch.randint(-6, 7, x.shape, generator=generator).float())).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_a_sum_is_made_in_the_order_of_ranks(
    num_ranks: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it takes one exchange or two, the sum is rounded once."""
    x = terms(num_ranks, 37, 11, dtype=dtype)
    expected = torch.zeros(37, 11)
    for term in x:
        expected += term.float()
    if dtype == torch.float32 and num_ranks > 2:
        assert not torch.equal(expected, sum(reversed(list(x)))), "another order has other bits"  # type: ignore[arg-type]
    for small_bytes in (x[0].nbytes, x[0].nbytes - 1):
        monkeypatch.setattr(group_module, "SMALL_BYTES", small_bytes)
        folder = tmp_path / str(small_bytes)
        folder.mkdir()
        for total in together(num_ranks, folder, lambda group: group.sum(x[group.rank])):
            assert total.shape == (37, 11)
            assert torch.equal(total, expected.to(dtype))


def test_sums_of_any_number_of_elements_and_of_views(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "SMALL_BYTES", 0)
    x = terms(3, 5, 7, dtype=torch.float32)
    expected = x[0] + x[1] + x[2]

    def sums(group: RankGroup) -> list[torch.Tensor]:
        mine = x[group.rank]
        return [group.sum(each) for each in (mine.T, mine[:1, :1], mine[0, :3], mine[:0], mine[:, 2])]

    for totals in together(3, tmp_path, sums):
        for total, part in zip(
            totals, (expected.T, expected[:1, :1], expected[0, :3], expected[:0], expected[:, 2]), strict=True
        ):
            assert torch.equal(total, part)


def test_outputs_are_laid_side_by_side(tmp_path: Path) -> None:
    y = torch.arange(24.0).view(4, 6)
    for whole in together(3, tmp_path, lambda group: group.gather_outputs(y[:, 2 * group.rank :][:, :2], 5)):
        assert torch.equal(whole, y[:, :5])
        assert whole.is_contiguous()


def test_ranks_that_must_be_alike(tmp_path: Path) -> None:
    def problem(group: RankGroup, name: str) -> str:
        try:
            group.check_alike(name, "GPUs")
        except ValueError as error:
            return str(error)
        return ""

    (tmp_path / "other").mkdir()
    assert together(3, tmp_path, lambda group: problem(group, "H200")) == ["", "", ""]
    problems = together(3, tmp_path / "other", lambda group: problem(group, "H100" if group.rank == 1 else "H200"))
    assert problems == [
        f"tensor_parallel_size: GPUs must be alike on all ranks; rank {rank} has {name}"
        for rank, name in enumerate(("H200", "H100", "H200"))
    ]


def test_the_smallest_number_and_what_the_first_has(tmp_path: Path) -> None:
    def call(group: RankGroup) -> tuple[int, list[int]]:
        return group.smallest(7 - group.rank), group.share_first(
            torch.tensor([group.rank, 5 * group.rank + 1])
        ).tolist()

    assert together(3, tmp_path, call) == [(5, [0, 1])] * 3


def test_nobody_waits_for_a_rank_that_never_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "MEETING", group_module.timedelta(seconds=0.2))
    with pytest.raises(RuntimeError):
        RankGroup(0, 2, "cpu", tmp_path / "meeting")


class Nccl:
    """The methods of NCCL's process group that `RankGroup` uses to end it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.num_aborts = 0
        self._error = error

    def _set_default_timeout(self, timeout: timedelta) -> None:
        del timeout

    def abort(self) -> None:
        self.num_aborts += 1
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize("error", [None, RuntimeError("Future for ProcessGroup abort timed out")])
def test_what_a_device_waits_for_is_aborted(
    error: Exception | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller does not wait for the abort to end: that may come after the device's wait, or never."""
    nccl = Nccl(error)
    monkeypatch.setattr(group_module, "_nccl", lambda store, rank, num_ranks: nccl)
    RankGroup(0, 2, "cuda", tmp_path / "meeting").abort()
    assert nccl.num_aborts == 1
