"""The adapters' weights, and products with what they add.

    Adapters(modules) ──adapt(product)──> one for each product that some adapter changes, or may come to change
          ├── assign, before each step: which of its rows are whose
          └── read (any thread) ──> put, and some day remove, between two steps: one that comes while the engine runs

Owns the weights: in the model's dtype, `s` multiplied into B. Read whole and checked, read-only afterwards. What is
assigned holds until the next time.

Shapes: T tokens of a step, n those of one adapter, R ranks of a product's adapters side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray

from engine.kv_cache import TORCH_DTYPES
from engine.layers import GatedLinear, Linear, MakeLinear
from engine.lora.modules import WEIGHTS_FILE, LoRAModule, LoRARoom
from engine.model_loader.weights import PLAIN_DTYPES, TensorsInMemory, open_tensors, opening
from engine.to_device import to_device
from engine.weight import Weight
from engine.weight_cut import INPUTS, OUTPUTS, Cut, CutOf, uncut

PREFIX = "base_model.model."
"""Of all names in PEFT's files: its wrappers around the model."""
RANK_GRAIN = 16
"""Ranks are filled up with zeros to a multiple: kernels take inputs in pairs, and more at once."""
MAX_HEADER_BYTES = 1 << 20
MAX_NUMBER_BYTES = 8
"""In a file."""

NO_ROOM = LoRARoom()
_Adapted = TypeVar("_Adapted", bound="AdaptedProduct")

AdapterIds = NDArray[np.int64]
"""[T] the adapter of each row of a step, from 1 on in the order of the modules, 0 for none; [0] where nobody asks."""


@dataclass(frozen=True, slots=True)
class AddedPart:
    """What one adapter adds to some of a product's outputs."""

    start: int
    """The first of these."""
    down: torch.Tensor
    """[R, inputs]"""
    up: torch.Tensor
    """[outputs, R], multiplied by the scale"""


Added = Mapping[int, Sequence[AddedPart]]
"""To one product, by the adapters' ids; of those alone that change it."""


class AdaptedProduct(Protocol):
    """A product that adapters change. `prepare` is called on any thread, the others between two steps."""

    def prepare(self, parts: Sequence[AddedPart]) -> Any:
        """What `put` takes, of one adapter."""

    def put(self, adapter_id: int, prepared: Any) -> None:
        """From now on it adds this to its rows, of which there are none yet."""

    def remove(self, adapter_id: int) -> None:
        """It has no rows any more, and adds nothing."""


class Place(NamedTuple):
    """A product that adapters may come to change, and what it computes."""

    product: AdaptedProduct
    outputs: Mapping[str, int]
    inputs: int


ReadAdapter = Sequence[tuple[AdaptedProduct, Any]]
"""An adapter's weights, on the device, as its products take them."""


class Adapters:
    """Of one engine. These compute with plain products, two for each adapter in a step; kernels have their own, which
    take all at once (`engine.kernels.cpu_adapters`, `engine.kernels.gpu.adapters`).

    Raises `ValueError` where a file is no adapter's; where one does not fit the model, `adapt` and `check_all_taken`
    do."""

    def __init__(
        self,
        modules: Sequence[LoRAModule],
        dtype: str,
        device: str,
        linear: MakeLinear = Linear,
        cut_of: CutOf = uncut,
        room: LoRARoom = NO_ROOM,
    ) -> None:
        """`linear`: what multiplies with an adapter's weights. `cut_of`: which part of the model's products is here, to
        which a part of what adapters add belongs. `room`: for adapters that come later."""
        self.rows: Sequence[tuple[int, torch.Tensor]] = ()
        """For each adapter in the step its id and its rows."""
        self._linear = linear
        self._dtype, self._device = TORCH_DTYPES[dtype], device
        self._cut_of = cut_of
        self._room = room
        self._files = [self._open(module) for module in modules]
        self._places: list[Place] = []
        """Where there is room."""

    def assign(self, adapter_ids: AdapterIds) -> None:
        """In what is computed from now on these rows are those adapters', and all others nobody's."""
        ids = [number for number in np.unique(adapter_ids).tolist() if number]
        rows = [np.flatnonzero(adapter_ids == number) for number in ids]
        if not ids:
            self.rows = ()
            return
        on_device = torch.split(to_device(np.concatenate(rows), self._device), [len(part) for part in rows])
        self.rows = list(zip(ids, on_device, strict=True))

    def adapt(self, linear: Linear, outputs: Mapping[str, int], inputs: int) -> Linear:
        """`linear` and what adapters add to it: it computes the products of those names, one below the other."""
        added = self._take(outputs, inputs)
        return self._adapted(linear, added, outputs, inputs) if self._is_to_adapt(added) else linear

    def adapt_gated(
        self, gated_linear: Callable[..., GatedLinear], linear: MakeLinear, outputs: Mapping[str, int], inputs: int
    ) -> GatedLinear:
        """The same of a gate and what it is applied to: what `gated_linear` makes, of products that `linear` makes."""
        added = self._take(outputs, inputs)
        if not self._is_to_adapt(added):
            return gated_linear()

        def adapted(weight: Weight, bias: torch.Tensor | None) -> Linear:
            return self._adapted(linear(weight, bias), added, outputs, inputs)

        # What adapters add comes before one is applied to the other, so these are two steps.
        return gated_linear(linear=adapted)

    def check_all_taken(self) -> None:
        """Raises `ValueError` where an adapter changes what it cannot change here."""
        for file in self._files:
            file.check_all_taken()

    # -- adapters that come and go ------------------------------------------------------------------------------

    def read(self, module: LoRAModule) -> ReadAdapter:
        """Its weights, for `put`. On any thread, beside steps. Raises `ValueError` where it does not fit the model, or
        is not what `module` is of any more: what several ranks have read is one adapter."""
        # Others may do anything to its files meanwhile.
        file = self._open(module, self.max_bytes(module.name, module.rank))
        parts = [(place.product, file.take_all(place.outputs, place.inputs)) for place in self._places]
        file.check_all_taken()
        return [(product, product.prepare(of_product)) for product, of_product in parts if of_product]

    def max_bytes(self, name: str, rank: int) -> int:
        """That a file of that rank may have. Raises `ValueError` for a rank that is too large."""
        self._room.check_rank(name, rank)
        numbers = 0
        for place in self._places:
            for product, outputs in place.outputs.items():
                cut = self._cut_of(product)
                shape = (outputs, place.inputs)
                numbers += sum(shape if cut is None else cut.whole(shape))
        return MAX_HEADER_BYTES + MAX_NUMBER_BYTES * rank * numbers

    def put(self, adapter_id: int, adapter: ReadAdapter) -> None:
        """Between two steps: the number's rows are this adapter's from now on. Nothing else has the number."""
        for product, prepared in adapter:
            product.put(adapter_id, prepared)

    def remove(self, adapter_id: int) -> None:
        """Between two steps: nobody asks for it any more."""
        for place in self._places:
            place.product.remove(adapter_id)

    # -- inside -------------------------------------------------------------------------------------------------

    def _open(self, module: LoRAModule, max_bytes: int | None = None) -> _AdapterFile:
        return _AdapterFile(module, self._dtype, self._device, self._cut_of, max_bytes)

    def _is_to_adapt(self, added: Added) -> bool:
        return bool(added) or self._room.num > 0

    def _take(self, outputs: Mapping[str, int], inputs: int) -> Added:
        taken = {number: file.take_all(outputs, inputs) for number, file in enumerate(self._files, start=1)}
        return {number: parts for number, parts in taken.items() if parts}

    def _adapted(self, linear: Linear, added: Added, outputs: Mapping[str, int], inputs: int) -> Linear:
        adapted = AdaptedLinear(linear, sum(outputs.values()), self._linear, self)
        return self._with_place(adapted, added, outputs, inputs)

    def _with_place(self, adapted: _Adapted, added: Added, outputs: Mapping[str, int], inputs: int) -> _Adapted:
        """It, with what the adapters of the start add, and to be found by later ones."""
        for adapter_id, parts in added.items():
            adapted.put(adapter_id, adapted.prepare(parts))
        if self._room.num:
            self._places.append(Place(adapted, outputs, inputs))
        return adapted


class AdaptedLinear(Linear):
    """A product of all rows, and for the rows of each adapter what it adds."""

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
    """What one adapter adds to a product. Of several side by side it is one product, too: their A below one another,
    and of B each has its own outputs and its own ranks, with zeros elsewhere, which change no sum."""

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
        """To those rows of y: [T, out], of those of x: [T, in]."""
        if len(rows_n) == len(x):
            y += self._up(self._down(x))
        else:
            y.index_add_(0, rows_n, self._up(self._down(x[rows_n])))


class _AdapterFile:
    """One adapter's tensors, each handed out once."""

    def __init__(
        self, module: LoRAModule, dtype: torch.dtype, device: str, cut_of: CutOf, max_bytes: int | None
    ) -> None:
        """`max_bytes`: where the file is to be read at once, which may have as many; None: it is mapped."""
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
        self._left = set(self._handle.keys())
        if not self._left:
            raise ValueError(f"{self._who}: {path} holds no tensors: it would change nothing")

    def take_all(self, outputs: Mapping[str, int], inputs: int) -> list[AddedPart]:
        """What it adds to the products of those names, which are one product, one below the other."""
        parts, start = [], 0
        for name, size in outputs.items():
            pair = self.take(name, size, inputs)
            if pair is not None:
                parts.append(AddedPart(start, *pair))
            start += size
        return parts

    def take(self, product: str, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A [R, inputs] and s B [outputs, R] of the product of that name; None: it is left as it is. Of a part of its
        outputs A is whole, of a part of its inputs B."""
        names = [f"{PREFIX}{product}.lora_{which}.weight" for which in "AB"]
        if not self._left.intersection(names):
            return None
        rank, cut = self._module.rank, self._cut_of(product)
        down = self._read(names[0], (rank, inputs), cut if cut is not None and cut.axis == INPUTS else None)
        up = self._read(names[1], (outputs, rank), cut if cut is not None and cut.axis == OUTPUTS else None)
        down, up = down.to(self._dtype), (up.float() * self._module.scale).to(self._dtype)
        if not (torch.isfinite(down).all() and torch.isfinite(up).all()):
            raise ValueError(
                f"{self._who}: what it adds to {product} is not a number in {self._dtype}, or too large for it"
            )
        return down, up

    def check_all_taken(self) -> None:
        if self._left:
            some = ", ".join(f"{name!r:.120}" for name in sorted(self._left)[:3])
            raise ValueError(
                f"{self._who} changes what cannot be changed in this model: {some}; it may have q, "
                "k, v, o, gate, up and down projections of layers that the model has"
            )

    def _read(self, name: str, shape: tuple[int, ...], cut: Cut | None) -> torch.Tensor:
        """`shape`: of the part that `cut` says."""
        if cut is not None:
            part = cut.part(shape)
            return self._read(name, cut.whole(shape), None).narrow(cut.axis, part.start, len(part))
        if name not in self._left:
            raise ValueError(f"{self._who} lacks the tensor {name}")
        with opening(self._path, self._who):
            tensor: torch.Tensor = self._handle.get_tensor(name)
        if tuple(tensor.shape) != shape or tensor.dtype not in PLAIN_DTYPES:
            found = f"{tuple(tensor.shape)} in {tensor.dtype}"
            raise ValueError(f"{self._who} does not fit the model: {name} has shape {found}, expected {shape}")
        self._left.discard(name)
        return tensor
