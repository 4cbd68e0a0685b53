"""Our norms in place of transformers': which are replaced, and what they compute then."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from model_bench import randomise
from recurrent_cases import CONFIGS as RECURRENT_CONFIGS
from test_transformers_models import CONFIGS
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm

from engine.kernels.build import load_cpu_kernels
from engine.kernels.cpu import KernelRMSNorm
from engine.layers import RMSNorm
from engine.models.replaced_norms import _Norm, replace_norms

pytestmark = pytest.mark.usefixtures("one_thread")

WITH_OTHERS = {"cohere2", "gpt-neox", "gpt2", "modernbert-decoder", "opt", "phi", "starcoder2"}
"""Their norms subtract the mean."""


class SameRMSNorm(RMSNorm):
    """A part that is not plain torch, and computes the same."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_they_compute_what_transformers_do(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
    randomise(model)
    model = model.to(dtype).eval()
    norms = {path: module for path, module in model.named_modules() if type(module).__name__.endswith("Norm")}
    norms = copy.deepcopy(norms)
    assert norms
    replace_norms(model, SameRMSNorm, dtype)
    for path, norm in norms.items():
        ours = model.get_submodule(path)
        assert isinstance(ours, _Norm) == (name not in WITH_OTHERS), path
        size = len(norm.weight) if getattr(norm, "weight", None) is not None else 16
        x = (torch.randn(2, 3, size) * torch.tensor([[0.01], [1.0], [20.0]])).to(dtype)
        found, expected = ours(x), norm(x)
        assert found.dtype == expected.dtype == dtype
        unit = torch.finfo(dtype).eps
        torch.testing.assert_close(found, expected, rtol=unit, atol=0.0)
        if dtype != torch.float32:
            assert (found != expected).float().mean() < 0.01, f"{path}: rounded in another place"


def test_plain_torch_replaces_none() -> None:
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["gemma3"]())
    replace_norms(model, RMSNorm, torch.float32)
    assert not any(isinstance(module, _Norm) for module in model.modules())


class _ScaledNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(32)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._normed(x)

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class NormOfOtherEpsilon(_ScaledNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


class NormOfSum(_ScaledNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.eps)


class GatedNorm(_ScaledNorm):
    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return self._normed(x if gate is None else x * gate)


class NormWithMore(_ScaledNorm):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.rand(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._normed(x) + self.bias


class Scaled(_ScaledNorm):
    """Has no norm's name."""


class NormOfAllButOne(_ScaledNorm):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x[..., :1], self._normed(x)[..., 1:]), dim=-1)


class NormOfImages(_ScaledNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, height, width, size = x.shape
        return self._normed(x.reshape(batch, -1, size)).view(batch, height, width, size)


@pytest.mark.parametrize(
    "kind",
    [_ScaledNorm, NormOfOtherEpsilon, NormOfSum, GatedNorm, NormWithMore, NormOfAllButOne, NormOfImages, Scaled],
)
def test_only_what_computes_the_same_is_replaced(kind: type[Any]) -> None:
    model = nn.ModuleDict({"norm": kind()})
    replace_norms(model, SameRMSNorm, torch.float32)
    assert isinstance(model["norm"], _Norm) == (kind is _ScaledNorm)


class NormThatWidens(nn.Module):
    """Has no weight, and returns float32 whatever it is given."""

    eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)


@pytest.mark.parametrize("norm", [LlamaRMSNorm(64), NormThatWidens()], ids=lambda each: type(each).__name__)
def test_what_returns_another_dtype_than_the_models_stays(norm: nn.Module) -> None:
    """Such as Llama's with a weight that is kept in float32."""
    for dtype in (torch.float32, torch.bfloat16):
        assert norm(torch.ones(1, 64, dtype=dtype)).dtype == torch.float32
        model = nn.ModuleDict({"norm": norm})
        replace_norms(model, SameRMSNorm, dtype)
        assert isinstance(model["norm"], _Norm) == (dtype == torch.float32)


@pytest.mark.parametrize(
    "norm", [LlamaRMSNorm(64), GemmaRMSNorm(64), Llama4TextL2Norm()], ids=lambda e: type(e).__name__
)
def test_rows_in_another_dtype_than_the_models(norm: nn.Module) -> None:
    """DeepSeek V4 norms some in float32. The kernels compute bfloat16 alone."""
    load_cpu_kernels()
    model = nn.ModuleDict({"norm": norm}).bfloat16()
    randomise(model)
    x = torch.randn(2, 3, 64)
    expected = norm(x)
    replace_norms(model, KernelRMSNorm, torch.bfloat16)
    assert isinstance(model["norm"], _Norm)
    torch.testing.assert_close(model["norm"](x), expected, rtol=0.0, atol=0.0)
    assert model["norm"](x.bfloat16()).dtype == torch.bfloat16


def test_a_norm_without_a_weight_takes_rows_of_any_size() -> None:
    load_cpu_kernels()
    model, norm = nn.ModuleDict({"norm": Llama4TextL2Norm()}), Llama4TextL2Norm()
    replace_norms(model, KernelRMSNorm, torch.bfloat16)
    for size in (16, 32, 16):
        x = torch.randn(3, size).bfloat16()
        torch.testing.assert_close(model["norm"](x), norm(x))


@pytest.mark.parametrize("name", RECURRENT_CONFIGS)
def test_models_that_keep_states_compute_the_same(name: str) -> None:
    """Nemotron-H's code asks a norm for its weight's dtype."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(RECURRENT_CONFIGS[name]()).eval()
    randomise(model)
    tokens = torch.arange(2, 9)[None]
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
        replace_norms(model, SameRMSNorm, torch.float32)
        found = model(tokens, use_cache=False).logits
    assert any(isinstance(module, _Norm) for module in model.modules())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 5, 300])
@pytest.mark.parametrize("size", [64, 576, 1001])
def test_the_cpu_kernel_with_a_weight_in_float32(num_tokens: int, size: int) -> None:
    load_cpu_kernels()
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(num_tokens, size, generator=generator).bfloat16()
    weight = 1 + torch.randn(size, generator=generator)
    plain, ours = RMSNorm(weight, 1e-6), KernelRMSNorm(weight, 1e-6)
    found, expected = ours(x), plain(x)
    assert found.dtype == torch.bfloat16
    # The sum of squares is added up in another order, so values halfway between two others may round either way.
    assert (found != expected).float().mean() < 0.01
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-6)
    rounded_first = RMSNorm(weight.bfloat16(), 1e-6)(x)
    assert (found != rounded_first).float().mean() > 0.1, "it is rounded once"
