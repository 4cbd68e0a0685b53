"""FlashAttention-4, if installed, compiles the backend's calls, and copies nothing. This needs no GPU: run `pip install
"flash-attn-4[cu13]"` in an environment of Python 3.12."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("capability", ["9", "10"])
def test_flash_attention_4_compiles_what_the_backend_calls(capability: str) -> None:
    pytest.importorskip("flash_attn.cute")
    result = subprocess.run(
        [sys.executable, "-W", "ignore", ROOT / "tests" / "flash_attn_4_compile.py", capability],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    calls = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(calls) == len(set(calls)) > 100
