"""A model that runs on transformers' code, in a whole cluster: its tokens are those of transformers alone. In bfloat16,
with the CPU kernels, it gives the same bits in any batch."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from clusters import RunningCluster
from model_bench import save_model
from transformers_cases import FALCON_H1, GEMMA2, GEMMA4, GRANITE_H, LFM2, QWEN3_5, QWEN3_MOE

from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.model_loader import create_engine_config
from engine.sampling_params import SamplingParams
from protos import tandem_inference_pb2 as pb
from tandem.answer import Answer
from tandem.client import Client

NUM_TOKENS = 10


@pytest.mark.parametrize(
    "config",
    [
        # A sliding window, capped scores and a score scale. tests/unit/test_transformers_models.py tests an engine.
        pytest.param(GEMMA2, id="gemma2", marks=pytest.mark.slow),
        pytest.param(QWEN3_5, id="states"),
    ],
)
def test_tokens_of_a_cluster(
    config: dict[str, Any], model_folder: Path, tmp_path: Path, start_cluster: Callable[..., RunningCluster]
) -> None:
    """Prefilled by one worker and decoded by another."""
    vocab_size = transformers.AutoTokenizer.from_pretrained(model_folder).vocab_size
    sizes = {"vocab_size": vocab_size, "max_position_embeddings": 512, "architectures": None}
    model = save_model(transformers.AutoConfig.for_model(**config | sizes), tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_folder / name, tmp_path)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in (320, 40, 3, 17, 64, 90)]
    expected = [
        model.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )[0, len(prompt):].tolist()
        for prompt in prompts
    ]  # fmt: skip
    running = start_cluster("--model", str(tmp_path), "--dtype", "float32", "--kv-cache-gib", "0.1")
    with Client(running.address) as client, ThreadPoolExecutor(len(prompts)) as threads:

        def ask(prompt: list[int]) -> Answer:
            return client.generate(prompt, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)

        answers = [ask(prompts[0]), *threads.map(ask, prompts[1:])]
    assert [answer.token_ids for answer in answers] == expected
    assert answers[0].timings.mode == pb.MODE_DISAGGREGATED  # long, and no other request ran
    running.wait_until_at_rest()


BY_NAME = {
    "llama": None, "qwen3.5": QWEN3_5, "lfm2": LFM2, "granite-h": GRANITE_H, "falcon-h1": FALCON_H1, "gemma4": GEMMA4,
    "qwen3-moe": QWEN3_MOE,
}  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize("config", BY_NAME.values(), ids=BY_NAME.keys())
def test_the_same_bits_alone_together_and_in_chunks(
    config: dict[str, Any] | None, few_layers: Path, tmp_path: Path
) -> None:
    folder = few_layers
    if config is not None:
        sizes = {"vocab_size": 512, "max_position_embeddings": 512, "architectures": None}
        save_model(transformers.AutoConfig.for_model(**config | sizes), folder := tmp_path)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(10, 300, (n,), generator=generator).tolist() for n in (5, 40, 130)]
    params = [SamplingParams(temperature=t, seed=7, max_tokens=8, ignore_eos=True, logprobs=1) for t in (0.0, 1.0, 0.7)]
    requests = list(zip(prompts, params, strict=True))

    def answers(requests: list[tuple[list[int], SamplingParams]], **settings: int) -> list[list[object]]:
        args = EngineArgs(
            model=str(folder), dtype="bfloat16", model_impl="transformers", num_kv_blocks=64, max_model_len=512,
            num_threads=2, max_num_batched_tokens=128, **{"max_num_seqs": 8} | settings,
        )  # fmt: skip
        engine = LLMEngine(create_engine_config(args))
        if engine.config.device.attention_backend != "cpu":
            pytest.skip("no CPU kernels here")
        found: dict[str, list[object]] = {str(i): [] for i in range(len(requests))}
        for i, (prompt, sampling_params) in enumerate(requests):
            engine.add_request(str(i), prompt, sampling_params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                assert output.logprobs is not None
                found[output.request_id] += zip(output.token_ids, output.logprobs, strict=True)
        return list(found.values())

    together = answers(requests)
    assert answers(requests, max_num_seqs=1) == together
    assert answers(requests, prefill_chunk_tokens=17) == together
