"""What docs/gpu.md carries to a machine with torch, Triton and transformers is all that benchmarks/gpu.py needs to
import."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, distribution, files, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.gpu_parts import kernels, servers

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def carry(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int | None], Path]:
    """Makes the package folder of a bare machine: torch, Triton and transformers, what these need, and the packages of
    the first lines, or of all, that docs/gpu.md carries there."""
    text = (ROOT / "docs/gpu.md").read_text()
    (listed,) = re.findall(r"-d wheels \\\n(.*?)\nzip", text, re.DOTALL)
    lines = [line.split() for line in listed.replace("\\", "").splitlines()]

    def make(num_lines: int | None) -> Path:
        folder = tmp_path_factory.mktemp("site")
        carried = {canonicalize_name(name) for line in lines[:num_lines] for name in line}
        for name in with_needs(["torch", "triton", "transformers"]) | carried:
            for top in tops_of(name):
                if not (folder / top).exists():  # several packages may share one, such as google
                    (folder / top).symlink_to(str(distribution(name).locate_file(top)))
        return folder

    return make


def tops_of(name: str) -> set[str]:
    """The top-level entries of a package in the package folder; none if it is not installed here, such as
    `nixl-cu13`."""
    try:
        return {path.parts[0] for path in files(name) or []} - {".."}
    except PackageNotFoundError:
        return set()


def with_needs(names: Iterable[str]) -> set[str]:
    found: set[str] = set()
    todo = list(names)
    while todo:
        name = canonicalize_name(todo.pop())
        if name in found or not tops_of(name):
            continue
        found.add(name)
        needed = [Requirement(text) for text in requires(name) or []]
        todo += [one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


def run_bare(site: Path, *arguments: str, path: str = str(ROOT)) -> subprocess.CompletedProcess[str]:
    """Run Python with these packages and no others."""
    return subprocess.run(
        [sys.executable, "-S", *arguments], env=os.environ | {"PYTHONPATH": f"{path}{os.pathsep}{site}"}, cwd=ROOT,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_lines", "modules"),
    [
        (1, ("benchmarks.gpu", "benchmarks.gpu_parts.products", "engine.llm_engine", "accelerate")),
        (2, ("benchmarks.transfer", "worker_service.device_pool", "worker_service.cuda_ipc")),
        (None, (
            "benchmarks.gpu_parts.servers", "tandem.bench.backends", "tandem.bench.run", "tandem.bench.summary",
            "tandem.bench.workload", "tandem.cluster", "tandem.__main__", "router.__main__",
            "prefill_service.__main__", "decode_service.__main__", *servers.NEEDED,
        )),
    ],
    ids=["engines", "pushes", "servers"],
)  # fmt: skip
def test_what_is_carried_to_a_bare_machine_is_all_that_is_imported(
    carry: Callable[[int | None], Path], num_lines: int | None, modules: tuple[str, ...]
) -> None:
    done = run_bare(carry(num_lines), "-c", f"import {', '.join(modules)}")
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_the_kernels_tests_find_all_that_they_ask_for_on_a_bare_machine(carry: Callable[[int | None], Path]) -> None:
    """pytest sets up the plan of their fixtures, but runs no test."""
    _, *arguments = kernels.command()
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = run_bare(carry(2), *arguments, "-n", "0", "--setup-plan", path=path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "SETUP    F one_thread" in done.stdout
    assert re.search(r"\d+ deselected", done.stdout), "what takes minutes was not left out"
