"""Compares answers of an engine on this device with those of an engine on the CPU, token for token: in float32, with
small random models, with all sampling parameters, with adapters, speculation, experts, a pool that is too small, and
blocks that are loaded from host memory.

    the same weights ──> plain torch on the CPU, a pool with room for all ──> tokens of each request
                     └─> this device, with the settings of a case         ──> the same tokens, or the case fails

Random draws are equal: they depend only on a request's seed and a token's position. A case whose subject did not occur
(for example, no request was preempted) shows nothing, and fails as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.gpu_parts.model import Plan, random_tokens, save_model
from benchmarks.gpu_parts.rows import Row
from benchmarks.gpu_parts.runner import Setting
from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.model_loader import create_engine_config
from engine.sampling_params import SamplingParams
from engine.scheduling.stats import SchedulerStats
from engine.scheduling.thinking import ThinkingBudget

ADAPTERS = {"small": 4, "large": 16}
"""Ranks of the adapters, by name."""
ON_THE_CPU = {"device": "cpu", "num_threads": 4}
"""Kernel tests run in parallel with this: with a thread for each core it took more than two minutes then, and alone 25
s."""
FULL = Plan(
    hidden_size=256, num_layers=4, prompt_lens=(1, 16, 17, 60, 128, 333), num_decoded=0, chunk=100, num_greedy=48
)
TINY = Plan(hidden_size=64, num_layers=2, prompt_lens=(1, 16, 17, 40), num_decoded=0, chunk=10, num_greedy=12)


@dataclass(frozen=True, kw_only=True)
class Request:
    prompt: Sequence[int]
    params: SamplingParams
    lora_name: str = ""


@dataclass(frozen=True, kw_only=True)
class Case:
    what: str
    requests: Callable[[Plan], list[Request]]
    model: str = "llama"
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings only of the engine on this device."""
    small_pool: bool = False
    """The pool has room for the longest request and little more."""
    brings_adapters: bool = False
    """Adapters are added to a running engine on this device, each in place of another one that was removed."""
    num_rounds: int = 1
    """Each round has all requests, and begins after the previous one has ended."""
    happened: tuple[str, Callable[[SchedulerStats], int]] | None = None
    """The subject of the case, and how often it occurred."""


def measure(setting: Setting) -> Iterator[Row]:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    plan = TINY if setting.is_tiny else FULL
    with TemporaryDirectory() as name:
        folders = {model: Path(name) / model for model in {case.model for case in CASES}}
        for model, folder in folders.items():
            save_model(model, plan, folder)
        modules = save_adapters(folders["llama"])
        for case in CASES:
            requests = case.requests(plan)
            shared: dict[str, Any] = {"model": str(folders[case.model])}
            if any(request.lora_name for request in requests):
                shared["lora_modules"] = json.dumps(modules)
            yield row_of(case, requests, setting, shared)


def row_of(case: Case, requests: Sequence[Request], setting: Setting, shared: Mapping[str, Any]) -> Row:
    num_blocks = num_kv_blocks(requests, is_small=False)
    expected, _ = answers(requests, {**shared, "num_kv_blocks": num_blocks, **ON_THE_CPU}, case.num_rounds)
    if case.small_pool:
        num_blocks = num_kv_blocks(requests, is_small=True)
    settings = {**shared, **case.settings, "num_kv_blocks": num_blocks, "device": setting.device}
    brought = json.loads(settings.pop("lora_modules")) if case.brings_adapters else {}
    found, stats = answers(requests, settings, case.num_rounds, brought)
    num_other: int | None = sum(found[i] != expected[i] for i in expected)
    note = f"{sum(map(len, expected.values()))} tokens"
    if case.happened:
        what, count_of = case.happened
        count = count_of(stats)
        note += f", {what}: {count}"
        num_other = num_other if count else None
    return Row(
        what=f"answers unlike the CPU's, {case.what}", value=num_other, unit=f"of {len(expected)}", at_most=0,
        is_check=True, note=note,
    )  # fmt: skip


def num_kv_blocks(requests: Sequence[Request], *, is_small: bool) -> int:
    """Blocks for all requests, or for the longest one and one block."""
    blocks = sorted(-(-(len(r.prompt) + r.params.max_tokens + 1) // EngineArgs.block_size) + 1 for r in requests)
    return blocks[-1] + 1 if is_small else sum(blocks)


def answers(
    requests: Sequence[Request],
    settings: Mapping[str, Any],
    num_rounds: int = 1,
    brought: Mapping[str, str] = MappingProxyType({}),
) -> tuple[dict[str, list[int]], SchedulerStats]:
    """The tokens of each request in each round, and what the engine counted. `brought`: folders of adapters to add to
    the running engine, by name."""
    longest = max(len(request.prompt) + request.params.max_tokens for request in requests)
    args = {"dtype": "float32", "max_model_len": longest + 1, "max_num_seqs": len(requests), **settings}
    engine = LLMEngine(create_engine_config(EngineArgs(**args)))
    bring(engine, brought)
    tokens: dict[str, list[int]] = {}
    for _ in range(num_rounds):
        for number, request in enumerate(requests, len(tokens)):
            tokens[str(number)] = []
            engine.add_request(str(number), request.prompt, request.params, lora_name=request.lora_name)
        while engine.has_unfinished_requests() or engine.is_copying:
            for output in engine.step():
                tokens[output.request_id].extend(output.token_ids)
    stats = engine.stats
    engine.close()
    return tokens, stats


def bring(engine: LLMEngine, folders: Mapping[str, str]) -> None:
    """Add adapters by name, each in place of another one that was added before."""
    right = [*folders.values()]
    for those in (right[::-1], right):
        for name, folder in zip(folders, those, strict=True):
            module = engine.find_lora(name, Path(folder))
            adapter = engine.read_lora(module)
            engine.remove_lora(name)
            engine.free_loras(engine.loras.leaving)
            engine.add_lora(module, adapter)


# -- what is asked --------------------------------------------------------------------------------------------------


def prompts_of(plan: Plan, count: int) -> list[list[int]]:
    return [
        random_tokens(plan.prompt_lens[number % len(plan.prompt_lens)], plan.vocab_size, seed=number)
        for number in range(count)
    ]


def sampled(plan: Plan) -> list[Request]:
    """A request for each sampling parameter, and requests with several of them; each parameter changes the answer."""
    asked: list[dict[str, Any]] = [
        {"temperature": 0, "logit_bias": {7: 3.0, 11: -100.0}},
        {"temperature": 0, "allowed_token_ids": frozenset(range(5, 500, 3))},
        {"temperature": 0, "min_tokens": plan.num_greedy // 2, "stop_token_ids": frozenset(range(0, 1000, 16))},
        {"temperature": 0, "bad_words_token_ids": (*((n,) for n in range(0, 900, 5)), (3, 8), (901, 902, 903))},
        {"temperature": 0, "presence_penalty": -1.5, "frequency_penalty": 0.3, "repetition_penalty": 1.3},
        {"temperature": 0, "logprobs": 5},
        {"temperature": 0.8},
        {"temperature": 1.2, "top_k": 40},
        {"temperature": 1.0, "top_p": 0.5},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 1.2, "top_p": 0.8, "top_k": 20, "min_p": 0.2, "repetition_penalty": 0.8, "logprobs": 2},
        {"temperature": 1.0, "logit_bias": {3: 5.0}, "allowed_token_ids": frozenset(range(600))},
        {"temperature": 0, "thinking_budget": ThinkingBudget(num_tokens=5, end_token_id=7, has_begun=True)},
    ]  # fmt: skip
    return [
        Request(prompt=prompt, params=SamplingParams(seed=number, max_tokens=plan.num_greedy, **params))
        for number, (prompt, params) in enumerate(zip(prompts_of(plan, len(asked)), asked, strict=True))
    ]


def greedy(plan: Plan) -> list[Request]:
    params = SamplingParams(temperature=0, max_tokens=plan.num_greedy, ignore_eos=True)
    return [Request(prompt=prompt, params=params) for prompt in prompts_of(plan, 6)]


def adapted(plan: Plan) -> list[Request]:
    """Requests with each adapter and without one, in the same steps."""
    names = ["", *ADAPTERS]
    return [
        Request(prompt=request.prompt, params=request.params, lora_name=names[number % len(names)])
        for number, request in enumerate(greedy(plan))
    ]


def repeating(plan: Plan) -> list[Request]:
    """Prompts that repeat themselves, with greedy and with random answers."""
    return [
        Request(
            prompt=random_tokens(9, plan.vocab_size, seed=number) * 4,
            params=SamplingParams(
                temperature=temperature, seed=number, max_tokens=2 * plan.num_greedy, ignore_eos=True,
                repetition_penalty=0.7,
            ),
        )
        for number, temperature in enumerate((0, 0, 0, 0.3))
    ]  # fmt: skip


CASES = (
    Case(what="all that is asked of the sampler", requests=sampled),
    Case(what="adapters", requests=adapted),
    Case(
        what="adapters that come while it runs", requests=adapted, brings_adapters=True,
        settings={"max_loras": len(ADAPTERS), "max_lora_rank": max(ADAPTERS.values())},
    ),
    Case(
        what="guesses", requests=repeating,
        settings={"speculative_config": '{"method": "ngram", "num_speculative_tokens": 4}'},
        happened=("right guesses", lambda stats: stats.num_accepted_tokens),
    ),
    Case(what="experts", requests=greedy, model="qwen3_moe"),
    Case(
        what="too small a pool", requests=greedy, small_pool=True,
        happened=("preemptions", lambda stats: stats.num_preemptions),
    ),
    Case(
        what="blocks from the host", requests=greedy, small_pool=True, settings={"kv_offloading_size": 0.25},
        num_rounds=2,
        happened=("blocks loaded", lambda stats: stats.num_loaded_blocks),
    ),
)  # fmt: skip


def save_adapters(model: Path) -> dict[str, str]:
    """Save random adapters of every product of the model's layers beside `model`, in PEFT's layout. Returns their
    folders by name."""
    weights = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    folders = {}
    for name, rank in ADAPTERS.items():
        folder = model / name
        folder.mkdir()
        folders[name] = str(folder)
        (folder / "adapter_config.json").write_text(
            json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"})
        )
        added = {}
        for weight_name, weight in weights.items():
            if "_proj." not in weight_name:
                continue
            outputs, inputs = weight.shape
            prefix = f"base_model.model.{weight_name.removesuffix('.weight')}"
            added[f"{prefix}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
            added[f"{prefix}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * rank**-0.5
        save_file(added, folder / "adapter_model.safetensors")
    return folders
