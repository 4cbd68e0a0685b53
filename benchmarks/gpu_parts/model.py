"""Compares whole models with transformers in float64 on this device: small random models that cover all features of a
layer.

    weights, rounded to bfloat16 ──> transformers, float64 ──────────────> logits of a prompt's end and of tokens after
                                 └─> our engine, float32 and bfloat16 ──> the same: whole, in chunks, decoding

Error: |ours - theirs| / |theirs| over all logits of all prompts. float32 must be exact except for rounding; the error
of bfloat16 may be twice that of transformers in bfloat16. Greedy answers in float32 must be equal, token for token.
(transformers computes norms and rotary angles in float32 whatever the model's type: the reference is accurate to 1e-6.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.gpu_parts.rows import Row
from benchmarks.gpu_parts.runner import Setting
from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.model_loader import create_engine_config
from engine.running.executor import Executor
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import ScheduledSequence, SchedulerOutput
from engine.scheduling.sequence import Sequence as EngineSequence

MODELS = ("llama", "qwen3", "gemma2")
"""The last one uses transformers' own code with our attention, and has a soft cap, a scale and windows."""
MAX_FLOAT32_ERROR = 5e-5
"""With tf32 instead of float32, the error would be 3e-4."""
BFLOAT16_SLACK = 2.0
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The sizes of a comparison."""

    hidden_size: int
    num_layers: int
    prompt_lens: tuple[int, ...]
    """Lengths around the block size, one token, and several tiles of keys."""
    num_decoded: int
    """Given tokens after each prompt, computed one by one."""
    chunk: int
    num_greedy: int
    vocab_size: int = 1000

    @property
    def max_len(self) -> int:
        return max(self.prompt_lens) + max(self.num_decoded, self.num_greedy) + 1


FULL = Plan(hidden_size=1024, num_layers=4, prompt_lens=(1, 16, 17, 333, 1100), num_decoded=6, chunk=100, num_greedy=24)
TINY = Plan(hidden_size=128, num_layers=2, prompt_lens=(1, 16, 17, 40), num_decoded=3, chunk=12, num_greedy=4)


def measure(setting: Setting) -> Iterator[Row]:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    plan = TINY if setting.is_tiny else FULL
    sequences = [random_tokens(n + plan.num_decoded, plan.vocab_size, seed=n) for n in plan.prompt_lens]
    for name in MODELS:
        with TemporaryDirectory() as folder:
            save_model(name, plan, Path(folder))
            model = reference(name, Path(folder), torch.float64, setting.device)
            exact = reference_logits(model, plan, sequences)
            answers = reference_answers(model, plan, sequences)
            for dtype in ("float32", "bfloat16"):
                model = reference(name, Path(folder), getattr(torch, dtype), setting.device)
                theirs = relative_error(reference_logits(model, plan, sequences), exact)
                if dtype == "float32" and not theirs < MAX_FLOAT32_ERROR:
                    raise RuntimeError(f"{name}: transformers' float32 is off by {theirs:.1e} from its own float64")
                yield from compare_logits(name, dtype, plan, sequences, exact, theirs, Path(folder), setting)
            yield compare_answers(name, plan, sequences, answers, Path(folder), setting)


def compare_logits(
    name: str, dtype: str, plan: Plan, sequences: Sequence[list[int]], exact: torch.Tensor, theirs: float,
    folder: Path, setting: Setting,
) -> Iterator[Row]:  # fmt: skip
    driver = Driver(folder, plan, dtype, setting.device)
    at_most = MAX_FLOAT32_ERROR if dtype == "float32" else BFLOAT16_SLACK * theirs
    for how, chunk in (("whole", plan.max_len), ("in chunks", plan.chunk)):
        ours = driver.logits(sequences, plan, chunk)
        yield Row(
            what=f"{name}, {dtype}, prompts {how}", value=relative_error(ours[:, 0], exact[:, 0]), unit="error",
            at_most=at_most, is_check=True, note=f"transformers' {theirs:.1e}",
        )  # fmt: skip
    yield Row(
        what=f"{name}, {dtype}, decoding", value=relative_error(ours[:, 1:], exact[:, 1:]), unit="error",
        at_most=at_most, is_check=True, note=f"transformers' {theirs:.1e}",
    )  # fmt: skip
    # Products of one row use a separate kernel.
    ours = driver.logits(sequences[-1:], replace(plan, prompt_lens=plan.prompt_lens[-1:]), plan.max_len)
    yield Row(
        what=f"{name}, {dtype}, decoding alone", value=relative_error(ours[:, 1:], exact[-1:, 1:]), unit="error",
        at_most=at_most, is_check=True, note=f"transformers' {theirs:.1e}",
    )  # fmt: skip


def compare_answers(
    name: str, plan: Plan, sequences: Sequence[list[int]], answers: list[list[int]], folder: Path, setting: Setting
) -> Row:
    """Compares answers of the whole engine: scheduler, graphs, sampler."""
    engine = LLMEngine(create_engine_config(engine_args(folder, plan, "float32", setting.device)))
    params = SamplingParams(temperature=0, max_tokens=plan.num_greedy, ignore_eos=True)
    for number, length in enumerate(plan.prompt_lens):
        engine.add_request(str(number), sequences[number][:length], params)
    tokens: dict[str, list[int]] = {str(number): [] for number in range(len(sequences))}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id].extend(output.token_ids)
    num_other = sum(tokens[str(number)] != answer for number, answer in enumerate(answers))
    return Row(
        what=f"{name}, float32, greedy answers unlike", value=num_other, unit=f"of {len(answers)}", at_most=0,
        is_check=True, note=f"{plan.num_greedy} tokens each",
    )  # fmt: skip


def relative_error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """NaN if ours has a NaN, which violates any bound."""
    return float((ours.double() - exact).norm() / exact.norm())


def random_tokens(count: int, vocab_size: int, seed: int) -> list[int]:
    tokens: list[int] = torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return tokens


# -- transformers ---------------------------------------------------------------------------------------------------


def save_model(name: str, plan: Plan, folder: Path) -> None:
    """Save a random model in `folder`, in float32. Its weights are exact in bfloat16."""
    import transformers

    head_dim = plan.hidden_size // 8
    shared: dict[str, Any] = {
        "vocab_size": plan.vocab_size, "hidden_size": plan.hidden_size, "intermediate_size": 3 * plan.hidden_size,
        "num_hidden_layers": plan.num_layers, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": head_dim,
        "max_position_embeddings": 2048, "initializer_range": 1.5 * plan.hidden_size**-0.5, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    config_class = {
        "llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config, "gemma2": transformers.Gemma2Config,
        "qwen3_moe": transformers.Qwen3MoeConfig,
    }[name]  # fmt: skip
    if name == "qwen3_moe":
        shared |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": plan.hidden_size}
    if name == "gemma2":
        shared |= {"sliding_window": plan.chunk, "query_pre_attn_scalar": 2 * head_dim, "attn_logit_softcapping": 5.0}
    config = config_class(**shared)
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:  # they start as 1, with which a missing norm weight would go unnoticed
                parameter.add_(torch.randn_like(parameter) * 0.2)
            parameter.copy_(parameter.bfloat16())
    model.save_pretrained(folder)


def reference(name: str, folder: Path, dtype: torch.dtype, device: str) -> Any:
    """The model of transformers. Loaded again for each type, because a converted model loses the precision of its
    rotary angles."""
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained
    attention = "eager" if name == "gemma2" else "sdpa"  # which does not support a soft cap
    return load(folder, dtype=dtype, attn_implementation=attention).to(device).eval()


@torch.inference_mode()
def reference_logits(model: Any, plan: Plan, sequences: Sequence[list[int]]) -> torch.Tensor:
    """float64 [sequences, 1 + num_decoded, vocabulary]: the logits after the prompt's last token, and after each given
    token."""
    found = []
    for tokens in sequences:
        logits = model(torch.tensor([tokens], device=model.device)).logits[0]
        found.append(logits[len(tokens) - plan.num_decoded - 1 :].double())
    return torch.stack(found)


@torch.inference_mode()
def reference_answers(model: Any, plan: Plan, sequences: Sequence[list[int]]) -> list[list[int]]:
    """Greedy answers to each prompt."""
    answers = []
    for tokens, length in zip(sequences, plan.prompt_lens, strict=True):
        prompt = torch.tensor([tokens[:length]], device=model.device)
        all_tokens = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=plan.num_greedy,
            min_new_tokens=plan.num_greedy, do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        answers.append(all_tokens[0, length:].tolist())
    return answers


# -- ours -----------------------------------------------------------------------------------------------------------


def engine_args(folder: Path, plan: Plan, dtype: str, device: str) -> EngineArgs:
    num_blocks = sum(-(-(length + plan.num_greedy + 16) // 16) for length in plan.prompt_lens) + plan.max_len // 16
    return EngineArgs(
        model=str(folder), dtype=dtype, device=device, num_kv_blocks=num_blocks, max_model_len=plan.max_len,
        max_num_seqs=len(plan.prompt_lens), enable_prefix_caching=False,
    )  # fmt: skip


class Driver:
    """An engine's executor without a scheduler, with sequences whose blocks are scattered in the pool."""

    def __init__(self, folder: Path, plan: Plan, dtype: str, device: str) -> None:
        config = create_engine_config(engine_args(folder, plan, dtype, device))
        self._executor = Executor(config)
        order = torch.randperm(config.cache.num_blocks, generator=torch.Generator().manual_seed(3))
        self._free: list[int] = order.tolist()
        self._block_size = config.cache.block_size

    def logits(self, sequences: Sequence[list[int]], plan: Plan, chunk: int) -> torch.Tensor:
        """float64, like `reference_logits`: prompts in steps of at most `chunk` tokens each, then token by token."""
        self._executor.kv_pool.fill_(float("nan"))  # shows up any read of numbers that were not written
        seqs = [
            self._sequence(number, tokens, length)
            for number, (tokens, length) in enumerate(zip(sequences, plan.prompt_lens, strict=True))
        ]
        found: list[list[torch.Tensor]] = [[] for _ in seqs]
        while any(seq.num_uncomputed_tokens for seq in seqs):
            self._step(
                [(seq, min(chunk, seq.num_uncomputed_tokens)) for seq in seqs if seq.num_uncomputed_tokens], found
            )
        for index in range(plan.num_decoded):
            for seq, tokens, length in zip(seqs, sequences, plan.prompt_lens, strict=True):
                seq.token_ids.append(tokens[length + index])
            self._step([(seq, 1) for seq in seqs], found)
        self._free += [block_id for seq in seqs for block_id in seq.block_table]
        return torch.stack([torch.stack(rows) for rows in found])

    def _sequence(self, number: int, tokens: list[int], num_prompt_tokens: int) -> EngineSequence:
        seq = EngineSequence(number, str(number), tokens[:num_prompt_tokens], num_prompt_tokens, GREEDY)
        seq.block_table = [self._free.pop() for _ in range(-(-len(tokens) // self._block_size))]
        return seq

    def _step(self, chunks: list[tuple[EngineSequence, int]], found: list[list[torch.Tensor]]) -> None:
        chunks.sort(key=lambda item: item[1] > 1)  # like the scheduler: sequences with one token first
        output = SchedulerOutput([ScheduledSequence(*item) for item in chunks], [])
        runner = self._executor._worker.runner
        logits = runner.compute(runner.prepare(output)).logits
        for seq, num_new_tokens in chunks:
            seq.num_computed_tokens += num_new_tokens
        if logits is not None:
            for seq, row in zip(output.sampled_seqs, logits, strict=True):
                found[seq.seq_id].append(row.double().clone())  # the next replay overwrites it
