"""Makes the measurements of `benchmarks/engine.py` with vLLM's offline `LLM`. Run by vLLM's own Python; prints a line
with RATES and JSON.

    python vllm_engine.py '{"model": FOLDER, "prompt_tokens": [128], "batch_sizes": [1, 8], "context_tokens": 128,
                            "num_steps": 128, "num_prompts": 5}'

The decode rate is computed from the time for `num_steps` + 1 tokens minus the time for one token.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from itertools import count

from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

_seeds = count(1)


def new_prompts(num_prompts: int, num_tokens: int, vocab_size: int) -> list[dict[str, list[int]]]:
    """Prompts that begin differently from all earlier ones."""
    return [
        {"prompt_token_ids": [(7919 * seed + 31 * i + seed * i) % (vocab_size - 100) + 50 for i in range(num_tokens)]}
        for seed in (next(_seeds) for _ in range(num_prompts))
    ]


def main() -> None:
    case = json.loads(sys.argv[1])
    longest = max([*case["prompt_tokens"], case["context_tokens"] + case["num_steps"]]) + 2
    llm = LLM(
        model=case["model"],
        dtype="bfloat16",
        max_model_len=longest,
        max_num_seqs=max(case["batch_sizes"]),
        enable_prefix_caching=False,
        skip_tokenizer_init=bool(case.get("folder")),
    )
    vocab_size = llm.llm_engine.model_config.get_vocab_size()

    def seconds(num_prompts: int, num_tokens: int, max_tokens: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        prompts = new_prompts(num_prompts, num_tokens, vocab_size)
        start_s = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start_s

    results = []
    for num_tokens in case["prompt_tokens"]:
        seconds(1, num_tokens, 1)
        taken = statistics.median(seconds(1, num_tokens, 1) for _ in range(case["num_prompts"]))
        results.append(
            {"phase": "prefill", "batch_size": 1, "prompt_tokens": num_tokens, "tokens_per_s": num_tokens / taken}
        )
    for batch_size in case["batch_sizes"]:
        context, steps = case["context_tokens"], case["num_steps"]
        prefill = statistics.median(seconds(batch_size, context, 1) for _ in range(3))
        whole = seconds(batch_size, context, steps + 1)
        rate = batch_size * steps / (whole - prefill)
        results.append({"phase": "decode", "batch_size": batch_size, "prompt_tokens": context, "tokens_per_s": rate})
    print("RATES " + json.dumps(results), flush=True)  # vLLM logs to stdout as well, also after this


if __name__ == "__main__":
    main()
