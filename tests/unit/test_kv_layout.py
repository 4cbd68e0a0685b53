"""Layouts and pools: what a peer may claim, and where each block's bytes are."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest
import xxhash

from kv_transfer import HostPool, KVLayout, errors
from kv_transfer.errors import STATUS_OF, TransferError, TransportMissing, from_status
from kv_transfer.host_pool import runs

SHAPE: dict[str, Any] = {
    "num_layers": 3,
    "num_blocks": 7,
    "block_size": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "dtype": "bfloat16",
}


def make_pool() -> HostPool:
    layout = KVLayout(**SHAPE)
    array = np.random.default_rng(1).integers(0, 256, (3, 7, layout.block_bytes), dtype=np.uint8)
    return HostPool(layout, array)


def test_sizes() -> None:
    layout = KVLayout(**SHAPE)
    assert layout.block_bytes == 2 * 2 * 4 * 8 * 2
    assert layout.pool_bytes == 3 * 7 * layout.block_bytes
    assert KVLayout(**{**SHAPE, "dtype": "float32"}).block_bytes == 2 * layout.block_bytes
    assert KVLayout(**{**SHAPE, "num_parts": 1}).block_bytes == layout.block_bytes / 2


def test_survives_the_wire() -> None:
    layout = KVLayout(**SHAPE, order="layer block kv head dim slot")
    assert KVLayout.from_proto(layout.to_proto()) == layout


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 0),
        ("num_layers", 2**32 - 1),
        ("num_blocks", 0),
        ("num_blocks", 2**32 - 1),
        ("block_size", 0),
        ("block_size", 2**31),
        ("num_kv_heads", 0),
        ("head_dim", 2**20),
        ("num_parts", 0),
        ("num_parts", 3),
        ("dtype", "complex128"),
        ("dtype", ""),
        ("digest", "crc32"),
        ("order", ""),
        ("order", "layer block " + "x" * 1000),
    ],
)
def test_peers_numbers_are_bounded(field: str, value: Any) -> None:
    message = KVLayout(**SHAPE).to_proto()
    setattr(message, field, value)
    with pytest.raises(ValueError, match=field):
        KVLayout.from_proto(message)


def test_sizes_are_bounded_together() -> None:
    message = KVLayout(**SHAPE).to_proto()
    message.block_size, message.num_kv_heads, message.head_dim = 4096, 4096, 16384
    with pytest.raises(ValueError, match="too large"):
        KVLayout.from_proto(message)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 4),
        ("block_size", 8),
        ("num_kv_heads", 3),
        ("head_dim", 16),
        ("num_parts", 1),
        ("dtype", "float16"),
        ("order", "layer block head kv slot dim"),
    ],
)
def test_differences_name_the_field(field: str, value: Any) -> None:
    layout = KVLayout(**SHAPE)
    (difference,) = layout.differences(KVLayout(**{**SHAPE, field: value}))
    assert difference.startswith(f"{field}: ")
    assert repr(value) in difference


def test_pools_may_differ_in_size() -> None:
    layout = KVLayout(**SHAPE)
    assert layout.differences(KVLayout(**{**SHAPE, "num_blocks": 9})) == []


def test_pool_reads_and_writes_what_it_says() -> None:
    pool = make_pool()
    before = pool.array.copy()
    data = pool.read(1, [6, 0, 1])
    assert data == before[1, 6].tobytes() + before[1, 0].tobytes() + before[1, 1].tobytes()
    pool.write(2, [2, 3, 5], data)
    np.testing.assert_array_equal(pool.array[2, [2, 3, 5]], before[1, [6, 0, 1]])
    pool.array[2, [2, 3, 5]] = before[2, [2, 3, 5]]
    np.testing.assert_array_equal(pool.array, before)


def test_digests_are_of_each_block_of_each_layer() -> None:
    pool = make_pool()
    digests = pool.digests([4, 1])
    assert digests.shape == (3, 2)
    assert digests.dtype == np.uint64
    for layer in range(3):
        for index, block_id in enumerate([4, 1]):
            assert int(digests[layer, index]) == xxhash.xxh3_64_intdigest(pool.array[layer, block_id].tobytes())
    assert pool.digests([]).shape == (3, 0)


def test_neighbours_are_merged() -> None:
    assert runs([4, 5, 6, 2, 3, 9, 8]) == [(0, 4, 3), (3, 2, 2), (5, 9, 1), (6, 8, 1)]
    assert runs([]) == []


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((3, 7, 255), dtype=np.uint8),
        np.zeros((3, 7, 256), dtype=np.int8),
        np.zeros((3, 7, 512), dtype=np.uint8)[:, :, ::2],
        np.frombuffer(bytes(3 * 7 * 256), dtype=np.uint8).reshape(3, 7, 256),
    ],
    ids=["size", "dtype", "strided", "read-only"],
)
def test_pool_refuses_other_memory(array: np.ndarray[Any, Any]) -> None:
    with pytest.raises(ValueError, match="the pool must be"):
        HostPool(KVLayout(**SHAPE), array)


def test_every_error_has_its_status() -> None:
    assert set(STATUS_OF) == set(TransferError.__subclasses__())
    assert errors.__doc__ is not None
    drawing = {line.split()[1]: line.split()[2] for line in errors.__doc__.splitlines() if "──" in line}
    assert drawing == {each.__name__: code.name for each, code in STATUS_OF.items()}
    for kind, code in STATUS_OF.items():
        if kind is not TransportMissing:  # never crosses the wire
            assert type(from_status(code, "why")) is kind
    assert str(from_status(grpc.StatusCode.INTERNAL, "why")) == "INTERNAL: why"
