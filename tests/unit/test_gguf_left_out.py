"""What transformers leaves out of a GGUF file: Tandem reads it itself, or refuses the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf_files import SIZES, write_llama
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.model_loader import resolve_model
from engine.model_loader.gguf_left_out import rope_scaling
from engine.models.rope_config import RopeConfig

Change = Callable[[gguf.GGUFWriter], None]
HEAD_DIM = SIZES["hidden"] // SIZES["heads"]
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def llama3_factors(theta: float = 10000.0, head_dim: int = HEAD_DIM) -> np.ndarray:
    """The factors by which transformers scales frequencies."""
    config = transformers.LlamaConfig(head_dim=head_dim, rope_parameters=LLAMA3 | {"rope_theta": theta})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = theta ** -(torch.arange(0, head_dim, 2) / head_dim)
    return (plain / scaled).numpy().astype(np.float32)


def frequencies(factors: np.ndarray) -> Change:
    return lambda writer: writer.add_tensor("rope_freqs.weight", factors)


def scaled(kind: gguf.RopeScalingType, factor: float, original: int | None = None) -> Change:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(factor)
        if original is not None:
            writer.add_rope_scaling_orig_ctx_len(original)

    return change


def yarn_of_deepseek(writer: gguf.GGUFWriter) -> None:
    scaled(gguf.RopeScalingType.YARN, 4.0, 32)(writer)
    writer.add_rope_scaling_yarn_log_mul(0.1)


def test_a_file_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    """The first of several parts lacks some. transformers would fill them with random numbers."""
    path = write_llama(tmp_path / "split.gguf", lacks=("blk.1.ffn_down", "blk.1.ffn_up"))
    with pytest.raises(
        ValueError, match=r"split\.gguf cannot be converted: it lacks 2 tensors .*layers\.1\.mlp\.down_proj.*--merge"
    ):
        resolve_model(str(path), download_dir=tmp_path / "cache")
    assert not [each for each in (tmp_path / "cache").iterdir() if each.is_dir()]


def test_biases_that_the_architecture_lacks_are_not_left_out(tmp_path: Path) -> None:
    bias = np.ones(SIZES["hidden"], np.float32)
    path = write_llama(tmp_path / "biased.gguf", lambda writer: writer.add_tensor("blk.0.attn_q.bias", bias))
    with pytest.raises(ValueError, match=r"transformers does not read its tensors blk\.0\.attn_q\.bias; give"):
        resolve_model(str(path), download_dir=tmp_path)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (frequencies(llama3_factors()), LLAMA3),
        (
            scaled(gguf.RopeScalingType.YARN, 4.0, 32),
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
    ],
)
def test_positions_are_scaled_as_the_file_says(tmp_path: Path, change: Change, expected: dict[str, Any]) -> None:
    folder = resolve_model(str(write_llama(tmp_path / "far.gguf", change)), download_dir=tmp_path)
    hf_config = json.loads((folder / "config.json").read_text())
    wanted = {"rope_parameters": {"rope_theta": 10000.0} | expected}
    assert RopeConfig.from_hf(hf_config, 128) == RopeConfig.from_hf(wanted, 128)


def read(path: Path) -> gguf.GGUFReader:
    return gguf.GGUFReader(path)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda _: None, {}),
        (scaled(gguf.RopeScalingType.NONE, 4.0), {}),
        (scaled(gguf.RopeScalingType.LINEAR, 1.0), {}),
        (scaled(gguf.RopeScalingType.LINEAR, 4.0), {"rope_type": "linear", "factor": 4.0}),
        (frequencies(np.ones(16, np.float32)), {}),
    ],
)
def test_fields_of_positions(tmp_path: Path, change: Change, expected: dict[str, Any]) -> None:
    assert rope_scaling(read(write_llama(tmp_path / "x.gguf", change)), 10000.0) == expected


def test_factors_of_llama_3_1_and_3_2(tmp_path: Path) -> None:
    for head_dim in (64, 128):
        path = write_llama(tmp_path / "x.gguf", frequencies(llama3_factors(500000.0, head_dim)))
        scaling = rope_scaling(read(path), 500000.0)
        assert scaling == {name: value for name, value in LLAMA3.items() if name != "rope_theta"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (scaled(gguf.RopeScalingType.LONGROPE, 4.0), "llama.rope.scaling.type 'longrope' cannot be converted"),
        (yarn_of_deepseek, "llama.rope.scaling.yarn_log_multiplier cannot be converted; give a Hugging Face folder"),
        (frequencies(np.full(16, 4, np.float32)), "rope_freqs.weight scales positions otherwise than Llama 3"),
    ],
)
def test_other_scalings_are_refused(tmp_path: Path, change: Change, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope_scaling(read(write_llama(tmp_path / "x.gguf", change)), 10000.0)
