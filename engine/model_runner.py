"""One step on one device: copy and clear blocks, build arrays, run the model, sample.

Owns nothing but references: the pool is the worker's, sequences are the scheduler's and only read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from engine import device_draw
from engine.attention import PagedBackend
from engine.config import EngineConfig
from engine.decode_graphs import RECORDING_BYTES, CudaRecorder, DecodeGraphs
from engine.input_batch import InputBatch, build_input_batch
from engine.kernels.sampling import choose_largest, draw_unfiltered
from engine.kv_cache import clear_blocks, copy_blocks
from engine.logprobs import PromptLogprobs, RawLogits, prompt_logprobs
from engine.models.model import Model
from engine.sampled_tokens import SampledTokens
from engine.sampler import ChooseRows, Sampler
from engine.sequence import BlockExport, OnLayerWritten, SchedulerOutput


class Forward(NamedTuple):
    """What the model makes of a step."""

    batch: InputBatch | None
    """None: nothing was scheduled."""
    logits: torch.Tensor | None
    """[sampling sequences, vocabulary] in the model's dtype or wider. None: nothing is sampled."""
    prompt_logprobs: list[PromptLogprobs]
    """Of prompts that ask."""


class ModelRunner:
    """Used by the stepping thread alone."""

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        backend: PagedBackend[Any],
        kv_pool: torch.Tensor,
        on_layer_written: OnLayerWritten | None,
    ) -> None:
        self._model = model
        self._backend = backend
        self._kv_pool = kv_pool
        self._on_layer_written = on_layer_written
        self._block_size = config.cache.block_size
        self._device = config.device.device
        self._graphs = self._make_graphs(config)
        self._sampler = make_sampler(config)
        self._last: SampledTokens | None = None

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput) -> SampledTokens:
        """Begin to compute a step. The one before may still be under way, and this one go on from its tokens."""
        batch, logits, told = self.forward(output)
        token_ids = logprobs = None
        if batch is not None and logits is not None:
            raw_logits = RawLogits.of(logits, batch.sampling_seqs)
            token_ids = self._sampler.sample(logits, batch.sampling_seqs, batch.last_token_ids)
            logprobs = None if raw_logits is None else raw_logits.logprobs(token_ids)
        self._last = SampledTokens(output, token_ids, logprobs, told, self._device)
        return self._last

    @torch.inference_mode()
    def forward(self, output: SchedulerOutput) -> Forward:
        """The step without sampling."""
        if output.blocks_to_copy:
            copy_blocks(self._kv_pool, output.blocks_to_copy)
        if not output.scheduled:
            return Forward(None, None, [])
        batch = build_input_batch(output, self._block_size, self._device, self._last)
        if batch.begun_blocks:
            clear_blocks(self._kv_pool, batch.begun_blocks)
        if self._graphs is not None and not output.exports and self._graphs.can_run(batch):
            return Forward(batch, self._graphs.run(batch), [])
        plan = self._backend.prepare(batch.layout)
        x_TD = self._model.forward(
            batch.token_ids, batch.positions, plan, self._kv_pool, self._layer_callback(output.exports)
        )
        told = prompt_logprobs(output, x_TD, self._model.compute_logits)
        if not batch.sampling_seqs:
            return Forward(batch, None, told)
        if batch.sample_rows is not None:
            x_TD = x_TD[batch.sample_rows]
        return Forward(batch, self._model.compute_logits(x_TD), told)

    def record_decode_steps(self, on_recorded: Callable[[int, int], None]) -> int:
        """Before the first request. `on_recorded`: so many, of so many. Returns how many there are: none without a
        GPU."""
        if self._graphs is None:
            return 0
        with torch.inference_mode():
            self._graphs.record_all(on_recorded)
        return self._graphs.num_recordings

    def record_largest_decode_step(self) -> int:
        """To see what memory recordings take: returns what they will keep, all of them, beside what torch counts as
        allocated."""
        if self._graphs is None:
            return 0
        with torch.inference_mode():
            num_all = self._graphs.record_largest()
        torch.cuda.empty_cache()
        shared_bytes = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return shared_bytes + num_all * RECORDING_BYTES

    def _make_graphs(self, config: EngineConfig) -> DecodeGraphs | None:
        """None where decoding steps are launched one kernel after the other."""
        if not config.device.uses_graphs:
            return None

        # Not `self`, which has the graphs: a circle would keep a device's memory until a collector comes by, and what
        # is there when a worker is made is kept from it for good.
        model, kv_pool = self._model, self._kv_pool

        def forward(token_ids: torch.Tensor, positions: torch.Tensor, plan: Any) -> torch.Tensor:
            return model.compute_logits(model.forward(token_ids, positions, plan, kv_pool, None))

        return DecodeGraphs(
            forward=forward,
            backend=self._backend,  # type: ignore[arg-type]  # the configuration has seen to it
            recorder=CudaRecorder(),
            max_num_seqs=config.scheduler.max_num_seqs,
            max_context_len=min(config.device.max_seq_len_to_capture, config.model.max_model_len),
            device=config.device.device,
        )

    def _layer_callback(self, exports: list[BlockExport]) -> Any:
        on_layer_written = self._on_layer_written
        if on_layer_written is None or not exports:
            return None
        return lambda layer: on_layer_written(layer, exports)


def make_sampler(config: EngineConfig) -> Sampler:
    """What is fastest where the logits are."""
    eos_token_ids = config.model.eos_token_ids
    if config.device.attention_backend == "cpu":
        return Sampler(eos_token_ids, choose_greedy=choose_largest, draw_unfiltered=draw_unfiltered)
    if config.device.device != "cpu":
        draw = _kernels_draw() if config.device.uses_triton else device_draw.draw
        return Sampler(eos_token_ids, draw_filtered=draw, draw_unfiltered=draw)
    return Sampler(eos_token_ids)


def _kernels_draw() -> ChooseRows:
    from engine.kernels.gpu.draw import draw  # needs Triton

    return draw
