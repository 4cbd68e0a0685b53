"""Experts in MXFP4: the same numbers as transformers', a checkpoint with such experts, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from four_bit_checkpoints import converted, random_bytes, save_four_bits
from model_bench import Bench, assert_close, engine_config, random_tokens, reference
from safetensors.torch import load_file, save_file

from engine.model_loader.mxfp4 import widen

pytestmark = pytest.mark.usefixtures("one_thread")


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
    """A folder with experts in MXFP4, and the model that it stands for."""
    return tmp_path, save_four_bits(tmp_path)


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
        (lambda blocks, scales: (blocks, torch.full_like(scales, 255)), r"is not a number \(255\)"),
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
    fields["quantization_config"]["quant_method"] = "bitsandbytes"
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="quantization_config: quant_method 'bitsandbytes' is not supported"):
        engine_config(folder)
