"""Which library the FlashAttention backend uses, when the backend itself is chosen, and what is reported if not. GPUs
and libraries are faked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from types import ModuleType
from typing import Any

import flash_reference
import pytest
import torch
from model_shapes import shape_of

from engine.attention import Needs, choice, choose_attention_backend, flash_calls, why_no_graphs
from engine.attention.flash_calls import FlashUnavailable, load_flash_calls, release_of


def needs(
    device: str = "cuda", block_size: int = 256, dtype: str = "bfloat16", kv_dtype: str = "", **change: int
) -> Needs:
    return Needs(
        model=shape_of(**change),
        device=device,
        capability=(9, 0),
        dtype=dtype,
        kv_dtype=kv_dtype or dtype,
        block_size=block_size,
    )


def choose(name: str, **change: Any) -> str:
    return choose_attention_backend(name, needs(**change))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Fakes a GPU and libraries."""

    def make(
        capability: tuple[int, int], *modules: str, version: str = "2.8.3", torch_version: str = "2.13.0",
        version_of_4: str = "4.0.0b36",
    ) -> None:  # fmt: skip
        def installed(distribution: str) -> str:
            if distribution not in modules:
                raise PackageNotFoundError(distribution)
            return version_of_4

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch, "__version__", torch_version)
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: "torch" in modules)
        monkeypatch.setattr(flash_calls, "find_spec", lambda name: name if name in modules else None)
        monkeypatch.setattr(flash_calls.metadata, "version", installed)
        for name in ("flash_attn", "flash_attn_interface", "flash_attn.cute"):
            module = ModuleType(name)
            module.__dict__.update(
                __version__=version, flash_attn_varlen_func=flash_reference.flash_attn_varlen_func,
                flash_attn_with_kvcache=flash_reference.flash_attn_with_kvcache,
            )  # fmt: skip
            monkeypatch.setitem(sys.modules, name, module)

    return make


GpuMaker = Callable[..., None]


def loaded(block_size: int = 256, head_dim: int = 128) -> str:
    return load_flash_calls(
        device="cuda", dtype="bfloat16", kv_dtype="bfloat16", head_dim=head_dim, block_size=block_size
    ).name


def test_the_first_library_that_fits_is_taken(gpu: GpuMaker) -> None:
    libraries = ("flash_attn_interface", "flash-attn-4", "flash_attn_2_cuda", "torch")
    for capability, expected in [
        ((9, 0), "FlashAttention-3"),
        ((8, 0), "FlashAttention-2"),
        ((10, 0), "FlashAttention-4"),
        ((12, 0), "FlashAttention-2"),
    ]:
        gpu(capability, *libraries)
        assert loaded() == expected
    for capability, head_dim, expected in [
        ((9, 0), 192, "FlashAttention-4"),
        ((9, 0), 72, "FlashAttention-2"),
        ((10, 0), 192, "FlashAttention-2"),
        ((10, 0), 256, "FlashAttention-4"),
    ]:
        gpu(capability, *libraries[1:])
        assert loaded(head_dim=head_dim) == expected
    gpu((9, 0), *libraries[1:])
    assert loaded(block_size=16) == "FlashAttention-4"
    gpu((9, 0), "flash_attn_2_cuda", "torch")
    assert loaded() == "FlashAttention-2"
    gpu((9, 0), "torch")
    assert loaded() == "torch's FlashAttention-2"
    gpu((9, 0), *libraries)
    assert loaded(block_size=16) == "FlashAttention-3"


def test_auto_prefers_triton_then_flash_attention_then_plain_torch(
    gpu: GpuMaker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu((8, 0), "flash_attn_2_cuda")
    monkeypatch.setattr(choice, "why_no_triton_kernels", lambda _: "")
    assert choose("auto") == "triton"
    assert choose("flash_attn") == "flash_attn"
    assert "Triton kernels" not in capsys.readouterr().err
    monkeypatch.setattr(choice, "why_no_triton_kernels", lambda _: "there are none")
    assert choose("auto") == "flash_attn"
    assert "using FlashAttention-2 for attention" in capsys.readouterr().err
    assert choose("auto", block_size=16) == "torch"
    error = capsys.readouterr().err
    assert "using plain torch, several times slower. No Triton kernels: there are none; no FlashAttention: " in error
    assert "FlashAttention-2 needs block_size 256, is 16" in error
    with pytest.raises(
        ValueError, match="attention_backend triton cannot work here: there are none; give auto or torch"
    ):
        choose("triton")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"device": "cpu"}, "the device is cpu"),
        ({"dtype": "float32"}, "it computes float16 and bfloat16, and dtype is float32"),
        ({"kv_dtype": "float8_e4m3fn"}, "pools of the queries' dtype, and kv_cache_dtype makes this one float8_e4m3fn"),
        ({"head_dim": 264}, "head size must be a multiple of 8 and at most 256, is 264"),
        ({"head_dim": 36}, "head size must be a multiple of 8 and at most 256, is 36"),
        ({"block_size": 128}, "FlashAttention-2 needs block_size 256, is 128"),
    ],
)
def test_what_it_cannot_do_is_said(gpu: GpuMaker, change: dict[str, int], why: str) -> None:
    gpu((9, 0), "flash_attn_2_cuda")
    with pytest.raises(ValueError, match=f"backend flash_attn cannot work here: .*{why}.*; give auto or torch"):
        choose("flash_attn", **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("capability", "modules", "versions", "why"),
    [
        ((7, 5), ["flash_attn_2_cuda"], {}, "needs a GPU of compute capability 8.0, and this one has 7.5"),
        ((10, 0), ["flash_attn_interface"], {}, "FlashAttention-3 is for compute capability 9, and this GPU has 10.0"),
        ((12, 0), ["flash-attn-4"], {}, "FlashAttention-4 has pages for 9.x to 11.x, and this GPU has 12.0"),
        ((9, 0), ["flash-attn-4"], {"version_of_4": "4.0.0b9"}, "flash-attn-4 must be 4.0.0b36 or later, is 4.0.0b9"),
        ((8, 0), ["flash_attn_2_cuda"], {"version": "2.5.9.post1"}, "flash_attn must be 2.6 or later, is 2.5.9.post1"),
        ((10, 0), ["flash_attn_2_cuda"], {"version": "2.7.2"}, "must be 2.7.3 or later for a GPU of 10.0, is 2.7.2"),
        ((8, 0), [], {}, r"2 \(flash_attn\) is not installed; this build of torch has no FlashAttention"),
        ((8, 0), ["torch"], {"torch_version": "2.12.1+cu130"}, "takes pages from 2.13 on, and torch is 2.12.1"),
    ],
)  # fmt: skip
def test_why_there_is_none(
    gpu: GpuMaker, capability: tuple[int, int], modules: list[str], versions: dict[str, str], why: str
) -> None:
    gpu(capability, *modules, **versions)
    with pytest.raises(FlashUnavailable, match=why):
        loaded()


@pytest.mark.parametrize("version", ["4.0.0b40", "4.0.0", "4.1.0rc1"])
def test_later_versions_are_taken(gpu: GpuMaker, version: str) -> None:
    gpu((9, 0), "flash-attn-4", version_of_4=version)
    assert loaded() == "FlashAttention-4"


def test_heads_that_one_library_lacks_are_named(gpu: GpuMaker) -> None:
    gpu((10, 0), "flash-attn-4")
    with pytest.raises(FlashUnavailable, match=r"FlashAttention-4 has heads of 16, .*, 128, 256 here, and the model's"):
        loaded(head_dim=192)


def test_another_implementation_beneath_torch_is_not_ours(gpu: GpuMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu((9, 0), "torch")
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4")
    with pytest.raises(FlashUnavailable, match="torch's own was replaced by FA4 in this process"):
        loaded()


def test_a_library_that_does_not_load_is_an_error_and_none_is_taken_instead(
    gpu: GpuMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu((9, 0), "flash_attn_2_cuda", "torch")
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(FlashUnavailable, match="flash_attn is installed and cannot be loaded"):
        loaded()


def test_a_package_that_has_the_name_and_nothing_else_is_an_error(
    gpu: GpuMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu((9, 0), "flash_attn_interface", "torch")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    with pytest.raises(FlashUnavailable, match="flash_attn_interface is installed and has no flash_attn_with_kvcache"):
        loaded()


def test_which_decoding_steps_can_be_recorded(gpu: GpuMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    def why(backend: str, device: str = "cuda") -> str:
        return why_no_graphs(backend, needs(device=device, dtype="float16"))

    monkeypatch.setattr(choice, "why_no_triton_kernels", lambda _: "")
    gpu((8, 0), "flash_attn_2_cuda")
    assert why("triton") == why("flash_attn") == ""
    assert "without Triton kernels" in why("torch")
    assert "without Triton kernels" in why("flash_attn", device="cpu")
    monkeypatch.setattr(choice, "why_no_triton_kernels", lambda _: "there are none")
    assert "without Triton kernels" in why("flash_attn")


def test_versions() -> None:
    assert release_of("2.8.3.post1") == (2, 8, 3)
    assert release_of("2.13.0+cu130") == (2, 13, 0)
    assert release_of("2.8.4-ours") == (2, 8, 4)
