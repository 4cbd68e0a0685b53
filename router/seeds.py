"""The seeds of a request and of its answers. A draw depends on (seed, position) alone, so whoever knows the seed can
continue the answer."""

from __future__ import annotations

import secrets

from protos import tandem_inference_pb2 as pb

RANDOM = -1
"""As in vLLM, a request with this seed asks for a random one."""


def has_seed(params: pb.SamplingParams) -> bool:
    return params.HasField("seed") and params.seed != RANDOM


def drawn_seed() -> int:
    """A random seed that fits the wire and is not `RANDOM`."""
    return secrets.randbits(63)


def seed_of_sequence(seed: int, index: int) -> int:
    """vLLM's rule: answer `index` of several has the seed + index (in 64 bits, signed), so that it equals the single
    answer to that seed."""
    return (seed + index + (1 << 63)) % (1 << 64) - (1 << 63)
