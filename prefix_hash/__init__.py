"""Hashes that identify a KV block's content: chained, keyed, 128-bit hashes of the token ids up to the block's end.

Engine, registry and router must agree on them bit for bit, so this package imports nothing of ours.

    hash(block i) = BLAKE2b-128(key, hash(block i-1) || token ids of block i as little-endian uint32)

Two blocks have equal hashes only if all tokens up to their ends are equal *and* the hashes were made with the same key.
The key stands for everything else that KV depends on (weights, dtype; see `prefix_key`), and for who may share it (see
`salted_key`). The hash is cryptographic, because a tenant who could make two prompts collide would get another's KV.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16
"""Size of one block's hash."""


def prefix_key(compat_digest: str) -> bytes:
    """The 32-byte key of all prefix hashes of one model (`compat_digest`)."""
    return blake2b(f"tandem-prefix\0{compat_digest}\0".encode(), digest_size=32).digest()


def salted_key(key: bytes, cache_salt: str, lora_digest: str = "") -> bytes:
    """The key of requests with this salt and this adapter, which share no blocks with other requests. Returns `key` if
    both are empty."""
    if lora_digest:
        key = blake2b(lora_digest.encode(), digest_size=32, key=key, person=b"lora").digest()
    return blake2b(cache_salt.encode(), digest_size=32, key=key).digest() if cache_salt else key


def prompt_digest(token_ids: Sequence[int], key: bytes) -> bytes:
    """A hash that identifies all KV of a prompt, including a partial last block: equal only for the same token ids and
    key. Two workers that serve one request compare it to ensure that they mean the same prompt."""
    return blake2b(_as_bytes(token_ids), digest_size=HASH_BYTES, key=key, person=b"prompt").digest()


def extend_block_hashes(hashes: list[bytes], token_ids: Sequence[int], block_size: int, key: bytes) -> None:
    """Append the missing hashes of full blocks of `token_ids` to `hashes`. A partial last block has no hash."""
    parent = hashes[-1] if hashes else b""
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        ids = _as_bytes(token_ids[start : start + block_size])
        parent = blake2b(parent + ids, digest_size=HASH_BYTES, key=key).digest()
        hashes.append(parent)


def block_hashes(token_ids: Sequence[int], block_size: int, key: bytes) -> list[bytes]:
    """The hashes of all full blocks of `token_ids`, in order."""
    hashes: list[bytes] = []
    extend_block_hashes(hashes, token_ids, block_size, key)
    return hashes


def _as_bytes(token_ids: Sequence[int]) -> bytes:
    """Encode each id as a little-endian uint32."""
    ids = array("I", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()
