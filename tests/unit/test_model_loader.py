"""Weights: which are read from where, what distinguishes them, and which errors wrong ones cause."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from llama_folders import config_of, folder_with, greedy, write_weights
from safetensors.torch import load_file, save_file

from engine.running.executor import Executor
from prefix_hash import prefix_key


def test_dummy_weights_need_only_config_json_and_follow_the_seed(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m")
    first, again, other = (config_of(folder, seed=seed) for seed in (1, 1, 2))
    assert greedy(first) == greedy(again)
    assert greedy(first) != greedy(other)
    assert first.compat_digest == again.compat_digest != other.compat_digest


def test_sharded_weights_equal_one_file(tmp_path: Path) -> None:
    whole, sharded = folder_with(tmp_path / "whole"), folder_with(tmp_path / "sharded")
    tensors = write_weights(whole)
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:7], "model-00002-of-00002.safetensors": names[7:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, sharded / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    assert greedy(config_of(whole, load_format="auto")) == greedy(config_of(sharded, load_format="auto"))

    outside = dict.fromkeys(names, "../whole/model.safetensors")
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": outside}))
    (tmp_path / "index" / "config.json").write_text((whole / "config.json").read_text())
    with pytest.raises(ValueError, match=r"names files in other folders: \.\./whole/model\.safetensors"):
        config_of(tmp_path / "index", load_format="auto")

    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="model-00002-of-00002"):
        config_of(sharded, load_format="auto")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux says what is mapped")
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("dtype", "backend"), [("float32", "torch"), ("bfloat16", "torch"), ("bfloat16", "cpu")])
def test_the_file_is_let_go_once_the_model_is_there(tmp_path: Path, dtype: str, backend: str, ties: bool) -> None:
    """A single tensor that is still a view of the file would keep all of it in memory."""
    folder = folder_with(tmp_path / "m", tie_word_embeddings=ties, dtype=dtype, head_dim=16)
    tensors = write_weights(folder)
    for name in [name for name in tensors if "self_attn" in name]:
        outputs, inputs = {"q": (64, 16), "k": (32, 16), "v": (32, 16), "o": (16, 64)}[name.split(".")[-2][0]]
        tensors[name] = torch.randn(outputs, inputs)
    if ties:
        del tensors["lm_head.weight"]
    save_file({name: each.to(getattr(torch, dtype)) for name, each in tensors.items()}, folder / "model.safetensors")
    executor = Executor(config_of(folder, load_format="auto", attention_backend=backend, block_size=16))
    assert str(folder / "model.safetensors") not in Path("/proc/self/maps").read_text()
    del executor


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m")
    tensors = write_weights(folder)
    bad = {
        "lack the tensor model.norm.weight": {k: v for k, v in tensors.items() if k != "model.norm.weight"},
        r"model.norm.weight has shape \(15,\), expected \(16,\)": tensors | {"model.norm.weight": torch.ones(15)},
        "does not use: model.layers.0.self_attn.q_norm.weight": tensors
        | {"model.layers.0.self_attn.q_norm.weight": torch.ones(4)},
        "does not use: model.layers.1.self_attn.q_proj.bias": tensors
        | {"model.layers.1.self_attn.q_proj.bias": torch.ones(16)},
    }
    for message, changed in bad.items():
        save_file(changed, folder / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            Executor(config_of(folder, load_format="auto"))
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"m/model\.safetensors is empty; copy or download it again"):
        config_of(folder, load_format="auto")


def test_tied_embeddings_and_old_buffers(tmp_path: Path) -> None:
    tied, untied = folder_with(tmp_path / "tied", tie_word_embeddings=True), folder_with(tmp_path / "untied")
    tensors = write_weights(untied)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, untied / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}, tied / "model.safetensors")
    assert greedy(config_of(tied, load_format="auto")) == greedy(config_of(untied, load_format="auto"))


def test_digests(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m")
    write_weights(folder)
    base = config_of(folder, load_format="auto")
    assert base.prefix_key == prefix_key(base.compat_digest)
    copied = shutil.copytree(folder, tmp_path / "elsewhere")
    assert config_of(copied, load_format="auto").compat_digest == base.compat_digest
    same = config_of(folder, load_format="auto", num_kv_blocks=33, max_model_len=10, max_num_seqs=3)
    assert same.compat_digest == base.compat_digest
    others = [
        config_of(folder, load_format="auto", dtype="bfloat16"),
        config_of(folder, load_format="auto", block_size=8),
        config_of(folder, load_format="auto", quantization="int8"),
        config_of(folder, load_format="auto", kv_cache_dtype="fp8"),
        config_of(folder_with(folder, rms_norm_eps=1e-5), load_format="auto"),
        config_of(folder_with(folder, rope_theta=5000.0), load_format="auto"),
    ]
    folder_with(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] += 1
    save_file(tensors, folder / "model.safetensors")
    others.append(config_of(folder, load_format="auto"))
    digests = {config.compat_digest for config in [base, *others]}
    assert len(digests) == 8
    assert config_of(folder, load_format="auto", kv_cache_dtype="fp8_e4m3").cache.kv_dtype == "float8_e4m3fn"
    assert others[-1].model.weights_digest != base.model.weights_digest


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_pickled_weights_are_to_be_converted(tmp_path: Path, name: str) -> None:
    folder = folder_with(tmp_path / "m")
    (folder / name).write_bytes(b"x")
    with pytest.raises(
        ValueError, match=rf"m has pickled weights \({name}\), which are not read; convert .*save_pretrained\('.*m'\)"
    ):
        config_of(folder, load_format="auto")
