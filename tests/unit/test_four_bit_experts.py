"""Models whose experts stay in MXFP4, on a pretended GPU: transformers' numbers in a quarter of the memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from four_bit_checkpoints import EXPERTS, save_four_bits
from model_bench import SMALL, Bench, assert_close, engine_config, random_tokens, reference
from pretend_gpu import PretendGpu, pretend_gpu
from pretend_gpu.triton import triton_interprets
from safetensors.torch import load_file, save_file
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers_cases import GPT_OSS
from triton_device import DEVICE

from engine.model_loader.mxfp4 import widen
from engine.model_loader.transformers_weights import load_causal_lm
from engine.models.transformers_experts import FourBitExperts, with_four_bit_experts

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU")]

ON_GPU: dict[str, Any] = {
    "device": "cuda", "attention_backend": "triton", "max_num_batched_tokens": 16, "max_num_seqs": 4,
    "enforce_eager": True,
}  # fmt: skip
MXFP4 = GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}}


@pytest.fixture
def gpu() -> Iterator[PretendGpu]:
    with pretend_gpu(total_bytes=8 << 30, has_triton=True) as pretended, triton_interprets(pretended):
        yield pretended


def experts_in(model: Any) -> list[FourBitExperts]:
    return [module for module in model.modules() if isinstance(module, FourBitExperts)]


@pytest.mark.slow
def test_logits_are_those_of_the_model_that_is_meant(gpu: PretendGpu, tmp_path: Path) -> None:
    model = save_four_bits(tmp_path)
    bench = Bench(engine_config(tmp_path, **ON_GPU))
    seq = bench.sequence(random_tokens(21, seed=3))
    bench.logits((seq, 13))
    logits = bench.logits((seq, 8))
    assert logits is not None
    assert_close(logits.cpu(), reference(model, seq.token_ids).unsqueeze(0))


def test_weights_stay_as_they_are_stored(tmp_path: Path) -> None:
    save_four_bits(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    experts = experts_in(load_causal_lm(engine_config(tmp_path), None, keeps_four_bits=True).causal_lm)
    assert len(experts) == SMALL["num_hidden_layers"]
    for layer, module in enumerate(experts):
        kept = dict(module.named_parameters())
        assert kept.keys() == {f"{weight}_{part}" for weight in EXPERTS for part in ("blocks", "scales", "bias")}
        for name, parameter in kept.items():
            assert torch.equal(parameter, stored[f"model.layers.{layer}.mlp.experts.{name}"])


@pytest.mark.parametrize(
    ("name", "shape", "why"),
    [
        ("gate_up_proj_blocks", (4, 128, 2, 16), "do not fit config.json in the shapes of: .*gate_up_proj_blocks"),
        ("down_proj_bias", (4, 97), "do not fit config.json in the shapes of: .*down_proj_bias"),
        ("down_proj", None, "lack tensors: .*down_proj_blocks, .*down_proj_scales"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, name: str, shape: tuple[int, ...] | None, why: str) -> None:
    save_four_bits(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    at = f"model.layers.1.mlp.experts.{name}"
    if shape is None:
        del tensors[f"{at}_blocks"], tensors[f"{at}_scales"]
    else:
        tensors[at] = torch.zeros(shape, dtype=tensors[at].dtype)
        if name.endswith("blocks"):
            tensors[at.replace("blocks", "scales")] = torch.zeros(shape[:-1], dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=why):
        load_causal_lm(engine_config(tmp_path), None, keeps_four_bits=True)


def test_weights_made_up_are_as_large_as_others_and_hang_on_the_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MXFP4))
    plain = GptOssExperts.__init__

    def made(experts: GptOssExperts, *args: Any, **kwargs: Any) -> None:
        plain(experts, *args, **kwargs)
        assert experts.gate_up_proj.is_meta, "plain ones would take four times the memory"

    monkeypatch.setattr(GptOssExperts, "__init__", made)

    def made_up(seed: int) -> list[torch.Tensor]:
        config = engine_config(tmp_path, load_format="dummy", seed=seed)
        [experts, *_] = experts_in(load_causal_lm(config, None, keeps_four_bits=True).causal_lm)
        sizes = [
            widen(experts.gate_up_proj_blocks.data, experts.gate_up_proj_scales.data, torch.float32).std(),
            experts.gate_up_proj_bias.std(),
        ]
        assert all(0.015 < float(size) < 0.025 for size in sizes)
        return [parameter.data for parameter in experts.parameters()]

    some, same, others = made_up(0), made_up(0), made_up(1)
    assert all(map(torch.equal, some, same))
    assert not any(map(torch.equal, some[:1], others[:1]))


@pytest.mark.parametrize("size", [{"hidden_size": 48}, {"intermediate_size": 80}])
def test_sizes_that_do_not_come_in_groups(size: dict[str, int], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MXFP4 | size))
    config = engine_config(tmp_path, load_format="dummy")
    with pytest.raises(ValueError, match=r"hidden_size and intermediate_size must be multiples of 32, are \d+ and \d+"):
        load_causal_lm(config, None, keeps_four_bits=True)


def test_experts_of_other_models_have_no_such_weights() -> None:
    model_class = with_four_bit_experts(transformers.MixtralForCausalLM)
    config = transformers.MixtralConfig(**SMALL, num_local_experts=2)
    with torch.device("meta"), pytest.raises(ValueError, match="mxfp4 is known of experts as gpt-oss has them"):
        model_class(config)
