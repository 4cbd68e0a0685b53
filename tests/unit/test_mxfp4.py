"""Experts in MXFP4: the numbers that transformers makes of them, a checkpoint of them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from model_bench import SMALL, Bench, assert_close, engine_config, random_tokens, reference, save_model
from safetensors.torch import load_file, save_file

from engine.model_loader.mxfp4 import widen

pytestmark = pytest.mark.usefixtures("one_thread")

EXPERTS = ("gate_up_proj", "down_proj")


def converted(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # seconds, which others need not wait for

    return convert_moe_packed_tensors(blocks, scales, dtype=dtype)


def random_bytes(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_numbers_are_those_of_transformers(dtype: torch.dtype) -> None:
    blocks, scales = random_bytes(3, 5, 4, 16), random_bytes(3, 5, 4, low=100, high=150)
    ours = widen(blocks, scales, dtype)
    assert (ours.shape, ours.dtype, ours.is_contiguous()) == ((3, 128, 5), dtype, True)
    assert torch.equal(ours, converted(blocks, scales, dtype))


def test_a_scale_is_a_power_of_two_and_the_lower_half_comes_first() -> None:
    blocks = torch.tensor([0x12, 0xF7, *[0] * 14], dtype=torch.uint8).view(1, 1, 1, 16)
    assert widen(blocks, torch.tensor([[[128]]], dtype=torch.uint8), torch.float32)[0, :5, 0].tolist() == [
        2.0, 1.0, 12.0, -12.0, 0.0,
    ]  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, transformers.PreTrainedModel]:
    """A folder with experts in MXFP4, and the model that it means."""
    sizes = SMALL | {"hidden_size": 96, "intermediate_size": 64}
    config = transformers.GptOssConfig(
        **sizes, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8, pad_token_id=0
    )
    model = save_model(config, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(config.num_hidden_layers):
        for weight in EXPERTS:
            name = f"model.layers.{layer}.mlp.experts.{weight}"
            num_experts, num_inputs, num_outputs = tensors.pop(name).shape
            blocks = random_bytes(num_experts, num_outputs, num_inputs // 32, 16)
            scales = random_bytes(num_experts, num_outputs, num_inputs // 32, low=120, high=125)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            model.get_parameter(name).data.copy_(converted(blocks, scales, torch.float32))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return tmp_path, model


def test_logits_are_those_of_the_model_that_is_meant(checkpoint: tuple[Path, transformers.PreTrainedModel]) -> None:
    folder, model = checkpoint
    bench = Bench(engine_config(folder))
    seq = bench.sequence(random_tokens(21, seed=3))
    bench.logits((seq, 13))
    assert_close(bench.logits((seq, 8)), reference(model, seq.token_ids).unsqueeze(0))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda blocks, scales: (blocks, scales[:, :, :1]), "with scales of shape"),
        (lambda blocks, scales: (blocks[..., :8], scales), "with scales of shape"),
        (lambda blocks, scales: (blocks.int(), scales), "MXFP4 is in uint8"),
        (lambda blocks, scales: (blocks, scales.int()), "MXFP4 is in uint8"),
        (lambda blocks, scales: (blocks, torch.full_like(scales, 255)), r"is no number \(255\)"),
        (lambda blocks, scales: (blocks, None), "hold tensors that the architecture does not use|lack tensors"),
        (lambda blocks, scales: (None, scales), "hold tensors that the architecture does not use|lack tensors"),
    ],
    ids=["fewer scales", "half blocks", "other blocks", "other scales", "no number", "no scales", "no blocks"],
)
def test_what_does_not_fit_is_refused(
    change: object, why: str, checkpoint: tuple[Path, transformers.PreTrainedModel]
) -> None:
    folder, _ = checkpoint
    name = "model.layers.1.mlp.experts.down_proj"
    tensors = load_file(folder / "model.safetensors")
    blocks, scales = change(tensors.pop(f"{name}_blocks"), tensors.pop(f"{name}_scales"))  # type: ignore[operator]
    changed = {f"{name}_blocks": blocks, f"{name}_scales": scales}
    tensors |= {key: tensor.contiguous() for key, tensor in changed.items() if tensor is not None}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=why):
        Bench(engine_config(folder))


def test_another_quantization_is_refused(checkpoint: tuple[Path, transformers.PreTrainedModel]) -> None:
    folder, _ = checkpoint
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"]["quant_method"] = "awq"
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="quantization_config, but for quant_method mxfp4"):
        engine_config(folder)
