"""Feed-forward modules of transformers' whose gate and `up` become one product: which, and what they compute then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_bench import Bench, engine_config, random_tokens, save_model
from test_transformers_models import CONFIGS
from torch import nn
from transformers.activations import ACT2FN

from engine.models.gated_modules import activation_in, activation_of
from engine.models.product_modules import GatedProducts

pytestmark = pytest.mark.usefixtures("one_thread")

ACTIVATION_OF = {
    "afmoe": "silu", "cohere2": "silu", "gemma": "gelu_tanh", "gemma2": "gelu_tanh", "gemma3": "gelu_tanh",
    "gemma4": "gelu_tanh", "gemma4-moe": "gelu_tanh", "gemma4-shared": "gelu_tanh", "glm4-moe": "silu",
    "granite": "silu", "olmo2": "silu", "qwen2-moe": "silu",
}  # fmt: skip
"""Of the families whose feed-forward, or that of whose shared experts, has a gate."""


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - {"gemma3n"}))
def test_gates_of_families(name: str) -> None:
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
    found = {activation_of(module) for module in model.modules()} - {None}
    assert found == ({ACTIVATION_OF[name]} if name in ACTIVATION_OF else set())


def test_layers_of_one_class_may_differ() -> None:
    """Gemma 3n's code drops most of what the gate yields in some layers."""
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["gemma3n"]())
    assert [activation_of(layer.mlp) for layer in model.model.layers] == [None, *["gelu_tanh"] * 4]


class FeedForward(nn.Module):
    """The usual one."""

    def __init__(self, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(32, 48), nn.Linear(32, 48)
        self.down_proj = nn.Linear(48, 32)
        self.act_fn = activation or nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class OtherWayRound(FeedForward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class WithNorm(FeedForward):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.norm(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


class Scaled(FeedForward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 1.001)


class Limited(FeedForward):
    """DeepSeek V4's limit is 10, Step 3.7's 16; the latter's is of what the activation yields."""

    def __init__(self, most: float, *, is_before: bool = True) -> None:
        super().__init__()
        self.most, self.is_before = most, is_before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x).clamp(min=-self.most, max=self.most)
        gate = self.act_fn(gate.clamp(max=self.most)) if self.is_before else self.act_fn(gate).clamp(max=self.most)
        return self.down_proj(gate * up)


class LimitedFromBelow(FeedForward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(min=-12.0)) * self.up_proj(x))


class OtherLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class OfOtherLinears(FeedForward):
    """What its layers compute is not in what it computes with others in their place."""

    def __init__(self, name: str) -> None:
        super().__init__()
        setattr(self, name, OtherLinear(32, 48))


class WithAnOption(FeedForward):
    """Its caller may give what ours does not take."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x) * scale


class OfASize(FeedForward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.view(-1, 32))


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (FeedForward(), "silu"),
        (FeedForward(nn.GELU(approximate="tanh")), "gelu_tanh"),
        (FeedForward(nn.GELU()), None),
        (FeedForward(nn.ReLU()), None),
        (OtherWayRound(), None),
        (WithNorm(), None),
        (Scaled(), None),
        (Limited(10.0), None),
        (Limited(16.0, is_before=False), None),
        (Limited(500.0), None),
        (LimitedFromBelow(), None),
        (OfOtherLinears("gate_proj"), None),
        (OfOtherLinears("up_proj"), None),
        (WithAnOption(), None),
        (FeedForward(ACT2FN["gelu_new"]), "gelu_tanh"),
        (FeedForward(ACT2FN["gelu_accurate"]), "gelu_tanh"),
        (FeedForward(ACT2FN["gelu_fast"]), "gelu_tanh"),
        (FeedForward(ACT2FN["gelu_10"]), None),
        (FeedForward(ACT2FN["quick_gelu"]), None),
        (FeedForward(ACT2FN["mish"]), None),
        (OfASize(), None),
        (nn.Linear(3, 4), None),
    ],
    ids=lambda each: type(each).__name__,
)
def test_only_what_computes_the_same_is_joined(module: nn.Module, expected: str | None) -> None:
    assert activation_of(module) == expected


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (nn.SiLU(), "silu"),
        (torch.nn.functional.silu, "silu"),
        (nn.GELU(approximate="tanh"), "gelu_tanh"),
        (nn.GELU(), None),
        (nn.PReLU(device="meta"), None),
        (None, None),
        (ACT2FN["gelu_new"], "gelu_tanh"),
        (lambda gate: nn.functional.silu(gate).clamp(max=500.0), None),
    ],
    ids=["silu", "a function", "gelu by tanh", "gelu", "with weights", "none", "gelu by its formula", "limited"],
)
def test_activations_of_experts(function: object, expected: str | None) -> None:
    assert activation_in(function) == expected


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["gemma3", "glm4-moe", "gemma4"])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_with_the_cpu_kernels(name: str, quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As close to float32 as with two products."""
    config = CONFIGS[name]()
    config.intermediate_size = 160
    save_model(config, tmp_path)
    settings: dict[str, Any] = {
        "dtype": "bfloat16", "block_size": 16, "model_impl": "transformers", "quantization": quantization,
    }  # fmt: skip
    if engine_config(tmp_path, **settings).device.attention_backend != "cpu":
        pytest.skip("no C++ compiler: there are no CPU kernels")

    def logits(**given: Any) -> tuple[torch.Tensor, int]:
        bench = Bench(engine_config(tmp_path, **given))
        found = bench.logits((bench.sequence(random_tokens(30, seed=5)), 30))
        assert found is not None
        modules = bench.runner._model._body.modules()  # type: ignore[attr-defined]
        return found.float(), sum(isinstance(module, GatedProducts) for module in modules)

    exact, num_plain = logits(model_impl="transformers", num_kv_blocks=64)
    joined, num_joined = logits(**settings)
    monkeypatch.setattr("engine.models.transformers_products.activation_of", lambda _: None)
    apart, num_apart = logits(**settings)
    assert (num_plain, num_apart) == (0, 0)
    assert num_joined >= 1
    assert (joined - exact).norm() < 1.3 * (apart - exact).norm()
