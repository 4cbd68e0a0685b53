"""The Triton kernels compile for GPUs of several kinds, and fit on them. This needs no GPU: Triton brings the
assembler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu_kinds import GPU_KINDS
from machine_code import early_writes, unfenced_products

from engine.attention.choice import TRITON_THAT_FENCES
from engine.attention.flash_calls import release_of
from engine.float8 import why_no_float8
from engine.kernels.gpu.gpu_kind import H200

triton = pytest.importorskip("triton", reason="Triton is not installed")

ROOT = Path(__file__).parents[2]
KERNELS = {
    "split_kernel", "reduce_kernel", "prefill_kernel", "rotate_kernel", "norm_kernel", "activation_kernel",
    "digest_kernel",    "product_kernel", "one_row_kernel", "widen_kernel", "quantize_kernel",
    "latent_decode_kernel", "latent_prefill_kernel", "latent_project_kernel", "unfolded_kernel", "bounds_kernel",
    "race_kernel", "copy_kernel", "shrink_kernel", "expand_kernel", "tiles_kernel", "expert_kernel",
    "row_product_kernel", "expert_row_product_kernel", "sum_kernel", "sum_pieces_kernel", "choose_kernel",
    "pieces_kernel", "reduce_pieces_kernel", "four_bit_kernel", "gate_kernel", "int4_kernel", "widen_int4_kernel",
    "int4_expert_kernel", "convolve_kernel", "delta_kernel", "scan_kernel", "solve_kernel",
    "delta_spans_kernel", "scan_spans_kernel",
}  # fmt: skip
FLOAT8_KERNELS = {"widen_kernel", "quantize_kernel"}


ONE_OF_EACH = [
    "128 bfloat16", "128 bfloat16, 8-bit pool", "16 heads bfloat16, pool of bfloat16", "normed", "64 rows, groups",
    "64 rows, int4 words", "256 rows, int4 128", "1 row bfloat16", "bfloat16", "at 8", "draws bfloat16",
    "rank 16 bfloat16", "DeepSeek-V3, 1 token", "gpt-oss-20b, 1 token", "16 rows, batch invariant",
    "128 bfloat16, pool of bfloat16, batch invariant", "bfloat16, unfolded", "Qwen3-30B-A3B, 1 token, int4 128",
    "Qwen3-Next, bfloat16", "Nemotron-Nano-9B-v2, bfloat16",
]  # fmt: skip
ONE_INSTRUCTION = {
    "80": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    "90": "wgmma.mma_async.sync.aligned.m64k16.f32.bf16.bf16",
    "100": "tcgen05.mma.cta_group::1.kind::f16",
    "120": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
}
"""The instruction that multiplies the rows of `batch_invariant`, whatever their number; only its number of columns
varies."""


TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


needs_tools = pytest.mark.skipif(
    not all((TOOLS / tool).exists() for tool in ("cuobjdump", "nvdisasm")),
    reason="this Triton brings no disassembler for GPUs",
)


def compiled(folder: Path, *arguments: str) -> Any:
    """What `triton_compile.py` prints."""
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(folder),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    environment.pop("TRITON_INTERPRET", None)
    result = subprocess.run(
        [sys.executable, ROOT / "tests" / "triton_compile.py", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@needs_tools
@pytest.mark.parametrize("cases", [ONE_OF_EACH, pytest.param([], marks=pytest.mark.slow)], ids=["one of each", "all"])
def test_kernels_compile_for_an_h200_and_spill_no_registers(cases: list[str], tmp_path: Path) -> None:
    usage = compiled(tmp_path, "90", *cases)["90"]
    assert {name.split()[0] for name in usage} == KERNELS
    assert [name for name, used in usage.items() if used["stack"]] == []
    assert [name for name, used in usage.items() if used["shared"] > H200.shared_bytes] == []
    assert [name for name, used in usage.items() if used.get("early_writes")] == []
    if release_of(triton.__version__) >= TRITON_THAT_FENCES:
        assert [name for name, used in usage.items() if used.get("unfenced")] == []
    assert usage["prefill_kernel 128 bfloat16"]["operands"] > 0  # products are recognised in the machine code
    for name, used in usage.items():
        if "rows, batch invariant" in name:
            assert used["multiplies"] == [ONE_INSTRUCTION["90"]], name
    # 16 bytes at a time, and 8 where the address is no multiple of 16.
    assert usage["copy_kernel bfloat16"]["stores"] == ["st.global.v2.b64"]
    assert usage["copy_kernel at 8"]["stores"] == ["st.global.b64"]
    assert usage["expand_kernel rank 16 bfloat16"]["stores"] == ["st.global.v4.b32"]
    # Three programs of the decode kernel fit on a multiprocessor: its speed depends on loads in flight.
    for case in ("128 bfloat16", "128 bfloat16, 8-bit pool"):
        assert 3 * usage[f"split_kernel {case}"]["shared"] <= H200.shared_bytes


TELLING = {
    "80": ["128 bfloat16", "128 heads bfloat16, pool of bfloat16"],
    "89": ["256 bfloat16", "20 heads bfloat16, pool of bfloat16", "bfloat16, unfolded"],
    "100": ["128 heads bfloat16, pool of float8_e4m3fn", "bfloat16, unfolded"],
    "120": ["128 bfloat16", "DeepSeek-V2-Lite, 4096 tokens"],
}
"""Kernels that would not fit on these GPUs, or would spill, with the sizes for an H200."""
ALL_OTHERS = [{f"{major}{minor}": []} for major, minor in GPU_KINDS if (major, minor) != H200.capability]
FEW_BYTES = 16
"""Bytes of stack that a few kernels take whatever their sizes are."""


@needs_tools
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(TELLING, id="telling", marks=pytest.mark.slow),
        *(pytest.param(each, marks=pytest.mark.slow, id=next(iter(each))) for each in ALL_OTHERS),
    ],
)
def test_kernels_compile_for_other_gpus_and_fit_into_them(cases: dict[str, list[str]], tmp_path: Path) -> None:
    found = compiled(tmp_path, *(argument for number, names in cases.items() for argument in (number, *names)))
    for number, usage in found.items():
        kind = GPU_KINDS[int(number[:-1]), int(number[-1])]
        if not cases[number]:
            has_float8 = not why_no_float8(kind.capability)
            assert {name.split()[0] for name in usage} == (KERNELS if has_float8 else KERNELS - FLOAT8_KERNELS)
        assert [(number, name) for name, used in usage.items() if used["shared"] > kind.shared_bytes] == []
        assert [(number, name) for name, used in usage.items() if used["stack"] > FEW_BYTES] == []
        # Two programs of the decode kernel, each with a kilobyte of the driver's, fit on a multiprocessor. Excepted are
        # float32, which is slow on purpose, and many queries.
        for name, used in usage.items():
            if name.startswith("split_kernel") and "float32" not in name and "64 heads" not in name:
                assert 2 * (used["shared"] + 1024) <= kind.shared_bytes + 1024


ALL_SIZES = [f"{num_rows} rows, batch invariant" for num_rows in (16, 32, 64, 256, 2048)]
EXPERTS_IN_8_BITS = [f"DeepSeek-V2-Lite, {num_tokens}" for num_tokens in ("1 token", "500 tokens", "4096 tokens")]


@needs_tools
@pytest.mark.slow
def test_rows_are_multiplied_by_one_instruction_in_tiles_of_all_sizes(tmp_path: Path) -> None:
    """The instruction adds up 16 inputs at a time, in the order of tiles, so that bits do not depend on the batch."""
    cases = ALL_SIZES + EXPERTS_IN_8_BITS
    found = compiled(tmp_path, *(argument for number in ONE_INSTRUCTION for argument in (number, *cases)))
    for number, usage in found.items():
        multiplies = {
            name: used["multiplies"]
            for name, used in usage.items()
            if not name.startswith(("tiles_kernel", "choose_kernel", "sum_kernel"))  # these multiply nothing
        }
        assert multiplies == {name: [ONE_INSTRUCTION[number]] for name in multiplies}


PRODUCTS = """
.L_x_0:
        /*0000*/                   LDS.64 R10, [R2] ;
        /*0010*/                   LDS.128 R4, [R2+0x10] ;
        /*0020*/                   WARPGROUP.ARRIVE ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR4], R24, gsb0 ;
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, {groups} ;
        /*0060*/              @!P0 BRA `({target}) ;
        /*0070*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0080*/                   STG.E desc[UR4][R2.64], R24 ;
        /*0090*/                   EXIT ;
.L_x_1:
        /*00a0*/                   ISETP.GE.AND P0, PT, R8, R9, PT ;
        /*00b0*/                   EXIT ;
"""


@pytest.mark.parametrize(
    ("groups", "target", "expected"),
    [("0x2", ".L_x_0", ["LDS.64 R10, [R2]"]), ("0x1", ".L_x_0", []), ("0x0", ".L_x_0", []), ("0x2", ".L_x_1", [])],
)
def test_a_write_to_what_tensor_cores_still_read_is_found(groups: str, target: str, expected: list[str]) -> None:
    assert early_writes(PRODUCTS.format(groups=groups, target=target)) == expected


COPIES = """
        /*0000*/                   LDGDEPBAR ;
.L_x_0:
        /*0010*/                   {wait} ;
        /*0020*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0030*/              @!P1 BRA `(.L_x_1) ;
        /*0040*/                   {fence} ;
.L_x_1:
        /*0050*/                   WARPGROUP.ARRIVE ;
        /*0060*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0070*/              @!P0 BRA `(.L_x_0) ;
        /*0080*/                   EXIT ;
"""
PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"


@pytest.mark.parametrize(
    ("wait", "fence", "is_skipped", "expected"),
    [
        ("DEPBAR.LE SB0, 0x3", "NOP", False, [PRODUCT]),
        ("DEPBAR.LE SB0, 0x3", "FENCE.VIEW.ASYNC.S", False, []),
        ("DEPBAR.LE SB0, 0x3", "FENCE.VIEW.ASYNC.S", True, [PRODUCT]),
        ("NOP", "NOP", False, []),
    ],
)
def test_a_product_without_a_fence_after_copies_is_found(
    wait: str, fence: str, is_skipped: bool, expected: list[str]
) -> None:
    text = COPIES.format(wait=wait, fence=fence)
    assert unfenced_products(text if is_skipped else text.replace("@!P1 BRA `(.L_x_1)", "NOP")) == expected
