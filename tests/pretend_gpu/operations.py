"""Torch's operations on tensors of the pretended GPU: the CPU computes them at once, on the tensors' memory.

operation ─ only the host's tensors ──────────────────────────> as ever
          ├ to, copy_, pin_memory ── between the two ──────────> a copy, now or late (streams.py)
          └ of the device ── check: all there? a wait? a race? ── compute ── if a graph is recorded: keep it for
                                                                             replays
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pretend_gpu.devices import used
from pretend_gpu.memory import DeviceMemory, DeviceTensor, device_tensors_in, on_host, storage_of, tensors_in
from pretend_gpu.races import Accesses, Places, Timeline, places_of_elements
from pretend_gpu.streams import current_graph, current_stream, host, wait

aten = torch.ops.aten

UNWRITTEN = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided)
PINNING = (aten.pin_memory, aten._pin_memory)
INDEXED = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
MASKS = (torch.bool, torch.uint8)
READ_BACK = (
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.bincount,
    aten.unique_consecutive, aten.is_nonzero, aten.equal,
)  # fmt: skip
"""Operations whose result, or its size, the host has to know."""
TAKES_HOST_SCALARS = (aten.where, aten.masked_fill_, *INDEXED[1:])
"""Operations that are not pointwise and still take a host tensor without axes."""
PICKING = (*INDEXED, aten.index_select, aten.index_copy_, aten.index_fill_, aten.index_add_)
"""Operations that use parts of their first tensor, by indices in the others."""

FAR_BYTES = 2**31 - 1
"""How far one launch of torch reaches in a tensor: an operation on a longer tensor takes as many launches as needed.
An operation that picks rows takes one launch, wherever the rows are."""


class Operations:
    def __init__(self, total_bytes: int, *, has_grouped_products: bool) -> None:
        """`has_grouped_products`: torch has one kernel for all experts of a layer, in bfloat16; otherwise it reads the
        number of rows of each expert back to the host."""
        self.accesses = Accesses(host, _launching)
        self.memory = DeviceMemory(total_bytes, self.dispatch, self.accesses)
        self._has_grouped_products = has_grouped_products
        self.mode = _Mode(self.dispatch)
        """Entered by every thread that uses the device."""
        self.num_launches = 0
        """Launches of torch's operations, copies between host and device included."""
        self._pinned: dict[int, torch.UntypedStorage] = {}
        """Pinned storages, kept so that no other memory takes their addresses."""

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        # Torch tracks which tensor a wrapper is a view of; it cannot do so for tensors made in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            return self._operation(func, args, kwargs)

    def _operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        packet, tensors = func.overloadpacket, device_tensors_in((args, kwargs))
        if packet in PINNING:
            return self._pin(args[0].clone())
        if packet is aten.empty_like and args[0].is_meta and _names_device(tuple(kwargs.values())):
            # Torch would ask the real device for this.
            func, args, kwargs = aten.empty.memory_format, (args[0].shape,), {"dtype": args[0].dtype} | kwargs
        if not tensors and _is_of_shapes_alone((*args, *kwargs.values())):
            return func(*args, **kwargs)
        if packet is aten.is_pinned:
            return storage_of(args[0]) in self._pinned
        if packet is aten.to:
            return self._to(args[0], **_by_name(func, args) | kwargs)
        if packet is aten._to_copy:
            return self._converted(args[0], **kwargs)
        if packet is aten.copy_ and len(tensors) == 1:
            return self._copied(*args, **kwargs)
        if not tensors and not _names_device((*args, *kwargs.values())):
            is_pinned = kwargs.get("pin_memory")
            result = func(*args, **{**kwargs, "pin_memory": False} if is_pinned else kwargs)
            return self._pin(result) if is_pinned else result
        for device in (*args, *kwargs.values()):
            if isinstance(device, torch.device) and device.type == "cuda":
                used(device)
        if func._can_decompose():
            with self.mode:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        self._check(func, args, kwargs)
        return self._computed(func, args, kwargs, tensors)

    def _check(self, func: Any, args: Any, kwargs: Any) -> None:
        packet = func.overloadpacket
        for tensor in tensors_in((args, kwargs)):
            if isinstance(tensor, DeviceTensor):
                continue
            if packet is aten.index:
                wait("an index on the host")
            elif tensor.dim() or not (torch.Tag.pointwise in func.tags or packet in TAKES_HOST_SCALARS):
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
                    f"({func}, the host's is {tuple(tensor.shape)})"
                )
        if packet in INDEXED and any(index is not None and index.dtype in MASKS for index in args[1]):
            wait(f"{func} by a mask")
        if packet in READ_BACK or (packet is aten.repeat_interleave and kwargs.get("output_size") is None):
            wait(str(func))
        # It waits outside recordings, too, but that costs only speed, and tests' engines in float32 always do it.
        is_looped = packet is aten._grouped_mm and not (self._has_grouped_products and args[0].dtype == torch.bfloat16)
        if is_looped and current_graph():
            wait("a product for each group")
        if packet is aten.histc and (len(args) < 4 or args[2] == args[3]):
            wait("a histogram between bounds that have to be found first")

    def _computed(self, func: Any, args: Any, kwargs: Any, tensors: list[DeviceTensor]) -> Any:
        uses = _uses(func, args, kwargs)
        args, kwargs = on_host((args, kwargs))
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        compute = _histogram if func.overloadpacket is aten.histc else func
        for use in uses:
            use.touch(self.accesses)
        if _computes(func):
            self.num_launches += 1 if func.overloadpacket in PICKING else _num_launches(tensors)
        result = compute(*args, **kwargs)
        is_new = [not any(storage_of(m) == storage_of(t.memory) for t in tensors) for m in tensors_in(result)]
        allocated = [memory for memory, new in zip(tensors_in(result), is_new, strict=True) if new]
        if func.overloadpacket in UNWRITTEN:
            for memory in allocated:
                self.memory.spoil(memory)
        for tensor in tensors:
            memory = tensor.memory
            if (tensor.shape, tensor.stride()) != (memory.shape, memory.stride()):
                raise NotImplementedError(f"{func} gives a tensor another shape")
        on_device = self.memory.wrap(result, tensors)
        if _computes(func):
            written = [_Use(memory, str(func), is_written=True) for memory in allocated]
            for use in written:
                use.touch(self.accesses)
            uses += written
        if graph := current_graph():
            again = self._again(func, compute, args, kwargs, result, uses)
            graph.launch(again, [t.memory for t in tensors], allocated)
        return on_device

    def _again(
        self, func: Any, compute: Callable[..., Any], args: Any, kwargs: Any, result: Any, uses: list[_Use]
    ) -> Callable[[], None]:
        """The same operation again, which writes its results to the same memory."""
        if not _computes(func):
            return lambda: None

        def again() -> None:
            for use in uses:
                use.touch(self.accesses)
            for memory, value in zip(tensors_in(result), tensors_in(compute(*args, **kwargs)), strict=True):
                if memory is not value:
                    memory.copy_(value)

        return again

    def _to(self, source: torch.Tensor, *, copy: bool = False, **names: Any) -> torch.Tensor:
        if (other := names.pop("other", None)) is not None:
            names |= {"device": other.device, "dtype": other.dtype}
        is_same = torch.device(names.get("device") or source.device).type == source.device.type
        if is_same and (names.get("dtype") or source.dtype) == source.dtype and not copy:
            return source
        return self._converted(source, **names)

    def _converted(
        self, source: torch.Tensor, *, device: Any = None, non_blocking: bool = False, **names: Any
    ) -> torch.Tensor:
        names = {name: value for name, value in names.items() if name in ("dtype", "memory_format")}
        to = source.device if device is None else torch.device(device)
        if to.type == "cuda":
            used(to)
        if to.type == source.device.type:
            if to.type == "cpu":
                return aten._to_copy(source, **names)  # type: ignore[no-any-return]
            return self._computed(aten._to_copy.default, (source,), names, [source])  # type: ignore[list-item, no-any-return]
        if to.type == "cuda":
            target: torch.Tensor = DeviceTensor(torch.empty_like(source, **names), self.memory)
        else:
            target = torch.empty_like(source.memory, **names)  # type: ignore[attr-defined]
            if non_blocking:
                self._pin(target)
        return self._copied(target, source, non_blocking)

    def _copied(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """Between host and device."""
        host = source if isinstance(target, DeviceTensor) else target
        if current_graph():
            raise RuntimeError("a copy between host and device, while a graph is recorded")
        on_device = target if isinstance(target, DeviceTensor) else source
        self.num_launches += 1 if on_device.is_contiguous() else 1 + _num_launches([on_device])
        is_late = non_blocking and storage_of(host) in self._pinned
        if not is_late:
            wait(f"a copy between host and device ({'not pinned' if non_blocking else 'not non_blocking'})")
            current_stream().finish()
        if isinstance(target, DeviceTensor):
            _Use(target.memory, "a copy from the host", is_written=True).touch(self.accesses)
            target.memory.copy_(source)
            if is_late:
                current_stream().later(_unchanged(source))
        else:
            copied = source.memory.clone()  # type: ignore[attr-defined]
            _Use(source.memory, "a copy to the host", is_written=False).touch(self.accesses)  # type: ignore[attr-defined]
            if not is_late:
                current_stream().wait_for_all()
            if is_late:
                target.view(torch.uint8).fill_(0xFF) if target.dim() else target.fill_(-1)
                current_stream().later(lambda: target.copy_(copied))
            else:
                target.copy_(copied)
        return target

    def _pin(self, memory: torch.Tensor) -> torch.Tensor:
        used()  # pinned in the context of the current device
        self._pinned[storage_of(memory)] = memory.untyped_storage()
        return memory


@dataclass(frozen=True, slots=True)
class _Use:
    """An operation's use of memory."""

    memory: torch.Tensor
    what: str
    is_written: bool
    picked: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Returns the used ones of all elements; None: all are used."""

    def touch(self, accesses: Accesses) -> None:
        accesses.touch(self.memory, self._places(), self.what, is_written=self.is_written)

    def _places(self) -> Places | None:
        if self.picked is None:
            return None
        num_elements = self.memory.untyped_storage().nbytes() // self.memory.itemsize
        shape = self.memory.size(), self.memory.stride(), self.memory.storage_offset()
        elements = self.picked(_numbers(num_elements).as_strided(*shape))
        return places_of_elements(elements.numpy().reshape(-1), self.memory.itemsize)


@lru_cache(maxsize=8)
def _numbers(num_elements: int) -> torch.Tensor:
    return torch.arange(num_elements)


def _launching() -> Timeline | None:
    return None if current_graph() else current_stream().launching()


def _num_launches(tensors: list[torch.Tensor]) -> int:
    """How many launches an operation on all their elements takes."""
    spans = [sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1 for x in tensors]
    return max([-(-span * x.itemsize // FAR_BYTES) for x, span in zip(tensors, spans, strict=True)], default=1)


def _computes(func: Any) -> bool:
    return not func.is_view and func.overloadpacket not in UNWRITTEN


def _uses(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[_Use]:
    """The operation's uses of the memory of its arguments."""
    if not _computes(func):
        return []
    uses = []
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        picked = _picked(func, *on_host(args)) if position == 0 and func.overloadpacket in PICKING else None
        uses += [_Use(tensor.memory, str(func), is_written, picked) for tensor in device_tensors_in(value)]
    return uses


def _picked(func: Any, x: torch.Tensor, *names: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that picks from the places of `x` what the operation picks from `x`."""
    del x
    if func.overloadpacket in INDEXED:
        return lambda places: aten.index(places, names[0])  # type: ignore[no-any-return]
    dim, index = names[:2]
    return lambda places: places.index_select(dim, index)


def _is_of_shapes_alone(values: tuple[Any, ...]) -> bool:
    """Whether an operation runs on torch's meta device, or moves something there."""
    meta = torch.device("meta")
    return any(value == meta for value in values if isinstance(value, torch.device)) or any(
        tensor.is_meta for tensor in tensors_in(values)
    )


def _histogram(x: torch.Tensor, *bounds: Any, **names: Any) -> torch.Tensor:
    """A histogram of integers, too, which torch does not support on a CPU."""
    return torch.histc(x.double(), *bounds, **names).to(x.dtype)


class _Mode(TorchDispatchMode):
    def __init__(self, dispatch: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self._dispatch = dispatch

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, but telling torch so would take seconds of imports."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._dispatch(func, args, kwargs or {})


def _names_device(args: tuple[Any, ...]) -> bool:
    return any(isinstance(arg, torch.device) and arg.type == "cuda" for arg in args)


def _by_name(func: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    """All arguments but the first, by name."""
    return {argument.name: value for argument, value in zip(func._schema.arguments[1:], args[1:], strict=False)}


def _unchanged(host: torch.Tensor) -> Callable[[], None]:
    before = _bytes_of(host)

    def check() -> None:
        assert _bytes_of(host) == before, "the host wrote to pinned memory while it was being copied"

    return check


def _bytes_of(host: torch.Tensor) -> bytes:
    return host.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).numpy().tobytes()
