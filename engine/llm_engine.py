"""The engine: `schedule -> launch -> apply`, one step after the other, on one thread.

    on a CPU               on a device (`async_scheduling`)
    schedule(k)            schedule(k + 1)  launch(k + 1)       while the device computes step k
    launch(k)              wait for tokens of k, apply(k)       while it computes step k + 1
    apply(k)

A draft model, if there is one, guesses between `schedule` and `launch`.

Owns the scheduler, the block manager and the executor. Owns no thread: whoever calls `step` must make all other calls
from that same thread (see `engine.async_llm_engine`).

Three ways in: `add_request` (prefill and decode here), `add_prefill` (compute the prompt and one token, then hold the
KV for another engine), `reserve` + `commit` (decode what another engine prefilled). Two ways out: a finished output,
and `abort` in any state, which also frees held blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Unpack

from engine.config import EngineConfig
from engine.input_processor import FurtherArguments, InputProcessor
from engine.kv_memory import KVMemory
from engine.kv_shape import num_state_blocks_of
from engine.lora.adapters import ReadAdapter
from engine.lora.modules import LoRAModule
from engine.lora.table import AdapterTable
from engine.model_loader.model_config import lora_module_of
from engine.outputs import RequestOutput
from engine.running.executor import Executor
from engine.sampling.sampled_tokens import SampledTokens
from engine.sampling_params import SamplingParams
from engine.scheduling.block_ledger import BlockLedger, CacheEvent, HostLedger
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.grammar import Grammars
from engine.scheduling.pace import StepPace
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import OnLayerWritten, SchedulerOutput, Sequence
from engine.scheduling.snapshots import min_snapshot_tokens
from engine.scheduling.stats import SchedulerStats
from engine.scheduling.stream_interval import StreamInterval
from prefix_hash import prompt_digest, salted_key


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks for a sequence whose KV comes from elsewhere."""

    block_ids: list[int]
    num_cached_blocks: int
    """Leading blocks of `block_ids` whose KV the prefix cache has already: the other engine need not send them."""
    prompt_digest: bytes
    """Identifies the tokens, model and adapter that the KV must be computed from: see `prefix_hash.prompt_digest`."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy the engine is."""

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_free_seqs: int
    blocks: BlockLedger
    host_blocks: HostLedger = field(default_factory=HostLedger)


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    scheduler_output: SchedulerOutput
    tokens: SampledTokens
    start_s: float
    """When the step was launched."""


class LLMEngine:
    """Token ids in, token ids out. Not thread-safe."""

    def __init__(
        self,
        config: EngineConfig,
        on_layer_written: OnLayerWritten | None = None,
        memory: KVMemory | None = None,
    ) -> None:
        """Load the model, and allocate the block pool from `memory` (default: the process' own memory).

        `step` calls `on_layer_written` once per layer, with the blocks of prefill-only requests whose KV in that layer
        is now final.
        """
        self.config = config
        self.executor = _create_executor(config, on_layer_written, memory or KVMemory())
        num_state_blocks = num_state_blocks_of(config.model.recurrent_bytes, self.executor.kv_shape.all_layers_bytes)
        self.block_manager = BlockManager(
            num_blocks=self.executor.kv_shape.num_blocks,
            block_size=config.cache.block_size,
            prefix_key=config.prefix_key,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            num_host_blocks=self.executor.num_host_blocks,
            num_state_blocks=num_state_blocks,
            min_snapshot_tokens=min_snapshot_tokens(num_state_blocks, config.cache.block_size),
        )
        self._scheduler = Scheduler(
            config.scheduler,
            self.block_manager,
            max_model_len=config.model.max_model_len,
            eos_token_ids=config.model.eos_token_ids,
        )
        self._sequences = self._scheduler.sequences
        self._pace = StepPace(config.scheduler.max_itl_ms / 1000)
        self._interval = StreamInterval(config.scheduler.stream_interval)
        self._grammars = Grammars(
            config.model.path, vocab_size=config.model.vocab_size, eos_token_ids=config.model.eos_token_ids
        )
        self.loras = AdapterTable(config.lora_modules, config.lora_room.num)
        self._processor = InputProcessor(config, self._sequences, self._grammars, self.loras)
        self._in_flight: _StepInFlight | None = None
        self._last_done_s = 0.0
        self._is_woken = False
        """See `wake_by`."""
        self.is_idle = True
        """The last step computed nothing: there was no work, no free memory, or all work waits for a grammar or for
        blocks from host memory (`wake_by`)."""

    # -- ways in ------------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Seq[int],
        sampling_params: SamplingParams,
        *,
        may_wait: bool = True,
        **further: Unpack[FurtherArguments],
    ) -> bool:
        """Queue a request to be prefilled and decoded here. Returns False if the request would have to wait and
        `may_wait` is False. `add_request`, `add_prefill` and `reserve` raise what `InputProcessor.process` raises."""
        seq = self._processor.process(request_id, prompt_token_ids, sampling_params, **further)
        if not may_wait and not self._scheduler.has_room(seq):
            _refuse(seq)
            return False
        self._sequences.add(seq)
        return True

    def add_prefill(
        self,
        request_id: str,
        prompt_token_ids: Seq[int],
        sampling_params: SamplingParams,
        *,
        num_receiver_blocks: int = 0,
        **further: Unpack[FurtherArguments],
    ) -> bytes:
        """Queue a request to be prefilled here. After its first token, the engine holds its blocks until `abort`.

        The first `num_receiver_blocks` blocks are not offered to `on_layer_written`, since the receiver has them.
        Returns the prompt digest, which must equal the receiver's `Reservation.prompt_digest`.
        """
        seq = self._processor.process(request_id, prompt_token_ids, sampling_params, **further)
        seq.is_prefill_only = True
        seq.num_state_blocks = self.block_manager.num_state_blocks
        seq.num_exported_blocks = num_receiver_blocks
        self._sequences.add(seq)
        return self._prompt_digest(seq)

    def reserve(
        self,
        request_id: str,
        prompt_token_ids: Seq[int],
        sampling_params: SamplingParams,
        **further: Unpack[FurtherArguments],
    ) -> Reservation | None:
        """Reserve blocks for a request that another engine prefills. Returns None if too few blocks are available."""
        seq = self._processor.process(request_id, prompt_token_ids, sampling_params, **further)
        seq.prompt_logprobs = None  # the prefilling engine reports them
        seq.num_state_blocks = self.block_manager.num_state_blocks
        if not self._scheduler.reserve(seq):
            _refuse(seq)
            return None
        num_cached_blocks = seq.num_computed_tokens // self.block_manager.block_size
        return Reservation([*seq.block_table, *seq.loaded_state_ids], num_cached_blocks, self._prompt_digest(seq))

    def commit(self, request_id: str, token_id: int, num_tokens: int) -> None:
        """Start decoding a reserved request: its blocks now hold the KV of all `num_tokens` tokens, and the other
        engine sampled `token_id` after them.

        Raises `KeyError` if the reservation is gone. Raises `ValueError`, and keeps the reservation, for an invalid
        token or if the reservation was for another number of tokens.
        """
        if not 0 <= token_id < self.config.model.vocab_size:
            raise ValueError(f"token_id must be in [0, {self.config.model.vocab_size}), is {token_id}")
        self._scheduler.commit(request_id, token_id, num_tokens)

    # -- ways out -----------------------------------------------------------------------------------------------

    def hold(self, request_id: str) -> None:
        """Stop computing a prefill-only request, but keep its blocks until `abort`, since a transfer may read them."""
        self._sequences.hold(request_id)

    def abort(self, request_id: str) -> bool:
        """End a request in any state and free its blocks. Returns False if the request is unknown or already ended."""
        self._interval.forget(request_id)
        return self._sequences.abort(request_id)

    # -- one step -----------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Launch a step, then wait for a step and return its new tokens. With `async_scheduling`, wait for the
        previously launched step: the first call after an idle time returns nothing. Otherwise wait for this step."""
        earlier, self._in_flight = self._in_flight, self._launch()
        if earlier is None and not self.config.scheduler.async_scheduling:
            earlier, self._in_flight = self._in_flight, None
        self.is_idle = earlier is None and self._in_flight is None
        return [] if earlier is None else self._finish(earlier)

    def _launch(self) -> _StepInFlight | None:
        output = self._schedule()
        may_wait = self._in_flight is None and not self._is_woken
        while not output.scheduled and may_wait and self._wait():
            output = self._schedule()
        if not output.scheduled:
            return None
        start_s = time.monotonic()
        for s in output.scheduled:
            s.seq.first_scheduled_s = s.seq.first_scheduled_s or start_s
        if output.draft_parts:
            output = self._scheduler.take_drafts(output, self.executor.draft(output.draft_parts))
        tokens = self.executor.launch(output)
        self._scheduler.begin(output)
        return _StepInFlight(output, tokens, start_s)

    def _schedule(self) -> SchedulerOutput:
        self._scheduler.take_copied(self.executor.take_copied())
        output = self._scheduler.schedule(self._pace.num_prefill_tokens(self._sequences.num_waiting_prompts))
        self.executor.copy_blocks(self.block_manager.take_copies())
        return output

    def _wait(self) -> bool:
        """Wait for a grammar, or for blocks from host memory, without which nothing can be computed. Returns False if
        none is pending."""
        return self._scheduler.wait_for_grammar() or (self._sequences.has_work and self.executor.wait_for_copies())

    def _finish(self, step: _StepInFlight) -> list[RequestOutput]:
        """Wait for the step's tokens and apply them to their sequences."""
        output, tokens = step.scheduler_output, step.tokens
        sampled = self.executor.wait(tokens)
        # A step that was launched early began when the previous step was done.
        began_s, self._last_done_s = max(step.start_s, self._last_done_s), time.monotonic()
        request_outputs = self._scheduler.apply(output, sampled, tokens.logprobs(), tokens.prompt_logprobs())
        self._note(output, request_outputs, self._last_done_s - began_s)
        return self._interval.take_in(request_outputs)

    def has_unfinished_requests(self) -> bool:
        """Return whether any request is waiting or running, or a step is in flight. Granted and held requests do not
        count: they wait for other engines."""
        return self._sequences.has_work or self._in_flight is not None

    def wake_by(self, wake: Callable[[], None]) -> None:
        """Make `step` return instead of blocking on a grammar or on blocks from host memory. A step with nothing else
        to do then computes nothing, and `wake` is called, on any thread, once the grammar or the blocks are ready."""
        self._is_woken = True
        self._grammars.on_compiled = wake
        self.executor.on_copied(wake)

    def close(self) -> None:
        """End the other ranks' processes, if any. Must be the last call."""
        self.executor.close()

    # -- questions ----------------------------------------------------------------------------------------------

    @property
    def is_copying(self) -> bool:
        """Whether blocks are being copied between the pool and host memory: these copies end even if no request
        comes."""
        return self.block_manager.is_copying

    @property
    def stats(self) -> SchedulerStats:
        return self._scheduler.stats

    def load(self) -> EngineLoad:
        sequences = self._sequences
        return EngineLoad(
            num_running=len(sequences.running),
            num_waiting=len(sequences.waiting) + len(sequences.loading),
            num_waiting_tokens=sequences.num_waiting_tokens,
            num_free_seqs=sequences.num_free_seqs,
            blocks=self.block_manager.ledger(),
            host_blocks=self.block_manager.host_ledger(),
        )

    def forget_prefixes(self) -> bool:
        """Drop all cached prefixes. Returns whether no block of the pool is cached any more
        (`BlockManager.forget_prefixes`)."""
        return self.block_manager.forget_prefixes()

    def take_cache_events(self) -> list[CacheEvent]:
        """Return the prefix blocks that were stored and evicted since the last call, in order."""
        return self.block_manager.take_cache_events()

    def cached_hashes(self) -> list[bytes]:
        """Return the hashes of all blocks in the prefix cache."""
        return self.block_manager.cached_hashes()

    def audit(self) -> tuple[BlockLedger, list[str]]:
        """Return the ledger, and the errors that a recount of the whole pool finds."""
        return self.block_manager.ledger(), self._scheduler.check_integrity()

    def granted_block_ids(self) -> set[int]:
        """Return the blocks that are reserved for KV from other engines."""
        return {
            block_id
            for seq in self._sequences.granted.values()
            for block_id in (*seq.block_table, *seq.loaded_state_ids)
        }

    # -- adapters that come and go ------------------------------------------------------------------------------

    def find_lora(self, name: str, path: Path) -> LoRAModule:
        """Describe the adapter in folder `path`; reads its weights to compute their digest. May run on any thread.
        Raises `ValueError` if the folder holds no adapter that can be served."""
        return lora_module_of(name, path, self.executor.max_adapter_bytes)

    def read_lora(self, module: LoRAModule) -> ReadAdapter:
        """Read the adapter's weights, for `add_lora`. May run on any thread. Raises `ValueError` if the adapter cannot
        be served."""
        return self.executor.read_adapter(module)

    def add_lora(self, module: LoRAModule, adapter: ReadAdapter) -> int:
        """Serve an adapter from now on, and return its number. An adapter that had the same name starts leaving. Raises
        `ValueError` if there is no room. After any exception, nothing has changed."""
        number = self.loras.next_number(module.name)
        try:
            self.executor.put_adapter(number, adapter)
        except BaseException:
            self.executor.remove_adapter(number)  # the next adapter with this number may change other products
            raise
        return self.loras.add(module)

    def remove_lora(self, name: str) -> bool:
        """Make an adapter leave: new requests can no longer ask for it, except by its digest. Returns False if there is
        no adapter of that name, or if it is a permanent one."""
        return self.loras.remove(name)

    def free_loras(self, numbers: Collection[int]) -> list[int]:
        """Free those of the adapters `numbers` that are leaving and that no request uses. Returns the numbers of all
        adapters that are still leaving."""
        in_use = self._sequences.lora_ids
        for number in set(self.loras.leaving).intersection(numbers) - in_use:
            self.executor.remove_adapter(number)
            self.loras.free(number)
        return self.loras.leaving

    # -- inside -------------------------------------------------------------------------------------------------

    def _note(self, output: SchedulerOutput, request_outputs: list[RequestOutput], seconds: float) -> None:
        """Record what a step computed and how long it took, for the pace of later steps and for the statistics."""
        nums_tokens = [s.num_new_tokens - len(s.draft_token_ids) - s.num_replayed for s in output.scheduled]
        num_decoding = nums_tokens.count(1)
        num_prefill_tokens = sum(nums_tokens) - num_decoding
        self._pace.note(num_decoding=num_decoding, num_prefill_tokens=num_prefill_tokens, seconds=seconds)
        stats = self._scheduler.stats
        stats.num_steps += 1
        # The device computes a prompt's single token like a decoded token; the statistics count it as the prompt's.
        stats.num_prompt_tokens += num_prefill_tokens + sum(
            num_tokens == 1 and s.first < s.seq.num_prompt_tokens
            for s, num_tokens in zip(output.scheduled, nums_tokens, strict=True)
        )
        stats.num_generation_tokens += sum(len(o.token_ids) for o in request_outputs)
        stats.seconds_in_steps += seconds

    def _prompt_digest(self, seq: Sequence) -> bytes:
        """Digest of the tokens and the adapter of a sequence that two engines share. It leaves out the cache salt,
        which decides who may share blocks and does not affect their KV."""
        return prompt_digest(seq.token_ids, salted_key(self.config.prefix_key, "", seq.lora_digest))


def _refuse(seq: Sequence) -> None:
    """Clean up a sequence that was never added to the scheduler, which otherwise ends sequences."""
    if seq.grammar is not None:
        seq.grammar.close()


def _create_executor(config: EngineConfig, on_layer_written: OnLayerWritten | None, memory: KVMemory) -> Executor:
    """Raises `ValueError` if the weights do not fit the config, or the device is missing or too small."""
    if config.parallel.tensor_parallel_size == 1:
        return Executor(config, on_layer_written, memory)
    from engine.tensor_parallel.executor import TensorParallelExecutor  # imports torch.distributed

    return TensorParallelExecutor(config, on_layer_written, memory)
