"""The Triton kernels compile for an H200, and fit into it. Needs no GPU: Triton brings the assembler with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from machine_code import early_writes

triton = pytest.importorskip("triton", reason="Triton is not installed")

ROOT = Path(__file__).parents[2]
SHARED_BYTES = 227 * 1024
"""What a program may have on a Hopper GPU."""
KERNELS = {
    "split_kernel", "reduce_kernel", "prefill_kernel", "rotate_kernel", "norm_kernel", "silu_kernel", "digest_kernel",
    "product_kernel", "widen_kernel", "quantize_kernel", "latent_decode_kernel", "latent_prefill_kernel",
    "latent_project_kernel", "bounds_kernel", "race_kernel", "copy_kernel",
    "shrink_kernel", "expand_kernel", "tiles_kernel", "expert_kernel",
}  # fmt: skip


ONE_OF_EACH = [
    "128 bfloat16", "128 bfloat16, 8-bit pool", "16 heads bfloat16, pool of bfloat16", "normed", "16 rows",
    "16 rows, groups", "64 rows", "bfloat16", "at 8", "draws bfloat16", "rank 16 bfloat16",
    "DeepSeek-V3, 1 token",
]  # fmt: skip


TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


@pytest.mark.skipif(
    not all((TOOLS / tool).exists() for tool in ("cuobjdump", "nvdisasm")),
    reason="this Triton brings no disassembler for GPUs",
)
@pytest.mark.parametrize("cases", [ONE_OF_EACH, pytest.param([], marks=pytest.mark.slow)], ids=["one of each", "all"])
def test_kernels_compile_for_an_h200_and_spill_no_registers(cases: list[str], tmp_path: Path) -> None:
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    environment.pop("TRITON_INTERPRET", None)
    result = subprocess.run(
        [sys.executable, ROOT / "tests" / "triton_compile.py", "90", *cases],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    usage = json.loads(result.stdout)["90"]
    assert {name.split()[0] for name in usage} == KERNELS
    assert [name for name, used in usage.items() if used["stack"]] == []
    assert [name for name, used in usage.items() if used["shared"] > SHARED_BYTES] == []
    assert [name for name, used in usage.items() if used.get("early_writes")] == []
    assert usage["prefill_kernel 128 bfloat16"]["operands"] > 0  # products are recognised
    # 16 bytes at a time, and 8 where the address is no multiple of 16.
    assert usage["copy_kernel bfloat16"]["stores"] == ["st.global.v2.b64"]
    assert usage["copy_kernel at 8"]["stores"] == ["st.global.b64"]
    assert usage["expand_kernel rank 16 bfloat16"]["stores"] == ["st.global.v4.b32"]
    # Three programs of the decode kernel find room on a multiprocessor: it lives from loads in flight.
    for case in ("128 bfloat16", "128 bfloat16, 8-bit pool"):
        assert 3 * usage[f"split_kernel {case}"]["shared"] <= SHARED_BYTES


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
