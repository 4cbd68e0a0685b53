"""A pool in a device's memory: it has the same bytes as the host pool, and no layer is reported before it is
written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from device_peers import Done, OneProcess, copy_rows_of_host

from kv_transfer import HostPool, KVLayout, TransportMissing
from kv_transfer.pool import Digests, Rows
from worker_service.cuda_ipc import DevicePeers
from worker_service.device_pool import DevicePool, DeviceWatch, digest_on_host

LAYOUT = KVLayout(num_layers=3, num_blocks=7, block_size=4, num_kv_heads=2, head_dim=8, dtype="bfloat16")
PATIENCE_S = 5.0


def digest_blocks(tensor: torch.Tensor, block_ids: Sequence[int]) -> Digests:
    return HostPool(LAYOUT, tensor.numpy()).digests(block_ids)


def make_pools() -> tuple[HostPool, DevicePool, list[str]]:
    """A host pool and a device pool over the same bytes, and the log of what was done beside the engine."""
    size = (LAYOUT.num_layers, LAYOUT.num_blocks, LAYOUT.block_bytes)
    host = HostPool(LAYOUT, np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8))
    log: list[str] = []

    @contextmanager
    def beside() -> Iterator[None]:
        log.append("entered")
        yield
        log.append("done")

    return host, DevicePool(LAYOUT, torch.from_numpy(host.array), digest_blocks, beside), log


@pytest.mark.parametrize("block_ids", [[3], [0, 1, 2], [6, 2, 3, 0]])
def test_it_is_the_same_bytes(block_ids: list[int]) -> None:
    host, pool, log = make_pools()
    assert pool.base_address == host.base_address
    for layer in range(LAYOUT.num_layers):
        assert pool.read(layer, block_ids, prefix=b"head") == host.read(layer, block_ids, prefix=b"head")
    np.testing.assert_array_equal(pool.digests(block_ids), host.digests(block_ids))
    assert log == ["entered", "done"] * 4


@pytest.mark.parametrize("block_ids", [[], [3], [6, 2, 3, 0]])
def test_digests_by_the_host_are_the_host_pools(block_ids: list[int]) -> None:
    host, _, _ = make_pools()
    tensor = torch.from_numpy(host.array).view(torch.bfloat16).view(3, 7, 2, 2, 4, 8)
    np.testing.assert_array_equal(digest_on_host(tensor, block_ids), host.digests(block_ids))


def test_what_is_written_lies_in_its_blocks_alone() -> None:
    host, pool, log = make_pools()
    before = host.array.copy()
    data = bytes(range(256)) * (2 * LAYOUT.block_bytes // 256)
    pool.write(1, [5, 2], memoryview(data))
    assert log == ["entered", "done"]
    assert host.read(1, [5, 2]) == data
    others = np.ones(LAYOUT.num_blocks, dtype=bool)
    others[[5, 2]] = False
    np.testing.assert_array_equal(host.array[1][others], before[1][others])
    np.testing.assert_array_equal(host.array[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensor: tensor[:2], "3 layers of 7 blocks"),
        (lambda tensor: tensor[:, :, :-1], "must have"),
        (lambda tensor: tensor.transpose(0, 1).contiguous().transpose(0, 1), "contiguous"),
    ],
    ids=["layers", "bytes", "order"],
)
def test_a_tensor_of_another_shape_is_refused(change: Callable[[torch.Tensor], Any], named: str) -> None:
    _, pool, _ = make_pools()
    with pytest.raises(ValueError, match=named):
        DevicePool(LAYOUT, change(pool._bytes_LBN), digest_blocks)


# -- when it is written ---------------------------------------------------------------------------------------------


def test_what_copies_to_peers_is_made_once_and_tried_on_a_row_of_our_own() -> None:
    """Otherwise the first transfer would wait until the kernel is compiled."""
    host, _, _ = make_pools()
    before = host.array.copy()
    copied: list[tuple[int, list[list[int]]]] = []
    made: list[DevicePeers] = []

    def copy_rows(source: torch.Tensor, address: int, rows_2R: Rows) -> None:
        copied.append((address, rows_2R.tolist()))
        copy_rows_of_host(source, address, rows_2R)

    def make_peers() -> DevicePeers:
        made.append(DevicePeers(OneProcess(), copy_rows, nullcontext, Done))
        return made[-1]

    pool = DevicePool(LAYOUT, torch.from_numpy(host.array), digest_blocks, make_peers=make_peers)
    assert made == []
    endpoint = pool.describe_memory()
    assert endpoint.pool_bytes == LAYOUT.pool_bytes
    pool.open_peer(endpoint, LAYOUT.num_blocks)
    assert len(made) == 1
    assert copied == [(pool.base_address, [[0], [0]])]
    np.testing.assert_array_equal(host.array, before)


def test_a_pool_that_cannot_be_opened_says_so() -> None:
    _, pool, _ = make_pools()
    with pytest.raises(TransportMissing, match="can be opened by no other process"):
        pool.describe_memory()


class LaggingDevice:
    """A device that does what was launched only when the test lets it go on."""

    def __init__(self) -> None:
        self.events: list[LaggingEvent] = []

    def record(self) -> LaggingEvent:
        self.events.append(LaggingEvent())
        return self.events[-1]

    def go_on(self, num_events: int) -> None:
        for event in [event for event in self.events if not event.query()][:num_events]:
            event.is_done.set()


class LaggingEvent:
    def __init__(self) -> None:
        self.is_done = threading.Event()

    def query(self) -> bool:
        return self.is_done.is_set()

    def synchronize(self) -> None:
        assert self.is_done.wait(PATIENCE_S)


def test_who_launches_does_not_wait_and_who_listens_hears_in_order_when_it_is_done() -> None:
    device, heard, has_heard = LaggingDevice(), [], threading.Semaphore(0)
    watch = DeviceWatch(device.record)

    def tell(layer: int) -> None:
        heard.append(layer)
        has_heard.release()

    for layer in range(3):
        watch.when_done(lambda layer=layer: tell(layer))
    assert (len(device.events), heard) == (3, [])
    device.go_on(2)
    assert has_heard.acquire(timeout=PATIENCE_S)
    assert has_heard.acquire(timeout=PATIENCE_S)
    assert heard == [0, 1]
    device.go_on(1)
    watch.catch_up()
    assert heard == [0, 1, 2]
    watch.close()


def test_a_step_is_reported_when_its_layers_are_told_while_the_next_one_is_under_way() -> None:
    device, heard, may_tell = LaggingDevice(), [], threading.Event()
    watch = DeviceWatch(device.record)

    def tell(layer: int) -> None:
        assert may_tell.wait(PATIENCE_S)
        heard.append(layer)

    for layer in range(4):
        watch.when_done(lambda layer=layer: tell(layer))
    device.go_on(2)  # those of the first step
    reporting = threading.Thread(target=watch.catch_up)
    reporting.start()
    reporting.join(0.05)
    assert reporting.is_alive()  # done, but not reported
    may_tell.set()
    reporting.join(PATIENCE_S)
    assert (reporting.is_alive(), heard) == (False, [0, 1])
    device.go_on(2)
    watch.close()
    assert heard == [0, 1, 2, 3]


def test_a_device_that_fails_is_heard_of_no_more(caplog: pytest.LogCaptureFixture) -> None:
    class FailedEvent(LaggingEvent):
        def synchronize(self) -> None:
            raise RuntimeError("an illegal memory access was encountered")

    heard: list[str] = []
    watch = DeviceWatch(FailedEvent)
    for _ in range(2):
        watch.when_done(lambda: heard.append("written"))
    watch.close()
    watch.catch_up()
    assert heard == []
    assert "the device failed" in caplog.text


def test_nobody_waits_for_one_who_could_not_be_told(caplog: pytest.LogCaptureFixture) -> None:
    def tell() -> None:
        raise AttributeError("there is no such listener")

    device, heard = LaggingDevice(), list[str]()
    watch = DeviceWatch(device.record)
    watch.when_done(tell)
    watch.when_done(lambda: heard.append("the next one"))
    device.go_on(2)
    reporting = threading.Thread(target=watch.catch_up, daemon=True)
    reporting.start()
    reporting.join(PATIENCE_S)
    assert not reporting.is_alive()
    watch.close()
    assert heard == ["the next one"]
    assert "there is no such listener" in caplog.text
