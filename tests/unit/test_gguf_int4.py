"""GGUF files whose weights stay in 4 bits: the blocks of each form, and a whole small file, compared with transformers'
conversion."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from engine_steps import arguments, logits_of_steps
from gguf import GGMLQuantizationType as Form
from gguf_files import random_blocks, write_llama
from safetensors.torch import load_file

from engine.int4_weight import Int4Weight
from engine.model_loader import create_engine_config
from engine.model_loader.gguf import convert_gguf, convert_gguf_file
from engine.model_loader.gguf_int4 import _UNPACK, _as_torch


@pytest.mark.parametrize("form", [Form.Q4_0, Form.Q4_1, Form.Q4_K])
def test_blocks_stand_for_what_the_package_widens_them_to(form: Form) -> None:
    data = random_blocks(form, 6, 1024, seed=1)
    weight = Int4Weight.of_integers(*_as_torch(_UNPACK[form.name](data)), torch.float32)
    assert (len(weight), weight.num_inputs, weight.group_size) == (6, 1024, 32)
    assert torch.equal(weight.dequantized(), torch.from_numpy(gguf.quants.dequantize(data, form)))


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("gguf") / "small.gguf")


@pytest.fixture(scope="module")
def folders(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The converted folders: with 4-bit weights kept, and in bfloat16."""
    kept = convert_gguf_file(gguf_file, tmp_path_factory.mktemp("kept"))
    plain = tmp_path_factory.mktemp("plain")
    convert_gguf(gguf_file, plain)
    return kept, plain


def test_a_converted_file_keeps_its_blocks(folders: tuple[Path, Path]) -> None:
    """Those of queries and keys in the order of transformers' rows."""
    kept, plain = (load_file(folder / "model.safetensors") for folder in folders)
    for name, wide in plain.items():
        if name in kept:
            assert torch.equal(kept[name], wide)
            continue
        stem = name.removesuffix("weight")
        weight = Int4Weight(kept[f"{stem}packed"], kept[f"{stem}scale"], kept[f"{stem}offset"], torch.bfloat16)
        assert torch.equal(weight.dequantized(), wide)
    in_4_bits = {name.split(".")[-2] for name in plain.keys() - kept.keys()}
    assert in_4_bits == {"q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    config = json.loads((folders[0] / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "tandem-int4", "group_size": 32}
    assert "quantization_config" not in json.loads((folders[1] / "config.json").read_text())


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_engines_compute_as_with_the_widened_file(folders: tuple[Path, Path], backend: str) -> None:
    """The CPU kernels keep 4 bits, and do not round them to bfloat16 as those of the other file are."""
    logits = []
    for folder in folders:
        settings: dict[str, Any] = {"dtype": "bfloat16", "block_size": 16}
        args = replace(arguments(folder, backend, "cpu", **settings), load_format="auto", num_threads=1)
        is_kept = backend == "cpu" and folder == folders[0]
        assert create_engine_config(args).model.quantization == ("stored" if is_kept else "none")
        logits.append(torch.cat(logits_of_steps(args, records=False)))
    kept, widened = logits
    assert torch.equal(kept, widened) == (backend == "torch")
    assert (kept - widened).norm() < 0.05 * widened.norm()


def test_a_broken_conversion_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = load_file(folders[0] / "model.safetensors")
    for path in folders[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    name = "model.layers.0.mlp.down_proj.scale"
    save_file(tensors | {name: tensors[name][:, :3].contiguous()}, tmp_path / "model.safetensors")
    args = replace(arguments(tmp_path, "cpu", "cpu", dtype="bfloat16", block_size=16), load_format="auto")
    with pytest.raises(ValueError, match=r"down_proj.weight is in 4 bits of other sizes than \(256, 512\)"):
        logits_of_steps(args, records=False)
