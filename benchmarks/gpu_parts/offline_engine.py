"""Measures how long one engine, Tandem's or vLLM's, takes offline for the same prompts and decoding steps.

    python offline_engine.py tandem|vllm CASE

    CASE    {"model": FOLDER, "device": "cuda", "max_model_len": 16384, "kv_cache_gib": 24, "decode": [[64, 2048]],
             "prefill": [[8, 8192]], "answers": [32, 128], "num_rounds": 3}

Each engine runs in a separate process that has the device to itself. Weights are dummies, prompts are new token ids,
tokens are chosen greedily and not detokenised. The time of a prompt is that of an answer of one token. The time of a
decoding step is computed from the difference between longer and shorter answers: the steps in which prompts are still
computed are in both. Prints a line for each result, after a mark, since engines print as well.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # When run as a file, this folder comes first on the path, and its names would hide modules that others import.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

MAX_BATCHED_TOKENS = 16384
"""vLLM's default for one step, offline, on a GPU of 70 GB and more."""
MARK = "TIME "

Generate = Callable[[list[list[int]], int], None]
"""(prompts, number of tokens to answer each with)"""

_seeds = count(1)


def new_prompts(num_prompts: int, num_tokens: int, vocab_size: int) -> list[list[int]]:
    return [
        [(7919 * seed + 31 * i + seed * i) % (vocab_size - 100) + 50 for i in range(num_tokens)]
        for seed in (next(_seeds) for _ in range(num_prompts))
    ]


def tandem(case: dict[str, Any]) -> tuple[Generate, int, str]:
    from engine.engine_args import EngineArgs
    from engine.llm_engine import LLMEngine
    from engine.model_loader import create_engine_config
    from engine.sampling_params import SamplingParams
    from tandem import __version__

    args = EngineArgs(
        model=case["model"], load_format="dummy", dtype="bfloat16", device=case["device"],
        enable_prefix_caching=False, kv_cache_gib=case["kv_cache_gib"], max_model_len=case["max_model_len"],
        max_num_seqs=max_num_seqs(case), max_num_batched_tokens=MAX_BATCHED_TOKENS, max_itl_ms=0,
    )  # fmt: skip
    engine = LLMEngine(create_engine_config(args))
    names = count()

    def generate(prompts: list[list[int]], max_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        for prompt in prompts:
            engine.add_request(str(next(names)), prompt, params)
        while engine.has_unfinished_requests():
            engine.step()

    return generate, engine.config.model.vocab_size, f"Tandem {__version__}"


def vllm(case: dict[str, Any]) -> tuple[Generate, int, str]:
    from vllm import LLM, SamplingParams, __version__  # type: ignore[import-not-found]

    sizes = sorted({num_seqs for num_seqs, _ in case["decode"]})
    llm = LLM(
        model=case["model"], load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True,
        enable_prefix_caching=False, max_model_len=case["max_model_len"], max_num_seqs=max_num_seqs(case),
        max_num_batched_tokens=MAX_BATCHED_TOKENS, kv_cache_memory_bytes=int(case["kv_cache_gib"] * 2**30),
        # Graphs only for the measured sizes; others would take time and change nothing.
        compilation_config={"cudagraph_capture_sizes": sizes},
    )  # fmt: skip

    def generate(prompts: list[list[int]], max_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = llm.generate(asked, params, use_tqdm=False)
        assert all(len(answer.outputs[0].token_ids) == max_tokens for answer in answers)

    return generate, llm.llm_engine.model_config.get_vocab_size(), f"vLLM {__version__}"


def max_num_seqs(case: dict[str, Any]) -> int:
    return max(num_seqs for num_seqs, _ in (*case["decode"], *case["prefill"]))


def main() -> None:
    case = json.loads(sys.argv[2])
    generate, vocab_size, name = {"tandem": tandem, "vllm": vllm}[sys.argv[1]](case)

    def median_ms(num_prompts: int, num_tokens: int, max_tokens: int) -> float:
        """The median after one round that compiles and selects algorithms."""
        times_ms = []
        for _ in range(1 + case["num_rounds"]):
            prompts = new_prompts(num_prompts, num_tokens, vocab_size)
            start_s = time.perf_counter()
            generate(prompts, max_tokens)
            times_ms.append(1e3 * (time.perf_counter() - start_s))
        return statistics.median(times_ms[1:])

    def tell(**row: Any) -> None:
        print(MARK + json.dumps({"engine": name, **row}), flush=True)

    for num_prompts, num_tokens in case["prefill"]:
        tell(phase="prefill", size=[num_prompts, num_tokens], ms=median_ms(num_prompts, num_tokens, 1))
    for num_seqs, num_tokens in case["decode"]:
        few, more = case["answers"]
        extra_ms = median_ms(num_seqs, num_tokens, more) - median_ms(num_seqs, num_tokens, few)
        tell(phase="decode step", size=[num_seqs, num_tokens], ms=extra_ms / (more - few))


if __name__ == "__main__":
    main()
