"""Small GGUF files of a Llama, as llama.cpp's tools write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Form

SIZES = {"hidden": 256, "inner": 512, "heads": 8, "kv_heads": 4, "layers": 2}
WORDS = [*"abcdefghijklmnopqrstuvwxyz", "<s>", "</s>", "th", "he", *(f"<{i}>" for i in range(71))]
FORM_OF = {
    "attn_q": Form.Q4_0, "attn_k": Form.Q4_1, "attn_v": Form.Q8_0, "attn_output": Form.Q4_1, "ffn_gate": Form.Q4_K,
    "ffn_up": Form.Q4_K, "ffn_down": Form.Q4_0,
}  # fmt: skip
"""Covers all forms. q, k and v have different forms, so their joint product is widened; gate and up have the same."""


def random_blocks(form: Form, rows: int, inputs: int, seed: int) -> np.ndarray:
    """Return the bytes of a quantized tensor: random integers, and scales that give weights of a usual size."""
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


def write_llama(
    path: Path, change: Callable[[gguf.GGUFWriter], None] = lambda _: None, lacks: tuple[str, ...] = ()
) -> Path:
    """Write a GGUF file. `change` adds fields and tensors; the tensors named in `lacks` are left out."""
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
    change(writer)
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
            if f"blk.{layer}.{name}" in lacks:
                continue
            data = random_blocks(FORM_OF[name], *shape, seed=10 * layer + seed)
            writer.add_tensor(f"blk.{layer}.{name}.weight", data, raw_dtype=FORM_OF[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
