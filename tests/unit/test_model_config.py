"""What config.json and an engine's settings result in together, and errors in either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_kinds import GPU_KINDS
from llama_folders import LLAMA, config_of, folder_with, write_weights
from pretend_gpu import pretend_gpu
from quantized_checkpoints import FORMS

from engine.layers import inverse_frequencies
from engine.model_loader import model_config
from engine.model_loader import settings as settings_module
from engine.models import load_decoder_config
from engine.models.rope_config import RopeConfig

QWEN3: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": False}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def test_workers_whose_kernels_add_up_otherwise_are_not_paired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_with(tmp_path / "m", hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    settings = {"dtype": "bfloat16", "attention_backend": "cpu", "block_size": 16}
    own = config_of(folder, **settings).compat_digest
    monkeypatch.setattr(model_config, "cpu_arithmetic", lambda: "abacus")
    assert config_of(folder, **settings).compat_digest != own
    assert config_of(folder, **settings | {"attention_backend": "torch"}).compat_digest != own


def test_what_keeps_bits_whatever_the_batch(tmp_path: Path) -> None:
    """The CPU kernels are batch-invariant anyway, so their digests are equal. With it, GPUs of different kinds are not
    paired."""
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
    with pytest.raises(ValueError, match=f"batch_invariant is not possible here: {why_not}"):
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
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "quant_method 'bitsandbytes' is not supported; known are",
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
    monkeypatch.setattr(settings_module, "memory_bytes", lambda device: 511)
    with pytest.raises(
        ValueError, match=r"one block of 4 tokens would take .* has 2 layers with 2 key heads of size 4"
    ):
        config_of(folder)


# -- settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 65}, "max_model_len must be at most the model's max_position_embeddings=64, is 65"),
        ({"num_kv_blocks": 15}, "num_kv_blocks must be at least 16, what max_model_len=64 needs, is 15"),
        ({"num_kv_blocks": 0, "kv_cache_gib": 1e-6}, "kv_cache_gib must be at least .*, is 1e-06"),
        ({"num_kv_blocks": 0, "kv_cache_gib": 1e5}, r"kv_cache_gib must be at most [\d.]+, all the memory .* is 1000"),
        ({"num_kv_blocks": 10**12}, r"num_kv_blocks must be at most \d+, all the memory .* is 10000"),
        ({"load_format": "gguf"}, "load_format gguf needs a .gguf file"),
        ({"load_format": "safetensors"}, "has neither model.safetensors nor"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda, is 'tpu'"),
        ({"quantization": "int2"}, "quantization must be one of auto, none, fp8, int8, int4, awq, .*, is 'int2'$"),
        ({"quantization": "awq"}, "quantization awq is not .* this checkpoint, whose weights are plain; give auto"),
        ({"attention_backend": "FLASH_ATTN"}, "one of auto, .*, is 'FLASH_ATTN'; vLLM's FLASH_ATTN is flash_attn here"),
        ({"attention_backend": "TRITON_ATTN"}, "is 'TRITON_ATTN'; vLLM's TRITON_ATTN is triton here"),
        ({"load_format": "hf"}, "is 'hf'; vLLM's hf is auto here"),
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


@pytest.mark.parametrize("num_blocks", [*range(2, 17), 333])
def test_a_size_that_a_bound_names_is_within_it(
    num_blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who then gives the size that the error names is not refused again."""
    folder = folder_with(tmp_path / "m")
    monkeypatch.setattr(settings_module, "memory_bytes", lambda device: 512 * num_blocks + 511)
    length = min(64, 2 * num_blocks)

    def bound_of(name: str, **settings: float) -> float:
        with pytest.raises(ValueError, match=f"{name} must be at (least|most) ") as refused:
            config_of(folder, max_model_len=length, **settings)
        return float(str(refused.value).removeprefix(f"{name} must be at ").split()[1].rstrip(","))

    for wrong in (1e-9, 1.0):
        size = bound_of("kv_cache_gib", num_kv_blocks=0, kv_cache_gib=wrong)
        config = config_of(folder, num_kv_blocks=0, max_model_len=length, kv_cache_gib=size)
        assert length <= 4 * config.cache.num_blocks <= 4 * num_blocks
    most = bound_of("kv_offloading_size", num_kv_blocks=num_blocks, kv_offloading_size=1.0)
    assert config_of(folder, num_kv_blocks=num_blocks, max_model_len=length, kv_offloading_size=most)


def test_pool_size_from_gibibytes(tmp_path: Path) -> None:
    # 2 layers x (2 x 2 heads x 4 slots x 4 dims x 4 bytes)
    config = config_of(folder_with(tmp_path / "m"), num_kv_blocks=0, kv_cache_gib=(512 * 20 + 1) / 1024**3)
    assert config.cache.num_blocks == 20
    assert config.scheduler.prefill_chunk_tokens == config.scheduler.max_num_batched_tokens == 2048
    assert config_of(folder_with(tmp_path / "m"), prefill_chunk_tokens=7).scheduler.prefill_chunk_tokens == 7
    assert config.scheduler.prefill_batch_tokens == 256
    assert config_of(folder_with(tmp_path / "m"), prefill_batch_tokens=7).scheduler.prefill_batch_tokens == 7
    # The model is in float32: 8-bit floats take one byte instead of four.
    settings = {"num_kv_blocks": 0, "kv_cache_gib": (512 * 20 + 1) / 1024**3, "kv_cache_dtype": "fp8"}
    assert config_of(folder_with(tmp_path / "m"), **settings).cache.num_blocks == 80
