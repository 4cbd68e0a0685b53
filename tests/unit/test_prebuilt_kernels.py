"""Without a compiler, as in a container image, the engine uses the fastest prebuilt library that its machine can run,
and none that would crash it."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from engine.kernels import build
from engine.kernels.build import KINDS, KernelsUnavailable

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="prebuilt for kinds of x86")

AMX, BF16, V4, V3 = KINDS


@pytest.fixture
def prebuilt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with prebuilt libraries of all kinds, of a source that compiles at once. Afterwards there is no
    compiler."""
    source = tmp_path / "source" / "small.cpp"
    source.parent.mkdir()
    source.write_text("int answer() { return 42; }")
    monkeypatch.setattr(build, "SOURCE", source)
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    build.prebuild()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    return build.PREBUILT


def machine_with(monkeypatch: pytest.MonkeyPatch, features: frozenset[str]) -> None:
    monkeypatch.setattr(build, "_cpu_features", lambda: "flags\t\t: fpu " + " ".join(sorted(features)))


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_fastest_that_the_machine_can_run(kind: str, prebuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, KINDS[kind][1])
    assert build.cpu_library(Path("/not/written/to")) == prebuilt / kind / build.LIBRARY


def test_none_for_an_older_machine(prebuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, KINDS[V3][1] - {"avx2"})
    with pytest.raises(KernelsUnavailable, match="no C\\+\\+ compiler"):
        build.cpu_library(Path("/not/written/to"))


def test_what_is_damaged_is_left_out(
    prebuilt: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine_with(monkeypatch, KINDS[BF16][1])
    library = prebuilt / BF16 / build.LIBRARY
    library.write_bytes(library.read_bytes()[:4096])
    (prebuilt / V4 / build.BUILT_FROM).unlink()
    assert build.prebuilt_library() == prebuilt / V3 / build.LIBRARY
    assert f"{prebuilt / BF16} is damaged" in capsys.readouterr().err


def test_what_was_compiled_from_another_source_is_left_out(prebuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, KINDS[BF16][1])
    build.SOURCE.write_text("int answer() { return 43; }")
    assert build.prebuilt_library() is None


def test_with_a_compiler_this_very_machine_is_compiled_for() -> None:
    command = build.compile_command(build.find_compiler())
    assert "-march=native" in command
    assert not [flag for flags, _ in KINDS.values() for flag in flags if flag in command]
