"""One step on one device: clear blocks, build arrays, run the model, sample.

Owns nothing but references: the pool is the worker's, sequences are the scheduler's and only read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from engine.attention import PagedBackend
from engine.config import EngineConfig
from engine.kernels import sampling
from engine.kv_cache import clear_blocks
from engine.lora.adapters import Adapters
from engine.models.layer import OnLayer
from engine.models.model import Model
from engine.running.decode_graphs import RECORDING_BYTES, CudaRecorder, DecodeGraphs
from engine.running.input_batch import InputBatch, build_input_batch
from engine.sampling import device_draw
from engine.sampling.logprobs import RawLogits, prompt_logits, prompt_logprobs
from engine.sampling.sampled_tokens import SampledTokens
from engine.sampling.sampler import ChooseRows, Sampler
from engine.scheduling.sequence import OnLayerWritten, SchedulerOutput
from engine.step_input import StepInput

if TYPE_CHECKING:
    from engine.tensor_parallel.group import RankGroup


class Computed(NamedTuple):
    """What the model computes from a step."""

    batch: InputBatch
    logits: torch.Tensor | None
    """[sampled rows, vocabulary] in the model's dtype or wider. None: nothing is sampled."""
    prompt_logits: Iterator[torch.Tensor]
    """Of prompts that ask: some rows at a time, computed as they are taken. To be taken before the next step."""


class ModelRunner:
    """Used by the stepping thread alone.

    prepare ──StepInput──> launch = compute, then sample
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        backend: PagedBackend[Any],
        kv_pool: torch.Tensor,
        on_layer_written: OnLayerWritten | None,
        group: RankGroup | None = None,
    ) -> None:
        """`group`: see `Worker`."""
        self._model = model
        self._backend = backend
        self._kv_pool = kv_pool
        self._on_layer_written = on_layer_written
        self._block_size = config.cache.block_size
        self._device = config.device.device
        self._max_num_seqs, self._max_model_len = config.scheduler.max_num_seqs, config.model.max_model_len
        self._graphs = self._make_graphs(config)
        self._sampler = make_sampler(config)
        # Without a step ahead, nobody but the sampler needs to know what was sampled.
        self._sharing_group = group if config.scheduler.async_scheduling else None
        self._sampled: torch.Tensor | None = None
        """What the step launched last samples, on the device: where the next one goes on from."""
        self._row_of: dict[int, int] = {}
        """By `seq_id`, where."""

    @property
    def adapters(self) -> Adapters | None:
        """None: there are none, and none can come."""
        return self._model.adapters

    def prepare(self, output: SchedulerOutput) -> StepInput:
        """Of the step that is launched next."""
        return StepInput.of(output, self._block_size, self._row_of)

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput, step: StepInput) -> SampledTokens:
        """Begin to compute a step. The one before may still be under way, and this one go on from its tokens.
        `step`: what `prepare` made of `output`."""
        batch, logits, logits_of_prompts = self.compute(step, self._layer_callback(output))
        of_prompts = prompt_logprobs(output, logits_of_prompts)
        token_ids = logprobs = None
        if logits is not None:
            seqs = output.sampled_seqs
            raw_logits = RawLogits.of(logits, seqs)
            token_ids = self._sampler.sample(logits, seqs, batch.last_token_ids)
            logprobs = None if raw_logits is None else raw_logits.logprobs(token_ids)
        self._sampled = self._shared(token_ids)
        sampled = SampledTokens(output, token_ids, logprobs, of_prompts, self._device)
        self._row_of = sampled.row_of
        return sampled

    @torch.inference_mode()
    def follow(self, step: StepInput) -> None:
        """What `launch` does, on a rank that does not sample."""
        for _ in self.compute(step).prompt_logits:  # computed as they are taken
            pass
        self._sampled = self._shared(torch.empty(len(step.sample_rows), dtype=torch.int64, device=self._device))

    @torch.inference_mode()
    def compute(self, step: StepInput, on_layer: OnLayer | None = None) -> Computed:
        """A step without sampling: blocks cleared, and the model."""
        batch = build_input_batch(step, self._device, self._sampled)
        if len(step.begun_blocks):
            clear_blocks(self._kv_pool, step.begun_blocks)
        if self._graphs is not None and not step.has_exports and self._graphs.can_run(batch):
            return Computed(batch, self._graphs.run(batch), iter(()))
        if self._model.adapters is not None:
            self._model.adapters.assign(batch.adapter_ids)
        plan = self._backend.prepare(batch.layout)
        x_TD = self._model.forward(batch.token_ids, batch.positions, plan, self._kv_pool, on_layer)
        of_prompts = prompt_logits(step, x_TD, self._model.compute_logits)
        if not len(step.sample_rows):
            return Computed(batch, None, of_prompts)
        x_RD = x_TD if batch.sample_rows is None else x_TD[batch.sample_rows]
        return Computed(batch, self._model.compute_logits(x_RD), of_prompts)

    def close(self) -> None:
        """Let go of recorded steps. Nothing is launched any more."""
        self._graphs = None

    def record_decode_steps(self, on_recorded: Callable[[int, int], None]) -> int:
        """Before the first request. `on_recorded`: so many, of so many. Returns how many there are: none without a
        GPU."""
        if self._graphs is None:
            return 0
        with torch.inference_mode():
            self._graphs.record_all(on_recorded)
        return self._graphs.num_recordings

    def record_largest_decode_step(self) -> int:
        """To see what memory decoding takes, recorded or not: returns what recordings will keep, all of them, beside
        what torch counts as allocated."""
        self._backend.keep_scratch(self._max_num_seqs, self._max_model_len)
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
            adapters=model.adapters,  # type: ignore[arg-type]  # these are Triton's, as all else that is recorded
            max_num_seqs=self._max_num_seqs,
            max_context_len=min(config.device.max_seq_len_to_capture, self._max_model_len),
            device=config.device.device,
        )

    def _shared(self, token_ids: torch.Tensor | None) -> torch.Tensor | None:
        """Rank 0's, where the next step may be launched before the host knows them."""
        if self._sharing_group is None or token_ids is None or not len(token_ids):
            return token_ids
        return self._sharing_group.share_first(token_ids)

    def _layer_callback(self, output: SchedulerOutput) -> OnLayer | None:
        on_layer_written, exports = self._on_layer_written, output.exports
        if on_layer_written is None or not exports:
            return None
        return lambda layer: on_layer_written(layer, exports)


def make_sampler(config: EngineConfig) -> Sampler:
    """What is fastest where the logits are."""
    eos_token_ids = config.model.eos_token_ids
    if config.device.attention_backend == "cpu":
        return Sampler(eos_token_ids, choose_greedy=sampling.choose_largest, draw_rows=sampling.draw)
    if config.device.device != "cpu":
        draw = _kernels_draw() if config.device.uses_triton else device_draw.draw
        return Sampler(eos_token_ids, draw_rows=draw)
    return Sampler(eos_token_ids)


def _kernels_draw() -> ChooseRows:
    from engine.kernels.gpu.draw import draw  # needs Triton

    return draw
