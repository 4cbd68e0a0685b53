"""GGUF files whose weights stay in 4 bits: each form's blocks, and a whole small file, by transformers' conversion."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from engine_steps import arguments, logits_of_steps
from gguf import GGMLQuantizationType as Form
from safetensors.torch import load_file

from engine.int4_weight import Int4Weight
from engine.model_loader import create_engine_config
from engine.model_loader.gguf import convert_gguf, convert_gguf_file
from engine.model_loader.gguf_int4 import _UNPACK, _as_torch

SIZES = {"hidden": 256, "inner": 512, "heads": 8, "kv_heads": 4, "layers": 2}
WORDS = [*"abcdefghijklmnopqrstuvwxyz", "<s>", "</s>", "th", "he", *(f"<{i}>" for i in range(71))]
FORM_OF = {
    "attn_q": Form.Q4_0, "attn_k": Form.Q4_1, "attn_v": Form.Q8_0, "attn_output": Form.Q4_1, "ffn_gate": Form.Q4_K,
    "ffn_up": Form.Q4_K, "ffn_down": Form.Q4_0,
}  # fmt: skip
"""All forms; q, k and v differ, so their product is widened, and gate and up are alike."""


def random_blocks(form: Form, rows: int, inputs: int, seed: int) -> np.ndarray:
    """Bytes of a tensor: any integers, and scales of a weight's size."""
    generator = np.random.default_rng(seed)
    if form == Form.Q8_0:
        numbers = generator.standard_normal((rows, inputs)).astype(np.float32) / 16
        return gguf.quants.quantize(numbers, form)
    size, num_bytes = gguf.GGML_QUANT_SIZES[form]
    blocks = generator.integers(0, 256, (rows, inputs // size, num_bytes), dtype=np.uint8)
    num_floats = 1 if form == Form.Q4_0 else 2
    floats = (generator.standard_normal((*blocks.shape[:2], num_floats)) / (2000 if form == Form.Q4_K else 60)).astype(
        np.float16
    )
    blocks[:, :, : 2 * num_floats] = floats.view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("form", [Form.Q4_0, Form.Q4_1, Form.Q4_K])
def test_blocks_stand_for_what_the_package_widens_them_to(form: Form) -> None:
    data = random_blocks(form, 6, 1024, seed=1)
    weight = Int4Weight.of_integers(*_as_torch(_UNPACK[form.name](data)), torch.float32)
    assert (len(weight), weight.num_inputs, weight.group_size) == (6, 1024, 32)
    assert torch.equal(weight.dequantized(), torch.from_numpy(gguf.quants.dequantize(data, form)))


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(SIZES["layers"])
    writer.add_context_length(128)
    writer.add_embedding_length(SIZES["hidden"])
    writer.add_feed_forward_length(SIZES["inner"])
    writer.add_head_count(SIZES["heads"])
    writer.add_head_count_kv(SIZES["kv_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([gguf.TokenType.CONTROL if word.endswith("s>") else gguf.TokenType.NORMAL for word in WORDS])
    writer.add_token_merges(["t h", "h e"])
    writer.add_bos_token_id(WORDS.index("<s>"))
    writer.add_eos_token_id(WORDS.index("</s>"))
    generator = np.random.default_rng(0)
    kv_size = SIZES["hidden"] * SIZES["kv_heads"] // SIZES["heads"]
    shapes = {
        "attn_q": (SIZES["hidden"], SIZES["hidden"]), "attn_k": (kv_size, SIZES["hidden"]),
        "attn_v": (kv_size, SIZES["hidden"]), "attn_output": (SIZES["hidden"], SIZES["hidden"]),
        "ffn_gate": (SIZES["inner"], SIZES["hidden"]), "ffn_up": (SIZES["inner"], SIZES["hidden"]),
        "ffn_down": (SIZES["hidden"], SIZES["inner"]),
    }  # fmt: skip
    embeddings = generator.standard_normal((len(WORDS), SIZES["hidden"])).astype(np.float32)
    writer.add_tensor("token_embd.weight", embeddings)
    writer.add_tensor("output.weight", embeddings[::-1].copy())
    writer.add_tensor("output_norm.weight", np.ones(SIZES["hidden"], np.float32))
    for layer in range(SIZES["layers"]):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(SIZES["hidden"], np.float32))
        for seed, (name, shape) in enumerate(shapes.items()):
            data = random_blocks(FORM_OF[name], *shape, seed=10 * layer + seed)
            writer.add_tensor(f"blk.{layer}.{name}.weight", data, raw_dtype=FORM_OF[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def folders(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """With 4 bits as they are, and in bfloat16."""
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
def test_engines_compute_as_with_the_widened_file_to_the_bit(folders: tuple[Path, Path], backend: str) -> None:
    logits = []
    for folder in folders:
        settings: dict[str, Any] = {"dtype": "bfloat16", "block_size": 16}
        args = replace(arguments(folder, backend, "cpu", **settings), load_format="auto", num_threads=1)
        is_kept = backend == "cpu" and folder == folders[0]
        assert create_engine_config(args).model.quantization == ("stored" if is_kept else "none")
        logits.append(torch.cat(logits_of_steps(args, records=False)))
    assert torch.equal(*logits)


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
