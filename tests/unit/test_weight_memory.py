"""Where the CPU kernels keep weights: in pieces of a few large mappings, which are freed with the last weight in
them."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from engine.kernels.build import load_cpu_kernels
from engine.running.worker import _saying_what_is_too_large

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere weights are usual tensors")
CHUNK_BYTES = 64 << 20


@pytest.fixture(autouse=True)
def kernels() -> None:
    load_cpu_kernels()


@pytest.fixture
def before() -> list[torch.Tensor]:
    """Two weights. The second is alone in a chunk, with room for 44 MB: the first leaves no other chunk with enough
    room for it."""
    return [packed(12288, 2560), packed(4096, 2560)]


def packed(num_outputs: int, num_inputs: int) -> torch.Tensor:
    weight = torch.full((num_outputs, num_inputs), 0.5, dtype=torch.bfloat16)
    panels: torch.Tensor = torch.ops.tandem_cpu.pack_weight(weight)
    return panels


def num_bytes(panels: torch.Tensor) -> int:
    return panels.numel() * panels.element_size()


def flags_of_mapping(address: int) -> list[str]:
    """The kernel's flags of the mapping that has this address: "hg" if huge pages were asked for, "nh" if refused."""
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if "-" in name and not name.endswith(":"):
            begin, end = (int(part, 16) for part in name.split("-"))
            is_here = begin <= address < end
        elif is_here and name == "VmFlags:":
            return rest
    raise AssertionError("nothing is mapped there")


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return True
    return False


def test_weights_stand_one_after_the_other(before: list[torch.Tensor]) -> None:
    weights = [packed(64, 600) for _ in range(4)]
    steps = {b.data_ptr() - a.data_ptr() for a, b in pairwise(weights)}
    assert steps == {num_bytes(weights[0])}
    assert all(panels.data_ptr() % 64 == 0 for panels in weights)


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages")
def test_huge_pages_are_asked_for_or_given_up() -> None:
    """Hosts that take long to find huge pages have "nh"."""
    assert {"hg", "nh"} & set(flags_of_mapping(packed(64, 600).data_ptr()))


def test_the_last_weight_takes_its_chunk_along(before: list[torch.Tensor]) -> None:
    first, *others = (
        packed(4096, 2560) for _ in range(4)
    )  # 20 MB each: two beside the one before, two in the next chunk
    addresses = [panels.data_ptr() for panels in (before[1], first, *others)]
    assert addresses[1] - addresses[0] == addresses[2] - addresses[1] == num_bytes(first)
    assert addresses[3] - addresses[2] != num_bytes(first)
    before.clear()
    del first
    assert all((panels == 0.5).all() for panels in others)
    del others
    assert not any(map(is_mapped, addresses))


def test_a_weight_larger_than_a_chunk_has_one_of_its_own() -> None:
    large = packed(16384, 2560)
    address = large.data_ptr()
    assert num_bytes(large) > CHUNK_BYTES
    assert (large == 0.5).all()
    del large
    assert not is_mapped(address)


def test_what_fills_up_the_last_panel_is_zeros_where_others_were_before() -> None:
    for _ in range(3):  # a freed chunk may be mapped again
        panels = packed(33, 64)
        assert (panels[1, :, 1:] == 0).all()
        assert (panels[1, :, 0] == 0.5).all()
        del panels


def test_want_of_memory_is_said_with_what_helps() -> None:
    no_memory = pytest.raises(ValueError, match=r"^this process may not have so much memory: lower .*can't allocate")
    with no_memory, _saying_what_is_too_large("cpu"):
        torch.empty(2**47, dtype=torch.bfloat16)  # more than addresses reach, however freely the kernel promises memory
