"""The examples, and README.md's first client, run unchanged against a real cluster; except the one in Go."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from clusters import RunningCluster

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
README = (ROOT / "README.md").read_text()


@pytest.fixture
def cluster(real_cluster: RunningCluster) -> RunningCluster:
    return real_cluster


def run(*command: str, cwd: Path = EXAMPLES) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_python_over_http(cluster: RunningCluster) -> None:
    out = run(sys.executable, str(EXAMPLES / "python" / "chat_over_http.py"), f"http://{cluster.http_address}/v1")
    assert out == "The capital of France is Paris.\n37 prompt tokens, 8 generated\n"


def test_python_over_grpc(cluster: RunningCluster) -> None:
    lines = run(sys.executable, str(EXAMPLES / "python" / "many_over_grpc.py"), cluster.address).splitlines()
    assert len(lines) == 8
    assert all("-> decode-1" in line for line in lines)


@pytest.mark.skipif(not (shutil.which("node") and shutil.which("npm")), reason="no Node.js here")
def test_node_over_grpc(cluster: RunningCluster, tmp_path: Path) -> None:
    """In a copy of the folder, with the packages that it needs, from the registry that npm is configured for."""
    shutil.copytree(EXAMPLES / "node", tmp_path / "examples" / "node", ignore=shutil.ignore_patterns("node_modules"))
    (tmp_path / "protos").mkdir()
    for proto in (EXAMPLES.parent / "protos").glob("*.proto"):
        shutil.copy(proto, tmp_path / "protos")
    folder = tmp_path / "examples" / "node"
    run("npm", "install", "--no-audit", "--no-fund", "--silent", cwd=folder)
    out = run("node", "generate.js", cluster.address, cwd=folder)
    assert out.startswith(" Paris.")
    assert out.endswith("FINISH_REASON_LENGTH: 16 tokens\n")


def test_the_first_client_of_the_readme_is_short_and_runs(cluster: RunningCluster) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    source = next(block for block in blocks if "Client(" in block)
    assert len(source.strip().splitlines()) <= 10
    out = run(sys.executable, "-c", source.replace("127.0.0.1:50051", cluster.address))
    assert out.startswith("The capital of France is Paris.")
    assert "completion_tokens: " in out
