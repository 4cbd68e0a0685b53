"""The adapters' weights, and the products that they change.

    Adapters(modules) ──adapt(product)──> one for each product that some adapter changes, or may change later
          ├── assign, before each step: each row's adapter
          └── read (any thread) ──> put, and later remove, between two steps: for adapters that come while running

Owns the weights, in the model's dtype, with `s` multiplied into B. They are read completely, checked, and read-only
afterwards. An assignment holds until the next one.

Shapes: T tokens of a step, n tokens of one adapter, R the concatenated ranks of a product's adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray

from engine.kv_cache import TORCH_DTYPES
from engine.layers import GatedLinear, Linear, MakeLinear
from engine.lora.modules import WEIGHTS_FILE, LoRAModule, LoRARoom
from engine.model_loader.folder import opening
from engine.model_loader.weights import PLAIN_DTYPES, TensorsInMemory, open_tensors
from engine.to_device import to_device
from engine.weight import Weight
from engine.weight_cut import INPUTS, OUTPUTS, Cut, CutOf, uncut

PREFIX = "base_model.model."
"""Prefix of all names in PEFT's files, from its wrappers around the model."""
LANGUAGE_BODIES = tuple(
    f"{PREFIX}{body}" for body in ("model.language_model.", "model.text_model.", "language_model.model.")
)
"""Prefixes of the layers' names in an adapter for a checkpoint of text and images, of which the text is served
(engine/model_loader/language_part.py). The last one is of older versions of transformers."""
RANK_GRAIN = 16
"""Ranks are padded with zeros to a multiple of this, since kernels read inputs in pairs, and in larger vectors."""
MAX_HEADER_BYTES = 1 << 20
MAX_NUMBER_BYTES = 8
"""Bytes of the widest number in a file."""

NO_ROOM = LoRARoom()
_Adapted = TypeVar("_Adapted", bound="AdaptedProduct")

AdapterIds = NDArray[np.int64]
"""[T] the adapter of each row of a step, numbered from 1, 0 for none; shape [0] if no row uses one."""


@dataclass(frozen=True, slots=True)
class AddedPart:
    """What one adapter adds to some of a product's outputs."""

    start: int
    """The first of these outputs."""
    down: torch.Tensor
    """[R, inputs]"""
    up: torch.Tensor
    """[outputs, R], with the scale multiplied in"""


Added = Mapping[int, Sequence[AddedPart]]
"""By adapter id: what each adapter that changes a product adds to it."""


class AdaptedProduct(Protocol):
    """A product that adapters change. `prepare` may be called on any thread, the other methods between two steps."""

    def prepare(self, parts: Sequence[AddedPart]) -> Any:
        """Convert one adapter's parts to the form that `put` takes."""

    def put(self, adapter_id: int, prepared: Any) -> None:
        """Install an adapter; no row of a step in flight may use `adapter_id`."""

    def remove(self, adapter_id: int) -> None:
        """Remove an adapter, which no row uses any more."""


class Place(NamedTuple):
    """A product that later adapters may change, with its outputs by name and its number of inputs."""

    product: AdaptedProduct
    outputs: Mapping[str, int]
    inputs: int


ReadAdapter = Sequence[tuple[AdaptedProduct, Any]]
"""An adapter's weights on the device, prepared for each product."""


class Adapters:
    """One per engine. This class computes plain products, two for each adapter in a step. The kernels' subclasses
    compute all adapters at once (`engine.kernels.cpu_adapters`, `engine.kernels.gpu.adapters`).

    The constructor raises `ValueError` if a file is not an adapter's; `adapt` and `check_all_taken` do if an adapter
    does not fit the model."""

    def __init__(
        self,
        modules: Sequence[LoRAModule],
        dtype: str,
        device: str,
        linear: MakeLinear = Linear,
        cut_of: CutOf = uncut,
        room: LoRARoom = NO_ROOM,
    ) -> None:
        """`linear`: multiplies with an adapter's weights. `cut_of`: this rank's part of each product, and so of each
        adapter. `room`: for adapters that come later."""
        self.rows: Sequence[tuple[int, torch.Tensor]] = ()
        """The id and the rows of each adapter in the step."""
        self._linear = linear
        self._dtype, self._device = TORCH_DTYPES[dtype], device
        self._cut_of = cut_of
        self._room = room
        self._files = [self._open(module) for module in modules]
        self._places: list[Place] = []
        """Products for later adapters; empty without room for such."""
        self._kinds: set[str] = set()
        """The names, without their layers, of the products that adapters may change."""

    def assign(self, adapter_ids: AdapterIds) -> None:
        """Set each row's adapter for what is computed from now on."""
        ids = [number for number in np.unique(adapter_ids).tolist() if number]
        rows = [np.flatnonzero(adapter_ids == number) for number in ids]
        if not ids:
            self.rows = ()
            return
        on_device = torch.split(to_device(np.concatenate(rows), self._device), [len(part) for part in rows])
        self.rows = list(zip(ids, on_device, strict=True))

    def adapt(self, linear: Linear, outputs: Mapping[str, int], inputs: int) -> Linear:
        """Return `linear` with the adapters' part added. `linear` computes the stacked products named in `outputs`."""
        added = self._take(outputs, inputs)
        return self._adapted(linear, added, outputs, inputs) if self._is_to_adapt(added) else linear

    def adapt_gated(
        self, gated_linear: Callable[..., GatedLinear], linear: MakeLinear, outputs: Mapping[str, int], inputs: int
    ) -> GatedLinear:
        """Like `adapt`, for a gate and `up`: `gated_linear` makes the product; `linear` makes its two parts if
        needed."""
        added = self._take(outputs, inputs)
        if not self._is_to_adapt(added):
            return gated_linear()

        def adapted(weight: Weight, bias: torch.Tensor | None) -> Linear:
            return self._adapted(linear(weight, bias), added, outputs, inputs)

        # Adapters add to gate and up before the gate is applied, so these must be separate products.
        return gated_linear(linear=adapted)

    def check_all_taken(self) -> None:
        """Raise `ValueError` if an adapter changes a product that it cannot change here."""
        for file in self._files:
            file.check_all_taken(self._kinds)

    # -- adapters that come and go ------------------------------------------------------------------------------

    def read(self, module: LoRAModule) -> ReadAdapter:
        """Read an adapter's weights for `put`. May run on any thread, in parallel to steps. Raises `ValueError` if the
        adapter does not fit the model, or if its file has changed since `module` was read: all ranks must read the same
        adapter."""
        # The file may change meanwhile: read it completely first, instead of mapping it.
        file = self._open(module, self.max_bytes(module.name, module.rank))
        parts = [(place.product, file.take_all(place.outputs, place.inputs)) for place in self._places]
        file.check_all_taken(self._kinds)
        return [(product, product.prepare(of_product)) for product, of_product in parts if of_product]

    def max_bytes(self, name: str, rank: int) -> int:
        """The largest possible file of an adapter of this rank. Raises `ValueError` if the rank is too large."""
        self._room.check_rank(name, rank)
        numbers = 0
        for place in self._places:
            for product, outputs in place.outputs.items():
                cut = self._cut_of(product)
                shape = (outputs, place.inputs)
                numbers += sum(shape if cut is None else cut.whole(shape))
        return MAX_HEADER_BYTES + MAX_NUMBER_BYTES * rank * numbers

    def put(self, adapter_id: int, adapter: ReadAdapter) -> None:
        """Install an adapter under a free number. Call it between two steps."""
        for product, prepared in adapter:
            product.put(adapter_id, prepared)

    def remove(self, adapter_id: int) -> None:
        """Remove an adapter that no request uses any more. Call it between two steps."""
        for place in self._places:
            place.product.remove(adapter_id)

    # -- inside -------------------------------------------------------------------------------------------------

    def _open(self, module: LoRAModule, max_bytes: int | None = None) -> _AdapterFile:
        return _AdapterFile(module, self._dtype, self._device, self._cut_of, max_bytes)

    def _is_to_adapt(self, added: Added) -> bool:
        return bool(added) or self._room.num > 0

    def _take(self, outputs: Mapping[str, int], inputs: int) -> Added:
        self._kinds.update(name.rpartition(".")[2] for name in outputs)
        taken = {number: file.take_all(outputs, inputs) for number, file in enumerate(self._files, start=1)}
        return {number: parts for number, parts in taken.items() if parts}

    def _adapted(self, linear: Linear, added: Added, outputs: Mapping[str, int], inputs: int) -> Linear:
        adapted = AdaptedLinear(linear, sum(outputs.values()), self._linear, self)
        return self._with_place(adapted, added, outputs, inputs)

    def _with_place(self, adapted: _Adapted, added: Added, outputs: Mapping[str, int], inputs: int) -> _Adapted:
        """Install the initial adapters' parts in `adapted`, and register it for later adapters."""
        for adapter_id, parts in added.items():
            adapted.put(adapter_id, adapted.prepare(parts))
        if self._room.num:
            self._places.append(Place(adapted, outputs, inputs))
        return adapted


class AdaptedLinear(Linear):
    """A product for all rows, plus each adapter's part for its rows."""

    def __init__(self, linear: Linear, num_outputs: int, adapter_linear: MakeLinear, adapters: Adapters) -> None:
        self._linear = linear
        self._num_outputs = num_outputs
        self._adapter_linear = adapter_linear
        self._added: dict[int, AddedProduct] = {}
        self._adapters = adapters

    def prepare(self, parts: Sequence[AddedPart]) -> AddedProduct:
        return AddedProduct(parts, self._num_outputs, self._adapter_linear)

    def put(self, adapter_id: int, prepared: AddedProduct) -> None:
        self._added[adapter_id] = prepared

    def remove(self, adapter_id: int) -> None:
        self._added.pop(adapter_id, None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out]"""
        y = self._linear(x)
        for adapter_id, rows_n in self._adapters.rows:
            added = self._added.get(adapter_id)
            if added is not None:
                added.add(x, rows_n, y)
        return y


class AddedProduct:
    """What one adapter adds to a product. Several parts form one product, too: their A are stacked, and B is block
    diagonal: each part has its own outputs and ranks, with zeros elsewhere."""

    def __init__(self, parts: Sequence[AddedPart], num_outputs: int, linear: MakeLinear) -> None:
        downs = [F.pad(part.down, (0, 0, 0, -len(part.down) % RANK_GRAIN)) for part in parts]
        whole_down = torch.cat(downs)
        whole_up = whole_down.new_zeros(num_outputs, len(whole_down))
        first = 0
        for part, down in zip(parts, downs, strict=True):
            size, rank = part.up.shape
            whole_up[part.start : part.start + size, first : first + rank] = part.up
            first += len(down)
        self._down, self._up = linear(whole_down), linear(whole_up)

    def add(self, x: torch.Tensor, rows_n: torch.Tensor, y: torch.Tensor) -> None:
        """Add to the rows `rows_n` of y [T, out], computed from these rows of x [T, in]."""
        if len(rows_n) == len(x):
            y += self._up(self._down(x))
        else:
            y.index_add_(0, rows_n, self._up(self._down(x[rows_n])))


class _AdapterFile:
    """One adapter's tensors, each of which is taken once."""

    def __init__(
        self, module: LoRAModule, dtype: torch.dtype, device: str, cut_of: CutOf, max_bytes: int | None
    ) -> None:
        """`max_bytes`: read the whole file, which may have at most this size; None: map the file."""
        self._module = module
        self._cut_of = cut_of
        self._dtype, self._device = dtype, device
        self._who = f"adapter {module.name!r}"
        self._path = path = module.path / WEIGHTS_FILE
        self._handle: Any
        if max_bytes is None:
            self._handle = open_tensors(path, device, self._who)
        else:
            self._handle = TensorsInMemory(path, device, max_bytes, self._who)
            module.check_weights(self._handle.digest)
        self._stored: dict[str, str] = {}
        """Names in the file, by the names that an adapter for the language model alone would have."""
        for name in self._handle.keys():  # noqa: SIM118
            if (other := self._stored.setdefault(_own_name(name), name)) != name:
                raise ValueError(f"{self._who}: {path} has two tensors for the same product: {other}, {name}")
        self._left = set(self._stored)
        if not self._left:
            raise ValueError(f"{self._who}: {path} has no tensors")

    def take_all(self, outputs: Mapping[str, int], inputs: int) -> list[AddedPart]:
        """What the adapter adds to the named products, which are stacked into one."""
        parts, start = [], 0
        for name, size in outputs.items():
            pair = self.take(name, size, inputs)
            if pair is not None:
                parts.append(AddedPart(start, *pair))
            start += size
        return parts

    def take(self, product: str, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A [R, inputs] and s B [outputs, R] of a product; None if the adapter does not change it. If this rank has a
        part of the outputs, A is whole; if it has a part of the inputs, B is whole."""
        names = [f"{PREFIX}{product}.lora_{which}.weight" for which in "AB"]
        if not self._left.intersection(names):
            return None
        rank, cut = self._module.rank, self._cut_of(product)
        down = self._read(names[0], (rank, inputs), cut if cut is not None and cut.axis == INPUTS else None)
        up = self._read(names[1], (outputs, rank), cut if cut is not None and cut.axis == OUTPUTS else None)
        down, up = down.to(self._dtype), (up.float() * self._module.scale).to(self._dtype)
        if not (torch.isfinite(down).all() and torch.isfinite(up).all()):
            raise ValueError(f"{self._who}: its weights for {product} are not finite in {self._dtype}")
        return down, up

    def check_all_taken(self, kinds: Iterable[str]) -> None:
        """`kinds`: of the products that the adapter may change."""
        if self._left:
            some = ", ".join(f"{self._stored[name]!r:.120}" for name in sorted(self._left)[:3])
            raise ValueError(
                f"{self._who} has weights that are not supported: {some}; supported are, of the model's layers: "
                f"{', '.join(sorted(kinds))}"
            )

    def _read(self, name: str, shape: tuple[int, ...], cut: Cut | None) -> torch.Tensor:
        """`shape`: of the part that `cut` selects."""
        if cut is not None:
            part = cut.part(shape)
            return self._read(name, cut.whole(shape), None).narrow(cut.axis, part.start, len(part))
        if name not in self._left:
            raise ValueError(f"{self._who} lacks the tensor {name}")
        with opening(self._path, self._who):
            tensor: torch.Tensor = self._handle.get_tensor(self._stored[name])
        if tuple(tensor.shape) != shape or tensor.dtype not in PLAIN_DTYPES:
            found = f"{tuple(tensor.shape)} in {tensor.dtype}"
            raise ValueError(f"{self._who} does not fit the model: {name} has shape {found}, expected {shape}")
        self._left.discard(name)
        return tensor


def _own_name(name: str) -> str:
    for body in LANGUAGE_BODIES:
        if name.startswith(body):
            return f"{PREFIX}model.{name.removeprefix(body)}"
    return name
