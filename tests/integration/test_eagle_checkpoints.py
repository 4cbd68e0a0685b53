"""Checkpoints of EAGLE-3 heads: what is read, what is refused and how, and what an engine keeps for a head."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_cases import (
    CPU,
    GREEDY,
    HEAD,
    MODEL,
    folder_of,
    make_engine,
    num_wrong,
    rewritten,
    write,
    write_random_head,
    write_ring,
    write_ring_head,
)
from handover import alone
from safetensors.torch import load_file
from transformers_cases import GEMMA4

from engine.engine_args import EngineArgs
from engine.model_loader import create_engine_config
from engine.model_loader.settings import check_draft_model
from engine.models.eagle_config import LAYER_IDS


def test_a_head_may_have_an_embedding_of_its_own(tmp_path: Path) -> None:
    ring, head = write_ring(tmp_path / "ring"), write_ring_head(tmp_path / "head")
    embedding_VD = load_file(ring / "model.safetensors")["model.embed_tokens.weight"]

    def with_embedding(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        named = {f"model.{name}": tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
        return named | {"lm_head.weight": tensors["lm_head.weight"], "model.embed_tokens.weight": embedding_VD.clone()}

    engine = make_engine(ring, rewritten(head, with_embedding), **CPU)
    assert alone(engine, [3, 4, 5], GREEDY) == list(range(6, 36))
    assert num_wrong(engine) == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda of: {**of, "d2t": torch.zeros(40, dtype=torch.int64) + torch.arange(40)}, r"d2t must give each of 40 "),
        (lambda of: {**of, "d2t": torch.full((40,), -1)}, r"a different id in \[0, 60\)"),
        (lambda of: {**of, "d2t": torch.zeros(40)}, "d2t is in torch.float32, must be integers"),
        (lambda of: {**of, "d2t": torch.zeros(39, dtype=torch.int64)}, r"d2t has shape \(39,\), expected \(40,\)"),
        (lambda of: {k: v for k, v in of.items() if k != "fc.weight"}, "lack the tensor fc.weight"),
        (
            lambda of: {**of, "more.weight": torch.zeros(3)},
            "hold tensors that the architecture does not use: more",
        ),
        (lambda of: {**of, "fc.weight": torch.zeros(64, 64)}, r"fc.weight has shape \(64, 64\), expected \(64, 192\)"),
    ],
    ids=["same ids", "negative ids", "floats", "too few ids", "no fc", "unknown", "other features"],
)
def test_weights_that_do_not_fit(tmp_path: Path, change: Any, says: str) -> None:
    ring, head = write_ring(tmp_path / "ring"), write_random_head(tmp_path / "head")
    with pytest.raises(ValueError, match=f"^speculative_config model: .*{says}"):
        make_engine(ring, rewritten(head, change), **CPU)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"vocab_size": 61}, "its vocab_size must be the model's, 60, is 61"),
        ({"num_key_value_heads": 4}, "the model's pool, which has 2 key heads of size 16, and it has 4 key heads"),
        ({"head_dim": 32}, "it has 2 key heads of size 32"),
        ({"num_hidden_layers": 3}, "num_hidden_layers must be 1"),
    ],
    ids=["vocabulary", "key heads", "head size", "layers"],
)
def test_heads_for_other_models(tmp_path: Path, fields: dict[str, Any], says: str) -> None:
    """An engine refuses them, and `tandem up` does before it starts anything."""
    ring, head = write_ring(tmp_path / "ring"), folder_of(tmp_path / "head", HEAD | fields)
    speculation = json.dumps({"method": "eagle3", "model": str(head), "num_speculative_tokens": 2})
    args = EngineArgs(model=str(ring), device="cpu", speculative_config=speculation)
    for check in (lambda: check_draft_model(args, ring, head), lambda: create_engine_config(args)):
        with pytest.raises(ValueError, match=f"^speculative_config model: .*{says}"):
            check()


def test_what_only_an_up_can_tell_early(tmp_path: Path) -> None:
    """Weights that are not there or pickled, as the authors' are, and a quantization that cannot be."""
    ring, head = write_ring(tmp_path / "ring"), write_ring_head(tmp_path / "head")
    bare = folder_of(tmp_path / "bare", json.loads((head / "config.json").read_text()))

    def says(head: Path, match: str, **fields: str) -> str:
        speculation = json.dumps({"method": "eagle3", "model": str(head), "num_speculative_tokens": 2} | fields)
        args = EngineArgs(model=str(ring), device="cpu", speculative_config=speculation)
        for check in (lambda: check_draft_model(args, ring, head), lambda: create_engine_config(args)):
            with pytest.raises(ValueError, match=f"^speculative_config model: .*{match}") as error:
                check()
        return str(error.value)

    says(head, "quantization fp8 cannot work here", quantization="fp8")
    says(bare, "has neither model.safetensors nor")
    torch.save(load_file(head / "model.safetensors"), bare / "pytorch_model.bin")
    advice = says(bare, r"has pickled weights \(pytorch_model.bin\), .*; convert them")
    command = shlex.split(advice[advice.index("python -c") :])
    subprocess.run([sys.executable, *command[1:]], check=True)
    engine = make_engine(ring, bare, **CPU)
    assert alone(engine, [3, 4, 5], GREEDY) == list(range(6, 36))
    assert num_wrong(engine) == 0


def test_a_head_that_ranks_cannot_share(tmp_path: Path) -> None:
    ring, head = write_ring(tmp_path / "ring"), write_ring_head(tmp_path / "head", intermediate_size=63)
    speculation = json.dumps({"method": "eagle3", "model": str(head), "num_speculative_tokens": 2})
    args = EngineArgs(model=str(ring), device="cpu", speculative_config=speculation, tensor_parallel_size=2)
    for check in (lambda: check_draft_model(args, ring, head), lambda: create_engine_config(args)):
        with pytest.raises(ValueError, match=r"^speculative_config model: tensor_parallel_size must divide"):
            check()


def test_a_head_whose_checkpoint_is_quantised(tmp_path: Path) -> None:
    """Only its weights decide: the field may be a copy of the model's."""
    ring, head = write_ring(tmp_path / "ring"), write_ring_head(tmp_path / "head")
    stored = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = json.loads((head / "config.json").read_text()) | {"quantization_config": stored}
    tensors = load_file(head / "model.safetensors")
    engine = make_engine(ring, write(tmp_path / "copied", config, tensors), **CPU)
    assert engine.config.draft is not None
    assert engine.config.draft.model.quantization == "none"
    assert alone(engine, [3, 4, 5], GREEDY) == list(range(6, 36))
    narrow = tensors | {"fc.weight": tensors["fc.weight"].to(torch.float8_e4m3fn)}
    with pytest.raises(ValueError, match=r"fc.weight is in torch.float8_e4m3fn, and a head's quantised weights "):
        make_engine(ring, write(tmp_path / "narrow", config, narrow), **CPU)


def test_a_head_of_another_size_without_an_embedding(tmp_path: Path) -> None:
    model = folder_of(tmp_path / "model", MODEL | {"hidden_size": 80})
    head = folder_of(tmp_path / "head", HEAD | {LAYER_IDS: [0, 1, 2]})
    says = "the head is for models with a hidden_size of 64, and the model's is 80"
    with pytest.raises(ValueError, match=f"^speculative_config model: {says}"):
        make_engine(model, head, load_format="dummy", **CPU)


def test_features_that_have_no_groups(tmp_path: Path) -> None:
    """Of a model with other hidden states than the head's."""
    model = folder_of(tmp_path / "model", MODEL | {"hidden_size": 80})
    head = folder_of(tmp_path / "head", HEAD | {LAYER_IDS: [0, 1, 2]})
    speculation = json.dumps(
        {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2, "quantization": "int4"}
    )
    args = EngineArgs(model=str(model), device="cpu", speculative_config=speculation, load_format="dummy")
    for check in (lambda: check_draft_model(args, model, head), lambda: create_engine_config(args)):
        with pytest.raises(ValueError, match=r"quantization int4 cannot work here: .* multiple of 32, is 240; give"):
            check()


def test_models_that_cannot_have_a_head(tmp_path: Path) -> None:
    head = folder_of(tmp_path / "head", HEAD | {"vocab_size": 97})
    speculation = json.dumps({"method": "eagle3", "model": str(head), "num_speculative_tokens": 2})
    model = folder_of(tmp_path / "model", GEMMA4)
    with pytest.raises(ValueError, match=r"^speculative_config model: .*the model's pool, which has heads of several"):
        create_engine_config(
            EngineArgs(model=str(model), device="cpu", load_format="dummy", speculative_config=speculation)
        )
    ring = write_ring(tmp_path / "ring")
    as_draft_model = json.dumps({"model": str(head), "num_speculative_tokens": 2})
    args = EngineArgs(model=str(ring), device="cpu", speculative_config=as_draft_model)
    for check in (lambda: check_draft_model(args, ring, head), lambda: create_engine_config(args)):
        with pytest.raises(ValueError, match=r"^speculative_config model: it is an EAGLE-3 head: give the method"):
            check()


def test_the_pool_keeps_a_layer_for_the_head(tmp_path: Path) -> None:
    ring, head = write_ring(tmp_path / "ring"), write_ring_head(tmp_path / "head")
    sizes = {"num_kv_blocks": 0, "kv_cache_gib": 0.02, "max_model_len": 512}
    plain, guessing = make_engine(ring, None, **sizes, **CPU), make_engine(ring, head, **sizes, **CPU)
    assert guessing.executor.kv_shape.num_blocks == plain.executor.kv_shape.num_blocks * 4 // 5
    too_small = {**sizes, "kv_cache_gib": 0.00028}
    says = r"^speculative_config model: with it, kv_cache_gib must be at least 0\.000\d+"
    with pytest.raises(ValueError, match=says):
        make_engine(ring, head, **too_small, **CPU)
    speculation = json.dumps({"method": "eagle3", "model": str(head), "num_speculative_tokens": 2})
    args = EngineArgs(model=str(ring), device="cpu", speculative_config=speculation, dtype="bfloat16", **too_small)
    with pytest.raises(ValueError, match=says):
        check_draft_model(args, ring, head)
