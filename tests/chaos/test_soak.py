"""Eight seconds of everything at once: `tandem chaos`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_eight_seconds_of_chaos(few_layers: Path) -> None:
    flags = ("--seconds", "8", "--seed", "98", "--model", str(few_layers), "--json")
    command = [sys.executable, "-m", "tandem", "chaos", *flags]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr[-6000:]}"
    report = json.loads(result.stdout)
    assert report["passed"]
    assert sum(report["faults"].values()) > 6
    assert report["requests"]["answered"] > 10
    assert report["tokens_checked"] > 200
    assert report["num_loaded_tokens"] > 0, "pools are so small that KV goes to host memory, and comes back"
    assert report["resumed"] > 0, "the router was killed under streams that went on"
