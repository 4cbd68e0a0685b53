"""What a user sets: `EngineArgs`, with vLLM's names. `engine.model_loader.create_engine_config` makes of it what the
engine reads (engine/config.py).

Frozen, validated at construction, never changed. Only entry points read the environment.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from engine.checkpoint_methods import METHODS
from engine.lora.modules import EXAMPLE as LORA_EXAMPLE
from engine.lora.modules import MAX_MODULES, MAX_RANK, parse_lora_modules
from engine.scheduling.speculation import EXAMPLE, SpeculativeConfig

OTHER_NAMES_OF_DTYPES = {"half": "float16", "float": "float32"}
DTYPES = ("auto", "float32", "bfloat16", "float16", *OTHER_NAMES_OF_DTYPES)
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
ATTENTION_BACKENDS = ("auto", "cpu", "triton", "flash_attn", "torch")
MODEL_IMPLS = ("auto", "tandem", "transformers")
"""Which code computes a model: our decoder, transformers' code over our attention, or ("auto") the first that can."""
QUANTIZATIONS = ("auto", "none", "fp8", "int8", "int4", *METHODS)
DEVICES = ("auto", "cpu", "cuda")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")
CHOICES = {
    "dtype": DTYPES, "quantization": QUANTIZATIONS, "kv_cache_dtype": KV_CACHE_DTYPES, "load_format": LOAD_FORMATS,
    "model_impl": MODEL_IMPLS, "device": DEVICES, "attention_backend": ATTENTION_BACKENDS,
}  # fmt: skip
"""By field of `EngineArgs`."""
OF_VLLM = {
    ("attention_backend", "flash_attn"): "flash_attn", ("attention_backend", "triton_attn"): "triton",
    ("attention_backend", "cpu_attn"): "cpu", ("load_format", "hf"): "auto", ("kv_cache_dtype", "bfloat16"): "auto",
}  # fmt: skip
"""What vLLM's other choices, in small letters, are called here."""
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
class EngineArgs:
    """One engine's settings, as flags. Field names are vLLM's; `metadata["help"]` is the flag's help text.

    Raises `ValueError` naming the field and its bound. `engine.model_loader.create_engine_config` resolves it.
    """

    model: str = field(
        default="smollm2-135m-instruct",
        metadata={"help": "Model to serve: a folder, a GGUF file, a Hugging Face hub id, or the default model's name."},
    )
    served_model_name: str = field(
        default="",
        metadata={
            "help": "Name of the model in requests (`model`), or several: NAME,NAME. Default: the model's own.",
            "if_empty": "a name must not be empty; for the model's own name, leave it out",
        },
    )
    dtype: str = field(
        default="auto",
        metadata={
            "help": "Data type of weights and activations: auto (as in the checkpoint), float32 (or float), bfloat16 "
            "or float16 (or half)."
        },
    )
    quantization: str = field(
        default="auto",
        metadata={
            "help": "Quantization of the weights in the layers' matrix products: auto (as in the checkpoint; on a CPU "
            "only int8 and int4 are kept, others are widened to --dtype), none (quantised weights are widened when "
            "loaded), int8 or int4 (weights only, on any device) or fp8 (weights, and activations in steps with many "
            "rows; GPUs of compute capability 8.9 or later). Other weights are quantised to it when loaded. A "
            "checkpoint's own method by name (awq, gptq, compressed-tensors, …) means auto."
        },
    )
    kv_cache_dtype: str = field(
        default="auto",
        metadata={"help": "Format of the KV pool: auto (the model's dtype) or fp8 (float8_e4m3fn, half the bytes)."},
    )
    model_impl: str = field(
        default="auto",
        metadata={
            "help": "Model implementation: tandem (native decoder), transformers (its modeling code with Tandem's "
            "attention, for most other causal language models) or auto (the first of these that supports the "
            "architecture)."
        },
    )
    load_format: str = field(
        default="auto",
        metadata={
            "help": "Format of the weights to load: auto, safetensors, gguf, or dummy (no file: random weights in the "
            "shapes of config.json)."
        },
    )
    seed: int = field(default=0, metadata={"help": "Seed for dummy weights."})
    max_model_len: int = field(
        default=0,
        metadata={"help": "Maximum length of prompt plus answer, in tokens. 0: the model's maximum."},
    )
    tensor_parallel_size: int = field(
        default=1,
        metadata={
            "help": "Number of processes to split the model among, each with its own GPU or its share of the CPU's "
            "cores. It must divide the number of query heads and the intermediate size, and must divide the number of "
            "key heads or be a multiple of it."
        },
    )
    lora_modules: str = field(
        default="",
        metadata={
            "help": f"LoRA adapters to serve beside the model: NAME=FOLDER pairs, such as {LORA_EXAMPLE}, separated by "
            "commas, or a JSON object. Requests give the name as their model; the folder is in PEFT's layout. Default: "
            "none."
        },
    )
    max_loras: int = field(
        default=0,
        metadata={
            "help": "Maximum number of adapters loaded at run time (--lora-dir) at once, including those being "
            "removed. On a GPU, memory for them is reserved at startup. 0: none."
        },
    )
    max_lora_rank: int = field(
        default=16, metadata={"help": f"Maximum rank of these adapters, 1 to {MAX_RANK}. GPUs reserve memory for it."}
    )
    block_size: int = field(default=16, metadata={"help": "Tokens per KV block: a power of two from 1 to 256."})
    num_kv_blocks: int = field(
        default=0, metadata={"help": "Size of the KV pool in blocks. 0: as --kv-cache-gib says."}
    )
    kv_cache_gib: float = field(
        default=0.0,
        metadata={
            "help": "Size of the KV pool in GiB, per GPU, if --num-kv-blocks is 0. 0: 1 GiB on a CPU; on a GPU, what "
            "--gpu-memory-utilization leaves."
        },
    )
    gpu_memory_utilization: float = field(
        default=0.9,
        metadata={
            "help": "Fraction of a GPU's memory for weights, KV pool and a step's working memory, in (0, 1]; used if "
            "the pool's size is not given. Engines that share a GPU need smaller fractions; tandem up divides the "
            "default among workers that share one."
        },
    )
    enable_prefix_caching: bool = field(
        default=True,
        metadata={"help": "Keep the KV blocks of finished requests and reuse them for prompts with the same prefix."},
    )
    kv_offloading_size: float = field(
        default=0.0,
        metadata={
            "help": "Host memory for KV offloading in GiB, for all ranks together. Cached blocks are copied there "
            "before they are evicted from the pool, and back when a prompt begins with them. For GPUs; on a CPU, use a "
            "larger pool instead. 0: no offloading."
        },
    )
    max_num_seqs: int = field(default=256, metadata={"help": "Maximum number of sequences in one step."})
    max_num_batched_tokens: int = field(default=2048, metadata={"help": "Maximum number of tokens in one step."})
    prefill_chunk_tokens: int = field(
        default=0, metadata={"help": "Maximum prompt tokens of one sequence in one step. 0: --max-num-batched-tokens."}
    )
    prefill_batch_tokens: int = field(
        default=0,
        metadata={
            "help": "Prompts are batched into one step until they have this many tokens together. Tokens beyond what "
            "keeps the device busy only delay the first prompt. 0: 256 on a CPU, --max-num-batched-tokens on a GPU."
        },
    )
    max_itl_ms: float = field(
        default=40.0,
        metadata={
            "help": "Target for the maximum inter-token latency (ITL), in milliseconds. While requests decode, prompts "
            "are prefilled in chunks so small that a step takes no longer than this. Each further waiting prompt "
            "allows half of this more, up to four times this. 0: no target; chunks as large as "
            "--max-num-batched-tokens allows."
        },
    )
    stream_interval: int = field(
        default=1,
        metadata={
            "help": "Number of tokens to send at a time; an answer's first and last tokens are sent without delay. 1: "
            "send each token at once. With many streams, larger values save worker, router and gateway most of the "
            "cost per token."
        },
    )
    async_scheduling: bool = field(
        default=True,
        metadata={
            "help": "On a GPU, schedule and launch each step while the one before it is still being computed. No "
            "effect on a CPU or with --speculative-config."
        },
    )
    speculative_config: str = field(
        default="",
        metadata={
            "help": f"Speculative decoding, as JSON such as {EXAMPLE}: propose tokens and verify several in one step. "
            "The tokens are the same; they come sooner where text repeats itself or has a fixed form. With "
            '{"model": "FOLDER", "num_speculative_tokens": 4}, a smaller model with the same tokens guesses; with '
            '"method": "eagle3", an EAGLE-3 head of the model; or "method": "mtp" for the head that the checkpoints of '
            "some models bring along. Default: off."
        },
    )
    device: str = field(
        default="auto", metadata={"help": "Device to compute on: auto (a GPU if there is one), cpu or cuda."}
    )
    num_threads: int = field(default=0, metadata={"help": "Compute threads per process. 0: all cores."})
    attention_backend: str = field(
        default="auto",
        metadata={
            "help": "Attention backend: auto (the fastest), cpu (compiled kernels, bfloat16), triton (GPU kernels), "
            "flash_attn (FlashAttention for prompts, the GPU kernels for decoding; float16 or bfloat16; "
            "FlashAttention-2 and torch's own build of it need --block-size 256) or torch (reference, slow)."
        },
    )
    batch_invariant: bool = field(
        default=False,
        metadata={
            "help": "On a GPU, give a request the same results, bit for bit, whether it runs alone, in a batch, in "
            "chunks, after a preemption or on another worker with the same kind of GPU. Slower: all matrix products "
            "use Tandem's kernels instead of the device's library, and decoding computes attention as prefill does. "
            "On a CPU the compiled kernels are always batch invariant."
        },
    )
    enforce_eager: bool = field(
        default=False,
        metadata={"help": "On a GPU, launch every kernel of every step instead of replaying CUDA graphs."},
    )
    max_seq_len_to_capture: int = field(
        default=8192,
        metadata={
            "help": "On a GPU, maximum context length, in tokens, of the decoding steps that are captured as CUDA "
            "graphs at startup. Steps with longer contexts are launched kernel by kernel."
        },
    )

    def __post_init__(self) -> None:
        for each in fields(self):
            _check_type(each.name, str(each.type), getattr(self, each.name))
        _check(bool(self.model), "model must not be empty")
        names = [name.strip() for name in self.served_model_name.split(",")]
        _check(
            self.served_model_name == "" or all(names),
            f"served_model_name must be NAME or NAME,NAME, is {self.served_model_name!r:.200}",
        )
        for name, choices in CHOICES.items():
            chosen = getattr(self, name)
            hint = f"; vLLM's {chosen} is {own} here" if (own := OF_VLLM.get((name, chosen.lower()))) else ""
            _check(chosen in choices, f"{name} must be one of {', '.join(choices)}, is {chosen!r}{hint}")
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
            self.load_format != "safetensors" or not self.model.endswith(".gguf"),
            f"load_format safetensors cannot read {self.model!r}; give auto or gguf",
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
