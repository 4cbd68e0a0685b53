"""Configuration that the engine reads: `EngineConfig` and its parts, with vLLM's names. Made from `EngineArgs`
(engine/engine_args.py) by `engine.model_loader.create_engine_config`.

Frozen, validated at construction, never changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.lora.modules import LoRAModule, LoRARoom
from engine.models.deepseek_config import LatentConfig
from engine.models.eagle_config import EagleConfig
from engine.models.head_shape import HeadShape
from engine.models.mtp_config import MtpConfig
from engine.scheduling.speculation import SpeculativeConfig
from prefix_hash import prefix_key

GIB = 1024**3
MOST_KEPT_STATES = 16
"""Large models' states take tens of megabytes each."""
HeadConfig = EagleConfig | MtpConfig
"""Of a head that guesses from the model's hidden states."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model's shape and location. Made by `engine.model_loader.create_engine_config`."""

    model: str
    """As the user named it."""
    served_model_name: str
    aliases: tuple[str, ...] = ()
    """The model's other names, which the router handles; no adapter may have one of them."""
    path: Path
    """Local folder with config.json and, unless weights are dummy, weights."""
    hf_config: dict[str, Any]
    """config.json, as parsed."""
    dtype: str
    """"float32", "bfloat16" or "float16", resolved."""
    quantization: str
    """Format of the weights of layers' products: "none", "fp8", "int8", "int4" or "stored", resolved."""
    model_impl: str
    """Which code computes the model: "tandem" or "transformers"."""
    max_model_len: int
    """Maximum length of prompt and answer together, in tokens."""
    vocab_size: int
    num_layers: int
    """Of the pool: the model's, and one for a head that guesses."""
    num_heads: int
    """Heads that one rank computes; so is `num_kv_heads`."""
    num_kv_heads: int
    head_dim: int
    """Dim of a key in the pool."""
    mla: LatentConfig | None
    """None: the pool holds keys and values of heads, not latents."""
    hidden_size: int
    eos_token_ids: frozenset[int]
    weights_digest: str
    """Digest of the weights' bytes (or of the dummy seed): weights with equal digests compute equal KV."""
    head_shapes: tuple[HeadShape, ...] = ()
    """Each layer's, if they differ: see `ModelShape`."""
    recurrent_bytes: int = 0
    """What a sequence keeps besides keys and values (engine/models/recurrent_states.py); 0: nothing."""


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    block_size: int
    kv_dtype: str
    """The pool's dtype: the model's, or "float8_e4m3fn"."""
    num_blocks: int
    """0: as many as fit on the GPU, measured after the model is loaded (engine/running/pool_size.py)."""
    gpu_memory_utilization: float
    enable_prefix_caching: bool
    kv_offloading_bytes: int
    """Host memory for blocks that the pool evicts (engine/scheduling/offloading.py); 0: none."""
    kv_order: str
    """The order of a block's bytes, which the attention backend chooses (engine/kv_cache.py)."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    tensor_parallel_size: int
    """Number of processes that compute every step together, each on its own device (engine/tensor_parallel)."""


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    """Token budget of one step."""
    prefill_chunk_tokens: int
    """Maximum prompt tokens of one sequence in one step."""
    prefill_batch_tokens: int
    """A step takes no further prompt once it has this many prompt tokens."""
    max_itl_ms: float
    """Target duration of a step that decodes and prefills (engine/scheduling/pace.py); 0: none."""
    stream_interval: int
    """Tokens of an answer that are reported at a time (engine/scheduling/stream_interval.py)."""
    async_scheduling: bool
    """Schedule and launch a step while the previous one is being computed (engine/llm_engine.py)."""
    speculation: SpeculativeConfig | None
    """Speculative decoding (engine/scheduling/speculation.py). None: off."""
    draft_batch_tokens: int
    """A step takes no further draft once it has this many rows for decoding sequences."""
    draft_catch_up_tokens: int = 0
    """The most known tokens that a draft model reads in a step (engine/scheduling/model_drafting.py)."""
    draft_model_len: int = 0
    """The longest sequence for which the draft model guesses; 0 without one."""

    @property
    def max_kept_states(self) -> int:
        """How many sequences may have drafts in a step, in models whose layers keep a state: the step keeps a copy of
        each one's."""
        return 0 if self.speculation is None else min(self.max_num_seqs, self.draft_batch_tokens // 2, MOST_KEPT_STATES)

    @property
    def max_decode_rows(self) -> int:
        """The most rows of decoding sequences, drafts included, in a step."""
        if self.speculation is None:
            return self.max_num_seqs
        num_wanted = self.max_num_seqs * (1 + self.speculation.num_speculative_tokens)
        return max(self.max_num_seqs, min(num_wanted, self.draft_batch_tokens, self.max_num_batched_tokens))


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    device: str
    num_threads: int
    """Compute threads of one rank; 0 leaves torch's default."""
    attention_backend: str
    """Resolved: "cpu", "triton", "flash_attn" or "torch"."""
    uses_triton: bool
    """The Triton kernels compute what surrounds attention."""
    batch_invariant: bool
    """A token's bits depend only on its sequence up to it. The CPU kernels always guarantee this."""
    uses_graphs: bool
    """Decode steps are recorded as CUDA graphs and replayed (engine/running/decode_graphs.py)."""
    max_seq_len_to_capture: int
    """Steps with a longer context are not recorded."""


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    load_format: str
    seed: int
    """Seed of dummy weights."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    model: ModelConfig
    cache: CacheConfig
    parallel: ParallelConfig
    scheduler: SchedulerConfig
    device: DeviceConfig
    load: LoadConfig
    lora_modules: tuple[LoRAModule, ...]
    """Adapters that are loaded at the start, sorted by name."""
    lora_room: LoRARoom = LoRARoom()  # noqa: RUF009 - it is frozen
    """Room for adapters that come while the engine runs."""
    draft: EngineConfig | None = None
    """What guesses, a draft model or a head: as of an engine for it alone
    (engine/model_loader/draft_config.py)."""
    head: HeadConfig | None = None
    """How the head is computed. None: there is none."""
    compat_digest: str
    """Covers all that must be equal for two engines to exchange KV: config, weights, dtypes, block size, order."""

    @property
    def prefix_key(self) -> bytes:
        """Key of the prefix hashes."""
        return prefix_key(self.compat_digest)
