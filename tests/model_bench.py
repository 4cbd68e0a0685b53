"""A small transformers model and an engine with the same weights, driven step by step to compare their results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from engine.config import EngineConfig
from engine.engine_args import EngineArgs
from engine.model_loader import create_engine_config
from engine.running.executor import Executor
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import BlockExport, ScheduledSequence, SchedulerOutput, Sequence

VOCAB_SIZE = 307
BLOCK_SIZE = 4
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


def save_model(config: Any, folder: Path) -> transformers.PreTrainedModel:
    """Save a model of random weights; return it, with transformers' own attention."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    randomise(model)
    model.save_pretrained(folder)
    return model


def randomise(model: torch.nn.Module) -> None:
    """Change parameters that start as 0 or 1, where forgetting them would not be noticed."""
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(std=0.5)
            elif "norm" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif parameter_name.endswith("A_log"):
                parameter.sub_(4)  # as made up, a state forgets nearly everything in two tokens
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.2)


def engine_config(folder: Path, **overrides: Any) -> EngineConfig:
    settings = {"dtype": "float32", "block_size": BLOCK_SIZE, "num_kv_blocks": 200, "num_threads": 1} | overrides
    return create_engine_config(EngineArgs(model=str(folder), **settings))


class Bench:
    """Drives an executor with sequences whose blocks lie scattered in the pool."""

    def __init__(self, config: EngineConfig, on_layer_written: Any = None) -> None:
        self.executor = Executor(config, on_layer_written)
        self.executor.kv_pool.fill_(float("nan"))  # so that a read of anything not yet written shows
        self.runner = self.executor._worker.runner
        order = torch.randperm(config.cache.num_blocks, generator=torch.Generator().manual_seed(3))
        self.free: list[int] = order.tolist()

    def sequence(self, token_ids: list[int], num_blocks: int = 16) -> Sequence:
        seq = Sequence(0, "r", list(token_ids), len(token_ids), GREEDY)
        seq.block_table = [self.free.pop() for _ in range(num_blocks)]
        return seq

    def continued(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Return the prompt and the most probable tokens after it, `num_tokens` in all."""
        seq = self.sequence(prompt)
        while len(seq) < num_tokens:
            num_new_tokens = seq.num_uncomputed_tokens
            step = SchedulerOutput([ScheduledSequence(seq, num_new_tokens)], [])
            [[token_id]] = self.executor.launch(step).wait()
            seq.num_computed_tokens += num_new_tokens
            seq.token_ids.append(token_id)
        return list(seq.token_ids)

    def logits(self, *chunks: tuple[Sequence, int]) -> torch.Tensor | None:
        """Run one step; return the logits of the sequences whose last token it computed."""
        step = self.runner.prepare(SchedulerOutput([ScheduledSequence(*c) for c in chunks], []))
        logits = self.runner.compute(step).logits
        for seq, num_new_tokens in chunks:
            seq.num_computed_tokens += num_new_tokens
        return logits


def reference(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0, -1]
    return logits


def random_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_close(ours: torch.Tensor | None, expected: torch.Tensor) -> None:
    assert ours is not None
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def check_layers_are_announced(config: EngineConfig) -> None:
    """Check, for a model of three layers, that a step announces each layer in order, once its KV is in the pool, and
    only if a block is exported."""
    seen: list[int] = []

    def on_layer_written(layer: int, exports: list[BlockExport]) -> None:
        [export] = exports
        pool = bench.executor.kv_pool
        assert not pool[layer, list(export.block_ids)].isnan().any()
        assert pool[layer + 1 :, list(export.block_ids), :, :, 0].isnan().all()
        seen.append(layer)

    bench = Bench(config, on_layer_written)
    seq = bench.sequence(random_tokens(8, seed=1))
    export = BlockExport("r", 0, tuple(seq.block_table[:2]))
    bench.executor.launch(SchedulerOutput([ScheduledSequence(seq, 8)], [export])).wait()
    assert seen == [0, 1, 2]
    seq.num_computed_tokens = 8
    seq.token_ids.append(3)
    bench.executor.launch(SchedulerOutput([ScheduledSequence(seq, 1)], [])).wait()
    assert seen == [0, 1, 2]  # nothing exported, nothing announced


def logits_of_backends(folder: Path, **settings: Any) -> list[torch.Tensor]:
    """Of the same steps by the CPU kernels in bfloat16, and by plain torch in bfloat16 and in float32."""
    results = []
    for backend, dtype in (("cpu", "bfloat16"), ("torch", "bfloat16"), ("torch", "float32")):
        bench = Bench(engine_config(folder, dtype=dtype, block_size=16, attention_backend=backend, **settings))
        late, running = bench.sequence(random_tokens(40, seed=4)), bench.sequence(random_tokens(30, seed=5))
        bench.logits((late, 20))
        bench.logits((running, 29), (late, 10))
        logits = bench.logits((running, 1), (late, 10))
        assert logits is not None
        results.append(logits.float())
    return results
