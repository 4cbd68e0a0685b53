"""Which packages may import which. A package that does not exist yet breaks no rule."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import tandem

ROOT = Path(__file__).parents[2]

MAY_IMPORT: dict[str, set[str]] = {
    "protos": set(),
    "prefix_hash": set(),
    "engine": {"prefix_hash"},
    "kv_transfer": {"protos", "prefix_hash"},
    "rpc": {"protos"},
    "registry": {"protos"},
    "router": {"protos", "rpc", "registry", "prefix_hash"},
    "worker_service": {"engine", "kv_transfer", "rpc", "registry", "prefix_hash", "protos"},
    "prefill_service": {"worker_service", "engine", "kv_transfer", "rpc", "registry", "prefix_hash", "protos"},
    "decode_service": {"worker_service", "engine", "kv_transfer", "rpc", "registry", "prefix_hash", "protos"},
    "gateway": {"tandem", "rpc", "protos"},  # the client, with its messages and errors
}
ANYTHING_OF_OURS = {"tandem", "tests", "benchmarks"}
NEVER_IMPORTED = {"tests", "benchmarks"}
OURS = set(MAY_IMPORT) | ANYTHING_OF_OURS

NEVER_FROM_OUTSIDE: dict[str, set[str]] = {
    "router": {"torch", "transformers"},
    "registry": {"torch", "grpc"},
    "rpc": {"torch", "redis"},
    "kv_transfer": {"torch", "redis"},
    "engine": {"grpc", "redis"},
    "prefix_hash": {"torch", "grpc", "redis"},
    "gateway": {"torch", "redis"},
}
NEVER_ANYWHERE = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
HOLDS_INTEGERS_ONLY = "engine/scheduling"
VAGUE_NAMES = {"utils", "util", "common", "core", "helpers", "helper", "misc"}


def existing(packages: set[str]) -> list[str]:
    return sorted(package for package in packages if (ROOT / package / "__init__.py").exists())


def imports_of(path: Path) -> set[tuple[str, int]]:
    """Return the top-level packages that a file imports anywhere, also lazily, with their lines."""
    found: set[tuple[str, int]] = set()
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            found.update((alias.name.partition(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add((node.module.partition(".")[0], node.lineno))
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                found.add((node.args[0].value.partition(".")[0], node.lineno))
    return found


def breaches(package: str, forbidden: set[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for name, line in sorted(imports_of(path))
        if name in forbidden
    ]


@pytest.mark.parametrize("package", existing(set(MAY_IMPORT)))
def test_package_imports_only_what_it_may(package: str) -> None:
    forbidden = OURS - MAY_IMPORT[package] - {package} | NEVER_FROM_OUTSIDE.get(package, set())
    assert not breaches(package, forbidden)


@pytest.mark.parametrize("package", existing(OURS - NEVER_IMPORTED))
def test_nothing_imports_tests_or_unpickles(package: str) -> None:
    assert not breaches(package, NEVER_IMPORTED | NEVER_ANYWHERE)


def test_what_decides_holds_integers_only() -> None:
    assert (ROOT / HOLDS_INTEGERS_ONLY / "scheduler.py").is_file()
    assert not breaches(HOLDS_INTEGERS_ONLY, {"torch", "transformers", "triton"})


def test_every_package_has_a_rule() -> None:
    """A new package needs a line in MAY_IMPORT; no file or folder has a vague name."""
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages <= OURS
    names = {path.stem for package in existing(OURS - {"tests"}) for path in (ROOT / package).rglob("*")}
    assert not names & VAGUE_NAMES


def modules_of(package: str) -> list[str]:
    paths = sorted((ROOT / package).rglob("*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return [name for name in names if not name.endswith("__main__")]


@pytest.mark.parametrize("package", existing({"router", "registry", "rpc", "kv_transfer", "prefix_hash"}))
def test_not_even_through_others(package: str) -> None:
    """Import every module of the package in a fresh process, and check what else was imported."""
    # nixl is an optional library, whose own imports are up to it.
    modules = [name for name in modules_of(package) if "nixl" not in name]
    code = f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
print(*sorted(set({sorted(NEVER_FROM_OUTSIDE[package])!r}) & sys.modules.keys()))
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


def test_a_type_checker_sees_what_is_imported_from_tandem() -> None:
    """`tandem` lists its names twice: for type checkers, and for the lazy imports at run time. Both must agree."""
    source = ast.parse((ROOT / "tandem" / "__init__.py").read_text())
    (seen,) = [node for node in source.body if isinstance(node, ast.If)]
    homes = {
        alias.name: node.module
        for node in seen.body
        if isinstance(node, ast.ImportFrom) and node.module and node.module != "typing"
        for alias in node.names
    }
    assert homes.keys() == {*tandem.__all__} - {"__version__"}
    for name, home in homes.items():
        assert getattr(tandem, name) is getattr(importlib.import_module(home), name), name
