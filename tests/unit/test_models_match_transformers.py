"""The native decoder computes what transformers computes, however a prompt is cut, and whatever shares the batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_bench import (
    SMALL,
    Bench,
    assert_close,
    check_layers_are_announced,
    engine_config,
    logits_of_backends,
    random_tokens,
    reference,
)  # fmt: skip
from model_bench import save_model as save

from engine.config import EngineConfig
from engine.engine_args import EngineArgs
from engine.model_loader import create_engine_config
from engine.quantization import quantize_int8

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
DEEPSEEK: dict[str, Any] = SMALL | {
    "num_key_value_heads": 6,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-2,  # unlike that of the latents' norms
}
OF_GLM_LITE = {name: value for name, value in DEEPSEEK.items() if name != "first_k_dense_replace"}
OF_GLM: dict[str, Any] = SMALL | {
    "head_dim": 16, "n_routed_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
}  # fmt: skip
OF_YOUTU = {name: value for name, value in OF_GLM_LITE.items() if "expert" not in name and "moe" not in name}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "original_max_position_embeddings": 16}
LATENT_CONFIGS: dict[str, Any] = {
    "deepseek-v2": lambda: transformers.DeepseekV2Config(**DEEPSEEK, q_lora_rank=None),
    "deepseek-v2-groups-yarn-biases": lambda: transformers.DeepseekV2Config(
        **DEEPSEEK, q_lora_rank=20, topk_method="group_limited_greedy", n_group=4, topk_group=2, attention_bias=True,
        mlp_bias=True, routed_scaling_factor=2.0, rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
    ),
    "deepseek-v3": lambda: transformers.DeepseekV3Config(**DEEPSEEK, q_lora_rank=20, n_group=4, topk_group=2),
    "deepseek-v3-yarn-halves": lambda: transformers.DeepseekV3Config(
        **DEEPSEEK, q_lora_rank=None, n_group=1, topk_group=1, rope_interleave=False, norm_topk_prob=False,
        attention_bias=True, rope_parameters=YARN | {
            "mscale": 1.2, "mscale_all_dim": 0.8, "rope_theta": 10.0, "beta_fast": 0.7, "beta_slow": 0.3
        },
    ),
    "glm-4.7-flash": lambda: transformers.Glm4MoeLiteConfig(**OF_GLM_LITE, q_lora_rank=20, routed_scaling_factor=1.8),
    "glm-4.7-flash-groups-late-biases": lambda: transformers.Glm4MoeLiteConfig(
        **OF_GLM_LITE, q_lora_rank=None, n_group=4, topk_group=2, attention_bias=True, norm_topk_prob=False,
        mlp_layer_types=["dense", "dense", "sparse"], rope_interleave=False,
    ),
    "youtu": lambda: transformers.YoutuConfig(**OF_YOUTU, q_lora_rank=20),
    "youtu-biases-untied": lambda: transformers.YoutuConfig(
        **OF_YOUTU, q_lora_rank=None, attention_bias=True, tie_word_embeddings=False
    ),
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "llama-biases-tied": lambda: transformers.LlamaConfig(
        **SMALL, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, head_dim=16
    ),
    "llama-rope-llama3": lambda: transformers.LlamaConfig(**SMALL, rope_parameters=LLAMA3_ROPE),
    "llama-rope-linear": lambda: transformers.LlamaConfig(
        **SMALL, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}
    ),
    "llama-rope-yarn": lambda: transformers.LlamaConfig(**SMALL, rope_parameters=YARN | {"factor": 2.0}),
    "mistral-sliding": lambda: transformers.MistralConfig(**SMALL, sliding_window=7),
    "mistral-full": lambda: transformers.MistralConfig(**SMALL, sliding_window=None),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL),
    "qwen2-late-sliding": lambda: transformers.Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=16),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**SMALL, **EXPERTS, head_dim=16, norm_topk_prob=True),
    "qwen3-moe-first-dense-sliding": lambda: transformers.Qwen3MoeConfig(
        **SMALL, **EXPERTS, mlp_only_layers=[0], attention_bias=True, use_sliding_window=True, sliding_window=5
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    "mixtral-sliding": lambda: transformers.MixtralConfig(
        **SMALL, num_local_experts=6, num_experts_per_tok=3, sliding_window=7
    ),
    "glm-4.5": lambda: transformers.Glm4MoeConfig(
        **OF_GLM, attention_bias=True, num_mtp_layers=0, routed_scaling_factor=1.7
    ),
    "glm-4.6-norms-groups-yarn": lambda: transformers.Glm4MoeConfig(
        **OF_GLM,
        use_qk_norm=True,
        n_group=4,
        topk_group=2,
        norm_topk_prob=False,
        rope_parameters=YARN | {"partial_rotary_factor": 0.25},
    ),
    "qwen3-bias-sliding": lambda: transformers.Qwen3Config(
        **SMALL, head_dim=16, attention_bias=True, use_sliding_window=True, sliding_window=5, max_window_layers=2
    ),
}


def save_model(name: str, folder: Path, **changes: Any) -> transformers.PreTrainedModel:
    config = (CONFIGS | LATENT_CONFIGS)[name]()
    config.update(changes)
    return save(config, folder)


@pytest.fixture(scope="module", params=sorted(CONFIGS | LATENT_CONFIGS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, EngineConfig]:
    folder = tmp_path_factory.mktemp(request.param)
    model = save_model(request.param, folder)
    return model, engine_config(folder)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("num_tokens", [1, 4, 23, 40])
def test_whole_prompt(pair: tuple[Any, EngineConfig], num_tokens: int) -> None:
    model, config = pair
    bench, tokens = Bench(config), random_tokens(num_tokens, seed=num_tokens)
    logits = bench.logits((bench.sequence(tokens), num_tokens))
    assert_close(logits, reference(model, tokens).unsqueeze(0))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("chunks", [(1, 22), (8, 8, 7), (3, 1, 1, 18), (22, 1)])
def test_chunked_prompt(pair: tuple[Any, EngineConfig], chunks: tuple[int, ...]) -> None:
    model, config = pair
    bench, tokens = Bench(config), random_tokens(23, seed=5)
    seq = bench.sequence(tokens)
    for num_new_tokens in chunks[:-1]:
        assert bench.logits((seq, num_new_tokens)) is None
    assert_close(bench.logits((seq, chunks[-1])), reference(model, tokens).unsqueeze(0))


def test_mixed_batches_decode_and_prefill(pair: tuple[Any, EngineConfig]) -> None:
    model, config = pair
    bench = Bench(config)
    running = [bench.sequence(random_tokens(n, seed=n)) for n in (2, 9, 17, 31)]
    bench.logits(*[(seq, len(seq)) for seq in running])
    late = bench.sequence(random_tokens(29, seed=99))
    for num_late_tokens in (5, 11, 12, 1):
        for seq in running:
            seq.token_ids.append(random_tokens(1, seed=len(seq))[0])
        logits = bench.logits(*[(seq, 1) for seq in running], (late, num_late_tokens))
    ending = [*running, late]
    assert_close(logits, torch.stack([reference(model, seq.token_ids) for seq in ending]))


def test_prompts_of_different_lengths_in_one_step(pair: tuple[Any, EngineConfig]) -> None:
    model, config = pair
    bench = Bench(config)
    seqs = [bench.sequence(random_tokens(n, seed=n)) for n in (40, 3, 12, 37, 1, 13)]
    logits = bench.logits(*[(seq, len(seq)) for seq in seqs])
    assert_close(logits, torch.stack([reference(model, seq.token_ids) for seq in seqs]))


@pytest.mark.one_in(3)
def test_greedy_tokens_equal(pair: tuple[Any, EngineConfig]) -> None:
    model, config = pair
    prompt = random_tokens(11, seed=1)
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=24, min_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0].tolist()
    assert Bench(config).continued(prompt, len(expected)) == expected


def test_a_head_of_its_own_beside_tied_embeddings_is_used(tmp_path: Path) -> None:
    """If the files have a head, it is used whatever the configuration says, as in transformers."""
    model = save_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert not config["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    bench, tokens = Bench(engine_config(tmp_path)), random_tokens(9, seed=4)
    logits = bench.logits((bench.sequence(tokens), 9))
    assert_close(logits, reference(told, tokens).unsqueeze(0))
    assert_close(logits, reference(model, tokens).unsqueeze(0))


def test_layers_are_announced_in_order_with_their_kv_in_the_pool(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    check_layers_are_announced(engine_config(tmp_path))


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    save_model("qwen2", tmp_path)
    tokens = random_tokens(30, seed=4)
    results = []
    for dtype in ("float32", "bfloat16"):
        bench = Bench(engine_config(tmp_path, dtype=dtype))
        seq = bench.sequence(tokens)
        bench.logits((seq, 20))
        logits = bench.logits((seq, 10))
        assert logits is not None
        results.append(logits.float())
    assert torch.nn.functional.cosine_similarity(*results).item() > 0.99


def with_int8_weights(model: Any) -> Any:
    """The model with its weights after quantisation: only those of the layers' products change."""
    with torch.no_grad():
        for name, parameter in model.model.layers.named_parameters():
            if name.endswith("proj.weight"):
                int8, scale = quantize_int8(parameter)
                parameter.copy_(int8 * scale[:, None])
    return model


@pytest.mark.parametrize("name", ["llama", "llama-biases-tied", "qwen3"])
def test_int8_weights_are_those_of_the_layers_products(name: str, tmp_path: Path) -> None:
    model = with_int8_weights(save_model(name, tmp_path))
    bench = Bench(engine_config(tmp_path, quantization="int8"))
    tokens = random_tokens(30, seed=4)
    seq = bench.sequence(tokens)
    bench.logits((seq, 20))  # more rows than torch's own product takes
    assert_close(bench.logits((seq, 10)), reference(model, tokens).unsqueeze(0))


@pytest.mark.parametrize(
    ("settings", "bound"),
    [({"quantization": "int8"}, 0.04), ({"kv_cache_dtype": "fp8"}, 0.1)],
    ids=["int8", "fp8 KV"],
)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_logits_in_8_bits_stay_near_float64(name: str, settings: dict[str, str], bound: float, tmp_path: Path) -> None:
    """For a chunk, a chunk on cached context, and decode steps, relative to the size of the logits. All else is
    float32."""
    model = save_model(name, tmp_path, initializer_range=0.1).double()
    bench = Bench(engine_config(tmp_path, **settings))
    seq = bench.sequence(random_tokens(24, seed=4))
    bench.logits((seq, 15))
    for num_new_tokens in (9, 1, 1):
        logits = bench.logits((seq, num_new_tokens))
        assert logits is not None
        expected = reference(model, seq.token_ids)
        error = (logits[0].double() - expected).norm() / expected.norm()
        assert bound / 20 < error < bound
        seq.token_ids.append(7)


FITS_CPU_KERNELS = {"head_dim": 16, "kv_lora_rank": 32, "qk_rope_head_dim": 16}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", sorted(CONFIGS | LATENT_CONFIGS))
def test_fused_layers_compute_what_plain_ones_do(name: str, tmp_path: Path) -> None:
    """Biases, norms of heads, windows, tied embeddings, latents: all that a layer may have, as close as bfloat16
    allows."""
    save_model(name, tmp_path, **FITS_CPU_KERNELS)
    fused, plain, exact = logits_of_backends(tmp_path)
    assert (fused - exact).norm() < 2 * (plain - exact).norm()
    has_experts = name.startswith(("mixtral", "qwen3-moe"))  # other experts may be chosen, or other groups of them
    bound = 0.6 if name.startswith(("deepseek", "glm")) else 0.3 if has_experts else 0.1
    assert (fused - exact).norm() < bound * exact.norm()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "qwen3-bias-sliding", "deepseek-v2", "deepseek-v3"])
def test_a_token_has_the_same_bits_in_any_step(name: str, tmp_path: Path) -> None:
    """With the CPU kernels, also for the choice of experts and what they compute."""
    sizes = {"hidden_size": 528, "intermediate_size": 384, "moe_intermediate_size": 384}
    save_model(name, tmp_path, **FITS_CPU_KERNELS, **sizes)
    config = engine_config(tmp_path, dtype="bfloat16", block_size=16, num_kv_blocks=800)
    if config.device.attention_backend != "cpu":
        pytest.skip("no CPU kernels here")
    tokens = random_tokens(40, seed=4)

    def logits_after(*chunks: int, beside: int) -> torch.Tensor:
        bench = Bench(config)
        seq = bench.sequence(tokens)
        for number, num_tokens in enumerate(chunks):
            others = [bench.sequence(random_tokens(9 + i, seed=number + i)) for i in range(beside)]
            logits = bench.logits(*((other, len(other)) for other in others), (seq, num_tokens))
        assert logits is not None
        return logits[-1]

    alone = logits_after(40, beside=0)
    for chunks, beside in (((40,), 3), ((7, 30, 3), 0), ((13, 26, 1), 2), ((39, 1), 17)):
        assert torch.equal(logits_after(*chunks, beside=beside), alone), chunks


def test_default_model_continues_as_transformers_does() -> None:
    config = create_engine_config(EngineArgs(dtype="float32", num_kv_blocks=600, num_threads=2))
    model = transformers.AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(config.model.path)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_dict=False
    )
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0].tolist()
    assert Bench(config).continued(prompt, len(expected)) == expected
    assert "Paris" in tokenizer.decode(expected)
