"""Which devices and models get the Triton backend, and why others do not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from model_shapes import shape_of

from engine.attention import Needs, choice, choose_attention_backend
from engine.kernels.gpu import why_no_triton


def choose(
    name: str, device: str, *, kv_dtype: str = "", capability: tuple[int, int] | None = None, **change: int
) -> str:
    """In float32, so that no CPU kernels are compiled."""
    needs = Needs(
        model=shape_of(**change),
        device=device,
        capability=capability,
        dtype="float32",
        kv_dtype=kv_dtype or "float32",
        block_size=16,
    )
    return choose_attention_backend(name, needs)


def test_a_gpu_gets_triton_and_a_cpu_only_when_asked() -> None:
    assert choose("auto", "cuda") == "triton"
    assert choose("triton", "cuda") == "triton"
    assert choose("torch", "cuda") == "torch"
    assert choose("auto", "cpu") == "torch"


def test_without_a_c_compiler_a_gpu_gets_plain_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert choose("auto", "cuda") == "torch"
    assert "Triton needs a C compiler, and there is none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("programs", "compiler", "why_not"),
    [
        (["gcc"], None, ""),
        (["clang"], None, ""),
        (["cc"], None, "Triton needs a C compiler, and there is none"),
        (["mine", "gcc"], "mine", ""),
        (["gcc"], "gcc -O2", "Triton compiles with CC, which is 'gcc -O2', and there is no such program"),
        (["gcc"], "", "Triton compiles with CC, which is '', and there is no such program"),
    ],
)
def test_the_compiler_is_the_one_that_triton_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, programs: list[str], compiler: str | None, why_not: str
) -> None:
    for name in programs:
        (tmp_path / name).touch(mode=0o755)
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr("sysconfig.get_paths", lambda scheme: {"include": str(tmp_path)})
    monkeypatch.setenv("PATH", str(tmp_path))
    if compiler is None:
        monkeypatch.delenv("CC", raising=False)
    else:
        monkeypatch.setenv("CC", compiler)
    assert why_no_triton("cuda").startswith(why_not)
    assert bool(why_no_triton("cuda")) == bool(why_not)


def test_without_pythons_headers_a_gpu_gets_plain_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda scheme: {"include": str(tmp_path)})
    monkeypatch.setenv("CC", sys.executable)
    assert choose("auto", "cuda") == "torch"
    assert f"there is no Python.h in {tmp_path}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"head_dim": 514}, "head size must be even and at most 512, is 514"),
        ({"num_kv_heads": 1, "num_heads": 65}, "at most 64 query heads may share a key head, and 65 do"),
        ({"hidden_size": 65536}, "hidden size must be at most 32768, is 65536"),
    ],
)
def test_what_it_cannot_do_is_done_by_plain_torch(
    change: dict[str, int], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert choose("auto", "cuda", **change) == "torch"
    assert why in capsys.readouterr().err
    with pytest.raises(ValueError, match=why):
        choose("triton", "cuda", **change)


def test_tensor_cores_that_triton_does_not_use_are_left_to_plain_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert choose("auto", "cuda", capability=(8, 0)) == "triton"
    assert choose("auto", "cuda", capability=(7, 5)) == "torch"
    why = "need a GPU of compute capability 8.0 or later, and this one has 7.5"
    assert why in capsys.readouterr().err
    with pytest.raises(ValueError, match=why):
        choose("triton", "cuda", capability=(7, 5))


@pytest.mark.parametrize(
    ("version", "capability", "dtype", "is_told"),
    [
        ("3.6.0", (9, 0), "bfloat16", True),
        ("3.7.0", (10, 0), "float16", True),
        ("3.7.1+git", (9, 0), "bfloat16", False),
        ("3.6.0", (12, 0), "bfloat16", False),
        ("3.6.0", (9, 0), "float32", False),
    ],
)
def test_a_triton_that_sets_no_fences_is_told_of(
    version: str, capability: tuple[int, int], dtype: str, is_told: bool, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(pytest.importorskip("triton"), "__version__", version)
    needs = Needs(model=shape_of(), device="cuda", capability=capability, dtype=dtype, kv_dtype=dtype, block_size=16)
    assert choose_attention_backend("auto", needs) == "triton"
    assert (f"Triton {version} sets no fence" in capsys.readouterr().err) == is_told


def test_8_bit_floats_need_a_gpu_that_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert choose("triton", "cuda", kv_dtype="float8_e4m3fn", capability=(8, 9)) == "triton"
    assert choose("triton", "cuda", capability=(8, 0)) == "triton"
    assert choose("auto", "cuda", kv_dtype="float8_e4m3fn", capability=(8, 0)) == "torch"
    why = "kv_cache_dtype is fp8, and it needs a GPU of compute capability 8.9 or later, and this one has 8.0"
    assert why in capsys.readouterr().err
    with pytest.raises(ValueError, match=why):
        choose("triton", "cuda", kv_dtype="float8_e4m3fn", capability=(8, 0))


def test_without_triton_plain_torch_computes_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(choice, "why_no_triton", lambda device: f"there is none for {device}")
    assert choose("auto", "cuda") == "torch"
    assert "using plain torch, several times slower. No Triton kernels" in capsys.readouterr().err
    with pytest.raises(ValueError, match="there is none for cuda; give auto or torch"):
        choose("triton", "cuda")
