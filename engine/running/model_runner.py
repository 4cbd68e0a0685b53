"""Runs one step on one device: clears blocks, builds input tensors, runs the model, samples.

Owns the recorded decode steps. The worker owns the pool; the scheduler owns the sequences, which are only read here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from engine.attention import PagedBackend
from engine.config import EngineConfig
from engine.kernels import cpu_sampling
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


MAX_TOKENS_READ_AGAIN = 32_768
"""With Triton's kernels, drafts are rows of their own while this adds at most so many tokens to what attention reads: 4
GB for Llama-3.1-8B, which an H200 copies in a millisecond. A recorded step saves more than that. By arithmetic, not
measured."""


class Computed(NamedTuple):
    """What the model computes in a step."""

    batch: InputBatch
    logits: torch.Tensor | None
    """[sampled rows, vocabulary] in the model's dtype or wider. None: nothing is sampled."""
    prompt_logits: Iterator[torch.Tensor]
    """Logits of prompts that ask for prompt logprobs, some rows at a time, computed as the iterator is consumed. Must
    be consumed before the next step."""


class StepReader(Protocol):
    """What reads each step beside the model (engine/running/head_drafter.py)."""

    def prepare(self, output: SchedulerOutput, step: StepInput) -> StepInput:
        """Add what `read` needs to the input of the step that is launched next."""

    def read(self, step: StepInput, batch: InputBatch, kv: torch.Tensor) -> None:
        """The model has computed a step: write what this keeps of its tokens to `kv`, one layer of the pool."""


class ModelRunner:
    """Used only by the stepping thread.

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
        reader: StepReader | None = None,
    ) -> None:
        """`group`: see `Worker`. `reader`: reads each step after the model has computed it; the pool's last layer is
        what it writes."""
        self._model = model
        self._backend = backend
        self._kv_pool = kv_pool
        self._on_layer_written = on_layer_written
        self._block_size = config.cache.block_size
        self._device = config.device.device
        self._max_decode_rows, self._max_model_len = config.scheduler.max_decode_rows, config.model.max_model_len
        self._max_tokens_read_again = MAX_TOKENS_READ_AGAIN if config.device.uses_triton else 0
        self._states = model.states
        self._reader = reader
        self._graphs = self._make_graphs(config)
        self._sampler = make_sampler(config)
        # Without async scheduling, only the sampling rank needs the sampled tokens.
        self._sharing_group = group if config.scheduler.async_scheduling else None
        self._sampled: torch.Tensor | None = None
        """The tokens that the last launched step samples, on the device: inputs of the next step."""
        self._row_of: dict[int, int] = {}
        """By `seq_id`: the row of the sequence's last token in `_sampled`."""

    @property
    def adapters(self) -> Adapters | None:
        """None if the engine has no adapters and no room for any."""
        return self._model.adapters

    def prepare(self, output: SchedulerOutput) -> StepInput:
        """Build the input of the step that is launched next."""
        step = StepInput.of(
            output, self._block_size, self._row_of, self._max_tokens_read_again, has_states=self._states is not None
        )
        return step if self._reader is None else self._reader.prepare(output, step)

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput, step: StepInput) -> SampledTokens:
        """Begin to compute a step. The previous step may still be running, and this one may continue from its tokens.
        `step`: the result of `prepare(output)`."""
        batch, logits, logits_of_prompts = self.compute(step, self._layer_callback(output))
        self._tell_of_states(output)
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
        """Do what `launch` does on a rank that does not sample."""
        for _ in self.compute(step).prompt_logits:  # consuming the iterator computes them
            pass
        self._sampled = self._shared(torch.empty(len(step.sample_rows), dtype=torch.int64, device=self._device))

    @torch.inference_mode()
    def compute(self, step: StepInput, on_layer: OnLayer | None = None) -> Computed:
        """Run a step without sampling: clear blocks and run the model."""
        batch = build_input_batch(step, self._device, self._sampled)
        if len(step.begun_blocks):
            clear_blocks(self._kv_pool, step.begun_blocks)
        self._begin_states(step)
        if self._graphs is not None and not step.has_exports and self._graphs.can_run(step):
            logits = self._graphs.run(step, batch)
            self._let_read(step, batch, on_layer)
            return Computed(batch, logits, iter(()))
        if self._model.adapters is not None:
            self._model.adapters.assign(step.adapter_ids)
        if self._states is not None:
            self._states.assign(step.layout.query_lens, step.layout.context_lens, step.state_slots)
        plan = self._backend.prepare(step.layout)
        x_TD = self._model.forward(batch.token_ids, batch.positions, plan, self._kv_pool, on_layer)
        self._let_read(step, batch, on_layer)
        for slot, *block_ids in step.saved_states.tolist():
            assert self._states is not None
            self._states.save(self._kv_pool, slot, block_ids)
        of_prompts = prompt_logits(step, x_TD, self._model.compute_logits)
        if not len(step.sample_rows):
            return Computed(batch, None, of_prompts)
        x_RD = x_TD if batch.sample_rows is None else x_TD[batch.sample_rows]
        return Computed(batch, self._model.compute_logits(x_RD), of_prompts)

    def _begin_states(self, step: StepInput) -> None:
        """Bring the states to what they are before the step."""
        if self._states is None:
            return
        self._states.put_back(step.restored_states)
        for slot, *block_ids in step.loaded_states.tolist():
            self._states.load(self._kv_pool, slot, block_ids)
        self._states.keep(step.kept_states)

    def _let_read(self, step: StepInput, batch: InputBatch, on_layer: OnLayer | None) -> None:
        if self._reader is None:
            return
        self._reader.read(step, batch, self._kv_pool[-1])
        if on_layer is not None:
            on_layer(len(self._kv_pool) - 1)

    def close(self) -> None:
        """Free the recorded steps. No launch may follow."""
        self._graphs = None

    def record_decode_steps(self, on_recorded: Callable[[int, int], None]) -> int:
        """Record all decode steps, before the first request. Calls `on_recorded(number recorded, number of all)`.
        Returns the number of recordings: 0 without CUDA graphs."""
        if self._graphs is None:
            return 0
        with torch.inference_mode():
            self._graphs.record_all(on_recorded)
        return self._graphs.num_recordings

    def record_largest_decode_step(self) -> int:
        """Allocate what decoding needs at most, recorded or not, so that it can be measured. Returns the bytes that all
        recordings will keep in addition to what torch counts as allocated."""
        self._backend.keep_scratch(self._max_decode_rows, self._max_model_len)
        if self._graphs is None:
            return 0
        with torch.inference_mode():
            num_all = self._graphs.record_largest()
        torch.cuda.empty_cache()
        shared_bytes = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return shared_bytes + num_all * RECORDING_BYTES

    def _make_graphs(self, config: EngineConfig) -> DecodeGraphs | None:
        """Returns None if decode steps are launched kernel by kernel."""
        if not config.device.uses_graphs:
            return None

        # Does not capture `self`, which holds the graphs: a reference cycle would keep the device's memory until a
        # garbage collection, and collections skip everything that exists when a worker is made (`gc.freeze`).
        model, kv_pool = self._model, self._kv_pool

        def forward(token_ids: torch.Tensor, positions: torch.Tensor, plan: Any) -> torch.Tensor:
            return model.compute_logits(model.forward(token_ids, positions, plan, kv_pool, None))

        return DecodeGraphs(
            forward=forward,
            backend=self._backend,  # type: ignore[arg-type]  # the configuration ensures it
            recorder=CudaRecorder(),
            adapters=model.adapters,  # type: ignore[arg-type]  # with graphs, adapters are Triton's
            states=model.states,
            max_num_seqs=self._max_decode_rows,
            max_context_len=min(config.device.max_seq_len_to_capture, self._max_model_len),
            device=config.device.device,
        )

    def _shared(self, token_ids: torch.Tensor | None) -> torch.Tensor | None:
        """Share rank 0's tokens with all ranks if the next step may be launched before the host knows them."""
        if self._sharing_group is None or token_ids is None or not len(token_ids):
            return token_ids
        return self._sharing_group.share_first(token_ids)

    def _tell_of_states(self, output: SchedulerOutput) -> None:
        """The step has written the states of these prompts to all layers of their blocks."""
        if self._on_layer_written is not None and output.state_exports:
            exports = [export.blocks for export in output.state_exports]
            for layer in range(len(self._kv_pool)):
                self._on_layer_written(layer, exports)

    def _layer_callback(self, output: SchedulerOutput) -> OnLayer | None:
        on_layer_written, exports = self._on_layer_written, output.exports
        if on_layer_written is None or not exports:
            return None
        return lambda layer: on_layer_written(layer, exports)


def make_sampler(config: EngineConfig) -> Sampler:
    """Choose the fastest sampler for the device that holds the logits."""
    eos_token_ids = config.model.eos_token_ids
    if config.device.attention_backend == "cpu":
        return Sampler(eos_token_ids, choose_greedy=cpu_sampling.choose_largest, draw_rows=cpu_sampling.draw)
    if config.device.device != "cpu":
        draw = _kernels_draw() if config.device.uses_triton else device_draw.draw
        return Sampler(eos_token_ids, draw_rows=draw)
    return Sampler(eos_token_ids)


def _kernels_draw() -> ChooseRows:
    from engine.kernels.gpu.draw import draw  # needs Triton

    return draw
