"""Ten seconds of everything at once: `tandem chaos`."""

from __future__ import annotations

import json
import subprocess
import sys


def test_ten_seconds_of_chaos() -> None:
    command = [sys.executable, "-m", "tandem", "chaos", "--seconds", "10", "--seed", "98", "--json"]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr[-6000:]}"
    report = json.loads(result.stdout)
    assert report["passed"]
    assert sum(report["faults"].values()) > 6
    assert report["requests"]["answered"] > 10
    assert report["tokens_checked"] > 200
    assert report["resumed"] > 0, "the router was killed under streams that went on"
