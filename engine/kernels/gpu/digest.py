"""Computes xxh3_64 of the pool's blocks on the device: the digests of `kv_transfer.pool.KVPool.digests`, bit for bit.

The hash is that of Y. Collet's xxHash specification (doc/xxhash_spec.md, XXH3, inputs of more than 240 bytes, seed 0,
default secret). Eight 64-bit lanes run over stripes of 64 bytes; after 16 stripes (a kilobyte) the lanes are scrambled.
What a stripe adds does not depend on the lanes, so a kilobyte is read and added up in parallel; only the scrambling (a
shift, two xors and a product per kilobyte) is sequential. One warp computes one block of one layer, and the many blocks
of a commit are computed in parallel.

Lanes are held as two halves, even and odd: a word of a stripe is added to the neighbouring lane, and its product to its
own lane.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from engine.to_device import integers, to_device

MIN_BLOCK_BYTES = 241
"""XXH3 hashes shorter inputs in another way."""

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248ee0"
    "3590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51"
    "e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8"
    "b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
"""XXH3's default secret."""
_PRIME64_1 = 0x9E3779B185EBCA87
_INITIAL_LANES = (
    0xC2B2AE3D, _PRIME64_1, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5,
    0x9E3779B1,
)  # fmt: skip


def _constants(block_bytes: int) -> NDArray[np.int64]:
    """The kernel's table, in 64-bit words: the secret (24), its part for the last stripe (8), its part for merging
    lanes (8), the initial values of the lanes (8), the initial value of the merge (1)."""
    parts = (_SECRET, _SECRET[121:185], _SECRET[11:75])
    words = np.concatenate([np.frombuffer(part, dtype="<u8") for part in parts])
    start = block_bytes * _PRIME64_1 % 2**64
    return np.concatenate((words, np.array([*_INITIAL_LANES, start], dtype=np.uint64))).view(np.int64)


def can_digest(block_bytes: int) -> bool:
    """Whether the kernel can hash blocks of that size: whole words, and longer than the inputs for XXH3's shorter
    methods."""
    return block_bytes >= MIN_BLOCK_BYTES and block_bytes % 8 == 0


def block_digests(kv_pool: torch.Tensor, block_ids: Sequence[int]) -> NDArray[np.uint64]:
    """xxh3_64 of each block of each layer: [layer, len(block_ids)]. Waits for the device.

    `kv_pool`: [layer, block, ...], contiguous. Raises `ValueError` if the kernel cannot hash such blocks
    (`can_digest`).
    """
    num_layers, num_blocks = kv_pool.shape[:2]
    block_bytes = kv_pool[0, 0].numel() * kv_pool.itemsize
    if not can_digest(block_bytes):
        raise ValueError(f"a block must have at least {MIN_BLOCK_BYTES} bytes, a multiple of 8, not {block_bytes}")
    device = kv_pool.device
    out = torch.empty(num_layers, len(block_ids), dtype=torch.int64, device=device)
    if out.numel():
        _digest_kernel[(len(block_ids), num_layers)](
            kv_pool.view(num_layers, num_blocks, -1).view(torch.int64),
            integers(block_ids, device),
            to_device(_constants(block_bytes), device),
            out,
            num_blocks,
            NUM_WORDS=block_bytes // 8,
            num_warps=1,
        )
    return out.cpu().numpy().view(np.uint64)


@triton.jit
def _split_words(pointer, words):
    """The words at even and at odd positions of the last axis, [..., 2]."""
    even, odd = tl.split(tl.load(pointer + words).to(tl.uint64, bitcast=True))
    return even, odd


@triton.jit
def _added(even, odd, even_secret, odd_secret):
    """What stripes [..., 4, 2] add to the even and to the odd lanes."""
    even_key = even ^ even_secret
    odd_key = odd ^ odd_secret
    return (even_key & 0xFFFFFFFF) * (even_key >> 32) + odd, (odd_key & 0xFFFFFFFF) * (odd_key >> 32) + even


@triton.jit(do_not_specialize=["num_blocks"])
def _digest_kernel(pool_ptr, block_ids_ptr, constants_ptr, out_ptr, num_blocks, NUM_WORDS: tl.constexpr):
    """Program (index of a block id, layer)."""
    PRIME32_1: tl.constexpr = 0x9E3779B1
    NUM_KILOBYTES: tl.constexpr = (NUM_WORDS * 8 - 1) // 1024
    LAST_STRIPES: tl.constexpr = (NUM_WORDS * 8 - 1 - NUM_KILOBYTES * 1024) // 64
    index = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    block_ptr = pool_ptr + (layer * num_blocks + tl.load(block_ids_ptr + index)) * NUM_WORDS

    lanes = tl.arange(0, 4)[:, None] * 2 + tl.arange(0, 2)[None, :]
    stripes = tl.arange(0, 16)[:, None, None]
    even_secret, odd_secret = _split_words(constants_ptr, stripes + lanes[None, :, :])
    even_scramble, odd_scramble = _split_words(constants_ptr, lanes + 16)
    even_acc, odd_acc = _split_words(constants_ptr, lanes + 40)

    words = stripes * 8 + lanes[None, :, :]
    for kilobyte in tl.range(0, NUM_KILOBYTES, num_stages=4):
        even, odd = _split_words(block_ptr + kilobyte * 128, words)
        even, odd = _added(even, odd, even_secret, odd_secret)
        even_acc += tl.sum(even, 0)
        odd_acc += tl.sum(odd, 0)
        even_acc = (even_acc ^ (even_acc >> 47) ^ even_scramble) * PRIME32_1
        odd_acc = (odd_acc ^ (odd_acc >> 47) ^ odd_scramble) * PRIME32_1

    # The rest: whole stripes, and then the block's last 64 bytes, even if they are part of those stripes.
    is_left = tl.arange(0, 16)[:, None] < LAST_STRIPES
    tail_words = tl.where(stripes < LAST_STRIPES, NUM_KILOBYTES * 128 + words, 0)
    even, odd = _split_words(block_ptr, tail_words)
    even, odd = _added(even, odd, even_secret, odd_secret)
    even_acc += tl.sum(tl.where(is_left, even, 0), 0)
    odd_acc += tl.sum(tl.where(is_left, odd, 0), 0)
    even, odd = _split_words(block_ptr + NUM_WORDS - 8, lanes)
    even_secret, odd_secret = _split_words(constants_ptr, lanes + 24)
    even, odd = _added(even, odd, even_secret, odd_secret)
    even_acc += even
    odd_acc += odd

    even_secret, odd_secret = _split_words(constants_ptr, lanes + 32)
    even_acc ^= even_secret
    odd_acc ^= odd_secret
    folded = (even_acc * odd_acc) ^ tl.umulhi(even_acc, odd_acc)
    digest = tl.sum(folded, 0) + tl.load(constants_ptr + 48).to(tl.uint64, bitcast=True)
    digest = (digest ^ (digest >> 37)) * 0x165667919E3779F9
    tl.store(out_ptr + layer * tl.num_programs(0) + index, (digest ^ (digest >> 32)).to(tl.int64, bitcast=True))
