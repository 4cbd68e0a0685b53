"""Adapters of models that run on transformers' code: tokens are those of the model with the adapter in its weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from handover import alone, handed_over
from lora_folders import ALPHA, merge, write_adapter_of
from safetensors.torch import load_file, save_file
from transformers_cases import FALCON_H1, GEMMA2, GEMMA4, GPT_OSS, QWEN3_5

from engine.config import EngineConfig
from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.model_loader import create_engine_config
from engine.models import load_model_shape
from engine.models.transformers_config import TransformersConfig
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams

GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 97, "n_embd": 48, "n_layer": 2,
    "n_head": 3, "n_positions": 128, "initializer_range": 0.3, "eos_token_id": 96, "bos_token_id": 1,
    "max_position_embeddings": 128, "dtype": "float32",
}  # fmt: skip
PHI3: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "vocab_size": 97, "hidden_size": 64,
    "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "initializer_range": 0.3, "eos_token_id": 96, "bos_token_id": 1, "pad_token_id": 0,
    "dtype": "float32",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    config: dict[str, Any]
    kinds: str
    """Of the products that adapters may change."""


CASES = {
    "Gemma 2": Case(GEMMA2, "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj"),
    "Phi-3": Case(PHI3, "down_proj gate_up_proj o_proj qkv_proj"),
    "GPT-2": Case(GPT2, "c_attn c_fc c_proj"),
    "gpt-oss": Case(GPT_OSS, "k_proj o_proj q_proj v_proj"),
    "Gemma 4": Case(
        GEMMA4,
        "down_proj gate_proj k_proj o_proj per_layer_input_gate per_layer_model_projection per_layer_projection q_proj "
        "up_proj v_proj",
    ),
    "Qwen 3.5": Case(
        QWEN3_5,
        "down_proj gate_proj in_proj_a in_proj_b in_proj_qkv in_proj_z k_proj o_proj out_proj q_proj up_proj v_proj",
    ),
    "Falcon-H1": Case(FALCON_H1, "down_proj gate_proj in_proj k_proj o_proj out_proj q_proj up_proj v_proj"),
}
PROMPTS = [[(37 * number + 11 * i) % 90 + 3 for i in range(length)] for number, length in enumerate((5, 33, 40, 18))]
NAMES = ["", "a", "b"]
"""Names of adapters; "": none."""
DRAWN = SamplingParams(temperature=3.0, seed=5, max_tokens=20, ignore_eos=True, logprobs=1)
"""Drawn where many tokens are likely: of some of these models, each token is the one before, if greedy."""
Asked = tuple[int, str]
"""Number of the prompt, adapter."""
ASKED: list[Asked] = [(number, name) for number in range(4) for name in NAMES]


def products_of(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the products that adapters may change, by name."""
    import transformers
    from transformers.pytorch_utils import Conv1D

    shape = load_model_shape(config, "transformers")
    assert isinstance(shape, TransformersConfig)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    found = {}
    for name in shape.adaptable:
        module = model.get_submodule(name)
        size = tuple(module.weight.shape)
        found[name] = size[::-1] if isinstance(module, Conv1D) else size
    return found


def write_models(folder: Path, config: dict[str, Any]) -> None:
    """A model, two adapters, and for each adapter the model with the adapter in its weights."""
    import transformers

    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    model.save_pretrained(folder / "model")
    (folder / "model" / "config.json").write_text(json.dumps(config))
    products = products_of(config)
    some = dict(list(products.items())[::3])
    for name, of, rank in (("a", products, 4), ("b", some, 3)):
        write_adapter_of(folder / name, of, rank=rank, seed=rank, config={"fan_in_fan_out": config is GPT2})
        merged = folder / f"merged-{name}"
        merged.mkdir()
        (merged / "config.json").write_text(json.dumps(config))
        merge(folder / "model" / "model.safetensors", folder / name, ALPHA / rank, merged, is_transposed=config is GPT2)


def config_of(folder: Path, model: str = "model", **settings: Any) -> EngineConfig:
    adapters = ",".join(f"{name}={folder / name}" for name in NAMES[1:]) if model == "model" else ""
    args = {"dtype": "float32", "num_kv_blocks": 60, "block_size": 16, "num_threads": 1, "device": "cpu"} | settings
    return create_engine_config(EngineArgs(model=str(folder / model), lora_modules=adapters, **args))


def ask(engine: LLMEngine, asked: list[Asked]) -> list[list[RequestOutput]]:
    """Run all requests at once."""
    for i, (number, name) in enumerate(asked):
        engine.add_request(str(i), PROMPTS[number], DRAWN, lora_name=name)
    answers: list[list[RequestOutput]] = [[] for _ in asked]
    while engine.has_unfinished_requests():
        for output in engine.step():
            answers[int(output.request_id)].append(output)
    _, problems = engine.audit()
    assert not problems
    return answers


def tokens_of(answer: list[RequestOutput]) -> list[int]:
    return [token for output in answer for token in output.token_ids]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_the_model_with_the_adapter_in_its_weights(name: str, tmp_path: Path) -> None:
    """All at once, with prompts in chunks."""
    case = CASES[name]
    write_models(tmp_path, case.config)
    assert sorted({product.rpartition(".")[2] for product in products_of(case.config)}) == case.kinds.split()
    expected: dict[Asked, list[int]] = {}
    for adapter in NAMES:
        with closing(LLMEngine(config_of(tmp_path, f"merged-{adapter}" if adapter else "model"))) as engine:
            asked = [each for each in ASKED if each[1] == adapter]
            answers = ask(engine, [(number, "") for number, _ in asked])
        expected |= {key: tokens_of(answer) for key, answer in zip(asked, answers, strict=True)}
    assert len({tuple(expected[2, adapter]) for adapter in NAMES}) == len(NAMES), "all say something else"
    with closing(LLMEngine(config_of(tmp_path, max_num_batched_tokens=24, max_num_seqs=16))) as engine:
        answers = ask(engine, ASKED)
    assert {key: tokens_of(answer) for key, answer in zip(ASKED, answers, strict=True)} == expected


@pytest.fixture(scope="module", params=["Gemma 4", "Qwen 3.5"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LLMEngine]]:
    """Two engines that use the CPU kernels."""
    folder = tmp_path_factory.mktemp("served")
    write_models(folder, CASES[request.param].config)
    config = config_of(folder, dtype="bfloat16")
    if config.device.attention_backend != "cpu":
        pytest.skip("no CPU kernels here")
    with closing(LLMEngine(config)) as engine, closing(LLMEngine(config)) as other:
        yield [engine, other]


def test_the_same_bits_alone_and_together(served: list[LLMEngine]) -> None:
    together, by_itself = served
    for key, answer in zip(ASKED, ask(together, ASKED), strict=True):
        [own] = ask(by_itself, [key])
        assert [(o.token_ids, o.logprobs) for o in answer] == [(o.token_ids, o.logprobs) for o in own]


def test_one_prefills_and_another_decodes(served: list[LLMEngine]) -> None:
    prefill, decode = served
    answers = set()
    for name in NAMES:
        expected = alone(prefill, PROMPTS[1], DRAWN, lora_name=name)
        assert handed_over(prefill, decode, PROMPTS[1], DRAWN, lora_name=name) == expected
        answers.add(tuple(expected))
    assert len(answers) == len(NAMES)


def test_weights_in_8_bits(tmp_path: Path) -> None:
    """What adapters add is in the model's dtype: the result is as close to the merged model as 8-bit weights are."""
    write_models(tmp_path, PHI3 | {"initializer_range": 0.05})

    def likeliest(engine: LLMEngine, name: str) -> float:
        [answer] = ask(engine, [(2, name)])
        assert answer[0].logprobs is not None
        return answer[0].logprobs[0].top[0].logprob

    eight_bits = LLMEngine(config_of(tmp_path, quantization="int8"))
    for name in NAMES[1:]:
        plain = LLMEngine(config_of(tmp_path, f"merged-{name}"))
        assert likeliest(eight_bits, name) == pytest.approx(likeliest(plain, ""), abs=0.1)


@pytest.mark.parametrize(
    ("name", "size", "sentence"),
    [
        ("lm_head", (97, 64), r"has weights that are not supported: .*lm_head.*: k_proj, o_proj, q_proj, v_proj$"),
        ("model.layers.0.mlp.experts.gate_up_proj", (128, 64), r"not supported: .*experts.gate_up_proj.lora_A"),
        ("model.visual.blocks.0.attn.qkv", (64, 64), r"not supported: .*model.visual.blocks.0"),
        ("model.layers.0.self_attn.q_proj", (64, 65), r"q_proj.lora_A.weight has shape \(2, 65\) .*expected \(2, 64\)"),
    ],
)
def test_what_an_adapter_cannot_change(tmp_path: Path, name: str, size: tuple[int, int], sentence: str) -> None:
    write_models(tmp_path, GPT_OSS)
    write_adapter_of(tmp_path / "a", {name: size}, rank=2, seed=1)
    with pytest.raises(ValueError, match=f"adapter 'a' .*{sentence}"):
        LLMEngine(config_of(tmp_path))


def test_products_of_some_tokens_or_of_none_are_not_for_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of such a product's input are other than those whose adapters a step has listed."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.gate_proj(x[:, 1:])  # and of all tokens
        return self.down_proj(self.gate_proj(x))  # type: ignore[no-any-return]

    monkeypatch.setattr("transformers.models.gemma2.modeling_gemma2.Gemma2MLP.forward", forward)
    shape = load_model_shape(GEMMA2 | {"vocab_size": 98}, "transformers")
    assert isinstance(shape, TransformersConfig)
    kinds = {name.rpartition(".")[2] for name in shape.adaptable}
    assert kinds == {"down_proj", "k_proj", "o_proj", "q_proj", "v_proj"}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("body", ["model.language_model.", "model.text_model.", "language_model.model."])
def test_an_adapter_for_the_whole_checkpoint_changes_its_language_model(tmp_path: Path, body: str) -> None:
    """Its layers have other names."""
    write_models(tmp_path, GEMMA4)
    with closing(LLMEngine(config_of(tmp_path))) as engine:
        expected = [tokens_of(answer) for answer in ask(engine, ASKED)]
    file = tmp_path / "a" / "adapter_model.safetensors"
    own, other = "base_model.model.model.", f"base_model.model.{body}"
    tensors = {f"{other}{name.removeprefix(own)}": value for name, value in load_file(file).items()}
    save_file(tensors, file)
    with closing(LLMEngine(config_of(tmp_path))) as engine:
        assert [tokens_of(answer) for answer in ask(engine, ASKED)] == expected
    one = next(iter(tensors))
    save_file(tensors | {one.replace(other, own): tensors[one].clone()}, file)
    with pytest.raises(ValueError, match=f"adapter 'a': .* has two tensors for the same product: .*{one}"):
        LLMEngine(config_of(tmp_path))
