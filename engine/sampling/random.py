"""Counter-based random numbers: a draw depends on its seed, position and token id, not on earlier draws.

Any worker that knows a sequence's seed and the token's position computes the same draw, so a sequence that was
preempted, moved or restarted continues with the tokens that it would have had. Each of several answers to one prompt
has its own seed.

Philox4x32-10 from J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
KEY_INCREMENTS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))  # golden ratio, sqrt(3) - 1
NUM_ROUNDS = 10
_LOW_32 = np.uint64(0xFFFFFFFF)
_SHIFT_32 = np.uint64(32)


def philox4x32(counters: NDArray[np.uint32], keys: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Ten rounds of Philox over each row.

    `counters`: [N, 4], `keys`: [N, 2], or [1, 2] for all. Returns [N, 4] random words.
    """
    c0, c1, c2, c3 = (counters[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = (keys[:, i].astype(np.uint64) for i in range(2))
    for _ in range(NUM_ROUNDS):
        # 32 x 32 -> 64 bits cannot overflow. Only the sums of the key are taken modulo 2**32.
        product_0, product_1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c2 = (product_1 >> _SHIFT_32) ^ c1 ^ k0, (product_0 >> _SHIFT_32) ^ c3 ^ k1
        c1, c3 = product_1 & _LOW_32, product_0 & _LOW_32
        k0, k1 = (k0 + KEY_INCREMENTS[0]) & _LOW_32, (k1 + KEY_INCREMENTS[1]) & _LOW_32
    return np.stack((c0, c1, c2, c3), axis=1).astype(np.uint32)


def exponentials(seed: int, position: int, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one exponentially distributed number (mean 1) for each of the ascending `token_ids` (at least one). It
    depends only on the id, `seed` and `position`.

    `seed` is 64-bit, signed or not; `position` is in [0, 2**32). Four ids share a Philox block. Each number is made
    from 32 random bits and lies between 1.2e-10 and 22.9.
    """
    block_of_token = token_ids >> 2
    blocks = np.arange(block_of_token[-1] + 1)
    if len(blocks) > len(token_ids):  # few ids: compute only their blocks
        blocks, block_of_token = np.unique(block_of_token, return_inverse=True)
    counters = np.zeros((len(blocks), 4), dtype=np.uint32)
    counters[:, 0], counters[:, 2] = blocks, position
    keys = np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype="<u8").view("<u4").reshape(1, 2)
    words = philox4x32(counters, keys)[block_of_token, token_ids & 3]
    numbers: NDArray[np.float64] = -np.log((words + 0.5) * 2.0**-32)
    return numbers
