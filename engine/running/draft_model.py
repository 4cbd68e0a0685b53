"""The draft model: a smaller model that guesses the next tokens of answers (method `draft_model` of speculation).

    loaded ──> measured (GPU) ──start──> its pool and runner ──> draft, before each step that it guesses for

    one draft   round 1 reads what it has not read of each sequence, the others a guess (draft_rounds.py)

Owns the model, a pool with as many blocks as the engine's, and a runner. A sequence's blocks have the same ids in both
pools (engine/scheduling/model_drafting.py).

It samples as the engine does: with the request's parameters, and with the same random numbers, which depend only on
seed, position and token (engine/sampling/random.py). So where both models think alike, they draw alike: at any
temperature, guesses are right nearly as often as rejection sampling would accept them, and still the engine's tokens
are those that it would have without guesses. After M. Daliri et al., Coupling without communication and
drafter-invariant speculative decoding (2024).

Shapes: T tokens, S sequences, D hidden, V the engine's vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from engine.attention import PagedBackend, create_attention_backend
from engine.cache_dir import report
from engine.config import GIB, EngineConfig
from engine.kv_cache import allocate_kv_pool
from engine.kv_shape import KVCacheShape, kv_cache_shape
from engine.model_loader import load_model
from engine.models.layer import OnLayer
from engine.models.model import Model
from engine.running.draft_rounds import Followed, run_rounds
from engine.running.model_runner import ModelRunner
from engine.running.pool_size import measured_steps
from engine.running.warm_up import warm_up
from engine.sampling.sampled_tokens import SampledTokens
from engine.scheduling.sequence import DraftPart, SchedulerOutput


class DraftModel:
    """Used only by the stepping thread. Raises `ValueError` if the weights do not fit the config."""

    def __init__(self, config: EngineConfig, vocab_size: int) -> None:
        """`config`: the draft model's. `vocab_size`: the engine's model's."""
        self._config = config
        self._backend: PagedBackend[Any] = create_attention_backend(config)
        model = load_model(config, self._backend)
        own_size = config.model.vocab_size
        self._model = model if own_size == vocab_size else _OfOtherVocabulary(model, own_size, vocab_size)
        if model.reads_back:
            self._config = replace(config, device=replace(config.device, uses_graphs=False))
        self._runner: ModelRunner | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return self._shape(1).pool_bytes

    def start(self, kv_pool: torch.Tensor) -> None:
        """Allocate as many blocks as the engine's pool has, and warm up a GPU."""
        num_blocks = kv_pool.shape[1]
        self._runner, pool = self._make_runner(num_blocks)
        report(f"{self._config.model.model} guesses; its KV takes {num_blocks * self.block_bytes / GIB:.2f} GiB")
        if self._config.device.device != "cpu":
            warm_up(self._config, self._runner, pool)

    def run_largest_steps(self) -> int:
        """Allocate what the pool's size does not decide, and run the largest steps, so that their memory can be
        measured. Returns the bytes that recordings will keep, as `ModelRunner.record_largest_decode_step`."""
        num_blocks, steps = measured_steps(self._config)
        runner, _ = self._make_runner(num_blocks)
        torch.cuda.empty_cache()
        of_others = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        kept_bytes = runner.record_largest_decode_step()
        for step in steps:
            runner.launch(step, runner.prepare(step)).wait()
        return max(0, kept_bytes - of_others)  # which counts the memory of the engine's own recordings again

    def draft(self, parts: list[DraftPart]) -> list[list[int]]:
        """Do the parts. Returns the guesses of each: `num_drafts` token ids, or fewer if a grammar ends the answer."""
        followed = [Followed(part, reads_pairs_apart=self._config.device.uses_graphs) for part in parts]
        run_rounds(sorted(followed, key=lambda each: each.place), self._launch, self._config.model.eos_token_ids)
        return [each.guesses for each in followed]

    def _launch(self, followed: list[Followed]) -> SampledTokens:
        assert self._runner is not None
        step = SchedulerOutput([each.next_item() for each in followed], [])
        return self._runner.launch(step, self._runner.prepare(step))

    def _make_runner(self, num_blocks: int) -> tuple[ModelRunner, torch.Tensor]:
        config = self._config
        pool = allocate_kv_pool(self._shape(num_blocks), config.device.device)
        return ModelRunner(config, self._model, self._backend, pool, None), pool

    def _shape(self, num_blocks: int) -> KVCacheShape:
        cache = self._config.cache
        return kv_cache_shape(
            self._config.model, num_blocks=num_blocks, block_size=cache.block_size, kv_dtype=cache.kv_dtype
        )


class _OfOtherVocabulary:
    """A model whose vocabulary is padded to another size than the engine's, as those of one family's models may be."""

    def __init__(self, model: Model, own_size: int, vocab_size: int) -> None:
        self._model = model
        self._own_size = own_size
        self._vocab_size = vocab_size
        self.adapters, self.states, self.reads_back = model.adapters, model.states, model.reads_back

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        plan: Any,
        kv_pool: torch.Tensor,
        on_layer: OnLayer | None,
    ) -> torch.Tensor:
        """A token that the model does not know is read as its last one."""
        return self._model.forward(token_ids.clamp_max(self._own_size - 1), positions, plan, kv_pool, on_layer)

    def compute_logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Tokens that the model does not know are never guessed."""
        logits_TV = self._model.compute_logits(x_TD)[:, : self._vocab_size]
        num_missing = self._vocab_size - logits_TV.shape[1]
        return torch.nn.functional.pad(logits_TV, (0, num_missing), value=float("-inf")).contiguous()
