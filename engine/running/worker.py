"""One device's share of an engine: threads, KV pool, model.

    made: threads set -> model loaded -> pool measured (GPU) and allocated -> warmed up (GPU)
    then `runner` launches step after step; freed with it

Owns the pool and the runner. Reports loading on stderr, since a large model takes minutes.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from engine.attention import PagedBackend, create_attention_backend
from engine.cache_dir import report
from engine.config import EngineConfig
from engine.kv_cache import allocate_kv_pool
from engine.kv_shape import KVCacheShape, kv_cache_shape
from engine.model_loader import load_model
from engine.model_loader.settings import naming_what_guesses
from engine.models.model import FeatureSource
from engine.running.draft_model import DraftModel
from engine.running.head_drafter import HeadDrafter
from engine.running.model_runner import ModelRunner
from engine.running.pool_size import measure_num_blocks
from engine.running.warm_up import warm_up
from engine.scheduling.sequence import OnLayerWritten, SchedulerOutput

if TYPE_CHECKING:
    from engine.tensor_parallel.group import RankGroup

REPORT_AFTER_S = 5.0


class Worker:
    """Raises `ValueError` if the weights do not fit the config, or if the device is missing or too small."""

    def __init__(
        self,
        config: EngineConfig,
        on_layer_written: OnLayerWritten | None,
        allocate_pool: Callable[[KVCacheShape, str], torch.Tensor],
        group: RankGroup | None = None,
    ) -> None:
        """`allocate_pool`: see `KVMemory.allocate`. `group`: the ranks that compute together with this one; None if
        there are no others."""
        if config.device.num_threads > 0:
            torch.set_num_threads(config.device.num_threads)
        device, start_s = config.device.device, time.monotonic()
        backend = create_attention_backend(config)
        with _saying_what_is_too_large(device), torch.inference_mode():
            model = _load(config, backend, group)
        if config.device.uses_graphs and model.reads_back:
            report(
                "decoding steps are not captured as CUDA graphs: the checkpoint's experts are not quantised, or are "
                "widened, and this GPU multiplies them one after the other"
            )
            config = replace(config, device=replace(config.device, uses_graphs=False))
        load_s = time.monotonic() - start_s
        if load_s > REPORT_AFTER_S:
            report(f"loaded {config.model.model} in {load_s:.0f} s")

        def make_runner(kv_pool: torch.Tensor, on_layer_written: OnLayerWritten | None) -> ModelRunner:
            reader = self.drafter if isinstance(self.drafter, HeadDrafter) else None
            return ModelRunner(config, model, backend, kv_pool, on_layer_written, group, reader)

        with (
            _saying_what_is_too_large(device),
            _saying_what_cannot_be_recorded(config),
            _saying_what_does_not_fit(config),
        ):
            self.drafter = _load_drafter(config, model, group)
            self.kv_shape = _shape_of_pool(config, make_runner, self.drafter, group)
            self.kv_pool = allocate_pool(self.kv_shape, device)
            self.runner = make_runner(self.kv_pool, on_layer_written)
            if device != "cpu":
                warm_up(config, self.runner, self.kv_pool)
            if self.drafter is not None:
                self.drafter.start(self.kv_pool)
            if device != "cpu":
                torch.cuda.synchronize()  # from here on, other streams and processes use the pool
        # All objects of now stay alive. Traversing them in each garbage collection would take 1.5 % of a decode step.
        gc.collect()
        gc.freeze()


def _load(config: EngineConfig, backend: PagedBackend[Any], group: RankGroup | None) -> FeatureSource:
    model = load_model(config, backend, group)
    # Loading the weights went through this memory; nothing later needs so much at once.
    if config.device.device == "cpu":
        _release_freed_memory()
    else:
        _release_pinned_memory()
    return model


def _load_drafter(
    config: EngineConfig, model: FeatureSource, group: RankGroup | None
) -> DraftModel | HeadDrafter | None:
    """Returns None if there is none, or if rank 0 has it: a draft model guesses there for all ranks."""
    if config.draft is None or (config.head is None and group is not None and group.rank):
        return None
    with naming_what_guesses(config.scheduler.speculation), torch.inference_mode():
        if config.head is not None:
            return HeadDrafter(config, model, group)
        return DraftModel(config.draft, config.model.vocab_size)


def _shape_of_pool(
    config: EngineConfig,
    make_runner: Callable[[torch.Tensor, None], ModelRunner],
    drafter: DraftModel | HeadDrafter | None,
    group: RankGroup | None,
) -> KVCacheShape:
    """The pool's shape, with the configured number of blocks, or else as many as fit on every rank."""
    cache = config.cache
    shape = kv_cache_shape(
        config.model, num_blocks=cache.num_blocks, block_size=cache.block_size, kv_dtype=cache.kv_dtype
    )
    if shape.num_blocks:
        return shape

    def run_steps(shape: KVCacheShape, steps: list[SchedulerOutput]) -> int:
        runner = make_runner(allocate_kv_pool(shape, config.device.device), None)
        kept_bytes = runner.record_largest_decode_step()
        # The largest twice: a head keeps the features of the step before.
        for step in [*steps, *steps[-1:]]:
            runner.launch(step, runner.prepare(step)).wait()
        return kept_bytes + (0 if drafter is None else drafter.run_largest_steps())

    block_bytes_beside = 0 if drafter is None else drafter.block_bytes
    num_blocks = measure_num_blocks(config, shape, run_steps, block_bytes_beside)
    return replace(shape, num_blocks=num_blocks if group is None else group.smallest(num_blocks))


@contextmanager
def _saying_what_cannot_be_recorded(config: EngineConfig) -> Iterator[None]:
    """Raise `ValueError` if transformers' code does something in a step that a CUDA graph cannot record, such as a copy
    from the host. The probe (`engine.models.transformers_probe`) has already ruled out reads from the device."""
    try:
        yield
    except RuntimeError as error:
        if _is_out_of_memory(error) or not config.device.uses_graphs or config.model.model_impl != "transformers":
            raise
        raise ValueError(
            "a decoding step by transformers' code could not be recorded as a CUDA graph: give enforce_eager "
            f"({str(error).splitlines()[0]})"
        ) from error


@contextmanager
def _saying_what_does_not_fit(config: EngineConfig) -> Iterator[None]:
    """Raise `ValueError` if one of our kernels needs more resources than this GPU has, or if Triton's assembler does
    not know the GPU: its kind is one that no tile sizes were chosen for."""
    if not config.device.uses_triton:
        yield
        return
    from triton.runtime.errors import OutOfResources, PTXASError

    try:
        yield
    except (OutOfResources, PTXASError) as error:
        raise ValueError(
            f"the Triton kernels do not fit this GPU: give attention_backend torch ({str(error).splitlines()[0]})"
        ) from error


@contextmanager
def _saying_what_is_too_large(device: str) -> Iterator[None]:
    """Raise `ValueError` if `device` has not enough memory."""
    try:
        yield
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        what_helps = (
            "this process may not have so much memory: lower kv_cache_gib or num_kv_blocks, or take a smaller model"
            if device == "cpu"
            else "the GPU has not enough memory: lower kv_cache_gib, num_kv_blocks or gpu_memory_utilization, or "
            "max_num_seqs, max_num_batched_tokens or max_seq_len_to_capture, or take a smaller model"
        )
        raise ValueError(f"{what_helps} ({str(error).splitlines()[0]})") from error


def _is_out_of_memory(error: RuntimeError) -> bool:
    """torch's GPU allocator has an error class of its own. Triton (loading kernels), the driver, our CPU kernels and
    torch's CPU allocator can only be told by their message."""
    message = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in message or "can't allocate memory" in message


def _release_pinned_memory() -> None:
    """Free the pinned host memory that torch caches for later copies, as torch itself does before it records."""
    torch.cuda.synchronize()
    empty_cache = getattr(torch._C, "_host_emptyCache", None)
    if empty_cache is not None:
        empty_cache()


def _release_freed_memory() -> None:
    """Return freed memory from the C library to the system: kernels have copied the weights into their own layout."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if malloc_trim is not None:
        malloc_trim(0)
