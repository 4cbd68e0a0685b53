"""`batch_invariant` on a pretended GPU: a request gets the same bits however it is computed (P3).

The tests compare logprobs, which show differences that tokens hide. Triton's kernels are interpreted. Whether tensor
cores agree for tiles of other sizes is checked on the device when a worker starts (tests/unit/test_triton_product.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deepseek_cases import V3
from many_endings import CONFIG
from pretend_gpu import PretendGpu, pretend_gpu
from pretend_gpu.engines import make_engine
from pretend_gpu.triton import triton_interprets
from transformers_cases import QWEN3_MOE
from triton_device import DEVICE

from engine.llm_engine import LLMEngine
from engine.sampling_params import SamplingParams

Told = dict[str, list[tuple[int, float]]]
"""By request: its tokens and their logprobs."""

LATENTS = V3 | {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "vocab_size": 60}
WIDE = CONFIG | {"hidden_size": 128, "num_hidden_layers": 1}
PROMPTS = {str(i): [(7 * i + 3 * j) % 55 + 5 for j in range(length)] for i, length in enumerate((35, 3, 18))}
SETTINGS: dict[str, Any] = {
    "attention_backend": "triton", "batch_invariant": True, "max_num_batched_tokens": 48,
    "max_num_seqs": 4, "max_model_len": 48,
    "dtype": "float32",
}  # fmt: skip
OTHERWISE: dict[str, dict[str, Any]] = {
    "in chunks": {"prefill_chunk_tokens": 7, "max_num_batched_tokens": 8, "enforce_eager": True},
    "preempted": {"num_kv_blocks": 16, "enable_prefix_caching": False},
    "guessed ahead": {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'},
}

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU")


@pytest.fixture
def gpu() -> Iterator[PretendGpu]:
    with pretend_gpu(has_triton=True) as pretended, triton_interprets(pretended):
        yield pretended


def told_by(engine: LLMEngine, names: list[str]) -> Told:
    """Run these requests at once."""
    for name in names:
        params = SamplingParams(temperature=0.8, seed=int(name), max_tokens=5, ignore_eos=True, logprobs=0)
        engine.add_request(name, PROMPTS[name], params)
    told: Told = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.logprobs is not None
            told.setdefault(output.request_id, []).extend(
                (each.sampled.token_id, each.sampled.logprob) for each in output.logprobs
            )
    return told


def told_one_by_one(engine: LLMEngine) -> Told:
    return {name: told for each in PROMPTS for name, told in told_by(engine, [each]).items()}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
MODELS = [
    pytest.param(CONFIG, {}, id="llama"),
    pytest.param(QWEN3_MOE, {}, id="experts"),
    pytest.param(QWEN3_MOE | {"quantization_config": GPTQ}, {}, id="experts in int4"),
    pytest.param(LATENTS, {}, id="latents"),
    pytest.param(CONFIG, {"quantization": "int8"}, id="int8"),
    pytest.param(CONFIG, {"quantization": "int4"}, id="int4"),
    pytest.param(CONFIG, {"quantization": "fp8", "kv_cache_dtype": "fp8", "dtype": "bfloat16"}, id="fp8"),
]


def check_same_bits(
    folder: Path, config: dict[str, Any], settings: dict[str, Any], ways: tuple[str, ...] = tuple(OTHERWISE)
) -> None:
    engine = make_engine(folder, config, **settings)
    together = told_by(engine, list(PROMPTS))
    assert told_one_by_one(engine) == together
    for how in ways:
        other = make_engine(folder, config, **settings | OTHERWISE[how])
        assert told_by(other, list(PROMPTS)) == together, how
        assert (other.stats.num_preemptions > 0) == (how == "preempted")


def test_the_same_bits_however_it_is_computed(tmp_path: Path) -> None:
    check_same_bits(tmp_path, WIDE, SETTINGS | {"device": "cpu"}, ("in chunks", "preempted"))


@pytest.mark.slow
@pytest.mark.parametrize(("config", "settings"), MODELS)
def test_the_same_bits_from_recorded_steps_a_step_ahead(
    gpu: PretendGpu, tmp_path: Path, config: dict[str, Any], settings: dict[str, Any]
) -> None:
    check_same_bits(tmp_path, config, SETTINGS | settings)
