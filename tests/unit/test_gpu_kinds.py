"""Launch sizes by kind of GPU: what must hold for them that no compiler checks (see test_triton_compile.py)."""

from __future__ import annotations

from itertools import product

import pytest
from gpu_kinds import GPU_KINDS
from pretend_gpu import pretend_gpu
from triton_device import DEVICE  # must come before the kernels

from engine.kernels.gpu.decode import DecodeConfig
from engine.kernels.gpu.experts import expert_config
from engine.kernels.gpu.gpu_kind import H200, GpuKind, TensorCores, gpu_kind
from engine.kernels.gpu.latents import LatentTileConfig
from engine.kernels.gpu.prefill import MAX_GROUPS, PrefillConfig

HEAD_DIMS = (8, 64, 80, 96, 128, 130, 192, 256)
KINDS = [*GPU_KINDS.values(), GpuKind((13, 0), 48 << 10)]
"""The last one stands for a future GPU, or for a slice of one."""


@pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU, and none to be pretended")
@pytest.mark.parametrize("kind", GPU_KINDS.values(), ids=lambda kind: str(kind.capability))
def test_a_gpu_says_of_what_kind_it_is(kind: GpuKind) -> None:
    with pretend_gpu(kind=kind):
        assert gpu_kind("cuda") == kind
    assert gpu_kind("cpu") == H200, "where nothing is launched but interpreted"


def test_tensor_cores_of_an_unknown_gpu_are_told_in_the_way_that_all_know() -> None:
    known = [kind.tensor_cores.value for kind in KINDS]
    assert known == ["mma.sync"] * 3 + ["wgmma", "tcgen05"] + ["mma.sync"] * 2
    assert GpuKind((11, 0), 227 << 10).tensor_cores is TensorCores.MMA


def test_sizes_for_an_h200() -> None:
    """They were chosen by reading its machine code. Sizes for other kinds are added to them, and do not replace
    them."""
    assert {(dim, 2): DecodeConfig.of(H200, dim, 2).block_n for dim in (8, 64, 128, 130, 256)} == {
        (8, 2): 64, (64, 2): 64, (128, 2): 64, (130, 2): 32, (256, 2): 32,
    }  # fmt: skip
    assert [DecodeConfig.of(H200, 128, *sizes).num_stages for sizes in ((2,), (2, 1), (4,))] == [5, 9, 3]
    assert PrefillConfig.of(H200, 128, 2, 4) == PrefillConfig.of(H200, 64, 2, 4, 1) == PrefillConfig(128, 64, 8, 5)
    assert PrefillConfig.of(H200, 192, 2, 4) == PrefillConfig(128, 32, 8, 2)
    assert PrefillConfig.of(H200, 256, 2, 4, 1) == PrefillConfig(128, 16, 8, 2)
    decode = [LatentTileConfig.of_decode(H200, *sizes) for sizes in ((16, 2, 2), (20, 2, 2), (128, 2, 2), (128, 2, 1))]
    assert [(each.block_m, each.block_n) for each in decode] == [(16, 32), (32, 32), (64, 32), (64, 16)]
    prefill = [LatentTileConfig.of_prefill(H200, 2, kv_itemsize) for kv_itemsize in (2, 1)]
    assert [(each.block_m, each.block_n) for each in prefill] == [(64, 32), (32, 16)]
    assert expert_config(H200, 9999, 64, 2).block_n == 128


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.capability))
def test_what_is_promised_about_bits_and_rows(kind: GpuKind) -> None:
    """A piece has whole tiles, a tile of queries has room for a token, and the tiles in which a row of experts is added
    up do not depend on the rows beside it. Tensor cores take at least 16 rows and keys."""
    for head_dim, itemsizes in product(HEAD_DIMS, ((2, 2), (2, 1), (4, 4))):
        decode = DecodeConfig.of(kind, head_dim, *itemsizes)
        assert decode.min_piece == 256
        assert decode.min_piece % decode.block_n == 0
        for num_groups in (1, MAX_GROUPS):
            prefill = PrefillConfig.of(kind, head_dim, itemsizes[0], num_groups, itemsizes[1])
            assert prefill.block_m >= num_groups
            assert min(prefill.block_n, decode.block_n) >= 16
    for num_heads, itemsizes in product((1, 16, 20, 128), ((2, 2), (2, 1), (4, 4))):
        latents = LatentTileConfig.of_decode(kind, num_heads, *itemsizes)
        assert latents.min_piece % latents.block_n == 0
        assert min(latents.block_n, LatentTileConfig.of_prefill(kind, *itemsizes).block_n) >= 16
    assert len({expert_config(kind, rows, 64, 2).block_k for rows in (1, 999, 1999, 9999)}) == 1
