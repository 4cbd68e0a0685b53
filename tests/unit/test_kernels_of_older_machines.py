"""The same source, compiled for machines that lack this one's instructions, passes the same tests."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).with_name("test_cpu_kernels.py")
ALL = "two-threads and (product or gates or attention or row_does or rotation or norms or draws)"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names kinds of x86")
@pytest.mark.parametrize(
    ("kind", "chosen"),
    [("x86-64-v3", ALL), ("x86-64-v4", "two-threads and (product or row_does)")],
)
@pytest.mark.slow
def test_kernels_compiled_for(kind: str, chosen: str) -> None:
    """v3: AVX2, without AVX-512. v4: AVX-512, without its bfloat16, which products alone would use."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS), "-k", chosen],
        env=os.environ | {"CXXFLAGS": f"-march={kind}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
