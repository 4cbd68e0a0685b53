"""Tensors of the pretended GPU, and its memory: which tensors hold how much of it.

A `DeviceTensor` has no numbers of its own: they lie in `memory`, a tensor on the CPU. Only this package looks there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pretend_gpu.devices import of_process
from pretend_gpu.races import Accesses

Dispatch = Callable[[Any, Any, Any], Any]


class DeviceTensor(torch.Tensor):
    memory: torch.Tensor
    _gpu_memory: DeviceMemory

    @staticmethod
    def __new__(cls, memory: torch.Tensor, gpu_memory: DeviceMemory) -> DeviceTensor:
        self: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls, memory.size(), strides=memory.stride(), storage_offset=memory.storage_offset(), dtype=memory.dtype,
            device=of_process(),
        )  # fmt: skip
        self.memory = memory
        self._gpu_memory = gpu_memory
        gpu_memory.hold(self)
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called only in threads that have not entered the mode of `Operations`."""
        [first, *_] = device_tensors_in((args, kwargs))
        return first._gpu_memory.dispatch(func, args, kwargs or {})

    # These run as operations or by a copy: torch's own implementations ask the device's library for the current device.

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
        return self if self.is_contiguous() else self.clone(memory_format=memory_format)

    def nonzero(self) -> torch.Tensor:  # type: ignore[override]
        return torch.ops.aten.nonzero(self)  # type: ignore[no-any-return]

    def __invert__(self) -> torch.Tensor:
        return torch.ops.aten.bitwise_not(self)  # type: ignore[no-any-return]

    def item(self) -> Any:
        return self.cpu().item()

    def __bool__(self) -> bool:
        return bool(self.cpu())

    def __int__(self) -> int:
        return int(self.cpu())

    def __float__(self) -> float:
        return float(self.cpu())

    def copy_(self, other: torch.Tensor, non_blocking: bool = False) -> DeviceTensor:
        return torch.ops.aten.copy_(self, other, non_blocking)  # type: ignore[no-any-return]

    def __getitem__(self, index: Any) -> torch.Tensor:
        picked, tensors = _basic(self, index if isinstance(index, tuple) else (index,))
        return torch.ops.aten.index(picked, tensors) if tensors else picked  # type: ignore[no-any-return]

    def __setitem__(self, index: Any, value: Any) -> None:
        picked, tensors = _basic(self, index if isinstance(index, tuple) else (index,))
        value = (
            value if isinstance(value, torch.Tensor) else torch.full((), value, dtype=self.dtype, device=self.device)
        )
        if tensors:
            torch.ops.aten.index_put_(picked, tensors, value)
        else:
            picked.copy_(value)

    def data_ptr(self) -> int:
        return self.memory.data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        del force
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.memory!r})"


class DeviceMemory:
    """How much the program has allocated, counted by the storages that its tensors keep."""

    def __init__(self, total_bytes: int, dispatch: Dispatch, accesses: Accesses) -> None:
        self.total_bytes = total_bytes
        self.dispatch = dispatch
        self.accesses = accesses
        self.rubbish = 0xFF
        """The value of each unwritten byte: reads as NaN or -1."""
        self.allocated_bytes = 0
        self.peak_bytes = 0
        self._num_holders: dict[int, int] = {}
        """How many tensors hold each storage."""
        self._lock = accesses.lock

    def hold(self, tensor: DeviceTensor) -> None:
        key, num_bytes = storage_of(tensor.memory), tensor.memory.untyped_storage().nbytes()
        with self._lock:
            if key not in self._num_holders:
                if self.allocated_bytes + num_bytes > self.total_bytes:
                    raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num_bytes} bytes")
                self.allocated_bytes += num_bytes
                self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
                self.accesses.allocated(key, num_bytes)
            self._num_holders[key] = self._num_holders.get(key, 0) + 1
        weakref.finalize(tensor, self._let_go, key, num_bytes).atexit = False

    def is_held(self, memory: torch.Tensor) -> bool:
        return storage_of(memory) in self._num_holders

    def wrap(self, tree: Any, known: list[DeviceTensor]) -> Any:
        """The tree with tensors of the device; tensors that an operation returns as it got them stay the same
        objects."""
        of_memory = {id(tensor.memory): tensor for tensor in known}

        def outside(memory: torch.Tensor) -> DeviceTensor:
            tensor = of_memory.get(id(memory))
            return DeviceTensor(memory, self) if tensor is None else tensor

        return mapped(torch.Tensor, outside, tree)

    def spoil(self, memory: torch.Tensor) -> None:
        """Fills its whole storage with rubbish."""
        if memory.dtype != torch.bool:
            torch.empty(0, dtype=torch.uint8).set_(memory.untyped_storage()).fill_(self.rubbish)

    def _let_go(self, key: int, num_bytes: int) -> None:
        with self._lock:
            self._num_holders[key] -= 1
            if not self._num_holders[key]:
                del self._num_holders[key]
                self.allocated_bytes -= num_bytes
                self.accesses.let_go(key)


def storage_of(memory: torch.Tensor) -> int:
    return memory.untyped_storage()._cdata


def _basic(x: torch.Tensor, index: tuple[Any, ...]) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The view that the numbers, slices and new axes of an index select, and the index's tensors, per axis of that
    view."""
    tensors: list[torch.Tensor | None] = []
    axis = 0
    for place, item in enumerate(index):
        if item is Ellipsis:
            axis = x.dim() - sum(later is not None for later in index[place + 1 :])
        elif item is None:
            x, axis = x.unsqueeze(axis), axis + 1
        elif isinstance(item, slice):
            start, stop, step = item.indices(x.shape[axis])
            x, axis = torch.ops.aten.slice(x, axis, start, max(start, stop), step), axis + 1
        elif isinstance(item, (torch.Tensor, tuple)):
            tensors += [None] * (axis - len(tensors)) + [torch.as_tensor(item, device=x.device)]
            axis += 1
        else:
            x = x.select(axis, int(item))
    return x, tensors


# Operations take and return tuples, lists and dicts of numbers and tensors. Torch's own functions to walk trees know
# more kinds of them, and took half the time of a step.


def mapped(kind: type | tuple[type, ...], function: Callable[[Any], Any], tree: Any) -> Any:
    """The same tree, with `function` applied to each leaf of that kind."""
    if isinstance(tree, kind):
        return function(tree)
    if isinstance(tree, (tuple, list)):
        items = [mapped(kind, function, item) for item in tree]
        return items if type(tree) is list else type(tree)(items)
    if isinstance(tree, dict):
        return {name: mapped(kind, function, item) for name, item in tree.items()}
    return tree


def leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (tuple, list)):
        for item in tree:
            yield from leaves(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from leaves(item)
    else:
        yield tree


def on_host(tree: Any) -> Any:
    """The same tree, with the memory of its tensors instead of them."""
    return mapped(DeviceTensor, lambda tensor: tensor.memory, tree)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]


def device_tensors_in(tree: Any) -> list[DeviceTensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, DeviceTensor)]
