"""How the CPU kernels are built and chosen: how they add up, what they cannot do, and what is reported without them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.attention import Needs, choice, choose_attention_backend
from engine.kernels import build
from engine.kernels.build import KernelsUnavailable, load_cpu_kernels


def test_how_it_adds_up_is_said() -> None:
    """Tiles if the compiler was told that there are some, unless Linux refuses them."""
    flags = os.environ.get("CXXFLAGS", "")
    vectors = ("pairs", "floats16", "bytes and floats8", "floats8", "floats4")
    load_cpu_kernels()
    expected = ("tiles",) if "PRETEND_TILES" in flags else ("tiles", "pairs") if has_amx(flags) else vectors
    found = re.fullmatch(r"([\w ]+) \(version \d+\)", build.cpu_arithmetic())
    assert found is not None
    assert found[1] in expected


def has_amx(flags: str) -> bool:
    """Whether the compiler says that this machine has AMX."""
    command = [*build.find_compiler(), "-march=native", *flags.split(), "-E", "-dM", "-xc++", os.devnull]
    return "__AMX_BF16__" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


SHAPE = {
    "device": "cpu", "dtype": "bfloat16", "head_dim": 64, "block_size": 16, "num_groups": 3,
    "product_inputs": (576, 1536), "has_soft_cap": False,
}  # fmt: skip


KNOWN = ("device", "dtype", "block_size", "quantization", "kv_dtype")


def choose(name: str, **change: object) -> str:
    """The backend behind `name` for `SHAPE` with these changes."""
    shape = {**SHAPE, **change}
    known = {key: shape.pop(key) for key in KNOWN if key in shape}
    model = SimpleNamespace(
        num_heads=shape.pop("num_groups"), num_kv_heads=1, head_shapes=(), mla=None, moe=None, **shape
    )
    known = {"kv_dtype": known["dtype"], **known}
    return choose_attention_backend(name, Needs(model=model, capability=None, **known))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"device": "cuda"}, "the device is cuda"),
        ({"dtype": "float32"}, "it computes bfloat16, and dtype is float32"),
        ({"block_size": 8}, "block_size must be a multiple of 16, is 8"),
        ({"head_dim": 72}, "head size must be a multiple of 16 up to 512, is 72"),
        ({"num_groups": 97}, "at most 96 query heads may share a key head, and 97 do"),
        ({"product_inputs": (161, 1536)}, "must be even, are 161 and 1536"),
        ({"product_inputs": (576, 203)}, "must be even, are 576 and 203"),
        ({"has_soft_cap": True}, "the model caps its scores"),
        ({"quantization": "fp8"}, "it multiplies with weights in bfloat16, int8 or int4, and quantization is fp8"),
        ({"kv_dtype": "float8_e4m3fn"}, "its pool holds bfloat16, and kv_cache_dtype makes it float8_e4m3fn"),
    ],
)
def test_what_they_cannot_do_is_done_by_plain_torch(change: dict[str, object], why: str) -> None:
    assert choose("auto") == choose("auto", quantization="int8") == "cpu"
    if "device" not in change:  # other kernels may serve a GPU: tests/unit/test_triton_attention.py
        assert choose("auto", **change) == "torch"
    with pytest.raises(ValueError, match=why):
        choose("cpu", **change)


@pytest.mark.parametrize("change", [{"quantization": "fp8"}, {"kv_dtype": "float8_e4m3fn"}])
def test_who_asks_for_8_bits_hears_what_that_costs(
    change: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert choose("auto", **change) == "torch"
    assert re.search("using plain torch, several times slower than the CPU kernels.*: it", capsys.readouterr().err)


def test_without_a_compiler_plain_torch_computes_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(choice, "load_cpu_kernels", load_cpu_kernels.__wrapped__)
    assert choose("auto") == "torch"
    assert "using plain torch, several times slower than the CPU kernels" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"there is no C\+\+ compiler .*: install g"):
        choose("cpu")


def test_source_that_does_not_compile_says_why_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tmp_path / "cpu.cpp"
    source.write_text("int main() { return nonsense; }")
    monkeypatch.setattr(build, "SOURCE", source)
    with pytest.raises(KernelsUnavailable, match="nonsense"):
        build.cpu_library(tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_a_damaged_library_is_built_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "source" / "small.cpp"
    source.parent.mkdir()
    source.write_text("int answer() { return 42; }")
    monkeypatch.setattr(build, "SOURCE", source)
    library = build.cpu_library(tmp_path)
    whole = library.read_bytes()
    library.chmod(0o644)
    library.write_bytes(whole[:4096])
    assert build.cpu_library(tmp_path).read_bytes()[:4] == whole[:4]
    assert len(library.read_bytes()) == len(whole)


@pytest.mark.parametrize(
    ("compiler", "why"),
    [
        ("nonsense", "there is no C++ compiler (nonsense)"),
        ("true", "has written nothing"),
        ("false", "cannot compile them: it ended with 1"),
        ("g++ --nonsense", "compile"),
    ],
)
def test_a_compiler_that_is_none_is_named(
    compiler: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(KernelsUnavailable, match=re.escape(why)):
        build.cpu_library(tmp_path)


def test_a_cache_that_cannot_be_written_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KernelsUnavailable, match="cannot be kept in"):
        build.cpu_library(tmp_path / "file" / "kernels")
