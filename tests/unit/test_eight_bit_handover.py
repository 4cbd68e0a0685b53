"""Prefill in one engine and decode in another, with pools of 8-bit floats, gives the tokens of a single engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from handover import alone, bytes_of, handed_over

from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.model_loader import create_engine_config
from engine.sampling_params import SamplingParams
from prefix_hash.compat import compat_difference

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 301, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256, "torch_dtype": "bfloat16",
}  # fmt: skip
BLOCK_SIZE = 16
NUM_TOKENS = 20


def engine_of(folder: Path, **settings: Any) -> LLMEngine:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    args = EngineArgs(
        model=str(folder), load_format="dummy", num_kv_blocks=40, block_size=BLOCK_SIZE, num_threads=1, device="cpu",
        attention_backend="torch", **settings,
    )  # fmt: skip
    return LLMEngine(create_engine_config(args))


@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}], ids=["16-bit weights", "int8"])
def test_the_same_tokens_as_one_engine_alone(tmp_path: Path, settings: dict[str, str]) -> None:
    one, prefill, decode = (engine_of(tmp_path, kv_cache_dtype="fp8", **settings) for _ in range(3))
    assert prefill.config.compat_digest == decode.config.compat_digest
    assert bytes_of(decode).layout.dtype == "float8_e4m3fn"
    for number, length in enumerate((15, 16, 49, 80)):
        prompt = [(37 * number + 11 * i) % 290 + 5 for i in range(length)]
        drawn = {"temperature": 0.9, "seed": 5} if number % 2 else {"temperature": 0.0}
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **drawn)  # type: ignore[arg-type]
        tokens = handed_over(prefill, decode, prompt, params)
        assert len(tokens) == NUM_TOKENS
        assert tokens == alone(one, prompt, params)
    for engine in (one, prefill, decode):
        ledger, problems = engine.audit()
        assert problems == []
        assert ledger.num_free + ledger.num_cached == ledger.num_blocks


def test_pools_of_other_numbers_are_no_peers(tmp_path: Path) -> None:
    """Sizes in bytes could not tell such pools apart: 16-bit numbers of half as many tokens take as many bytes."""
    eight, sixteen = engine_of(tmp_path, kv_cache_dtype="fp8"), engine_of(tmp_path)
    differing = compat_difference(eight.config.compat_digest, sixteen.config.compat_digest)
    assert differing == "compat_digest: kv_dtype 'float8_e4m3fn' != 'bfloat16'"
    assert bytes_of(eight).layout.differences(bytes_of(sixteen).layout) == ["dtype: 'float8_e4m3fn' != 'bfloat16'"]
    assert 2 * bytes_of(eight).layout.pool_bytes == bytes_of(sixteen).layout.pool_bytes
    quantised = engine_of(tmp_path, quantization="int8")
    differing = compat_difference(quantised.config.compat_digest, sixteen.config.compat_digest)
    assert differing == "compat_digest: quantization 'int8' != 'none'"
