"""The committed generated modules are what the .proto files generate."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROTOS = sorted((ROOT / "protos").glob("*.proto"))


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("protos")
    outputs = [f"--{kind}={out}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    sources = [str(path.relative_to(ROOT)) for path in PROTOS]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, *sources]
    subprocess.run(command, cwd=ROOT, check=True)
    return out / "protos"


def test_generated_files_are_current(generated: Path) -> None:
    fresh = {path.name: path.read_text() for path in generated.iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / "protos").glob("*_pb2*.py*")}
    assert committed.keys() == fresh.keys()
    stale = [name for name in fresh if fresh[name] != committed[name]]
    assert not stale, "run `make protos`"


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_enum_zero_means_nothing(path: Path) -> None:
    zeros = re.findall(r"(\w+) = 0;", path.read_text())
    assert all(name.endswith("_UNSPECIFIED") for name in zeros)
