"""The emulator that runs compiled kernels on a CPU (`tests/ptx`), and some kernels that it runs."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from ptx.machine import Launch, WrongProgram
from ptx.memory import Memory, Region, WrongAccess
from ptx.program import parse

ROOT = Path(__file__).resolve().parents[2]
THREAD = """
    mov.u32 %r1, %tid.x;
    ld.param.b64 %rd1, [k_param_0];
    ld.param.b64 %rd2, [k_param_1];
    mad.wide.u32 %rd3, %r1, 4, %rd1;
    mad.wide.u32 %rd4, %r1, 4, %rd2;
"""
"""%r1: the thread's number; %rd3 and %rd4: the addresses of its 4 bytes in the input and in the output."""


def run(body: str, given: torch.Tensor, num_threads: int = 64, num_blocks: int = 1, seed: int = 0) -> torch.Tensor:
    """What each thread writes to its place: int32, or -1 if it writes nothing."""
    program = parse(
        f".visible .entry k(.param .u64 k_param_0)\n.reqntid {num_threads}\n{{\n.reg .pred %p<9>;\n.reg .b16 %rs<9>;\n"
        f".reg .b32 %r<40>;\n.reg .b64 %rd<9>;\n{body}\n    ret;\n$L__func_end0:\n}}\n"
    )
    written = torch.full((num_threads,), -1, dtype=torch.int32)
    parameters = {f"k_param_{i}": struct.pack("Q", x.data_ptr()) for i, x in enumerate((given, written))}
    memory = Memory("global", [Region.of(given), Region.of(written)])
    Launch(program, parameters, memory, 4096, (num_blocks, 1, 1), warps_together=False).run(seed)
    return written


def test_threads_compute_and_store() -> None:
    given = torch.arange(64, dtype=torch.int32)
    body = f"{THREAD} ld.global.b32 %r2, [%rd3]; mad.lo.s32 %r3, %r2, 3, -1; st.global.b32 [%rd4+0], %r3;"
    assert run(body, given).tolist() == [3 * i - 1 for i in range(64)]


def test_threads_that_go_different_ways_meet_again() -> None:
    """A loop with as many rounds as the lower bits of a thread's number have ones."""
    body = f"""{THREAD}
        and.b32 %r2, %r1, 7;
        mov.b32 %r3, 0;
    $L1:
        setp.eq.b32 %p1, %r2, 0;
        @%p1 bra $L2;
        sub.s32 %r4, %r2, 1;
        and.b32 %r2, %r2, %r4;
        add.s32 %r3, %r3, 1;
        bra.uni $L1;
    $L2:
        shfl.sync.bfly.b32 %r5, %r3, 1, 31, -1;
        st.global.b32 [%rd4], %r5;"""
    assert run(body, torch.zeros(1)).tolist() == [((i ^ 1) & 7).bit_count() for i in range(64)]


@pytest.mark.parametrize("barrier", ["bar.sync 0;", ""])
def test_warps_go_on_in_any_order_between_barriers(barrier: str) -> None:
    """Each warp reads what the other has written. Without a barrier, at least one of them always reads too early."""
    body = f"""{THREAD}
        shl.b32 %r2, %r1, 2;
        mov.b32 %r3, global_smem;
        add.s32 %r4, %r3, %r2;
        st.shared.b32 [%r4], %r1;
        {barrier}
        xor.b32 %r5, %r4, 128;
        ld.shared.b32 %r6, [%r5];
        st.global.b32 [%rd4], %r6;"""
    outcomes = [run(body, torch.zeros(1), seed=seed).tolist() for seed in range(8)]
    right = [i ^ 32 for i in range(64)]
    assert [outcome == right for outcome in outcomes] == [bool(barrier)] * 8


@pytest.mark.parametrize(
    ("wait", "arrives"), [("cp.async.wait_group 0;", True), ("cp.async.wait_group 1;", False), ("", False)]
)
def test_a_copy_is_there_when_it_was_waited_for(wait: str, arrives: bool) -> None:
    body = f"""{THREAD}
        shl.b32 %r2, %r1, 2;
        cp.async.ca.shared.global [ %r2 + 0 ], [ %rd3 + 0 ], 0x4;
        cp.async.commit_group;
        {wait}
        ld.shared.b32 %r6, [%r2];
        st.global.b32 [%rd4], %r6;"""
    given = torch.arange(64, dtype=torch.int32)
    assert (run(body, given).tolist() == given.tolist()) == arrives


WRONG = {
    "beside": ("ld.global.v2.b32 {%r2, %r3}, [%rd3];", WrongAccess, "8 bytes of global memory at 4 beside"),
    "outside": ("ld.global.b32 %r2, [%rd3+256];", WrongAccess, r"global memory at 0x\w+, \+"),
    "shared, outside": ("st.shared.b32 [%r1+4096], %r1;", WrongAccess, "4 bytes of shared memory"),
    "a barrier for some": (
        "setp.lt.u32 %p1, %r1, 7; @%p1 bra $L3; bar.sync 0;\n$L3:\n mov.b32 %r2, 0;", WrongProgram, "do not reach"
    ),
    "a shuffle for some": (
        "setp.lt.u32 %p1, %r1, 7; @%p1 shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;", WrongProgram, "some threads of a warp"
    ),
    "unknown": ("frobnicate.b32 %r2, %r1;", NotImplementedError, "frobnicate"),
}  # fmt: skip


@pytest.mark.parametrize("what", list(WRONG))
def test_what_a_gpu_would_not_do_is_an_error(what: str) -> None:
    body, error, said = WRONG[what]
    with pytest.raises(error, match=said):
        run(THREAD + body, torch.zeros(64))


def test_a_product_of_tensor_cores() -> None:
    """One warp multiplies rows of a with columns of b, which ldmatrix has brought to its threads."""
    a = torch.randn(16, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    b = torch.randn(16, 8, generator=torch.Generator().manual_seed(2)).bfloat16()
    given = torch.cat([a.flatten(), b.flatten()]).view(torch.int32)  # 192 words
    body = f"""{THREAD}
        shl.b32 %r2, %r1, 4;
        mad.wide.u32 %rd5, %r1, 16, %rd1;
        setp.lt.u32 %p1, %r1, 16;
        cp.async.cg.shared.global [%r2], [%rd5], 0x10;
        @%p1 cp.async.cg.shared.global [%r2+512], [%rd5+512], 0x10;
        cp.async.commit_group;
        cp.async.wait_group 0;
        bar.sync 0;
        and.b32 %r3, %r1, 15;
        shr.u32 %r4, %r1, 4;
        shl.b32 %r5, %r3, 5;
        mad.lo.s32 %r6, %r4, 16, %r5;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r6];
        shl.b32 %r7, %r3, 4;
        add.s32 %r8, %r7, 512;
        ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {{%r14, %r15}}, [%r8];
        mov.b32 %r20, 0f3F800000;
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
            {{ %r16, %r17, %r18, %r19 }}, {{ %r10, %r11, %r12, %r13 }}, {{ %r14, %r15 }}, {{ %r20, %r20, %r20, %r20 }};
        st.global.b32 [%rd4], {{RESULT}};"""
    product = (a.double() @ b.double() + 1).numpy()
    lane = np.arange(32)
    for index in range(4):
        result = run(body.replace("{RESULT}", f"%r{16 + index}"), given, num_threads=32).view(torch.float32).numpy()
        expected = product[lane // 4 + 8 * (index // 2), 2 * (lane % 4) + index % 2]
        np.testing.assert_allclose(result, expected, rtol=1e-6)


# -- kernels --------------------------------------------------------------------------------------------------------

SOME = {
    "test_triton_digest.py": "digests",
    "test_triton_copy_rows.py": "",
    "test_triton_attention.py": "all_head_shapes and (8-3 or 64-4) or 8_bit_floats and 9-dtype1",
}
"""The test files that are run this way, and which of their tests."""
ALL = (
    "digest", "copy_rows", "fused", "attention", "product", "quantized", "lora", "draw", "experts", "latents",
    "unfolded", "one_row", "int4", "int4_experts",
)  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if "copy_rows" in name else pytest.mark.slow) for name in SOME]
)
def test_compiled_kernels_pass_their_tests(name: str) -> None:
    assert num_passed(name, SOME[name], "ptx") > 2


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ALL)
def test_all_compiled_kernels_pass_their_tests(name: str) -> None:
    assert num_passed(f"test_triton_{name}.py", "", "ptx, warps together") > 2


def num_passed(name: str, chosen: str, how: str) -> int:
    """Run tests of kernels in a process that does not interpret them. Returns how many passed."""
    pytest.importorskip("triton")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/unit/{name}", "-k", chosen]
    environment |= {"TRITON_ON_CPU": how}
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500, check=False
    )
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    passed = re.search(r"(\d+) passed", ended.stdout)
    assert passed is not None
    return int(passed[1])
