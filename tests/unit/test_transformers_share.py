"""Ranks that share a model which transformers' code computes: their logits are those of transformers alone.

Ranks are threads here, which sum over gloo as processes do (tests/integration/test_tensor_parallel.py)."""

from __future__ import annotations

import copy
import json
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from four_bit_checkpoints import converted, save_four_bits, with_all_experts
from lora_folders import ALPHA, write_adapter_of
from model_bench import SMALL, assert_close, engine_config, random_tokens, reference, save_model
from safetensors.torch import load_file
from test_transformers_checkpoints import save_quantized
from test_transformers_models import CONFIGS
from test_transformers_quantized import CONFIGS as QUANTISED
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers_cases import GPT_OSS, QWEN3_5

from engine.config import EngineConfig
from engine.kv_memory import KVMemory
from engine.models import load_model_shape
from engine.models.expert_parts import keep_part
from engine.models.head_shape import HeadShape, why_not_together
from engine.models.split import FAMILIES, OUTPUTS, Split
from engine.models.stored_weights import AS_STORED
from engine.models.transformers_config import TransformersConfig
from engine.models.transformers_experts import FourBitExperts
from engine.quantization_choice import quantizes
from engine.running.worker import Worker
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import ScheduledSequence, SchedulerOutput, Sequence
from engine.tensor_parallel.group import RankGroup
from engine.tensor_parallel.shares import share_of
from engine.weight_cut import OUTPUTS as OUTPUTS_AXIS
from engine.weight_cut import Cut

pytestmark = pytest.mark.usefixtures("one_thread")

FURTHER: dict[str, Any] = {
    "phi3": lambda: transformers.Phi3Config(**SMALL, pad_token_id=0),
    "one key head": lambda: transformers.Gemma3TextConfig(
        **SMALL | {"num_key_value_heads": 1}, head_dim=16, sliding_window=8, query_pre_attn_scalar=24, pad_token_id=0
    ),
    "odd sizes of fused products": lambda: transformers.Phi3Config(
        **SMALL | {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48, "intermediate_size": 42},
        pad_token_id=0,
    ),
    "fewer key heads than ranks": lambda: transformers.LlamaConfig(
        **SMALL | {"num_attention_heads": 4}, attention_bias=True, mlp_bias=True
    ),
    "fewer key heads than ranks, gathered": lambda: transformers.Olmo2Config(
        **SMALL | {"num_attention_heads": 4}, attention_bias=True
    ),
}
NUM_RANKS = {
    "odd sizes of fused products": 3, "fewer key heads than ranks": 4, "fewer key heads than ranks, gathered": 4,
}  # fmt: skip
"""Of the others: 2."""
NOT_SPLIT = {"gemma3n", "gpt2", "granite4", "modernbert-decoder", "opt"}
OWN = {name: make for name, make in (CONFIGS | FURTHER).items() if name not in NOT_SPLIT}
OF_EXPERTS = {
    "num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "n_routed_experts": 8, "moe_num_experts": 8, "head_dim": 16,
}  # fmt: skip
"""Fields of configurations with experts, by several names; the others ignore them."""
KERNELS: dict[str, Any] = {"dtype": "bfloat16", "block_size": 16, "num_kv_blocks": 64}
OFTEN = {"arcee", "ernie4_5_moe", "glm", "glm4", "llama", "phimoe", "seed_oss", "smollm3"}


class Ranks:
    """The ranks of an engine, as threads that run the same steps."""

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        num_ranks = config.parallel.tensor_parallel_size
        self._threads = ThreadPoolExecutor(num_ranks)
        meeting = Path(tempfile.mkdtemp(dir=folder)) / "meeting"

        def make(rank: int) -> Worker:
            group = RankGroup(rank, num_ranks, "cpu", meeting)
            worker = Worker(config, None, KVMemory().allocate, group)
            worker.kv_pool.fill_(float("nan"))
            return worker

        self.workers = list(self._threads.map(make, range(num_ranks)))

    def logits(self, *chunks: tuple[Sequence, int]) -> torch.Tensor:
        """Run one step; return the logits, which all ranks have, of the sequences whose last token it computed."""
        output = SchedulerOutput([ScheduledSequence(*chunk) for chunk in chunks], [])
        step = self.workers[0].runner.prepare(output)
        of_ranks = list(self._threads.map(lambda worker: worker.runner.compute(step).logits, self.workers))
        for seq, num_new_tokens in chunks:
            seq.num_computed_tokens += num_new_tokens
        first, *others = of_ranks
        assert first is not None
        assert all(other is not None and torch.equal(first, other) for other in others)
        return first

    def sequence(self, token_ids: list[int], first_block: int) -> Sequence:
        seq = Sequence(0, "r", token_ids, len(token_ids), SamplingParams(temperature=0))
        seq.block_table = list(range(first_block, first_block + 16))
        return seq


def config_of(folder: Path, num_ranks: int = 2, **settings: Any) -> EngineConfig:
    return engine_config(folder, model_impl="transformers", tensor_parallel_size=num_ranks, **settings)


def check_against_transformers(model: Any, ranks: Ranks) -> None:
    """With a chunk beside a decode."""
    early, late = ranks.sequence(random_tokens(31, seed=1), 0), ranks.sequence(random_tokens(22, seed=2), 16)
    ranks.logits((early, 31), (late, 5))
    early.token_ids.append(7)
    logits = ranks.logits((early, 1), (late, 17))
    assert_close(logits, torch.stack([reference(model, seq.token_ids) for seq in (early, late)]))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", OWN)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    num_ranks = NUM_RANKS.get(name, 2)
    model = save_model(OWN[name](), tmp_path)
    config = config_of(tmp_path, num_ranks)
    check_against_transformers(model, Ranks(config, tmp_path))
    own, whole = config.model, engine_config(tmp_path, model_impl="transformers").model
    assert own.num_heads * num_ranks == whole.num_heads, "each rank has its part of the heads"
    assert own.num_kv_heads == max(whole.num_kv_heads // num_ranks, 1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=() if each in OFTEN else pytest.mark.slow) for each in sorted(FAMILIES)]
)
def test_each_family_that_is_split(family: str, tmp_path: Path) -> None:
    config_class = CONFIG_MAPPING[family]
    try:
        config = config_class(**SMALL, **OF_EXPERTS, pad_token_id=0)
    except TypeError:
        config = config_class(**SMALL, pad_token_id=0)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]
    model = save_model(config, tmp_path)
    check_against_transformers(model, Ranks(config_of(tmp_path), tmp_path))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["gemma3", "qwen3-moe", "gpt-oss in MXFP4", "gpt-oss in MXFP4, parts unlike"])
def test_ranks_with_the_cpu_kernels(name: str, tmp_path: Path) -> None:
    """As close to float32 as one rank."""
    if name.startswith("gpt-oss in MXFP4"):
        save_four_bits(tmp_path, intermediate_size=96 if name.endswith("unlike") else 64)  # 32 share a scale
        with_all_experts(tmp_path)
    else:
        save_model(CONFIGS[name](), tmp_path)
    tokens, found = random_tokens(30, seed=5), []
    for num_ranks, further in ((1, {}), (2, KERNELS), (1, KERNELS)):
        config = config_of(tmp_path, num_ranks, **further)
        if further and config.device.attention_backend != "cpu":
            pytest.skip("no C++ compiler: there are no CPU kernels")
        ranks = Ranks(config, tmp_path)
        found.append(ranks.logits((ranks.sequence(tokens, 0), 30)).float())
    exact, ours, one = found
    assert (ours - exact).norm() < 2.5 * (one - exact).norm()


@pytest.mark.parametrize("name", ["olmo2", "qwen3-moe"])
def test_weights_are_quantised_in_parts(name: str, tmp_path: Path) -> None:
    """Parts of a weight have scales of their own where inputs are cut."""
    save_model(QUANTISED[name](), tmp_path)
    tokens, found = random_tokens(30, seed=5), []
    for num_ranks, quantization in ((1, "none"), (2, "int8")):
        ranks = Ranks(config_of(tmp_path, num_ranks, quantization=quantization), tmp_path)
        found.append(ranks.logits((ranks.sequence(tokens, 0), 30)).float())
    exact, ours = found
    assert 0.001 * exact.norm() < (ours - exact).norm() < 0.06 * exact.norm()


def test_a_part_that_does_not_fit_stays_plain() -> None:
    """But what is small in the whole model stays plain, whatever the number of ranks."""
    assert quantizes("int4", (256, 192), (256, 96))
    assert not quantizes("int4", (256, 96), (256, 48))
    assert quantizes("int4", (128, 64), (16, 64))
    assert not quantizes("int4", (127, 64), (127, 64))


@pytest.mark.parametrize("name", ["olmo2", "qwen3-moe"])
def test_a_checkpoint_in_8_bits(name: str, tmp_path: Path) -> None:
    """Each rank has its part of the weights as they are stored."""
    model = save_quantized(name, "int channel", tmp_path)
    config = config_of(tmp_path, **KERNELS)
    if config.model.quantization != AS_STORED:
        pytest.skip("no C++ compiler: there are no CPU kernels")
    ranks, tokens = Ranks(config, tmp_path), random_tokens(21, seed=1)
    logits = ranks.logits((ranks.sequence(tokens, 0), 21))
    expected = reference(model.bfloat16(), tokens).float()
    assert (logits[0] - expected).norm() < 0.15 * expected.norm()


def test_adapters_are_cut_as_the_products_are(tmp_path: Path) -> None:
    """Products that are gathered, summed, and neither."""
    model = save_model(OWN["phi3"](), tmp_path / "model")
    shape = load_model_shape(json.loads((tmp_path / "model" / "config.json").read_text()), "transformers")
    assert isinstance(shape, TransformersConfig)
    weights = {name: model.get_submodule(name).weight for name in shape.adaptable}
    write_adapter_of(tmp_path / "a", {name: tuple(w.shape) for name, w in weights.items()}, rank=4, seed=1)
    ranks = Ranks(config_of(tmp_path / "model", lora_modules=f"a={tmp_path / 'a'}"), tmp_path)
    seqs = [ranks.sequence(random_tokens(20 + number, seed=number), 16 * number) for number in range(2)]
    seqs[1].lora_id = 1
    logits = ranks.logits((seqs[0], 20), (seqs[1], 21))
    expected = [reference(model, seqs[0].token_ids)]
    added = load_file(tmp_path / "a" / "adapter_model.safetensors")
    with torch.no_grad():
        for name, weight in weights.items():
            down, up = (added[f"base_model.model.{name}.lora_{which}.weight"] for which in "AB")
            weight.add_(ALPHA / 4 * (up @ down))
    assert_close(logits, torch.stack([*expected, reference(model, seqs[1].token_ids)]))


def test_parts_of_experts_in_four_bits_are_those_of_what_they_stand_for(tmp_path: Path) -> None:
    model = save_model(transformers.GptOssConfig(**GPT_OSS | {"intermediate_size": 128}), tmp_path)
    whole = model.model.layers[0].mlp.experts
    torch.manual_seed(5)
    blocks = FourBitExperts(whole)
    blocks.make_up_weights()

    def widened(experts: FourBitExperts) -> tuple[torch.Tensor, torch.Tensor]:
        gate_up, down = (
            converted(getattr(experts, f"{name}_blocks").data, getattr(experts, f"{name}_scales").data, torch.float32)
            for name in ("gate_up_proj", "down_proj")
        )
        return gate_up, down  # [E, D, 2I], [E, I, D]

    gate_up, down = widened(blocks)
    for rank in range(2):
        own = copy.deepcopy(blocks)
        keep_part(own, range(64 * rank, 64 * rank + 64), has_output_bias=rank == 0)
        own_gate_up, own_down = widened(own)
        assert torch.equal(own_gate_up, gate_up[:, :, 128 * rank : 128 * rank + 128])
        assert torch.equal(own_down, down[:, 64 * rank : 64 * rank + 64])
        assert torch.equal(own.gate_up_proj_bias, blocks.gate_up_proj_bias[:, 128 * rank : 128 * rank + 128])
        assert torch.equal(own.down_proj_bias, blocks.down_proj_bias * (rank == 0))
    with pytest.raises(ValueError, match="tensor_parallel_size cuts a weight at input 48, where 32 share a scale"):
        keep_part(blocks, range(48), has_output_bias=True)


@pytest.mark.parametrize(("size", "num_parts"), [(2880, 4), (2880, 2), (96, 2), (96, 3)])
def test_parts_in_groups_are_all_of_it(size: int, num_parts: int) -> None:
    parts = [Cut(OUTPUTS_AXIS, num_parts, index).part_in_groups(size, 32) for index in range(num_parts)]
    assert [i for part in parts for i in part] == list(range(size))
    assert all(part.start % 32 == 0 for part in parts)
    assert {len(part) // 32 for part in parts} <= {size // 32 // num_parts, size // 32 // num_parts + 1}


# -- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "num_ranks", "sentence"),
    [
        ("gpt2", 2, r"must be 1 for this model, is 2: .*; docs/tensor-parallel.md lists them"),
        ("gemma3n", 2, "must be 1 for this model, is 2"),
        ("gemma3", 4, "must divide the model's 6 query heads, is 4; up to 16 these work: 1, 2$"),
        ("gemma3", 3, "must divide the model's 2 key heads, or be a multiple of them, is 3"),
        (
            "one key head",
            6,
            "must divide the 80 outputs of model.layers.0.mlp.gate_proj, is 6; up to 16 these work: 1, 2$",
        ),
        ("gpt-oss", 3, "must divide the model's 2 key heads, or be a multiple of them, is 3"),
    ],
)
def test_what_ranks_cannot_share(name: str, num_ranks: int, sentence: str) -> None:
    shape = shape_of((CONFIGS | FURTHER)[name]())
    with pytest.raises(ValueError, match=f"tensor_parallel_size {sentence}"):
        share_of(shape, num_ranks)


def test_heads_that_share_a_pool_only_in_the_whole_model() -> None:
    heads = (HeadShape(6, 6, 16), HeadShape(6, 1, 24))
    shape = replace(shape_of(CONFIGS["gemma4"]()), head_shapes=heads, splits=(Split("q_proj", OUTPUTS, 6),))
    assert not why_not_together(heads)
    with pytest.raises(ValueError, match=r"tensor_parallel_size 3 does not work .*\[\(2, 1, 24\), \(2, 2, 16\)\]"):
        share_of(shape, 3)


def test_layers_that_keep_a_state_are_not_split() -> None:
    with pytest.raises(ValueError, match="must be 1 for this model, is 2: layers that keep a state are not split"):
        share_of(load_model_shape(QWEN3_5, "transformers"), 2)


def test_a_plan_that_the_code_does_not_follow_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows an output that is cut meets one that is whole."""
    plan = dict(transformers.Gemma3TextConfig.base_model_tp_plan)
    del plan["layers.*.mlp.up_proj"]
    monkeypatch.setattr(transformers.Gemma3TextConfig, "base_model_tp_plan", plan)
    save_model(CONFIGS["gemma3"](), tmp_path)
    with pytest.raises(ValueError, match="tensor_parallel_size must be smaller for this model, or 1: its code"):
        Ranks(config_of(tmp_path), tmp_path)


def test_parts_of_experts_that_torch_does_not_multiply_are_refused(tmp_path: Path) -> None:
    """A row of 6 numbers is not a multiple of 16 bytes."""
    sizes = {"intermediate_size": 24, "num_attention_heads": 4, "num_local_experts": 4}
    save_model(transformers.MixtralConfig(**SMALL | sizes), tmp_path)
    with pytest.raises(ValueError, match=r"tensor_parallel_size must be smaller for this model, or 1: .* 16 bytes"):
        Ranks(config_of(tmp_path, 4), tmp_path)


def shape_of(config: Any) -> TransformersConfig:
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    shape = load_model_shape(json.loads(config.to_json_string()), "transformers")
    assert isinstance(shape, TransformersConfig)
    return shape


def test_the_families_are_listed_in_the_documents() -> None:
    """An error points there."""
    text = (Path(__file__).parents[2] / "docs" / "tensor-parallel.md").read_text()
    listed = text.partition("By `model_type`:\n\n")[2].partition("\n\n")[0]
    assert re.findall(r"`(\w+)`", listed) == sorted(FAMILIES)
