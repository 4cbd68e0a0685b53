"""Configuration: `EngineArgs` (what a user sets) -> `EngineConfig` (what the engine reads), with vLLM's names.

Frozen, validated at construction, never changed. Only entry points read the environment.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from engine.lora.modules import EXAMPLE as LORA_EXAMPLE
from engine.lora.modules import MAX_MODULES, MAX_RANK, LoRAModule, LoRARoom, parse_lora_modules
from engine.models.deepseek_config import LatentConfig
from engine.scheduling.speculation import EXAMPLE, SpeculativeConfig
from prefix_hash import prefix_key

OTHER_NAMES_OF_DTYPES = {"half": "float16", "float": "float32"}
DTYPES = ("auto", "float32", "bfloat16", "float16", *OTHER_NAMES_OF_DTYPES)
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
ATTENTION_BACKENDS = ("auto", "cpu", "triton", "flash_attn", "torch")
MODEL_IMPLS = ("auto", "tandem", "transformers")
"""Which code computes a model: our decoder, transformers' code over our attention, or ("auto") the first that can."""
QUANTIZATIONS = ("auto", "none", "fp8", "int8", "int4")
DEVICES = ("auto", "cpu", "cuda")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")
CHOICES = {
    "dtype": DTYPES, "quantization": QUANTIZATIONS, "kv_cache_dtype": KV_CACHE_DTYPES, "load_format": LOAD_FORMATS,
    "model_impl": MODEL_IMPLS, "device": DEVICES, "attention_backend": ATTENTION_BACKENDS,
}  # fmt: skip
"""By field of `EngineArgs`."""
LEAST = {
    "num_kv_blocks": 0, "max_num_seqs": 1, "max_num_batched_tokens": 1, "prefill_chunk_tokens": 0,
    "prefill_batch_tokens": 0,
}  # fmt: skip
MAX_RANKS = 64
MAX_STREAM_INTERVAL = 1024
MAX_THREADS = 1024
"""The thread barrier keeps a word per thread on the stack, and a system limits the threads of all its processes."""
RANGES = {
    "tensor_parallel_size": (1, MAX_RANKS), "num_threads": (0, MAX_THREADS), "max_itl_ms": (0, 3_600_000),
    "stream_interval": (1, MAX_STREAM_INTERVAL),
}  # fmt: skip
GIB = 1024**3


KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "int": ("a whole number", (int,)), "float": ("a number", (int, float)), "bool": ("true or false", (bool,)),
    "str": ("a text", (str,)),
}  # fmt: skip
"""By a field's type: its name in errors, and the accepted types. Each field's own check decides about its value."""


def _check_type(name: str, kind: str, value: object) -> None:
    if kind in KINDS:
        named, types = KINDS[kind]
        fits = isinstance(value, types) and (kind == "bool" or not isinstance(value, bool))
        _check(fits, f"{name} must be {named}, is {value!r}")


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


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

    @property
    def num_kv_parts(self) -> int:
        """Parts of a token in a layer of the pool: 2, keys and values; or 1, latents."""
        return 2 if self.mla is None else 1


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
    compat_digest: str
    """Covers all that must be equal for two engines to exchange KV: config, weights, dtypes, block size, order."""

    @property
    def prefix_key(self) -> bytes:
        """Key of the prefix hashes."""
        return prefix_key(self.compat_digest)


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """One engine's settings, as flags. Field names are vLLM's; `metadata["help"]` is the flag's help text.

    Raises `ValueError` naming the field and its bound. `engine.model_loader.create_engine_config` resolves it.
    """

    model: str = field(
        default="smollm2-135m-instruct",
        metadata={"help": "Model folder, GGUF file, hub id, or the default model's name."},
    )
    served_model_name: str = field(
        default="",
        metadata={"help": "Name, or names (NAME,NAME), that requests may give as `model`. Default: the model's own."},
    )
    dtype: str = field(
        default="auto", metadata={"help": "auto (the weights' own), float32 (or float), bfloat16 or float16 (or half)."}
    )
    quantization: str = field(
        default="auto",
        metadata={
            "help": "Format of the weights in the layers' matrix products: auto (each as the checkpoint stores it; "
            "on a CPU only int8 and int4 stay so), none (such weights are widened when loaded), int8 or int4 (weights "
            "only, on any device) or fp8 (also activations, where a step has many rows; GPUs of compute capability 8.9 "
            "or later). Weights that the checkpoint stores otherwise are quantised when loaded."
        },
    )
    kv_cache_dtype: str = field(
        default="auto",
        metadata={"help": "Format of the KV pool: auto (the model's dtype) or fp8 (float8_e4m3fn, half the bytes)."},
    )
    model_impl: str = field(
        default="auto",
        metadata={
            "help": "Which code computes the model: tandem (our decoder), transformers (its code over our "
            "attention, for most other families of causal language models) or auto (the first of these that knows "
            "the architecture)."
        },
    )
    load_format: str = field(
        default="auto",
        metadata={
            "help": "Format to load weights from: auto, safetensors, gguf, or dummy (random "
            "weights in the config's shapes)."
        },
    )
    seed: int = field(default=0, metadata={"help": "Seed for dummy weights."})
    max_model_len: int = field(
        default=0,
        metadata={"help": "Maximum length of prompt and answer together, in tokens. 0: what the model allows."},
    )
    tensor_parallel_size: int = field(
        default=1,
        metadata={
            "help": "Split the model among this many processes, each with its own GPU or its share of a CPU's "
            "cores. The number must divide the model's heads and intermediate size, and must divide its key heads "
            "or be a multiple of them."
        },
    )
    lora_modules: str = field(
        default="",
        metadata={
            "help": "LoRA adapters to serve beside the model: folders in PEFT's layout, each with the name that "
            f"requests give as their model: {LORA_EXAMPLE}, several separated by commas, or a JSON object. Empty: "
            "none."
        },
    )
    max_loras: int = field(
        default=0,
        metadata={
            "help": "How many further adapters there may be at once that come and go while it runs (--lora-dir), those "
            "included that are leaving. A GPU's memory is kept for them from the start on."
        },
    )
    max_lora_rank: int = field(
        default=16, metadata={"help": f"The largest rank of these adapters: 1 to {MAX_RANK}. It takes memory on GPUs."}
    )
    block_size: int = field(default=16, metadata={"help": "Tokens per KV block: a power of two from 1 to 256."})
    num_kv_blocks: int = field(default=0, metadata={"help": "Size of the KV pool in blocks. 0: kv-cache-gib decides."})
    kv_cache_gib: float = field(
        default=0.0,
        metadata={
            "help": "Size of the KV pool in GiB, on each GPU, if num-kv-blocks is 0. 0: 1 on a CPU; on a GPU, what "
            "gpu-memory-utilization leaves."
        },
    )
    gpu_memory_utilization: float = field(
        default=0.9,
        metadata={
            "help": "Share of a GPU's memory for weights, KV pool and a step's working memory, if the pool is "
            "given no size. Two engines on one GPU need a smaller share each; tandem up divides the default among "
            "its workers."
        },
    )
    enable_prefix_caching: bool = field(
        default=True, metadata={"help": "Keep blocks of finished requests and reuse them for equal prefixes."}
    )
    kv_offloading_size: float = field(
        default=0.0,
        metadata={
            "help": "GiB of host memory beside the KV pool, for all ranks together. Cached blocks are copied there "
            "before others take their place, and back when a prompt begins with them. For GPUs; on a CPU a larger "
            "pool does the same. 0: none."
        },
    )
    max_num_seqs: int = field(default=256, metadata={"help": "Maximum number of sequences in one step."})
    max_num_batched_tokens: int = field(default=2048, metadata={"help": "Token budget of one step."})
    prefill_chunk_tokens: int = field(
        default=0, metadata={"help": "Maximum prompt tokens of one sequence in one step. 0: max-num-batched-tokens."}
    )
    prefill_batch_tokens: int = field(
        default=0,
        metadata={
            "help": "Prompts share a step until they have this many tokens together. Once these keep the device "
            "busy, further prompts would make the first one wait for the last. 0: 256 on a CPU, "
            "max-num-batched-tokens on a GPU."
        },
    )
    max_itl_ms: float = field(
        default=40.0,
        metadata={
            "help": "Target for the longest gap between tokens, which is the time of one step. While requests "
            "decode, prompts beside them are computed in pieces small enough for it. Each further waiting prompt "
            "allows a step half as long again, up to four times this. 0: pieces as large as the token budget."
        },
    )
    stream_interval: int = field(
        default=1,
        metadata={
            "help": "Send an answer's tokens in groups of this many, but its first and its last without delay. 1: "
            "send each as it comes. Where many answers stream at once, larger groups save worker, router and "
            "gateway most of the cost per token."
        },
    )
    async_scheduling: bool = field(
        default=True,
        metadata={
            "help": "On a GPU, schedule and launch each step while the one before it is still being computed. A "
            "CPU does not do so, and nor does a GPU with --speculative-config."
        },
    )
    speculative_config: str = field(
        default="",
        metadata={
            "help": "Speculative decoding: guess ahead, and compute several tokens of an answer in one step. The "
            "tokens are the same, and come sooner where text repeats itself or has a fixed form. JSON, such as "
            f"{EXAMPLE}."
        },
    )
    device: str = field(default="auto", metadata={"help": "auto, cpu or cuda."})
    num_threads: int = field(default=0, metadata={"help": "Compute threads per process. 0: all cores."})
    attention_backend: str = field(
        default="auto",
        metadata={
            "help": "auto (the fastest), cpu (compiled kernels, bfloat16), triton (GPU kernels), flash_attn "
            "(FlashAttention for prompts, the GPU kernels for decoding; float16 or bfloat16; FlashAttention-2 and "
            "torch's own build of it need block-size 256) or torch."
        },
    )
    batch_invariant: bool = field(
        default=False,
        metadata={
            "help": "On a GPU, compute the same bits for a request whether it runs alone, among others, in chunks, "
            "after a preemption or on another worker with a GPU of the same kind: all matrix products use our "
            "kernels instead of the device's library, and decoding computes attention as prompts do. Slower. On a "
            "CPU the compiled kernels always do so."
        },
    )
    enforce_eager: bool = field(
        default=False,
        metadata={"help": "On a GPU, launch every kernel of every step instead of replaying CUDA graphs."},
    )
    max_seq_len_to_capture: int = field(
        default=8192,
        metadata={
            "help": "On a GPU, CUDA graphs of decoding steps are captured at startup for contexts of up to this "
            "many tokens. A step with a longer context is launched kernel by kernel."
        },
    )

    def __post_init__(self) -> None:
        for each in fields(self):
            _check_type(each.name, str(each.type), getattr(self, each.name))
        _check(bool(self.model), "model must not be empty")
        for name, choices in CHOICES.items():
            chosen = getattr(self, name)
            _check(chosen in choices, f"{name} must be one of {', '.join(choices)}, is {chosen!r}")
        for name, least in LEAST.items():
            number = getattr(self, name)
            _check(number >= least, f"{name} must be at least {least}, is {number}")
        for name, (least, most) in RANGES.items():
            number = getattr(self, name)
            _check(least <= number <= most, f"{name} must be in [{least}, {most}], is {number}")
        _check(
            self.max_model_len == 0 or self.max_model_len >= 2,
            f"max_model_len must be at least 2 (a prompt and an answer of one token), or 0, is {self.max_model_len}",
        )
        _check(0 <= self.seed < 2**63, f"seed must be in [0, 2**63), is {self.seed}")
        _check(
            self.load_format != "gguf" or self.model.endswith(".gguf"),
            f"load_format gguf needs a .gguf file as model, is {self.model!r}",
        )
        _check(
            1 <= self.block_size <= 256 and self.block_size & (self.block_size - 1) == 0,
            f"block_size must be a power of two from 1 to 256, is {self.block_size}",
        )
        for name in ("kv_cache_gib", "kv_offloading_size"):
            gib = getattr(self, name)
            _check(0 <= gib < float("inf"), f"{name} must be at least 0 and finite, is {gib}")
        _check(
            0 < self.gpu_memory_utilization <= 1,
            f"gpu_memory_utilization must be in (0, 1], is {self.gpu_memory_utilization}",
        )
        _check(
            self.max_num_batched_tokens >= self.max_num_seqs,
            f"max_num_batched_tokens must be at least max_num_seqs={self.max_num_seqs}, so that every running sequence "
            f"gets its token in every step, is {self.max_num_batched_tokens}",
        )
        _check(
            self.max_seq_len_to_capture >= 1,
            f"max_seq_len_to_capture must be at least 1, is {self.max_seq_len_to_capture}; for no CUDA graphs at all "
            "there is enforce_eager",
        )
        num_modules = len(parse_lora_modules(self.lora_modules))
        most = MAX_MODULES - num_modules
        _check(
            0 <= self.max_loras <= most,
            f"max_loras must be in [0, {most}] ({MAX_MODULES} adapters, lora_modules included), is {self.max_loras}",
        )
        _check(
            1 <= self.max_lora_rank <= MAX_RANK, f"max_lora_rank must be in [1, {MAX_RANK}], is {self.max_lora_rank}"
        )
        SpeculativeConfig.parse(self.speculative_config)
