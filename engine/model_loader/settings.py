"""Checks an engine's settings against its model's folder, as far as this needs neither torch nor the device.

EngineArgs, folder ──check_settings──> ValueError, or nothing: before any process is started (`tandem up`)
                   ──the others──────> parts of an EngineConfig (model_config.py), with the same checks
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.checkpoint_methods import METHODS, without_method
from engine.config import GIB, ModelConfig
from engine.engine_args import OTHER_NAMES_OF_DTYPES, EngineArgs
from engine.kv_shape import kv_cache_shape, kv_dtype_of, num_state_blocks_of
from engine.lora.modules import check_lora_folder, parse_lora_modules, read_lora_module
from engine.memory import least_gib, memory_bytes, most_gib
from engine.model_loader.eagle_settings import check_head_files, check_is_no_head, read_eagle_config
from engine.model_loader.folder import read_json
from engine.model_loader.language_part import read_config
from engine.model_loader.same_tokens import check_same_tokens
from engine.models import ModelShape, is_for_our_decoder, load_decoder_config
from engine.models.eagle_config import as_llama
from engine.models.mtp_config import WHY_NO_MTP_HEAD, MtpConfig
from engine.quantization_choice import check_quantization
from engine.scheduling.speculation import SpeculativeConfig
from engine.tensor_parallel.shares import share_of

CPU_KV_CACHE_GIB = 1.0
MODEL_DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes that models compute in."""
CUDA_DRIVER = "libcuda.so.1"
AMD_DRIVER = Path("/dev/kfd")
DRAFT_HAS_STATES = "it has layers that keep a state in place of keys and values, and cannot guess for another model"
"""Why a model cannot be the draft model."""


def check_settings(args: EngineArgs, folder: Path) -> None:
    """Raise `ValueError`, naming the field, if the engine would refuse `args` for the model in `folder`. It may still
    refuse what this leaves out: what depends on the device, and, of a model that transformers' code computes, what that
    code must be observed for."""
    hf_config = read_config(folder, args.load_format)
    without_method(args.quantization, hf_config)
    for name, path in lora_folders(args).items():
        check_adapter(name, path)
    offloading_bytes_of(args)
    speculation = SpeculativeConfig.parse(args.speculative_config)
    if not is_for_our_decoder(hf_config, args.model_impl):
        if speculation is not None and speculation.method == "mtp":
            with naming_what_guesses(speculation):
                raise ValueError(WHY_NO_MTP_HEAD)
        return
    shape = share_of(load_decoder_config(hf_config), args.tensor_parallel_size)
    _check_quantization(args, hf_config, shape)
    _num_blocks(args, shape, hf_config)
    if speculation is not None and speculation.method == "mtp":
        with naming_what_guesses(speculation):
            MtpConfig.of(shape)
            _check_memory_of_both(args, folder, _layer_bytes(args, shape, hf_config))


def _num_blocks(args: EngineArgs, shape: ModelShape, hf_config: dict[str, Any]) -> int:
    """`num_blocks_of` as far as it is known without the device."""
    is_cpu = _is_for_cpu(args)
    return num_blocks_of(
        args,
        shape,
        max_model_len=max_model_len_of(args, shape),
        kv_dtype=kv_dtype_of(args.kv_cache_dtype, dtype_of(args, hf_config)),
        device="cpu" if is_cpu else "cuda",
        knows_device=is_cpu,
    )


def check_draft_model(args: EngineArgs, folder: Path, draft_folder: Path) -> None:
    """Raise `ValueError` if the engine would refuse the draft model or head in `draft_folder` for the model in
    `folder`, as far as `check_settings` can tell such things."""
    speculation = SpeculativeConfig.parse(args.speculative_config)
    assert speculation is not None
    with naming_what_guesses(speculation):
        if speculation.method == "eagle3":
            _check_eagle_head(args, speculation, folder, draft_folder)
            return
        draft_args = replace(args, quantization=speculation.quantization)
        hf_config = read_config(draft_folder, load_format_of_draft(args))
        check_is_no_head(hf_config)
        without_method(speculation.quantization, hf_config)
        if is_for_our_decoder(hf_config, args.model_impl):
            shape = load_decoder_config(hf_config)
            _check_quantization(draft_args, hf_config, shape)
            _check_memory_of_both(args, folder, draft_block_bytes_of(args, shape, hf_config))
        check_same_tokens(folder, draft_folder)


def _check_eagle_head(args: EngineArgs, speculation: SpeculativeConfig, folder: Path, head_folder: Path) -> None:
    hf_config = read_config(folder, args.load_format)
    if not is_for_our_decoder(hf_config, args.model_impl):
        as_llama(read_json(head_folder / "config.json"))  # more is known once transformers' code has been observed
        check_head_files(head_folder, args.load_format)
        return
    model = load_decoder_config(hf_config)
    eagle, _ = read_eagle_config(
        head_folder, model, load_format=args.load_format, quantization=speculation.quantization
    )
    share = share_of(eagle.layer, args.tensor_parallel_size)
    # In the model's dtype, whatever the head's files have.
    _check_quantization(replace(args, quantization=speculation.quantization), hf_config, share)
    _check_memory_of_both(args, folder, _layer_bytes(args, share_of(model, args.tensor_parallel_size), hf_config))


def _layer_bytes(args: EngineArgs, shape: ModelShape, hf_config: dict[str, Any]) -> int:
    """Bytes of one layer of a block: what a head takes. `shape`: what one rank computes of the model."""
    kv_dtype = kv_dtype_of(args.kv_cache_dtype, dtype_of(args, hf_config))
    return block_bytes_of(args, shape, kv_dtype, "cpu" if _is_for_cpu(args) else "cuda") // shape.num_layers


def _check_memory_of_both(args: EngineArgs, folder: Path, draft_bytes: int) -> None:
    """Raise `ValueError` if the model in `folder` is one for our decoder and there are too few blocks for both."""
    hf_config = read_config(folder, args.load_format)
    if not is_for_our_decoder(hf_config, args.model_impl):
        return
    shape = share_of(load_decoder_config(hf_config), args.tensor_parallel_size)
    kv_dtype = kv_dtype_of(args.kv_cache_dtype, dtype_of(args, hf_config))
    num_blocks_in_both(
        args,
        _num_blocks(args, shape, hf_config),
        max_model_len=max_model_len_of(args, shape),
        own_bytes=block_bytes_of(args, shape, kv_dtype, "cpu" if _is_for_cpu(args) else "cuda"),
        draft_bytes=draft_bytes,
    )


def num_blocks_in_both(
    args: EngineArgs, num_blocks: int, *, max_model_len: int, own_bytes: int, draft_bytes: int
) -> int:
    """Of `num_blocks`, for which there would be memory in the model's pool alone, those that fit with as many in the
    draft model's. 0: to be measured. `own_bytes`, `draft_bytes`: of a block in each pool."""
    if args.num_kv_blocks or not num_blocks:
        return num_blocks
    both_bytes = own_bytes + draft_bytes
    num_needed = -(-max_model_len // args.block_size)
    if num_blocks * own_bytes < num_needed * both_bytes:
        least = least_gib(num_needed * both_bytes)
        why = f"with it, kv_cache_gib must be at least {least}, what max_model_len={max_model_len} needs"
        raise ValueError(f"{why} with its keys and values; or lower max_model_len")
    return num_blocks * own_bytes // both_bytes


def block_bytes_of(args: EngineArgs, shape: ModelShape | ModelConfig, kv_dtype: str, device: str) -> int:
    """Bytes of one block in all layers. On a CPU the pools of all ranks share the same memory."""
    block = kv_cache_shape(shape, num_blocks=1, block_size=args.block_size, kv_dtype=kv_dtype)
    return block.pool_bytes * (args.tensor_parallel_size if device == "cpu" else 1)


def draft_block_bytes_of(args: EngineArgs, shape: ModelShape, hf_config: dict[str, Any]) -> int:
    """The same of the draft model, which one rank has."""
    kv_dtype = kv_dtype_of(args.kv_cache_dtype, dtype_of(args, hf_config))
    return kv_cache_shape(shape, num_blocks=1, block_size=args.block_size, kv_dtype=kv_dtype).pool_bytes


@contextmanager
def naming_what_guesses(speculation: SpeculativeConfig | None) -> Iterator[None]:
    """Let a `ValueError` begin with the setting that names the draft model or head."""
    try:
        yield
    except ValueError as error:
        setting = "model" if speculation is None or speculation.model else f"method {speculation.method!r}"
        raise ValueError(f"speculative_config {setting}: {error}") from error


def _check_quantization(args: EngineArgs, hf_config: dict[str, Any], shape: ModelShape) -> None:
    by_name = args.quantization not in ("auto", *METHODS)
    if by_name and (_is_for_cpu(args) or args.quantization != "fp8"):  # fp8 depends on the GPU
        check_quantization(args.quantization, None, dtype_of(args, hf_config), shape)


def _is_for_cpu(args: EngineArgs) -> bool:
    return args.device == "cpu" or (args.device == "auto" and not may_have_gpu())


def load_format_of_draft(args: EngineArgs) -> str:
    """Made-up weights for the model mean made-up weights for the draft model."""
    return "dummy" if args.load_format == "dummy" else "auto"


def check_beside_states(args: EngineArgs) -> None:
    """Raise `ValueError` if `args` cannot work with layers that keep a state."""
    why = "the model has layers that keep a state in place of keys and values"
    speculation = SpeculativeConfig.parse(args.speculative_config)
    if speculation is not None and speculation.has_head:
        raise ValueError(f"speculative_config method must be 'ngram' or 'draft_model': {why}, and heads guess for none")
    if args.kv_offloading_size:
        raise ValueError(f"kv_offloading_size must be 0: {why}, which is not copied to host memory")


def may_have_gpu() -> bool:
    """Whether torch may find a GPU: it finds none without a driver. Importing torch to ask it takes a second."""
    try:
        ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        return AMD_DRIVER.exists()
    return True


def served_model_name_of(args: EngineArgs) -> str:
    """The first of several names; the others are aliases, which the router handles."""
    return args.served_model_name.partition(",")[0].strip() or Path(args.model).name


def aliases_of(args: EngineArgs) -> tuple[str, ...]:
    return tuple(map(str.strip, args.served_model_name.split(",")[1:]))


def lora_folders(args: EngineArgs) -> dict[str, Path]:
    """The adapters' folders by name, sorted."""
    folders = parse_lora_modules(args.lora_modules)
    own_names = [served_model_name_of(args), *aliases_of(args)]
    if taken := [name for name in own_names if name in folders]:
        raise ValueError(f"lora_modules: {taken[0]!r} is the model's own name; give the adapter another name")
    return dict(sorted(folders.items()))


def check_adapter(name: str, path: Path) -> None:
    """Check everything about a folder of --lora-modules but its weights."""
    try:
        check_lora_folder(name, path)
        read_lora_module(name, path, lambda _: "")
    except ValueError as error:
        raise ValueError(f"lora_modules: {error}") from error


def dtype_of(args: EngineArgs, hf_config: dict[str, Any]) -> str:
    """The model's dtype, resolved."""
    if args.dtype != "auto":
        return OTHER_NAMES_OF_DTYPES.get(args.dtype, args.dtype)
    dtype = hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32"
    if not isinstance(dtype, str) or dtype not in MODEL_DTYPES:
        raise ValueError(
            f"config.json: dtype {dtype!r} is not supported; give dtype as one of {', '.join(MODEL_DTYPES)}"
        )
    return str(dtype)


def max_model_len_of(args: EngineArgs, shape: ModelShape) -> int:
    """The maximum length of prompt and answer together, in tokens."""
    max_model_len = args.max_model_len or shape.max_positions
    if max_model_len > shape.max_positions:
        bound = f"the model's max_position_embeddings={shape.max_positions}"
        if shape.why_no_more_positions:
            bound = f"{shape.max_positions}, {shape.why_no_more_positions}"
        raise ValueError(f"max_model_len must be at most {bound}, is {max_model_len}")
    return max_model_len


def num_blocks_of(
    args: EngineArgs,
    shape: ModelShape,
    *,
    max_model_len: int,
    kv_dtype: str,
    device: str,
    knows_device: bool = True,
    recurrent_bytes: int = 0,
) -> int:
    """The number of KV blocks; 0: to be measured. `shape`: what one rank computes. Without `knows_device`, `device`
    is a guess, and its memory is not looked at. `recurrent_bytes`: see `ModelConfig`."""
    if device == "cuda" and not args.num_kv_blocks and not args.kv_cache_gib:
        return 0
    block = kv_cache_shape(shape, num_blocks=1, block_size=args.block_size, kv_dtype=kv_dtype)
    needed = -(-max_model_len // args.block_size) + num_state_blocks_of(recurrent_bytes, block.pool_bytes)
    block_bytes = block_bytes_of(args, shape, kv_dtype, device)
    most = memory_bytes(device) // block_bytes if knows_device else None
    if most is not None and most < 1:
        raise ValueError(
            f"block_size: one block of {args.block_size} tokens would take {block_bytes / GIB:.1f} GiB, more than the "
            f"memory of this process: the model has {shape.num_layers} layers with {shape.num_kv_heads} key heads of "
            f"size {shape.head_dim}"
        )
    if args.num_kv_blocks:
        field, num_blocks, setting = "num_kv_blocks", args.num_kv_blocks, f"{args.num_kv_blocks}"
    else:
        gib = args.kv_cache_gib or CPU_KV_CACHE_GIB
        field, num_blocks, setting = "kv_cache_gib", int(gib * GIB) // block_bytes, f"{gib:g}"
    if num_blocks < needed:
        least = needed if args.num_kv_blocks else least_gib(needed * block_bytes)
        why = f"what max_model_len={max_model_len} needs"
        if recurrent_bytes:
            why = f"what max_model_len={max_model_len} and a state of {least_gib(recurrent_bytes)} GiB need"
        raise ValueError(f"{field} must be at least {least}, {why}, is {setting}; or lower max_model_len")
    if most is not None and num_blocks > most:
        bound = most if args.num_kv_blocks else most_gib(most * block_bytes)
        raise ValueError(f"{field} must be at most {bound}, all the memory of this process, is {setting}")
    return num_blocks


def offloading_bytes_of(args: EngineArgs) -> int:
    """Bytes of host memory for KV offloading."""
    if args.kv_offloading_size and not args.enable_prefix_caching:
        raise ValueError("kv_offloading_size must be 0 without enable_prefix_caching, which looks blocks up")
    most_bytes = memory_bytes("cpu")
    if args.kv_offloading_size * GIB > most_bytes:
        raise ValueError(
            f"kv_offloading_size must be at most {most_gib(most_bytes)}, all the memory of this process, is "
            f"{args.kv_offloading_size:g}"
        )
    return int(args.kv_offloading_size * GIB)
