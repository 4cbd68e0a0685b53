"""Watches each launch of a kernel for errors that Triton's interpreter tolerates and a GPU does not.

    launch ──> arguments are moved apart, rubbish around each (small ones) ──> programs run, one after another
                                                                                   │ each load and store is
           <── what they stored is copied back, if nothing raced               <───┘ checked, and written down,
                                                                                     for whoever asks (`told_of`)

`InvalidAccess` says which kernel did what:
- an access outside the tensors that the kernel was given (outside the views, even if within their storages);
- two programs that store to the same address, or one that loads what another stores: on a GPU their order is undefined;
- a program that loads what it stored before: its threads do not wait for each other.

A load with a mask but no `other` gives zeros for the masked-out elements in the interpreter, and undefined values on a
GPU. Here it gives NaN, or the largest integer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

PAD_BYTES = 64 * 1024
MAX_MOVED_BYTES = 16 << 20
"""Larger allocations are not moved: each is a memory mapping of its own, with nothing right behind it."""
MAX_SPARES = 8
RUBBISH = 0xFF
"""The value of each byte: read as numbers it gives NaN, the largest integer, or -1."""


class InvalidAccess(Exception):  # noqa: N818
    """A kernel makes an access that would be an error on a GPU."""


_by_address: list[torch.Tensor] = []
"""Tensors that kernels may access although they are not among the arguments."""


@contextmanager
def known_by_address(*tensors: torch.Tensor) -> Iterator[None]:
    """Allow kernels to access `tensors`, whose addresses they get as integers."""
    _by_address.extend(tensors)
    try:
        yield
    finally:
        del _by_address[len(_by_address) - len(tensors) :]


def known_tensors() -> list[torch.Tensor]:
    return list(_by_address)


Listener = Callable[[str, NDArray[np.uint64], bool], None]
"""Called for a launch that has ended: with the kernel's name, addresses in its arguments, and whether it stored there
(else loaded)."""
_listeners: list[Listener] = []


@contextmanager
def told_of(listener: Listener) -> Iterator[None]:
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


_looks_for_races = True


@contextmanager
def races_allowed() -> Iterator[None]:
    """Tolerate races. For launches whose conflicting stores are never read, such as warm-up steps, whose tokens all go
    to one slot."""
    global _looks_for_races
    _looks_for_races = False
    try:
        yield
    finally:
        _looks_for_races = True


class Launch:
    """The addresses that the programs of one launch may access, and those that they have accessed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._ranges: list[tuple[int, int]] = []
        self._loads: list[_Access] = []
        self._stores: list[_Access] = []
        self._num_accesses = 0
        self.program = 0
        for tensor in _by_address:
            self.allow(tensor)

    def allow(self, tensor: torch.Tensor) -> None:
        if tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            begin = tensor.data_ptr()
            self._ranges.append((begin, begin + (last + 1) * tensor.element_size()))

    def load(self, addresses: NDArray[np.uint64], num_bytes: int) -> None:
        self._check_bounds("load", addresses, num_bytes)
        self._loads.append(self._access(addresses))

    def store(self, addresses: NDArray[np.uint64], num_bytes: int) -> None:
        self._check_bounds("store", addresses, num_bytes)
        self._stores.append(self._access(addresses))

    def _access(self, addresses: NDArray[np.uint64]) -> _Access:
        self._num_accesses += 1
        return addresses, self.program, self._num_accesses

    def _check_bounds(self, verb: str, addresses: NDArray[np.uint64], num_bytes: int) -> None:
        if not addresses.size:
            return
        first, last = addresses.min(), addresses.max() + num_bytes
        if any(begin <= first and last <= end for begin, end in self._ranges):
            return
        is_inside = np.zeros(addresses.shape, dtype=bool)
        for begin, end in self._ranges:
            is_inside |= (addresses >= np.uint64(begin)) & (addresses <= np.uint64(max(end - num_bytes, 0)))
        if not is_inside.all():
            outside = int(addresses[~is_inside][0])
            near = min(self._ranges, key=lambda each: max(each[0] - outside, outside - each[1]), default=(0, 0))
            raise InvalidAccess(
                f"{self._name}: program {self.program} would {verb} {num_bytes} bytes at {outside - near[1]:+} of an "
                f"argument's end, which has {near[1] - near[0]}"
            )

    def tell(self, moved: _Moved) -> None:
        for accesses, is_stored in ((self._loads, False), (self._stores, True)):
            for listener in _listeners if accesses else ():
                addresses, _, _ = _joined(accesses)
                listener(self._name, moved.before(addresses), is_stored)

    def end(self) -> None:
        """Check for races after all programs have run. Raises `InvalidAccess` if their order mattered."""
        if not self._stores or not _looks_for_races:
            return
        stored, by, when = _joined(self._stores)
        order = np.lexsort((when, stored))
        stored, by, when = stored[order], by[order], when[order]
        is_twice = (stored[1:] == stored[:-1]) & (by[1:] != by[:-1])
        if is_twice.any():
            at = int(is_twice.argmax())
            raise InvalidAccess(f"{self._name}: programs {by[at]} and {by[at + 1]} store to the same address")
        if not self._loads:
            return
        loaded, reader, read = _joined(self._loads)
        at = np.searchsorted(stored, loaded).clip(max=len(stored) - 1)  # the first store to that address
        is_raced = (stored[at] == loaded) & ((by[at] != reader) | (when[at] < read))
        if is_raced.any():
            first = int(is_raced.argmax())
            raise InvalidAccess(
                f"{self._name}: program {reader[first]} loads what program {by[at[first]]} stores in the same launch"
            )


_Access = tuple[NDArray[np.uint64], int, int]
"""Addresses, the program, and the access' number within the launch."""


def _joined(accesses: list[_Access]) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]:
    lens = [len(addresses) for addresses, _, _ in accesses]
    return (
        np.concatenate([addresses for addresses, _, _ in accesses]),
        np.repeat([program for _, program, _ in accesses], lens),
        np.repeat([when for _, _, when in accesses], lens),
    )


_spares: dict[int, torch.Tensor] = {}
"""Buffers of launches that have ended, by storage size, least recently used first. Allocating a new one would cost more
than the copy into it."""


class _Moved:
    """The storages of a launch's arguments, each with rubbish around it."""

    def __init__(self) -> None:
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() > MAX_MOVED_BYTES:
            return tensor
        if storage.data_ptr() not in self._storages:
            padded = _spares.pop(storage.nbytes(), None)
            if padded is None:
                with torch.inference_mode(mode=False):  # or the next launch may not write to it
                    padded = torch.full((storage.nbytes() + 2 * PAD_BYTES,), RUBBISH, dtype=torch.uint8)
            padded[PAD_BYTES:-PAD_BYTES] = _bytes_of(storage)
            self._storages[storage.data_ptr()] = storage, padded
        _, padded = self._storages[storage.data_ptr()]
        offset = PAD_BYTES // tensor.element_size() + tensor.storage_offset()
        return tensor.new_empty(0).set_(padded.untyped_storage(), offset, tensor.size(), tensor.stride())

    def before(self, addresses: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Map addresses in the moved arguments to those in the original ones."""
        addresses = np.unique(addresses)
        before = addresses.copy()
        for storage, padded in self._storages.values():
            first = padded.data_ptr() + PAD_BYTES
            begin, end = np.searchsorted(addresses, np.array([first, first + storage.nbytes()], dtype=np.uint64))
            before[begin:end] = addresses[begin:end] - np.uint64(first) + np.uint64(storage.data_ptr())
        return before

    def restore(self) -> None:
        for storage, padded in self._storages.values():
            _bytes_of(storage).copy_(padded[PAD_BYTES : PAD_BYTES + storage.nbytes()])
            _spares[storage.nbytes()] = padded  # its padding is intact, or the launch would have raised
        while len(_spares) > MAX_SPARES:
            del _spares[next(iter(_spares))]


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def watch_launches() -> None:
    """Watch all launches from now on, in this process."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    call, set_grid_idx = GridExecutor.__call__, InterpreterBuilder.set_grid_idx
    launches: list[tuple[Launch, _Moved]] = []

    def _init_args_hst(self: Any, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
        launch, moved = launches[-1]

        def moved_and_allowed(arg: Any) -> Any:
            if not isinstance(arg, torch.Tensor):
                if isinstance(arg, tuple) or hasattr(arg, "data_ptr") or hasattr(arg, "base"):
                    raise NotImplementedError(f"an argument that is a {type(arg).__name__} is not watched yet")
                return arg
            tensor = moved.move(arg)
            launch.allow(tensor)
            return tensor

        return [moved_and_allowed(arg) for arg in args], {name: moved_and_allowed(arg) for name, arg in kwargs.items()}

    def _restore_args_dev(self: Any, *_: Any) -> None:
        launch, moved = launches[-1]
        launch.end()
        moved.restore()
        launch.tell(moved)

    def watched_call(self: Any, *args: Any, **kwargs: Any) -> None:
        launches.append((Launch(self.fn.__name__), _Moved()))
        try:
            call(self, *args, **kwargs)
        finally:
            launches.pop()

    def watched_set_grid_idx(self: Any, x: int, y: int, z: int) -> None:
        _, num_y, num_z = self.grid_dim
        launches[-1][0].program = (x * num_y + y) * num_z + z
        set_grid_idx(self, x, y, z)

    def create_masked_load(self: Any, ptrs: Any, mask: Any, other: Any, *rest: Any) -> Any:
        is_loaded = np.broadcast_to(mask.data, ptrs.data.shape)
        element = ptrs.get_element_ty()
        launches[-1][0].load(ptrs.data[is_loaded], _num_bytes(element))
        if other is None and not is_loaded.all():
            dtype = load(self, ptrs, TensorHandle(np.zeros_like(is_loaded), mask.dtype), None, *rest).data.dtype
            rubbish = np.full(ptrs.data.nbytes // 8 * dtype.itemsize, RUBBISH, dtype=np.uint8).view(dtype)
            other = TensorHandle(rubbish.reshape(ptrs.data.shape), element)
        return load(self, ptrs, mask, other, *rest)

    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        is_stored = np.broadcast_to(mask.data, ptrs.data.shape)
        launches[-1][0].store(ptrs.data[is_stored], _num_bytes(ptrs.get_element_ty()))
        return store(self, ptrs, value, mask, *rest)

    def not_watched(self: Any, *_: Any) -> Any:
        raise NotImplementedError("atomic operations are not watched yet")

    GridExecutor._init_args_hst, GridExecutor._restore_args_dev = _init_args_hst, _restore_args_dev
    GridExecutor.__call__ = watched_call
    InterpreterBuilder.set_grid_idx = watched_set_grid_idx
    InterpreterBuilder.create_masked_load = create_masked_load
    InterpreterBuilder.create_masked_store = create_masked_store
    InterpreterBuilder.create_atomic_rmw = InterpreterBuilder.create_atomic_cas = not_watched


def _num_bytes(element: Any) -> int:
    return max(1, int(element.primitive_bitwidth) // 8)
