"""Models that transformers' own code computes, with Tandem's attention: their logits are those of transformers alone. A
model that cannot be served this way is refused because of what its code does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_bench import (
    SMALL,
    VOCAB_SIZE,
    Bench,
    assert_close,
    check_layers_are_announced,
    logits_of_backends,
    random_tokens,
    reference,
    save_model,
)  # fmt: skip
from model_bench import engine_config as config_of
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine.attention import Needs, choose_attention_backend, why_no_graphs
from engine.config import EngineConfig
from engine.models import load_model_shape
from engine.models.scores import Scores
from engine.models.transformers_config import TransformersConfig

pytestmark = pytest.mark.usefixtures("one_thread")


def engine_config(folder: Path, **settings: Any) -> EngineConfig:
    """A config that uses transformers' code, even if Tandem has a decoder of its own."""
    return config_of(folder, **{"model_impl": "transformers"} | settings)


NO_GROUPS = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
GPT2 = {
    "vocab_size": VOCAB_SIZE, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 128, "initializer_range": 0.3,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1000.0, "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2] * 4}
GEMMA4 = SMALL | {
    "num_hidden_layers": 5, "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
    "head_dim": 16, "global_head_dim": 32, "sliding_window": 8, "pad_token_id": 0, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "afmoe": lambda: transformers.AfmoeConfig(
        **SMALL, head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, num_dense_layers=1,
        sliding_window=8, pad_token_id=0,
    ),
    "cohere2": lambda: transformers.Cohere2Config(**SMALL, logit_scale=0.25, sliding_window=8, pad_token_id=0),
    "gemma": lambda: transformers.GemmaConfig(**SMALL, head_dim=16),
    "gemma2": lambda: transformers.Gemma2Config(**SMALL, head_dim=16, sliding_window=8, query_pre_attn_scalar=24),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SMALL, head_dim=16, sliding_window=8, query_pre_attn_scalar=24, pad_token_id=0
    ),
    "gemma4": lambda: transformers.Gemma4TextConfig(**GEMMA4),
    "gemma4-moe": lambda: transformers.Gemma4TextConfig(
        **GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1, enable_moe_block=True, num_experts=4,
        top_k_experts=2, moe_intermediate_size=24, use_bidirectional_attention="vision",
    ),
    "gemma4-shared": lambda: transformers.Gemma4TextConfig(**GEMMA4, num_kv_shared_layers=2, use_double_wide_mlp=True),
    "gemma3n": lambda: transformers.Gemma3nTextConfig(
        **GEMMA4 | {"intermediate_size": [80] * 5, "vocab_size_per_layer_input": 50}, laurel_rank=8,
        num_kv_shared_layers=2, activation_sparsity_pattern=[0.5] + [0.0] * 4,
    ),
    "glm4-moe": lambda: transformers.Glm4MoeConfig(
        **SMALL, head_dim=16, n_routed_experts=8, moe_intermediate_size=24, num_experts_per_tok=2, pad_token_id=0
    ),
    "gpt2": lambda: transformers.GPT2Config(**GPT2),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**NO_GROUPS),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **SMALL, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8, pad_token_id=0
    ),
    "granite": lambda: transformers.GraniteConfig(
        **SMALL, attention_multiplier=0.2, logits_scaling=3.0, residual_multiplier=0.7, embedding_multiplier=2.0
    ),
    "granite4": lambda: transformers.GraniteMoeHybridConfig(
        **SMALL, layer_types=["attention"] * 3, num_local_experts=0, num_experts_per_tok=0, mamba_n_heads=6,
        shared_intermediate_size=80, attention_multiplier=0.2, position_embedding_type="rope",
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    "modernbert-decoder": lambda: transformers.ModernBertDecoderConfig(
        **SMALL, local_attention=16, global_attn_every_n_layers=2, pad_token_id=0, cls_token_id=1, sep_token_id=2
    ),
    "olmo2": lambda: transformers.Olmo2Config(**SMALL),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=VOCAB_SIZE, hidden_size=48, word_embed_proj_dim=48, ffn_dim=80, num_hidden_layers=3,
        num_attention_heads=6, max_position_embeddings=128, init_std=0.3,
    ),
    "phi": lambda: transformers.PhiConfig(**SMALL),
    "phi3-longrope": lambda: transformers.Phi3Config(
        **SMALL, pad_token_id=0, original_max_position_embeddings=64, rope_parameters=LONGROPE
    ),
    "qwen2-moe": lambda: transformers.Qwen2MoeConfig(**SMALL, **EXPERTS, shared_expert_intermediate_size=24),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**SMALL, **EXPERTS, head_dim=16),
    "starcoder2": lambda: transformers.Starcoder2Config(**SMALL, sliding_window=8),
}  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """With chunks beside decodes, contexts longer than a sliding window, and decoded tokens."""
    model = save_model(CONFIGS[name](), tmp_path)
    bench = Bench(engine_config(tmp_path))
    running, late = [bench.sequence(random_tokens(n, seed=n)) for n in (3, 31)], bench.sequence(random_tokens(29, 99))
    bench.logits(*[(seq, len(seq)) for seq in running])
    for num_late_tokens in (5, 23, 1):
        for seq in running:
            seq.token_ids.append(random_tokens(1, seed=len(seq))[0])
        logits = bench.logits(*[(seq, 1) for seq in running], (late, num_late_tokens))
    assert_close(logits, torch.stack([reference(model, seq.token_ids) for seq in (*running, late)]))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["gemma2", "gemma4", "gpt-oss", "gpt2", "qwen3-moe"])
def test_greedy_tokens_equal(name: str, tmp_path: Path) -> None:
    model = save_model(CONFIGS[name](), tmp_path)
    prompt = random_tokens(11, seed=1)
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=24, min_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0].tolist()
    assert Bench(engine_config(tmp_path)).continued(prompt, len(expected)) == expected


def test_a_family_of_our_own_computed_by_transformers(tmp_path: Path) -> None:
    """The logits are the same, but the two are different engines: they are not paired."""
    save_model(transformers.Qwen3Config(**SMALL, head_dim=16), tmp_path)
    configs = [engine_config(tmp_path, model_impl=impl) for impl in ("auto", "tandem", "transformers")]
    assert [config.model.model_impl for config in configs] == ["tandem", "tandem", "transformers"]
    logits = []
    for config in configs[1:]:
        bench = Bench(config)
        seq = bench.sequence(random_tokens(20, seed=4))
        bench.logits((seq, 8))
        logits.append(bench.logits((seq, 12)))
    assert_close(logits[0], logits[1])
    assert configs[0].compat_digest == configs[1].compat_digest != configs[2].compat_digest
    assert configs[2].compat_digest == engine_config(tmp_path, model_impl="transformers").compat_digest


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["gemma", "gemma3", "gemma4", "gemma4-moe", "glm4-moe", "gpt-oss"])
def test_with_the_cpu_kernels(name: str, tmp_path: Path) -> None:
    """They compute attention, linear layers and the product of the logits, as close as bfloat16 allows."""
    save_model(CONFIGS[name](), tmp_path)
    ours, plain, exact = logits_of_backends(tmp_path, model_impl="transformers")
    assert (ours - exact).norm() < 2 * (plain - exact).norm()
    assert (ours - exact).norm() < 0.1 * exact.norm()


def test_layers_are_announced_in_order_with_their_kv_in_the_pool(tmp_path: Path) -> None:
    save_model(CONFIGS["gemma2"](), tmp_path)
    check_layers_are_announced(engine_config(tmp_path))


# -- what is seen of a model ----------------------------------------------------------------------------------------


def shape_of(config: Any) -> TransformersConfig:
    """The shape that its config.json gives."""
    shape = load_model_shape(json.loads(config.to_json_string()), "transformers")
    assert isinstance(shape, TransformersConfig)
    return shape


def hf(config: Any, architecture: str) -> Any:
    config.architectures = [architecture]
    return config


def test_scores_are_those_that_the_code_asks_for() -> None:
    shape = shape_of(hf(CONFIGS["gemma2"](), "Gemma2ForCausalLM"))
    windows = [8, 0, 8]
    assert [module.scores for module in shape.attention] == [Scores(24**-0.5, window, 50.0) for window in windows]
    assert shape.has_soft_cap
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.hidden_size) == (6, 2, 16, 48)
    assert (shape.vocab_size, shape.max_positions, shape.num_layers) == (VOCAB_SIZE, 128, 3)


def test_what_is_computed_otherwise_is_another_model() -> None:
    """Fields that only transformers reads count, too, such as the base of the rotation. Those that do not change KV do
    not."""
    base = shape_of(hf(CONFIGS["olmo2"](), "Olmo2ForCausalLM"))
    theta = {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}
    other = shape_of(hf(transformers.Olmo2Config(**SMALL, **theta), "Olmo2ForCausalLM"))
    longer = shape_of(hf(transformers.Olmo2Config(**SMALL | {"eos_token_id": 9}), "Olmo2ForCausalLM"))
    assert base.computation != other.computation
    assert base == longer
    # Some rotations are stretched by this field, and no other field says so.
    wider = shape_of(hf(transformers.Olmo2Config(**SMALL | {"max_position_embeddings": 256}), "Olmo2ForCausalLM"))
    assert base.computation != wider.computation


def test_a_window_of_a_very_long_context() -> None:
    long = {"max_position_embeddings": 1 << 21, "sliding_window": 300_000}
    shape = shape_of(hf(transformers.Starcoder2Config(**SMALL | long), "Starcoder2ForCausalLM"))
    assert {module.scores.sliding_window for module in shape.attention} == {300_000}
    assert (shape.max_positions, shape.why_no_more_positions) == (1 << 20, "as far as is looked for windows")


def test_what_of_an_engine_is_not_there_for_such_models() -> None:
    shape = shape_of(hf(CONFIGS["gemma2"](), "Gemma2ForCausalLM"))

    def needs(dtype: str = "bfloat16", device: str = "cpu") -> Needs:
        return Needs(model=shape, device=device, capability=None, dtype=dtype, kv_dtype=dtype, block_size=16)

    assert choose_attention_backend("auto", needs()) == "torch"
    with pytest.raises(ValueError, match="cpu cannot work here: the model caps its scores"):
        choose_attention_backend("cpu", needs())
    with pytest.raises(ValueError, match="flash_attn cannot work here: it is called without a soft cap"):
        choose_attention_backend("flash_attn", needs("float16", "cuda"))
    assert why_no_graphs("torch", needs("float16", "cuda"))


def test_sinks_are_seen_and_flash_attention_has_none() -> None:
    shape = shape_of(hf(CONFIGS["gpt-oss"](), "GptOssForCausalLM"))
    assert [module.has_sinks for module in shape.attention] == [True, True, True]
    assert [module.scores.sliding_window for module in shape.attention] == [8, 0, 8]
    assert not shape_of(hf(CONFIGS["gemma2"](), "Gemma2ForCausalLM")).has_sinks
    needs = Needs(model=shape, device="cuda", capability=None, dtype="float16", kv_dtype="float16", block_size=16)
    with pytest.raises(ValueError, match="flash_attn cannot work here: it is called without attention sinks"):
        choose_attention_backend("flash_attn", needs)


def test_positions_beyond_which_neighbours_would_count(tmp_path: Path) -> None:
    save_model(CONFIGS["phi3-longrope"](), tmp_path)
    assert engine_config(tmp_path).model.max_model_len == 64
    with pytest.raises(ValueError, match=r"max_model_len must be at most 64, beyond which rope_type longrope would"):
        engine_config(tmp_path, max_model_len=65)


@pytest.mark.parametrize(
    ("config", "architecture", "why"),
    [
        (lambda: transformers.BertConfig(**NO_GROUPS), "BertLMHeadModel", "a token sees tokens other than all"),
        (lambda: transformers.DiffLlamaConfig(**SMALL), "DiffLlamaForCausalLM", "attends more than once in a step"),
        (
            lambda: transformers.RecurrentGemmaConfig(**SMALL, lru_width=48, block_types=["recurrent", "attention"]),
            "RecurrentGemmaForCausalLM", r"keep a state \(in transformers' code: 2 RecurrentGemma",
        ),
        (
            lambda: transformers.YoutuConfig(**SMALL, kv_lora_rank=24, q_lora_rank=None, qk_nope_head_dim=8),
            "YoutuForCausalLM", "keys and values must have heads of one size",
        ),
        (lambda: transformers.BloomConfig(hidden_size=48, n_head=6), "BloomForCausalLM", "its attention is its own"),
        (lambda: transformers.GPTJConfig(n_embd=48, n_head=6), "GPTJForCausalLM", "takes no attention but its own"),
        (lambda: transformers.BartConfig(is_decoder=True), "BartForCausalLM", "counts positions by itself"),
        (
            lambda: transformers.OlmoConfig(**SMALL, rope_parameters={
                "rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0
            }),
            "OlmoForCausalLM", "their code reads values",
        ),
        (lambda: transformers.OlmoConfig(**SMALL | {"num_hidden_layers": 5000}), "OlmoForCausalLM", "at most 1024"),
        (transformers.Gemma3Config, "Gemma3ForConditionalGeneration", "models of more than text"),
        (
            lambda: transformers.Gemma2Config(**SMALL, head_dim=16, attn_logit_softcapping=0.0), "Gemma2ForCausalLM",
            r"attention caps its scores at 0.0 \(attn_logit_softcapping\)",
        ),
        (
            lambda: transformers.Gemma3TextConfig(**SMALL, head_dim=16, final_logit_softcapping=0.0),
            "Gemma3ForCausalLM", "final_logit_softcapping must be null or a finite number more than 0, is 0.0",
        ),
        (
            lambda: transformers.Gemma4TextConfig(**GEMMA4 | {"vocab_size_per_layer_input": 306}), "Gemma4ForCausalLM",
            "vocab_size_per_layer_input must be at least vocab_size=307, is 306",
        ),
        (lambda: transformers.OlmoConfig(**SMALL), "LlamaForCausalLM", "has no causal language model of that name"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_before_weights_are_read(config: Any, architecture: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        shape_of(hf(config(), architecture))


KIMI = SMALL | {
    "pad_token_id": 0, "head_dim": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "kv_lora_rank": 24, "layer_types": ["linear_attention"] * 2 + ["full_attention"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "architecture", "which"),
    [
        (
            lambda: transformers.JambaConfig(**SMALL, num_experts=2, attn_layer_period=2, attn_layer_offset=1),
            "JambaForCausalLM", "2 JambaMambaMixer",
        ),
        (
            lambda: transformers.Zamba2Config(**SMALL, layers_block_type=["mamba", "hybrid", "mamba"]),
            "Zamba2ForCausalLM", "3 Zamba2MambaMixer",
        ),
        (lambda: transformers.KimiLinearConfig(**KIMI), "KimiLinearForCausalLM", "2 KimiLinearDeltaAttention"),
        (lambda: transformers.MiniMaxConfig(**SMALL), "MiniMaxForCausalLM", "1 MiniMaxLightningAttention"),
        (
            lambda: transformers.RwkvConfig(vocab_size=97, hidden_size=48, num_hidden_layers=2), "RwkvForCausalLM",
            "2 RwkvFeedForward, 2 RwkvSelfAttention",
        ),
        (lambda: transformers.MambaConfig(num_hidden_layers=2, vocab_size=97), "MambaForCausalLM", "2 MambaMixer"),
        (lambda: transformers.Mamba2Config(num_hidden_layers=2, vocab_size=97), "Mamba2ForCausalLM", "2 Mamba2Mixer"),
    ],
)  # fmt: skip
def test_states_that_we_do_not_compute_are_named_and_those_that_we_do(
    config: Any, architecture: str, which: str
) -> None:
    with pytest.raises(ValueError, match=r"its layers keep a state .* that Tandem does not compute") as refused:
        shape_of(hf(config(), architecture))
    line = str(refused.value)
    assert f"(in transformers' code: {which})" in line
    assert "gated delta rules (Qwen3-Next, Qwen 3.5), Mamba-2 beside attention" in line
    assert "\n" not in line


def test_an_unknown_architecture_is_named() -> None:
    with pytest.raises(ValueError, match="architecture NewForCausalLM with model_type 'new' is not supported"):
        load_model_shape({"architectures": ["NewForCausalLM"], "model_type": "new"}, "auto")
    with pytest.raises(ValueError, match="NewForCausalLM is not supported; known are"):
        load_model_shape({"architectures": ["NewForCausalLM"], "model_type": "new"}, "tandem")


# -- weights --------------------------------------------------------------------------------------------------------


def test_tokens_that_see_each_other_outside_of_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The feed-forward looks one token back: its logits would depend on the sequence before it in the batch."""
    save_model(CONFIGS["olmo2"](), tmp_path)
    from transformers.models.olmo2.modeling_olmo2 import Olmo2MLP

    forward = Olmo2MLP.forward
    monkeypatch.setattr(Olmo2MLP, "forward", lambda self, x: forward(self, x + x.roll(1, 1)))
    with pytest.raises(ValueError, match="its tokens see each other outside of attention"):
        Bench(engine_config(tmp_path))


def test_a_place_in_the_step_instead_of_a_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(CONFIGS["olmo2"](), tmp_path)
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RotaryEmbedding

    forward = Olmo2RotaryEmbedding.forward

    def by_place(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return forward(self, x, torch.arange(position_ids.shape[1], device=position_ids.device)[None])

    monkeypatch.setattr(Olmo2RotaryEmbedding, "forward", by_place)
    with pytest.raises(ValueError, match="a token's place in the step counts, not its position"):
        Bench(engine_config(tmp_path))


def test_positions_that_begin_elsewhere(tmp_path: Path) -> None:
    """RoBERTa, if it is given no positions, counts from behind the position of padding. Here it would be given
    others."""
    config = transformers.RobertaConfig(**NO_GROUPS | {"initializer_range": 0.3}, is_decoder=True, pad_token_id=1)
    save_model(config, tmp_path)
    with pytest.raises(ValueError, match="does not count its positions from 0, by ones"):
        Bench(engine_config(tmp_path))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"), "lack tensors: model.layers.1.mlp.up_proj"),
        (
            lambda tensors: tensors.update(extra=torch.zeros(2)),
            "hold tensors that the architecture does not use: extra",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(7)}),
            "do not fit config.json in the shapes of: model.norm.weight",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(change: Any, why: str, tmp_path: Path) -> None:
    """transformers itself would fill in what is missing, with a warning."""
    save_model(CONFIGS["olmo2"](), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=why):
        Bench(engine_config(tmp_path))


def test_weights_that_have_to_be_unpickled_are_not_read(tmp_path: Path) -> None:
    model = save_model(CONFIGS["olmo2"](), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(
        ValueError, match=r"has pickled weights \(pytorch_model\.bin\), which are not read; convert them"
    ):
        engine_config(tmp_path)
    index = {"weight_map": dict.fromkeys(model.state_dict(), "pytorch_model.bin")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"names files that are not safetensors: pytorch_model\.bin"):
        engine_config(tmp_path)


def test_the_weights_that_are_computed_with_are_those_of_the_digest(tmp_path: Path) -> None:
    """The folder has an index and a single file, which differ, and config.json names a third."""
    model = save_model(CONFIGS["olmo2"](), tmp_path)
    path = tmp_path / "model.safetensors"
    path.rename(tmp_path / "part.safetensors")
    index = {"weight_map": dict.fromkeys(model.state_dict(), "part.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    digest = engine_config(tmp_path).compat_digest
    zeros = {name: torch.zeros_like(tensor) for name, tensor in load_file(tmp_path / "part.safetensors").items()}
    for other in (path, tmp_path / "other.safetensors"):
        save_file(zeros, other, metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"transformers_weights": "other.safetensors"}))
    bench = Bench(engine_config(tmp_path))
    assert_close(bench.logits((bench.sequence([5, 6, 7]), 3)), reference(model, [5, 6, 7]).unsqueeze(0))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert engine_config(tmp_path).compat_digest == digest
    (tmp_path / "part.safetensors").write_bytes(path.read_bytes())
    assert engine_config(tmp_path).compat_digest != digest


def test_files_that_are_broken_are_named(tmp_path: Path) -> None:
    save_model(CONFIGS["qwen3-moe"](), tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a safetensors file, or not a complete one"):
        Bench(engine_config(tmp_path))
    path.write_bytes(whole)
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]  # one of those that are stacked
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"cannot make this model|lack tensors|could not be brought"):
        Bench(engine_config(tmp_path))
    for content in ("{}", "{", "[]"):
        (tmp_path / "model.safetensors.index.json").write_text(content)
        with pytest.raises(ValueError, match="has no weight_map"):
            engine_config(tmp_path)


def test_dummy_weights_follow_the_seed_and_disturb_no_other_draws(tmp_path: Path) -> None:
    config = hf(CONFIGS["qwen3-moe"](), "Qwen3MoeForCausalLM")
    (tmp_path / "config.json").write_text(config.to_json_string())
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    logits = []
    for seed in (1, 1, 2):
        bench = Bench(engine_config(tmp_path, load_format="dummy", seed=seed))
        logits.append(bench.logits((bench.sequence([5, 6, 7]), 3)))
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize(
    "config", [CONFIGS["gemma"], lambda: transformers.GPT2Config(**GPT2 | {"n_head": 3})], ids=["gemma", "gpt2"]
)
def test_our_products_are_where_linear_layers_were(config: Any, tmp_path: Path) -> None:
    save_model(config(), tmp_path)
    runner = Bench(engine_config(tmp_path, dtype="bfloat16", block_size=16)).runner
    modules = runner._model._body.modules()  # type: ignore[attr-defined]
    assert not [module for module in modules if isinstance(module, nn.Linear | Conv1D)]
