"""Makes an `EngineConfig` from `EngineArgs` and a model's folder: reads config.json, fills in defaults, checks bounds.

Defines the compatibility digest: what must be equal for two engines to exchange KV.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from engine.attention import (
    Needs,
    choose_attention_backend,
    kv_order_of,
    uses_triton_kernels,
    why_no_graphs,
    why_no_kernels,
    why_not_invariant,
)
from engine.cache_dir import report
from engine.checkpoint_methods import without_method
from engine.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from engine.engine_args import EngineArgs
from engine.kernels.build import cpu_arithmetic
from engine.kv_cache import KV_FORMAT_VERSION
from engine.kv_shape import DTYPE_BYTES, kv_dtype_of
from engine.lora.modules import (
    WEIGHTS_FILE,
    LoRAModule,
    LoRARoom,
    check_lora_folder,
    read_lora_module,
)
from engine.memory import least_gib, memory_bytes
from engine.model_loader.folder import read_json, safetensors_files
from engine.model_loader.language_part import read_config
from engine.model_loader.settings import (
    aliases_of,
    check_adapter,
    check_beside_states,
    dtype_of,
    lora_folders,
    max_model_len_of,
    num_blocks_of,
    offloading_bytes_of,
    served_model_name_of,
)
from engine.model_loader.weights import check_size, digest_by_reading, digest_files, dummy_digest
from engine.models import ModelShape, load_model_shape
from engine.models.recurrent_shape import recurrent_bytes
from engine.models.stored_weights import AS_STORED, StoredWeights, is_mxfp4
from engine.quantization_choice import resolve_quantization
from engine.scheduling.speculation import SpeculativeConfig
from engine.tensor_parallel.shares import share_of
from prefix_hash.compat import join_parts

GPU_ARITHMETIC_VERSION = 1
"""Version of the order in which `batch_invariant` adds up: tile sizes of inputs and keys, and piece sizes of contexts.
"""
CPU_PREFILL_BATCH_TOKENS = 256
"""With this many rows, products reach a core's limit: twice as many rows take twice as long."""
CPU_DRAFT_BATCH_TOKENS = 16
"""Up to eight rows take hardly longer than one, since reading the weights dominates; from sixteen on, the time grows
with each row (docs/performance.md)."""
GPU_DRAFT_BATCH_TOKENS = 256
"""A guess, not measured."""


def make_engine_config(args: EngineArgs, folder: Path, hf_config: dict[str, Any] | None = None) -> EngineConfig:
    """`hf_config`: what the folder's config.json means; default: what it says. Raises `ValueError` naming the field and
    its bound, or what config.json lacks."""
    hf_config = read_config(folder, args.load_format) if hf_config is None else hf_config
    num_ranks = args.tensor_parallel_size
    shape = share_of(load_model_shape(hf_config, args.model_impl), num_ranks)
    # transformers' code for MXFP4 has a loader of its own.
    has_mxfp4 = shape.model_impl == "transformers" and is_mxfp4(hf_config)
    stored = StoredWeights() if has_mxfp4 else StoredWeights.from_hf(hf_config)
    device, dtype = _device(args), dtype_of(args, hf_config)
    capability = torch.cuda.get_device_capability() if device == "cuda" else None
    kv_dtype = kv_dtype_of(args.kv_cache_dtype, dtype)
    _check_devices(device, num_ranks)
    # Checked before reading weights and compiling kernels, which take a while.
    lora_modules = _lora_modules(args)
    _check_recurrent(args, recurrent_bytes(shape.recurrent_layers, DTYPE_BYTES[dtype]), device)
    needs = Needs(
        model=shape, device=device, capability=capability, dtype=dtype, kv_dtype=kv_dtype, block_size=args.block_size,
        batch_invariant=args.batch_invariant,
    )  # fmt: skip
    quantization = resolve_quantization(
        without_method(args.quantization, hf_config),
        stored,
        device=device,
        capability=capability,
        dtype=dtype,
        model=shape,
        has_kernels=bool(stored.quantizations) and not why_no_kernels(args.attention_backend, needs),
    )
    model = _model_config(args, folder, hf_config, shape, device, dtype=dtype, quantization=quantization)
    max_model_len = max_model_len_of(args, shape)
    num_blocks = num_blocks_of(
        args,
        shape,
        max_model_len=max_model_len,
        kv_dtype=kv_dtype,
        device=device,
        recurrent_bytes=model.recurrent_bytes,
    )
    has_float8_products = quantization == "fp8" or (quantization == AS_STORED and "fp8" in stored.quantizations)
    needs = replace(needs, quantization=quantization, has_float8_products=has_float8_products)
    backend = choose_attention_backend(args.attention_backend, needs)
    if args.batch_invariant and (why_not := why_not_invariant(args.attention_backend, backend, needs)):
        raise ValueError(f"batch_invariant is not possible here: {why_not}")
    cache = CacheConfig(
        block_size=args.block_size,
        kv_dtype=kv_dtype,
        num_blocks=num_blocks,
        gpu_memory_utilization=args.gpu_memory_utilization,
        enable_prefix_caching=args.enable_prefix_caching,
        kv_offloading_bytes=offloading_bytes_of(args),
        kv_order=kv_order_of(backend, shape),
    )
    return EngineConfig(
        model=model,
        cache=cache,
        parallel=ParallelConfig(tensor_parallel_size=num_ranks),
        scheduler=_scheduler_config(args, device),
        device=_device_config(args, backend, needs),
        load=LoadConfig(load_format="dummy" if args.load_format == "dummy" else "safetensors", seed=args.seed),
        lora_modules=lora_modules,
        lora_room=LoRARoom(num=args.max_loras, max_rank=args.max_lora_rank),
        compat_digest=compat_digest(
            shape, stored, model, cache, num_ranks, _arithmetic(backend, needs)
        ),
    )  # fmt: skip


def _check_recurrent(args: EngineArgs, state_bytes: int, device: str) -> None:
    """Raise `ValueError` if settings cannot work with layers that keep a state of `state_bytes`, 0 for none."""
    if not state_bytes:
        return
    most_bytes = memory_bytes(device)
    if args.max_num_seqs * state_bytes > most_bytes:
        raise ValueError(
            f"max_num_seqs must be at most {most_bytes // state_bytes}, all the memory of this process, is "
            f"{args.max_num_seqs}: each sequence keeps a state of {least_gib(state_bytes)} GiB"
        )
    check_beside_states(args)


def _device_config(args: EngineArgs, backend: str, needs: Needs) -> DeviceConfig:
    return DeviceConfig(
        device=needs.device,
        num_threads=args.num_threads or _num_threads(args.tensor_parallel_size),
        attention_backend=backend,
        uses_triton=uses_triton_kernels(backend, needs),
        batch_invariant=args.batch_invariant,
        uses_graphs=not args.enforce_eager and _can_record(backend, needs),
        max_seq_len_to_capture=args.max_seq_len_to_capture,
    )


def _scheduler_config(args: EngineArgs, device: str) -> SchedulerConfig:
    is_cpu = device == "cpu"
    batch_tokens = CPU_PREFILL_BATCH_TOKENS if is_cpu else args.max_num_batched_tokens
    speculation = SpeculativeConfig.parse(args.speculative_config)
    return SchedulerConfig(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        prefill_chunk_tokens=args.prefill_chunk_tokens or args.max_num_batched_tokens,
        prefill_batch_tokens=args.prefill_batch_tokens or batch_tokens,
        max_itl_ms=args.max_itl_ms,
        stream_interval=args.stream_interval,
        # Drafts can only be proposed once the host knows the last token.
        async_scheduling=args.async_scheduling and not is_cpu and speculation is None,
        speculation=speculation,
        draft_batch_tokens=CPU_DRAFT_BATCH_TOKENS if is_cpu else GPU_DRAFT_BATCH_TOKENS,
    )


def _can_record(backend: str, needs: Needs) -> bool:
    """Whether decode steps can be recorded as CUDA graphs. If users may expect that, reports why not."""
    why_not = why_no_graphs(backend, needs)
    if why_not and needs.device == "cuda" and backend in ("flash_attn", "triton"):
        report(f"decoding steps are not captured as CUDA graphs: {why_not}")
    return not why_not


def _arithmetic(backend: str, needs: Needs) -> dict[str, str]:
    """How kernels add up, where they promise that: part of the compatibility digest."""
    if backend == "cpu":
        return {"cpu_arithmetic": cpu_arithmetic()}
    if not needs.batch_invariant:
        return {}
    import triton

    number = "" if needs.capability is None else ", compute capability {}.{}".format(*needs.capability)
    return {"gpu_arithmetic": f"batch invariant {GPU_ARITHMETIC_VERSION}, Triton {triton.__version__}{number}"}


def compat_digest(
    shape: ModelShape,
    stored: StoredWeights,
    model: ModelConfig,
    cache: CacheConfig,
    num_ranks: int,
    arithmetic: dict[str, str],
) -> str:
    """Digest of architecture, weights, dtypes, KV order and end tokens. Leaves out the pool's size, the length limit
    and adapters: each adapter has its own digest, and requests without one are not affected by adapters.

    `arithmetic`: how kernels add up, where they promise that. An answer that moved to a machine with another arithmetic
    could continue with other tokens where two are nearly as likely.
    """
    # The number of positions changes no KV; where RoPE depends on it, its configuration has it.
    architecture = {k: v for k, v in asdict(shape).items() if k not in ("max_positions", "why_no_more_positions")}
    follow_from_the_rest = ("products", "adaptable", "siblings", "splits", "num_fixed_expert_tensors", "expert_sizes")
    for name in follow_from_the_rest:
        architecture.pop(name, None)
    for name in ("recurrent_layers", "head_shapes", "pool_layers", "num_unrotated"):
        if not architecture.get(name):
            architecture.pop(name, None)  # as in versions that knew no such layers
    # Ranks add up in another order than a single device, and their blocks hold other heads.
    ranks = {} if num_ranks == 1 else {"tensor_parallel_size": num_ranks}
    return join_parts(
        ranks
        | arithmetic
        | {
            "kv_format_version": KV_FORMAT_VERSION,
            "dtype": model.dtype,
            "quantization": model.quantization,
            "kv_dtype": cache.kv_dtype,
            "block_size": cache.block_size,
            "kv_order": cache.kv_order,
            "model": digest_of(architecture),
            # How the bytes of the weights are interpreted.
            "stored_weights": stored.name,
            "weights": model.weights_digest,
            # Does not affect KV, but an answer that moves to another engine must end at the same tokens.
            "eos_token_ids": digest_of(sorted(model.eos_token_ids)),
        }
    )


def digest_of(meaning: object) -> str:
    return hashlib.blake2b(json.dumps(meaning, sort_keys=True).encode(), digest_size=16).hexdigest()


def _model_config(
    args: EngineArgs,
    folder: Path,
    hf_config: dict[str, Any],
    shape: ModelShape,
    device: str,
    *,
    dtype: str,
    quantization: str,
) -> ModelConfig:
    is_dummy = args.load_format == "dummy"
    weights_digest = dummy_digest(args.seed, device) if is_dummy else digest_files(safetensors_files(folder))
    return ModelConfig(
        model=args.model,
        served_model_name=served_model_name_of(args),
        aliases=aliases_of(args),
        path=folder,
        hf_config=hf_config,
        dtype=dtype,
        quantization=quantization,
        model_impl=shape.model_impl,
        max_model_len=max_model_len_of(args, shape),
        vocab_size=shape.vocab_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        head_shapes=shape.head_shapes,
        mla=shape.mla,
        hidden_size=shape.hidden_size,
        eos_token_ids=_eos_token_ids(folder, hf_config, shape.vocab_size),
        weights_digest=weights_digest,
        recurrent_bytes=recurrent_bytes(shape.recurrent_layers, DTYPE_BYTES[dtype]),
    )


def _lora_modules(args: EngineArgs) -> tuple[LoRAModule, ...]:
    folders = lora_folders(args)
    for name, path in folders.items():
        check_adapter(name, path)
    return tuple(lora_module_of(name, path) for name, path in folders.items())


def lora_module_of(name: str, path: Path, max_bytes: Callable[[str, int], int] | None = None) -> LoRAModule:
    """Describe the adapter in a folder; reads its weights to compute their digest. `max_bytes`: the largest file, by
    name and rank. Raises `ValueError` if the folder holds no adapter that can be served."""
    check_lora_folder(name, path)
    weights = path / WEIGHTS_FILE

    def digest_of_weights(rank: int) -> str:
        if max_bytes is not None:
            # Check the size before reading, since reading cannot be interrupted.
            check_size(weights, weights.stat().st_size, max_bytes(name, rank), f"adapter {name!r}")
        return digest_by_reading(weights)

    return read_lora_module(name, path.resolve(), digest_of_weights)


def _device(args: EngineArgs) -> str:
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch finds no CUDA device")
    if args.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return args.device


def _check_devices(device: str, num_ranks: int) -> None:
    num_gpus = torch.cuda.device_count()
    if device == "cuda" and num_ranks > num_gpus:
        raise ValueError(f"tensor_parallel_size must be at most {num_gpus}, the GPUs that torch finds, is {num_ranks}")


def _num_threads(num_ranks: int) -> int:
    """Threads per rank: its part of the cores; 0: all."""
    return 0 if num_ranks == 1 else max(1, torch.get_num_threads() // num_ranks)


def _eos_token_ids(folder: Path, hf_config: dict[str, Any], vocab_size: int) -> frozenset[int]:
    generation = folder / "generation_config.json"
    values = [hf_config.get("eos_token_id")]
    if generation.is_file():
        values.append(read_json(generation).get("eos_token_id"))
    ids = [i for value in values if value is not None for i in (value if isinstance(value, list) else [value])]
    others = [i for i in ids if type(i) is not int]
    if others:
        raise ValueError(f"{folder}: eos_token_id must be an integer or several, is {others[0]!r:.80}")
    outside = sorted(i for i in set(ids) if not 0 <= i < vocab_size)
    if outside:
        raise ValueError(f"{folder}: eos_token_id {outside} is outside the vocabulary of {vocab_size}")
    return frozenset(ids)
