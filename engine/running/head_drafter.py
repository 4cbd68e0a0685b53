"""A head beside the model: reads what each step computes, and guesses before the next one.

    made ──> measured (GPU) ──start──> read, with each step of the model ──> draft, before each step that it guesses for

    a step   the model computes tokens 0 1 2 3, and leaves their hidden states
    read     the head's keys and values of 0 1 2 3, each with the feature of the token before it
    draft    token 4, which the step sampled, with the feature of 3: guesses 5
             5, with what the head's layer gave for 4: guesses 6

Owns the head, the features of the last step, and a runner for rounds of guesses. The head's keys and values are the
last layer of the engine's pool, so blocks that come from another engine, the prefix cache or host memory have them.
Where a sequence continues from such blocks, the feature before its first token is missing, and counts as zeros: nothing
but guesses may be worse for it.

Shapes: T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.attention import PagedBackend, create_attention_backend
from engine.cache_dir import report
from engine.config import EngineConfig
from engine.kv_cache import allocate_kv_pool
from engine.kv_shape import KVCacheShape, kv_cache_shape
from engine.model_loader.draft_heads import load_head
from engine.models.model import FeatureSource
from engine.running.draft_rounds import Followed, run_rounds
from engine.running.feature_rows import NO_FEATURE, FeatureRows
from engine.running.input_batch import InputBatch
from engine.running.model_runner import ModelRunner
from engine.running.pool_size import measured_steps
from engine.running.warm_up import warm_up
from engine.sampling.sampled_tokens import SampledTokens
from engine.scheduling.sequence import DraftPart, SchedulerOutput
from engine.step_input import StepInput
from engine.to_device import to_device

if TYPE_CHECKING:
    from engine.tensor_parallel.group import RankGroup


class HeadDrafter:
    """Used only by the stepping thread. Raises `ValueError` if the weights do not fit the config."""

    def __init__(self, config: EngineConfig, model: FeatureSource, group: RankGroup | None) -> None:
        """`config`: the engine's. `group`: see `Worker`."""
        assert config.draft is not None
        assert config.head is not None
        self._config = config.draft
        self._backend: PagedBackend[Any] = create_attention_backend(config.draft)
        self._group = group
        max_tokens = config.scheduler.max_num_batched_tokens
        self._head, self._features = load_head(config.draft, model, config.head, self._backend, max_tokens, group)
        self._runner: ModelRunner | None = None
        self._features_TD = self._head.features_TD[:0]
        """Of the last step."""
        self._rows = FeatureRows()
        self.on_round: Callable[[StepInput, bool], None] = lambda step, is_first: None
        """Called before each round: lets other ranks do the same (`follow_round`)."""

    @property
    def block_bytes(self) -> int:
        """Bytes that a block takes outside the engine's pool: none."""
        return 0

    def start(self, kv_pool: torch.Tensor) -> None:
        """Guess over the engine's pool from now on, and warm up a GPU."""
        if self._group is None or not self._group.rank:
            report(f"{self._config.model.model} guesses; its KV is one layer of the pool's {len(kv_pool)}")
        of_head = kv_pool[-1:]
        self._runner = self._make_runner(of_head)
        if self._config.device.device != "cpu":
            warm_up(self._config, self._runner, of_head)

    def run_largest_steps(self) -> int:
        """See `DraftModel.run_largest_steps`."""
        num_blocks, steps = measured_steps(self._config)
        runner = self._make_runner(allocate_kv_pool(self._shape(num_blocks), self._config.device.device))
        torch.cuda.empty_cache()
        of_others = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        kept_bytes = runner.record_largest_decode_step()
        for step in steps:
            runner.launch(step, runner.prepare(step)).wait()
        return max(0, kept_bytes - of_others)

    def prepare(self, output: SchedulerOutput, step: StepInput) -> StepInput:
        """See `StepReader`."""
        return replace(step, feature_rows=self._rows.next_step(output))

    def read(self, step: StepInput, batch: InputBatch, kv: torch.Tensor) -> None:
        """The model has computed a step: write the head's keys and values of its tokens to `kv`, the pool's last
        layer, and keep the features."""
        now_TD = self._head.fused(self._features.of_step(len(step.token_ids)))
        all_TD = torch.cat((now_TD.new_zeros(1, now_TD.shape[1]), self._features_TD, now_TD))
        before_TD = all_TD[to_device(step.feature_rows, now_TD.device)]
        self._head.read(batch.token_ids, batch.positions, before_TD, self._backend.prepare(step.layout), kv)
        self._features_TD = now_TD
        if self._group is not None:
            # The layer may be told of once an exchange follows its writes (`Executor._of_all_ranks`), and this one has
            # none of its own.
            self._group.sum(now_TD.new_zeros(1))

    def draft(self, parts: list[DraftPart]) -> list[list[int]]:
        """Do the parts. Returns the guesses of each: `num_drafts` token ids, or fewer if a grammar ends the answer;
        none if the last step did not compute the token before the last one."""
        followed = [Followed(part, reads_pairs_apart=False) for part in parts]
        rows = [self._rows.find(part.seq.seq_id, part.first - 1) for part in parts]
        row_of = {each: row - 1 for each, row in zip(followed, rows, strict=True) if row != NO_FEATURE}
        if row_of:
            run_rounds(list(row_of), _Rounds(self, row_of).launch, self._config.model.eos_token_ids)
        return [each.guesses for each in followed]

    def prepare_round(self, output: SchedulerOutput, rows: list[int]) -> StepInput:
        """`rows`: of each token's feature, among those of the model's last step, or, after the first round, among those
        that the round before left."""
        return replace(self._started.prepare(output), feature_rows=np.array(rows))

    def launch_round(self, output: SchedulerOutput, step: StepInput, *, is_first: bool) -> SampledTokens:
        """Begin to compute a round of guesses. `step`: the result of `prepare_round`."""
        self.on_round(step, is_first)
        self._give_features(step, is_first=is_first)
        return self._started.launch(output, step)

    def follow_round(self, step: StepInput, *, is_first: bool) -> None:
        """Do what `launch_round` does on a rank that does not sample."""
        self._give_features(step, is_first=is_first)
        self._started.follow(step)

    @torch.inference_mode()
    def _give_features(self, step: StepInput, *, is_first: bool) -> None:
        source_TD = self._features_TD if is_first else self._head.outputs_TD
        rows = to_device(step.feature_rows, source_TD.device)
        self._head.features_TD[: len(rows)] = source_TD[rows]

    @property
    def _started(self) -> ModelRunner:
        assert self._runner is not None
        return self._runner

    def _make_runner(self, kv_pool: torch.Tensor) -> ModelRunner:
        return ModelRunner(self._config, self._head, self._backend, kv_pool, None, self._group)

    def _shape(self, num_blocks: int) -> KVCacheShape:
        cache = self._config.cache
        return kv_cache_shape(
            self._config.model, num_blocks=num_blocks, block_size=cache.block_size, kv_dtype=cache.kv_dtype
        )


class _Rounds:
    """Rounds of guesses: the first reads features of the model's step, each other one what the round before left."""

    def __init__(self, drafter: HeadDrafter, row_of: dict[Followed, int]) -> None:
        self._drafter = drafter
        self._row_of = row_of
        self._is_first = True

    def launch(self, followed: list[Followed]) -> SampledTokens:
        output = SchedulerOutput([each.next_item() for each in followed], [])
        step = self._drafter.prepare_round(output, [self._row_of[each] for each in followed])
        tokens = self._drafter.launch_round(output, step, is_first=self._is_first)
        self._row_of = {each: row for row, each in enumerate(followed)}
        self._is_first = False
        return tokens
