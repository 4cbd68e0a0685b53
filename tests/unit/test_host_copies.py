"""Blocks are copied to host memory and come back unchanged, some at a time, and errors are reported."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from pretend_gpu import operations, pretend_gpu

from engine.config import EngineConfig, ParallelConfig
from engine.kv_shape import KVCacheShape
from engine.running import host_copies
from engine.running.host_copies import COPIES_AT_ONCE, HostCopies, num_host_blocks
from engine.scheduling.offloading import BlockCopy

SHAPE = (3, 40, 2, 2, 4, 8)
"""[layer, block, part, head, slot, dim]"""


def save(block_id: int, host_block_id: int) -> BlockCopy:
    return BlockCopy(False, block_id, host_block_id)


def load(block_id: int, host_block_id: int) -> BlockCopy:
    return BlockCopy(True, block_id, host_block_id)


def test_ranks_share_host_memory_equally_and_each_has_room_for_a_block() -> None:
    shape = KVCacheShape(num_layers=2, num_blocks=5, block_size=4, num_kv_heads=3, head_dim=8, dtype="bfloat16")

    def num_blocks(num_bytes: int, num_ranks: int) -> int:
        cache, parallel = SimpleNamespace(kv_offloading_bytes=num_bytes), ParallelConfig(tensor_parallel_size=num_ranks)
        return num_host_blocks(cast(EngineConfig, SimpleNamespace(cache=cache, parallel=parallel)), shape)

    block_bytes = shape.all_layers_bytes
    assert [num_blocks(7 * block_bytes, num_ranks) for num_ranks in (1, 2, 4)] == [7, 3, 1]
    assert [num_blocks(num_bytes, 2) for num_bytes in (0, 2 * block_bytes)] == [0, 1]
    with pytest.raises(ValueError, match="kv_offloading_size must be at least"):
        num_blocks(2 * block_bytes - 1, 2)


@pytest.fixture(params=["cpu", "pretended gpu"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cpu":
        yield "cpu"
        return
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pretend_gpu():
        yield "cuda"


def pool_of(device: str, dtype: torch.dtype) -> torch.Tensor:
    numbers = torch.randint(0, 100, SHAPE, generator=torch.Generator().manual_seed(1)).float().to(dtype)
    return numbers.to(device)


def done(copies: HostCopies, number: int) -> list[BlockCopy]:
    taken: list[BlockCopy] = []
    while len(taken) < number:
        assert copies.wait()
        taken += copies.take_done()
    assert not copies.wait()
    return taken


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_what_comes_back_is_what_was_saved(device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(device, dtype)
    before = pool.cpu().view(torch.uint8).clone()
    monkeypatch.setattr(host_copies, "PIECE_BYTES", 5 * before[:, 0].numel())  # several pieces of five host blocks each
    copies = HostCopies(pool, 13)
    saves = [save(block_id, 12 - i) for i, block_id in enumerate(range(0, 26, 2))]
    copies.begin(saves)
    assert sorted(done(copies, 13)) == sorted(saves)
    loads = [load(block_id + 1, 12 - i) for i, block_id in enumerate(range(0, 26, 2))]
    copies.begin(loads)
    assert sorted(done(copies, 13)) == sorted(loads)
    after = pool.cpu().view(torch.uint8)
    assert torch.equal(after[:, 1:26:2], before[:, 0:26:2])
    assert torch.equal(after[:, 0:26:2], before[:, 0:26:2])
    assert torch.equal(after[:, 26:], before[:, 26:])
    copies.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("is_load", [False, True])
def test_launches_do_not_grow_with_the_pool(is_load: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch of torch's covers up to 2 GiB, a layer or two of a large pool. A launch for each layer of each block
    would take longer than the copy to the host."""
    num_copies = COPIES_AT_ONCE
    with pretend_gpu() as gpu:
        pool = pool_of("cuda", torch.bfloat16)
        monkeypatch.setattr(operations, "FAR_BYTES", pool[0].numel() * pool.itemsize)
        copies = HostCopies(pool, num_copies)
        torch.cuda.synchronize()
        before = gpu.num_launches
        copies.begin([BlockCopy(is_load, number, number) for number in range(num_copies)])
        done(copies, num_copies)
        copies.close()
        assert num_copies <= gpu.num_launches - before <= num_copies + 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_next_are_launched_before_the_last_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch is reported once it was waited for. A load that is requested meanwhile goes before the other saves."""
    saves = [save(block_id, block_id) for block_id in range(2 * COPIES_AT_ONCE + 3)]
    asked = load(39, 0)
    story: list[object] = []
    """What was reported, and the number of launches at each wait of the thread."""
    with pretend_gpu() as gpu:
        copies = HostCopies(pool_of("cuda", torch.float32), 40)
        torch.cuda.synchronize()
        ended, wait_for = threading.Event(), torch.cuda.Event.synchronize
        before = gpu.num_launches

        def watched(event: torch.cuda.Event) -> None:
            if not story:
                copies.begin([asked])
            story.append(gpu.num_launches - before)
            wait_for(event)

        def take() -> None:
            story.append(done := copies.take_done())
            if done[-1] == saves[-1]:
                ended.set()

        monkeypatch.setattr(torch.cuda.Event, "synchronize", watched)
        copies.on_done = take
        copies.begin(saves)
        assert ended.wait(5)
        copies.close()
    batch = COPIES_AT_ONCE + 2  # one launch for each block, one for their rows and one more
    assert story == [
        2 * batch, saves[:COPIES_AT_ONCE], 2 * batch + 3, saves[COPIES_AT_ONCE:-3], 2 * batch + 8, [asked],
        2 * batch + 8, saves[-3:],
    ]  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_is_under_way_is_copied_to_its_end_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """After `close` the caller may free the pool."""
    with pretend_gpu():
        pool = pool_of("cuda", torch.float32)
        copies = HostCopies(pool, 40)
        torch.cuda.synchronize()
        left, wait_for = threading.Event(), torch.cuda.Event.synchronize

        def leaving(event: torch.cuda.Event) -> None:
            copies.leave()
            left.set()
            wait_for(event)

        monkeypatch.setattr(torch.cuda.Event, "synchronize", leaving)
        loads = [load(block_id, block_id) for block_id in range(2 * COPIES_AT_ONCE + 3)]
        copies.begin(loads)
        assert left.wait(5)
        copies.close()
        assert copies.take_done() == loads[: 2 * COPIES_AT_ONCE]
        pool.zero_()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_copy_that_fails_is_heard_of_behind_those_on_their_way() -> None:
    """After the error, the pool's memory may be freed, or belong to another."""
    with pretend_gpu():
        pool = pool_of("cuda", torch.float32)
        copies = HostCopies(pool, 40)
        torch.cuda.synchronize()
        copies.begin([*(load(block_id, block_id) for block_id in range(COPIES_AT_ONCE)), load(39, 40)])
        with pytest.raises(IndexError):
            done(copies, COPIES_AT_ONCE + 1)
        pool.zero_()
        copies.close()


def test_who_waits_for_a_load_does_not_wait_for_all_saves() -> None:
    copies = HostCopies(pool_of("cpu", torch.float32), 40)
    begun = [save(block_id, block_id) for block_id in range(39)]
    with copies._changed:  # before the thread sees any of them
        copies.begin(begun)
        copies.begin([load(39, 0)])
    taken = done(copies, 40)
    assert taken.index(load(39, 0)) <= COPIES_AT_ONCE
    copies.close()


def test_each_end_is_told() -> None:
    copies = HostCopies(pool_of("cpu", torch.float32), 4)
    told = threading.Event()
    copies.on_done = told.set
    copies.begin([save(0, 0)])
    assert told.wait(5)
    assert copies.take_done() == [save(0, 0)]
    assert copies.take_done() == []
    copies.close()


def test_a_copy_that_fails_is_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = HostCopies(pool_of("cpu", torch.float32), 4)
    told = threading.Event()
    copies.on_done = told.set
    copies.begin([save(0, 4)])  # there is no such host block
    assert told.wait(5)
    for ask in (copies.wait, copies.take_done):
        with pytest.raises(IndexError):
            ask()
    copies.close()


def test_who_waits_for_what_is_copied_no_more_hears_so() -> None:
    """For example code that runs at a program's exit, when the copies have ended."""
    copies = HostCopies(torch.zeros(2, 4, 2, 2, 4, 4), 4)
    copies.close()
    copies.begin([BlockCopy(False, 0, 0)])
    heard: list[BaseException] = []

    def wait() -> None:
        with pytest.raises(RuntimeError, match="nothing is copied to or from host memory any more") as error:
            copies.wait()
        heard.append(error.value)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(5)
    assert heard


ENDS_EARLY = """
import atexit
atexit.register(lambda: print("copying" if copies._thread.is_alive() else "ended"))  # the last handler
import torch
from engine.running.host_copies import HostCopies, _as_words, _ByDevice
from engine.scheduling.offloading import BlockCopy

pool = torch.zeros(8, 64, 2, 2, 16, 16)
copies = HostCopies(pool, 64)
words = _as_words(pool)
copies._copy = _ByDevice(words, words.new_empty(64, *words.shape[::2]))  # within torch, as on a GPU
copies.begin(BlockCopy(False, n % 64, n % 64) for n in range(50_000))
"""


def test_a_process_ends_well_in_the_middle_of_copies() -> None:
    """An engine need not be closed."""
    command = [sys.executable, "-c", ENDS_EARLY]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ended\n", "")
