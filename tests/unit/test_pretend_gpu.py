"""The pretended GPU refuses what a GPU would refuse, waits where it would wait, and has rubbish where a GPU may have
it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from pretend_gpu import PretendGpu, pretend_gpu, without_waiting
from pretend_gpu.memory import on_host, tensors_in
from pretend_gpu.races import Race
from torch.utils._device import _device_constructors

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture
def gpu() -> Iterator[PretendGpu]:
    with pretend_gpu(total_bytes=1 << 20) as pretended:
        yield pretended


def on_gpu(*numbers: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype, device="cuda")


def test_tensors_are_found_wherever_an_operation_takes_them(gpu: PretendGpu) -> None:
    a, b, c, d = (on_gpu(number) for number in range(4))
    largest = torch.return_types.max((c, d))
    tree = ((a, [None, b], 3), {"out": largest, "dim": 1})
    assert [id(tensor) for tensor in tensors_in(tree)] == [id(tensor) for tensor in (a, b, c, d)]
    args, names = on_host(tree)
    assert [tensor.device.type for tensor in tensors_in((args, names))] == ["cpu"] * 4
    assert (type(args), type(args[1]), args[1][0], args[2]) == (tuple, list, None, 3)
    assert (type(names["out"]), names["dim"]) == (torch.return_types.max, 1)


# -- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inference", [False, True])
def test_it_computes(gpu: PretendGpu, inference: bool) -> None:
    with torch.inference_mode(inference):
        x = on_gpu(3, 1, 2)
        assert (x.device, x.device.type, x.shape) == (torch.device("cuda", 0), "cuda", (3,))
        rows = torch.zeros(2, 3, device="cuda")
        rows[0] = x
        rows[1, :2].add_(x[1:], alpha=2)
        rows[:, on_gpu(2, dtype=torch.int64)] = 7
        out = torch.empty(2, 2, device="cuda")
        torch.mm(rows, rows.T, out=out)
        assert rows.tolist() == [[3, 1, 7], [2, 4, 7]]
        assert out.cpu().tolist() == [[59, 59], [59, 69]]
        assert x.to(torch.int64).view(torch.uint8)[::8].tolist() == [3, 1, 2]
        assert rows[..., 1].tolist() == [1, 4]
        assert rows[1, ..., None, 1:].tolist() == [[4, 7]]
        assert rows[None, :, on_gpu(2, 0, dtype=torch.int64)].tolist() == [[[7, 3], [7, 2]]]
        assert rows.is_contiguous()
        assert not rows.T.is_contiguous()
        assert x.argmax().item() == 0


def test_what_nobody_wrote_is_rubbish(gpu: PretendGpu) -> None:
    assert torch.empty(3, device="cuda").isnan().all()
    assert torch.empty_like(on_gpu(1, dtype=torch.int64)).item() == -1


def test_in_other_threads_as_well(gpu: PretendGpu) -> None:
    results: list[list[float]] = []
    thread = threading.Thread(target=lambda: results.append((on_gpu(1, 2) * 2).tolist()))
    thread.start()
    thread.join()
    assert results == [[2, 4]]


def test_memory_is_counted_by_what_is_held(gpu: PretendGpu) -> None:
    x = torch.zeros(1000, device="cuda")
    view = x[10:]
    assert torch.cuda.memory_allocated() == 4000
    y = x + 1
    del x, y
    assert torch.cuda.memory_allocated() == 4000
    assert torch.cuda.max_memory_allocated() == 8000
    del view
    assert torch.cuda.memory_allocated() == 0
    assert torch.cuda.mem_get_info() == (1 << 20, 1 << 20)


def test_there_is_no_more_memory_than_it_has(gpu: PretendGpu) -> None:
    held = torch.empty((1 << 20) - 100, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(200, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() == len(held)


def test_afterwards_there_is_none() -> None:
    with pretend_gpu():
        assert torch.cuda.is_available()
    assert not torch.cuda.is_available()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


# -- two places -----------------------------------------------------------------------------------------------------


def test_an_operation_has_its_tensors_in_one_place(gpu: PretendGpu) -> None:
    x = on_gpu(1, 2)
    for wrong in (lambda: x + torch.ones(2), lambda: torch.cat((x, torch.ones(2))), lambda: x.index_copy_(
        0, torch.tensor([0]), on_gpu(1)
    )):  # fmt: skip
        with pytest.raises(RuntimeError, match="same device"):
            wrong()
    assert (x + torch.tensor(1.0)).tolist() == [2, 3]  # it counts as a number
    assert torch.where(x > 1, 5, x).tolist() == [1, 5]
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()


# -- waiting --------------------------------------------------------------------------------------------------------

WAITING: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x[0] > 0),
    "int": lambda x: int(x[0]),
    "cpu": lambda x: x.cpu(),
    "tolist": lambda x: x.tolist(),
    "to the host": lambda x: x.to("cpu"),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "write by a mask": lambda x: x.__setitem__(x > 0, 1),
    "index on the host": lambda x: x[torch.tensor([0])],
    "repeats": lambda x: x.repeat_interleave(x.to(torch.int64)),
    "from ordinary memory": lambda _: torch.ones(1).to("cuda"),
    "from ordinary memory, non_blocking": lambda _: torch.ones(1).to("cuda", non_blocking=True),
    "pinned, blocking": lambda _: torch.ones(1).pin_memory().to("cuda"),
    "a list": lambda _: torch.tensor([1], device="cuda"),
    "copied": lambda x: x.copy_(torch.ones(2)),
    "to ordinary memory": lambda x: torch.ones(2).copy_(x, non_blocking=True),
    "synchronize": lambda _: torch.cuda.synchronize(),
    "stream": lambda _: torch.cuda.current_stream().synchronize(),
    "event": lambda _: torch.cuda.Event().synchronize(),  # type: ignore[no-untyped-call]
}


@pytest.mark.parametrize("how", list(WAITING))
def test_what_waits_can_be_refused(gpu: PretendGpu, how: str) -> None:
    x = on_gpu(1, 2)
    WAITING[how](x)
    with without_waiting(), pytest.raises(RuntimeError, match="the host waits for the device"):
        WAITING[how](x)


def test_what_does_not_wait_cannot(gpu: PretendGpu) -> None:
    x, index = on_gpu(1, 2), on_gpu(1, dtype=torch.int64)
    with without_waiting():
        host = torch.ones(2).pin_memory()
        x.copy_(host, non_blocking=True)
        host.to("cuda", non_blocking=True)
        torch.empty(2, pin_memory=True).copy_(x, non_blocking=True)
        x[index] = x[index] * 2
        torch.cuda.Event().record()  # type: ignore[no-untyped-call]


# -- order ----------------------------------------------------------------------------------------------------------


def test_a_copy_to_the_host_is_there_when_it_was_waited_for(gpu: PretendGpu) -> None:
    x, host = on_gpu(1, 2), torch.zeros(2).pin_memory()
    before, after, other = (torch.cuda.Event() for _ in range(3))  # type: ignore[no-untyped-call]
    before.record()
    host.copy_(x, non_blocking=True)
    x += 1  # the copy came first
    after.record()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        other.record()
    for earlier in (before, other):
        earlier.synchronize()
        assert host.isnan().all()
        assert not after.query()
    after.synchronize()
    assert host.tolist() == [1, 2]
    assert after.query()


def test_an_event_that_waits_for_another_stream(gpu: PretendGpu) -> None:
    host, beside = torch.zeros(1).pin_memory(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(beside):
        host.copy_(on_gpu(4), non_blocking=True)
        copied.record()
    torch.cuda.current_stream().wait_event(copied)
    torch.cuda.current_stream().synchronize()
    assert host.tolist() == [4]


def test_pinned_memory_must_not_change_while_it_is_copied(gpu: PretendGpu) -> None:
    host = torch.ones(2).pin_memory()
    host.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    host += 1
    torch.cuda.synchronize()
    host.to("cuda", non_blocking=True)
    host += 1
    with pytest.raises(AssertionError, match="pinned memory while it was being copied"):
        torch.cuda.synchronize()


# -- races ----------------------------------------------------------------------------------------------------------


def wait_for_event(first: torch.cuda.Stream, second: torch.cuda.Stream) -> None:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(first)
    second.wait_event(event)


def wait_on_the_host(first: torch.cuda.Stream, second: torch.cuda.Stream) -> None:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(first)
    with torch.cuda.stream(first):
        on_gpu(1).add_(1)  # not waited for, and not used by the other stream
    event.synchronize()


def wait_in_a_circle(first: torch.cuda.Stream, second: torch.cuda.Stream) -> None:
    third = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    third.wait_stream(first)
    wait_for_event(third, second)


WAYS_TO_WAIT: dict[str, Callable[[torch.cuda.Stream, torch.cuda.Stream], None]] = {
    "event": wait_for_event,
    "stream": lambda first, second: second.wait_stream(first),
    "a third stream": wait_in_a_circle,
    "the host, an event": wait_on_the_host,
    "the host, a stream": lambda first, _: first.synchronize(),
    "the host, the device": lambda *_: torch.cuda.synchronize(),
}
NO_WAYS: dict[str, Callable[[torch.cuda.Stream, torch.cuda.Stream], None]] = {
    "none": lambda *_: None,
    "the other way round": lambda first, second: wait_for_event(second, first),
    "the host, the other one": lambda _, second: second.synchronize(),
    "an event that is asked": lambda first, _: torch.cuda.Event().query(),  # type: ignore[no-untyped-call]
}
POOL = torch.zeros(4, 3, 8)
USES: dict[str, tuple[Callable[[torch.Tensor], object], Callable[[torch.Tensor], object]]] = {
    "read after write": (lambda x: x.add_(1), lambda x: x + 1),
    "write after read": (lambda x: x + 1, lambda x: x.mul_(2)),
    "write after write": (lambda x: x.zero_(), lambda x: x.mul_(2)),
    "to the host": (lambda x: x.zero_(), lambda x: x.cpu()),
    "from the host": (lambda x: x + 1, lambda x: x.copy_(POOL)),
    "a part": (lambda x: x[1].zero_(), lambda x: x[:, 2] + 1),
    "the same block": (
        lambda x: x.index_copy_(0, on_gpu(0, 2, dtype=torch.int64), x[:2] + 1),
        lambda x: x.index_select(0, on_gpu(3, 2, dtype=torch.int64)),
    ),
    "the smallest block": (
        lambda x: x.view(24, 4).index_fill_(0, on_gpu(5, dtype=torch.int64), 1),
        lambda x: x.view(24, 4).index_select(0, on_gpu(5, dtype=torch.int64)),
    ),
    "a block of all": (lambda x: x.sum(), lambda x: x.__setitem__(on_gpu(1, dtype=torch.int64), 0)),
}
NO_CONFLICTS: dict[str, tuple[Callable[[torch.Tensor], object], Callable[[torch.Tensor], object]]] = {
    "read after read": (lambda x: x + 1, lambda x: x + 2),
    "other parts": (lambda x: x[1].zero_(), lambda x: x[0] + 1),
    "other columns": (lambda x: x[:, 1].zero_(), lambda x: x[:, 2] + 1),
    "other blocks": (
        lambda x: x.index_fill_(0, on_gpu(0, 2, dtype=torch.int64), 1),
        lambda x: x.index_select(0, on_gpu(3, 1, dtype=torch.int64)),
    ),
    "views": (lambda x: x.add_(1), lambda x: x.view(-1)[3:].unsqueeze(0)),
}


def use_in_turn(
    uses: tuple[Callable[[torch.Tensor], object], Callable[[torch.Tensor], object]],
    waits: Callable[[torch.cuda.Stream, torch.cuda.Stream], None],
    x: torch.Tensor,
) -> None:
    first, second = (torch.cuda.Stream() for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        uses[0](x)
    waits(first, second)
    with torch.cuda.stream(second):
        uses[1](x)
    torch.cuda.synchronize()


@pytest.mark.parametrize("uses", list(USES))
@pytest.mark.parametrize("waits", list(WAYS_TO_WAIT))
def test_who_waits_may_use_what_another_used(gpu: PretendGpu, uses: str, waits: str) -> None:
    x = POOL.to("cuda")
    use_in_turn(USES[uses], WAYS_TO_WAIT[waits], x)


@pytest.mark.parametrize("uses", list(USES))
@pytest.mark.parametrize("waits", list(NO_WAYS))
def test_who_does_not_wait_must_not(gpu: PretendGpu, uses: str, waits: str) -> None:
    x = POOL.to("cuda")
    with pytest.raises(Race, match=r"stream \d+ (reads|writes) .* stream \d+ may still be using"):
        use_in_turn(USES[uses], NO_WAYS[waits], x)
    torch.cuda.synchronize()


@pytest.mark.parametrize("uses", list(NO_CONFLICTS))
def test_who_uses_something_else_need_not_wait(gpu: PretendGpu, uses: str) -> None:
    x = POOL.to("cuda")
    use_in_turn(NO_CONFLICTS[uses], NO_WAYS["none"], x)


def test_what_is_replayed_is_used_then(gpu: PretendGpu) -> None:
    x, y = POOL.to("cuda"), POOL.to("cuda")
    graph, _ = recorded(lambda: y.copy_(x))
    beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(beside):
        y.zero_()  # the recording itself wrote nothing
    wait_for_event(beside, torch.cuda.current_stream())
    graph.replay()
    with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(Race, match="reads"):  # type: ignore[no-untyped-call]
        y.sum()
    torch.cuda.synchronize()


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_memory_must_not_be_let_go_while_another_stream_uses_it(gpu: PretendGpu, is_waited_for: bool) -> None:
    """Torch would give the memory to the next operation of the stream on which it was allocated."""
    x, beside = POOL.to("cuda"), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    with torch.cuda.stream(beside):
        x.sum()
    if is_waited_for:
        wait_for_event(beside, torch.cuda.current_stream())
    del x
    if is_waited_for:
        on_gpu(1)
        return
    with pytest.raises(Race, match=r"memory of the default stream was let go while stream \d+ may still be using it"):
        on_gpu(1)


def test_memory_that_is_let_go_last_of_all_is_looked_at_too() -> None:
    def let_go_too_early() -> None:
        with pretend_gpu(total_bytes=1 << 20), torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            x = POOL.to("cuda")
            with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
                torch.cuda.synchronize()
                x.sum()
            del x

    with pytest.raises(Race, match="was let go while"):
        let_go_too_early()


# -- graphs ---------------------------------------------------------------------------------------------------------


def recorded(launch: Callable[[], torch.Tensor], pool: object = None) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):  # type: ignore[arg-type]
        result = launch()
    return graph, result


def test_a_graph_does_again_what_was_launched(gpu: PretendGpu) -> None:
    x, y, factor = on_gpu(1, 2), on_gpu(10, 10), 2

    def launch() -> torch.Tensor:
        y.add_(x * factor)
        return y.sum(dim=0, keepdim=True)

    graph, result = recorded(launch)
    assert result.isnan().all(), "recorded, not computed"
    x.copy_(on_gpu(3, 4))
    y.zero_()
    factor = 100  # the recording has the host's old value
    graph.replay()
    assert (y.tolist(), result.tolist()) == ([6, 8], [14])
    graph.replay()
    assert (y.tolist(), result.tolist()) == ([12, 16], [28])


def test_graphs_of_a_pool_share_their_memory(gpu: PretendGpu) -> None:
    x, pool = on_gpu(1, 2), torch.cuda.graph_pool_handle()
    (first, of_first), (second, of_second) = recorded(lambda: x + 1, pool), recorded(lambda: x + 2, pool)
    first.replay()
    assert of_first.tolist() == [2, 3]
    second.replay()
    assert of_second.tolist() == [3, 4]
    assert of_first.isnan().all()


def test_a_graph_needs_what_it_reads(gpu: PretendGpu) -> None:
    held = [on_gpu(1, 2)]
    graph, _ = recorded(lambda: held[0] + 1)
    graph.replay()
    held.clear()
    with pytest.raises(AssertionError, match="let go"):
        graph.replay()


@pytest.mark.parametrize("how", list(WAITING))
def test_nothing_waits_while_a_graph_is_recorded(gpu: PretendGpu, how: str) -> None:
    x = on_gpu(1, 2)
    with pytest.raises(RuntimeError, match=r"captur|graph is recorded"):
        recorded(lambda: WAITING[how](x))  # type: ignore[arg-type,return-value]
    recorded(lambda: x + 1)  # the next recording works


# -- afterwards -----------------------------------------------------------------------------------------------------


def test_torch_is_as_before() -> None:
    """Also if no default device had been set before."""
    _device_constructors.cache_clear()
    with pretend_gpu(total_bytes=1 << 20), torch.device("meta"):
        torch.empty(1)
    with torch.device("meta"):
        assert torch.tensor([]).device.type == "meta"


# -- several --------------------------------------------------------------------------------------------------------


def test_a_process_uses_one_of_several_and_every_thread_begins_with_the_first() -> None:
    """If a thread names no device, what it makes is on the thread's own current device."""
    errors: list[str] = []

    def try_all() -> None:
        for touch in (
            lambda: torch.zeros(1, device="cuda"),
            lambda: torch.zeros(1).pin_memory(),
            lambda: torch.empty(1, pin_memory=True),
            lambda: torch.ones(1).to("cuda"),
            torch.cuda.Stream,
            lambda: torch.cuda.Event().record(),  # type: ignore[no-untyped-call]
            lambda: torch.zeros(1, device="cuda:0"),
            torch.cuda.synchronize,
        ):
            try:
                touch()
            except RuntimeError as error:
                errors.append(str(error))

    with pretend_gpu(num_devices=2):
        assert torch.cuda.device_count() == 2
        torch.cuda.set_device(1)
        x = torch.zeros(2, device="cuda")
        assert (x.device.index, (x + 1).device.index, torch.cuda.current_device()) == (1, 1, 1)
        thread = threading.Thread(target=try_all)
        thread.start()
        thread.join()
        assert errors == ["cuda:0 is another process', this one uses cuda:1"] * 8
        with torch.cuda.stream(torch.cuda.Stream("cuda:1")):  # type: ignore[no-untyped-call]
            assert torch.cuda.current_device() == 1
        with pytest.raises(RuntimeError, match="invalid device ordinal 2 of 2"):
            torch.cuda.set_device(2)
