"""Ten times the sustainable load: goodput stays up, requests beyond it are refused at once, and nothing is left
over."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow  # by itself: beside other tests it measures them
def test_ten_times_the_sustainable_load() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "overload.py"), "--json"]
    result = subprocess.run(
        # Short requests: even a busy machine serves many of them within their deadline.
        [*command, "--seconds", "3", "--baseline-seconds", "2", "--prompt-tokens", "64", "--output-tokens", "8"],
        check=False, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    summary = json.loads(result.stdout)
    before, during, after = (summary[phase] for phase in ("before", "overload", "after"))
    num_admitted = during["requests"] - during["refused"]
    assert during["requests"] > 5 * before["answered"]
    # Looser than what is measured (docs/failure-contract.md), since any machine should pass.
    # Without refusals 5 % of the admitted requests would be answered in time.
    assert during["answered"] >= 0.5 * num_admitted, summary
    assert during["goodput_per_s"] >= 0.4 * before["goodput_per_s"], summary
    for phase in (before, during, after):
        assert phase["requests"] == phase["answered"] + phase["refused"] + phase["timed out"], "and no other end"
    assert after["answered"] == after["requests"] > 0, summary
    # measured for two seconds, of which one may be lost
    assert after["goodput_per_s"] >= 0.1 * before["goodput_per_s"], summary
    # long before the deadline, although ten times the load shares the cores
    assert during["p99_refusal_ms"] < 0.6 * 1000 * summary["shape"]["deadline_s"], summary
    assert during["p50_retry_after_s"] > 0, summary
    growth_mib = summary["memory_growth_mib"]
    assert max(growth_mib["redis"], growth_mib["router"]) < 64, summary
    # A worker's KV pool has 512 MiB, whose pages count once they are used: the faster the machine, the more are.
    assert max(growth_mib["prefill-1"], growth_mib["decode-1"]) < 64 + 512, summary
    assert summary["at_rest"]
