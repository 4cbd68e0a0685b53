"""The same source passes the same tests when it is compiled for machines that lack this one's instructions, or as if
there were a matrix unit, and when each access to memory is checked."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SUBJECTS = ("kernels", "sampling", "int8", "int4", "mxfp4", "experts", "adapters", "recurrent", "latents")
TESTS = [str(Path(__file__).with_name(f"test_cpu_{subject}.py")) for subject in SUBJECTS]
PRETEND_TILES = "-DTANDEM_PRETEND_TILES"
CPUINFO = Path("/proc/cpuinfo")
HAS_TILES = CPUINFO.exists() and "amx_bf16" in CPUINFO.read_text()
ALL = (
    "two-threads and (product or sums or each_number or gates or attention or row_does or rotation or norms or "
    "draws or filters or largest or added or recurrent or latents) or one_after_the_other and 2-"
)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names kinds of x86")
@pytest.mark.parametrize(
    ("kind", "chosen"),
    [
        ("x86-64-v3", ALL),
        ("x86-64-v4", "two-threads and (product or sums or row_does or latents)"),
        ("x86-64-v4 -mavx512bf16", "two-threads and (product or sums or row_does or latents)"),
    ],
)
@pytest.mark.slow
def test_kernels_compiled_for(kind: str, chosen: str) -> None:
    """v3: AVX2, without AVX-512. v4: AVX-512, without or with its bfloat16, but without a matrix unit (AMX), which only
    products would use."""
    run_tests(chosen, {"CXXFLAGS": f"-march={kind}"})


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(HAS_TILES, reason="there are some here: test_cpu_kernels.py")
def test_what_is_made_of_tiles_where_there_are_none() -> None:
    """Without AMX, the compiler uses a substitute (tiles_pretended.h), which refuses what the matrix unit would
    refuse."""
    chosen = (
        "two-threads and (product or sums or attention or inputs or latents_of_all or latents_of_long) or "
        "one_after_the_other and 2-"
    )
    run_tests(chosen, {"CXXFLAGS": f"{PRETEND_TILES} -O1"})


PRODUCT_S = """
import sys, time
import torch
from engine.kernels.build import load_cpu_kernels
from engine.layers import Linear
torch.set_num_threads(1)
make = Linear
if sys.argv[1] == "ours":
    load_cpu_kernels()
    from engine.kernels.cpu_products import PanelLinear as make
num_rows = int(sys.argv[2])
product, x = make(torch.randn(3072, 576).bfloat16()), torch.randn(num_rows, 576).bfloat16()
times = []
for _ in range(30):
    start_s = time.thread_time()
    product(x)
    times.append(time.thread_time() - start_s)
print(min(times))
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names kinds of x86")
@pytest.mark.parametrize("num_rows", [1, 64])
@pytest.mark.slow
def test_products_without_avx512_take_no_longer_than_torchs(num_rows: int) -> None:
    """They once took twenty times as long, to move vectors between registers and the stack."""
    limited = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "CXXFLAGS": "-march=x86-64-v3"}
    ours, theirs = (
        float(
            subprocess.run(
                [sys.executable, "-c", PRODUCT_S, whose, str(num_rows)],
                env=os.environ | limited, capture_output=True, text=True, timeout=300, check=True,
            ).stdout
        )
        for whose in ("ours", "torch's")
    )  # fmt: skip
    assert ours < theirs


def run_tests(chosen: str, variables: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *TESTS, "-k", chosen],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[:4000]


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++, whose sanitizer it is")
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("machine", ["-mno-amx-tile", PRETEND_TILES])
def test_nothing_beside_a_tensor_is_read_or_written(machine: str) -> None:
    """Torch's own memory is checked as well, since it comes from the C library: an access past a tensor's end is
    noticed."""
    variables = {"CXX": "g++", "CXXFLAGS": f"-fsanitize=address -g {machine}"}
    # Without the sanitizer preloaded: the compiler would take minutes with it.
    code = "from engine.kernels.build import cpu_library, kernels_dir; cpu_library(kernels_dir())"
    subprocess.run([sys.executable, "-c", code], env=os.environ | variables, timeout=300, check=True)
    libraries = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    run_tests("", variables | {"LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0"})
