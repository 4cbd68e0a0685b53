"""Adds what guesses to an `EngineConfig`: a draft model, an EAGLE-3 head, or the head in the model's checkpoint, as the
configuration of an engine that would run it alone, over a pool with as many blocks."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from engine.config import EngineConfig, HeadConfig
from engine.engine_args import EngineArgs
from engine.lora.modules import LoRARoom
from engine.model_loader.eagle_settings import check_is_no_head, read_eagle_config
from engine.model_loader.language_part import read_config
from engine.model_loader.model_config import digest_of, make_engine_config
from engine.model_loader.same_tokens import check_same_tokens
from engine.model_loader.settings import (
    DRAFT_HAS_STATES,
    block_bytes_of,
    draft_block_bytes_of,
    load_format_of_draft,
    num_blocks_in_both,
)
from engine.models import ModelShape, load_model_shape
from engine.models.mtp_config import MtpConfig
from prefix_hash.compat import join_parts

CATCH_UP_ROWS = 8
"""A draft model may read so many times as many known tokens in a step as the step may have rows for drafts. A guess:
what it reads delays the step."""


def with_draft_model(config: EngineConfig, args: EngineArgs, folder: Path) -> EngineConfig:
    """`folder`: the draft model's. Raises `ValueError` that says what is wrong with it."""
    load_format = load_format_of_draft(args)
    hf_config = read_config(folder, load_format)
    check_is_no_head(hf_config)
    shape = load_model_shape(hf_config, args.model_impl)
    if shape.recurrent_layers:
        raise ValueError(DRAFT_HAS_STATES)
    check_same_tokens(config.model.path, folder)
    num_blocks = num_blocks_in_both(
        args,
        config.cache.num_blocks,
        max_model_len=config.model.max_model_len,
        own_bytes=block_bytes_of(args, config.model, config.cache.kv_dtype, config.device.device),
        draft_bytes=draft_block_bytes_of(args, shape, hf_config),
    )
    config = replace(config, cache=replace(config.cache, num_blocks=num_blocks))
    draft = _draft_config(config, args, folder, shape)
    scheduler = replace(
        config.scheduler,
        draft_catch_up_tokens=draft.scheduler.max_num_batched_tokens,
        draft_model_len=draft.model.max_model_len,
    )
    return replace(config, scheduler=scheduler, draft=draft)


def with_eagle_head(config: EngineConfig, args: EngineArgs, folder: Path) -> EngineConfig:
    """`folder`: the head's. Its keys and values are one more layer of the pool, so two engines can exchange KV only if
    they have the same head. Raises `ValueError` that says what is wrong with it."""
    model = load_model_shape(config.model.hf_config, args.model_impl)
    speculation = config.scheduler.speculation
    assert speculation is not None
    eagle, hf_config = read_eagle_config(
        folder, model, load_format=args.load_format, quantization=speculation.quantization
    )
    config = _with_room_for_a_layer(config, args)
    head_args = replace(
        _draft_args(config, args),
        dtype=config.model.dtype,
        max_model_len=config.model.max_model_len,
        max_num_batched_tokens=_tokens_of_round(config),
        speculative_config="",
    )
    # RoPE knows no end, and a head that was trained with short texts guesses after long ones, too.
    head = _for_the_models_tokens(
        make_engine_config(head_args, folder, hf_config | {"max_position_embeddings": config.model.max_model_len}),
        config,
    )
    if head.cache.kv_order != config.cache.kv_order:
        raise ValueError(
            f"attention_backend must be one that can compute it and the model: {head.device.attention_backend} and "
            f"{config.device.attention_backend} order keys and values differently"
        )
    # What decides its keys and values, besides what the model's digest has. Its config as the engine has it would name
    # the length limit.
    in_digest = {"eagle_head": digest_of([head.model.weights_digest, head.model.quantization, asdict(eagle)])}
    return _with_head(config, head, eagle, in_digest)


def with_mtp_head(config: EngineConfig, args: EngineArgs) -> EngineConfig:
    """Let the head in the model's checkpoint guess: see `with_eagle_head`. Raises `ValueError` if there is none."""
    mtp = MtpConfig.of(load_model_shape(config.model.hf_config, args.model_impl))
    config = _with_room_for_a_layer(config, args)
    max_tokens = _tokens_of_round(config)
    head = replace(
        config,
        model=replace(config.model, model=f"the head of {config.model.model}", num_layers=1),
        scheduler=replace(
            config.scheduler, max_num_batched_tokens=max_tokens, prefill_chunk_tokens=max_tokens,
            prefill_batch_tokens=max_tokens, speculation=None,
        ),
        lora_modules=(),
        lora_room=LoRARoom(),
    )  # fmt: skip
    # The weights' digest has the head's, too.
    return _with_head(config, head, mtp, {"mtp_head": str(mtp.number)})


def _with_room_for_a_layer(config: EngineConfig, args: EngineArgs) -> EngineConfig:
    """With as many blocks as fit with one more layer."""
    own_bytes = block_bytes_of(args, config.model, config.cache.kv_dtype, config.device.device)
    num_blocks = num_blocks_in_both(
        args,
        config.cache.num_blocks,
        max_model_len=config.model.max_model_len,
        own_bytes=own_bytes,
        draft_bytes=own_bytes // config.model.num_layers,
    )
    return replace(config, cache=replace(config.cache, num_blocks=num_blocks))


def _tokens_of_round(config: EngineConfig) -> int:
    """The most tokens of a round of guesses."""
    return max(config.scheduler.max_num_seqs, 2 * config.cache.block_size)


def _with_head(
    config: EngineConfig, head: EngineConfig, head_config: HeadConfig, in_digest: dict[str, str]
) -> EngineConfig:
    """`head`: as of an engine for it alone. `in_digest`: what engines must have in common to exchange its KV."""
    # A round is launched before the host knows the guesses of the round before.
    head = replace(head, scheduler=replace(head.scheduler, async_scheduling=True))
    return replace(
        config,
        model=replace(config.model, num_layers=config.model.num_layers + 1),
        draft=head,
        head=head_config,
        compat_digest="; ".join((config.compat_digest, join_parts(in_digest))),
    )


def _draft_config(config: EngineConfig, args: EngineArgs, folder: Path, shape: ModelShape) -> EngineConfig:
    draft_args = replace(
        _draft_args(config, args),
        max_model_len=min(config.model.max_model_len, shape.max_positions),
        max_num_batched_tokens=_catch_up_tokens(config),
        tensor_parallel_size=1,
        # For rows: a sequence whose last guesses were all right has two tokens to read.
        speculative_config='{"num_speculative_tokens": 1}',
    )
    return _for_the_models_tokens(make_engine_config(draft_args, folder), config)


def _draft_args(config: EngineConfig, args: EngineArgs) -> EngineArgs:
    speculation = config.scheduler.speculation
    assert speculation is not None
    return replace(
        args,
        model=speculation.model,
        served_model_name="",
        load_format=load_format_of_draft(args),
        quantization=speculation.quantization,
        num_kv_blocks=config.cache.num_blocks,
        kv_cache_gib=0,
        kv_offloading_size=0,
        prefill_chunk_tokens=0,
        prefill_batch_tokens=0,
        async_scheduling=False,
        lora_modules="",
        max_loras=0,
    )


def _for_the_models_tokens(draft: EngineConfig, config: EngineConfig) -> EngineConfig:
    """The request's parameters mean the engine's tokens."""
    return replace(draft, model=replace(draft.model, eos_token_ids=config.model.eos_token_ids))


def _catch_up_tokens(config: EngineConfig) -> int:
    """Two blocks at least, since a sequence is read in whole blocks, and others may read a few tokens before it."""
    scheduler = config.scheduler
    return max(scheduler.max_num_seqs, CATCH_UP_ROWS * scheduler.draft_batch_tokens, 2 * config.cache.block_size)
