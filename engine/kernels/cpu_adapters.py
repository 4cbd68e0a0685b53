"""LoRA adapters for the CPU kernels: the call that computes a product also adds what all of the step's adapters add to
it (source/adapters.h). A step without adapters costs nothing extra.

    with_adapters(KERNEL_PARTS, modules) ──> parts whose products are AdaptedPanelLinear or AdaptedPanelGatedLinear
                                             where some adapter changes them; their layers know each row's adapter

Owns the adapters' weights, which are packed at load and read-only afterwards.

Shapes: T tokens, R the concatenated ranks of an adapter's products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812

from engine.kernels.cpu import fastest_stack
from engine.kernels.cpu_products import LANES, PANEL, PanelGatedLinear, PanelLinear
from engine.layers import GatedLinear, Linear, MakeLinear
from engine.lora.adapters import NO_ROOM, AdapterIds, Adapters, Added, AddedPart
from engine.lora.modules import LoRAModule, LoRARoom
from engine.models.parts import Parts
from engine.weight_cut import CutOf, uncut


def with_adapters(parts: Parts, modules: Sequence[LoRAModule], cut_of: CutOf, room: LoRARoom) -> Parts:
    """`parts`: the CPU kernels' parts. `cut_of`, `room`: see `Adapters`."""
    adapters = PanelAdapters(modules, cut_of, room)
    return replace(parts, stack=partial(fastest_stack, adapter_ids=lambda: adapters.ids_T), adapters=adapters)


class PanelAdapters(Adapters):
    def __init__(self, modules: Sequence[LoRAModule], cut_of: CutOf = uncut, room: LoRARoom = NO_ROOM) -> None:
        super().__init__(modules, "bfloat16", "cpu", cut_of=cut_of, room=room)
        self.ids_T: torch.Tensor | None = None
        """[T] int32, each row's adapter, 0 for none; None: no row uses one."""

    def assign(self, adapter_ids: AdapterIds) -> None:
        self.ids_T = torch.from_numpy(adapter_ids).int() if adapter_ids.any() else None

    def adapt_gated(
        self, gated_linear: Callable[..., GatedLinear], linear: MakeLinear, outputs: Mapping[str, int], inputs: int
    ) -> GatedLinear:
        del linear
        gated = gated_linear()
        added = self._take(outputs, inputs)
        if not self._is_to_adapt(added):
            return gated
        assert isinstance(gated, PanelGatedLinear)
        return self._with_place(AdaptedPanelGatedLinear(gated, inputs, self), added, outputs, inputs)

    def _adapted(self, linear: Linear, added: Added, outputs: Mapping[str, int], inputs: int) -> Linear:
        assert isinstance(linear, PanelLinear)
        return self._with_place(AdaptedPanelLinear(linear, inputs, self), added, outputs, inputs)


class _AddedInPanels:
    """A product, and what adapters add to it, in the kernels' form."""

    def __init__(
        self, product: PanelLinear | PanelGatedLinear, inputs: int, sixteens: Sixteens, adapters: PanelAdapters
    ) -> None:
        self.num_outputs, self.panels = product.num_outputs, product.panels
        self.scale, self.bias = product.scale, product.bias
        self.added = torch.classes.tandem_cpu.AddedProduct(inputs, len(sixteens))
        self._inputs = inputs
        self._sixteens = sixteens
        self._adapters = adapters

    def prepare(self, parts: Sequence[AddedPart]) -> PackedParts:
        return packed(parts, self._inputs, self._sixteens)

    def put(self, adapter_id: int, prepared: PackedParts) -> None:
        self.added.add(adapter_id, *prepared)

    def remove(self, adapter_id: int) -> None:
        self.added.remove(adapter_id)


class AdaptedPanelLinear(_AddedInPanels, PanelLinear):
    def __init__(self, linear: PanelLinear, inputs: int, adapters: PanelAdapters) -> None:
        super().__init__(linear, inputs, sixteens_of(linear), adapters)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._adapters.ids_T is None:
            return super().__call__(x)
        y: torch.Tensor = self.added.linear(
            x, self.panels, self.scale, self.bias, self.num_outputs, self._adapters.ids_T
        )
        return y


class AdaptedPanelGatedLinear(_AddedInPanels, PanelGatedLinear):
    def __init__(self, gated: PanelGatedLinear, inputs: int, adapters: PanelAdapters) -> None:
        super().__init__(gated, inputs, gated_sixteens(gated), adapters)
        self.is_gelu = gated.is_gelu

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._adapters.ids_T is None:
            return super().__call__(x)
        y: torch.Tensor = self.added.gated_linear(
            x, self.panels, self.scale, self.bias, self.num_outputs, self.is_gelu, self._adapters.ids_T
        )
        return y


Sixteens = Sequence[tuple[int, int]]
"""For every 16 outputs in a product's panels: the first output, and the end of the outputs that they may contain."""


def sixteens_of(linear: PanelLinear) -> Sixteens:
    return [(first, linear.num_outputs) for first in range(0, PANEL * len(linear.panels), LANES)]


def gated_sixteens(gated: PanelGatedLinear) -> Sixteens:
    """Alternately 16 outputs of the gate and 16 of `up`."""
    size = gated.num_outputs
    return [(start + first, start + size) for first in range(0, size, LANES) for start in (0, size)]


PackedParts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""A, B, and for every 16 outputs their first pair of ranks and the number of pairs: the arguments of
torch.classes.tandem_cpu.AddedProduct.add."""


def packed(parts: Sequence[AddedPart], inputs: int, sixteens: Sixteens) -> PackedParts:
    """Pack the parts of one adapter. No group of 16 outputs may contain outputs of two parts."""
    # Pad each part's ranks to pairs, and all ranks together to multiples of 16.
    downs = [F.pad(part.down, (0, 0, 0, len(part.down) % 2)) for part in parts]
    down_RK = torch.cat(downs)
    down_RK = F.pad(down_RK, (0, 0, 0, -len(down_RK) % LANES))
    first_pairs = [sum(len(down) for down in downs[:i]) // 2 for i in range(len(downs))]
    ups, pairs = [], []
    for first, end in sixteens:
        assert not any(first < part.start < min(first + LANES, end) for part in parts), "outputs of two parts"
        owner = next((i for i, part in enumerate(parts) if part.start <= first < _end(part)), None)
        if owner is None or first >= end:
            pairs.append((0, 0))
            continue
        ups.append(_of_sixteen(parts[owner], first))
        pairs.append((first_pairs[owner], len(ups[-1])))
    down = down_RK.view(-1, LANES, inputs // 2, 2).transpose(1, 2).contiguous()
    return down, torch.cat(ups), torch.tensor(pairs)


def _end(part: AddedPart) -> int:
    return part.start + len(part.up)


def _of_sixteen(part: AddedPart, first: int) -> torch.Tensor:
    """[pairs, 16, 2]: B of the 16 outputs from `first` on."""
    up = part.up[first - part.start : first - part.start + LANES]
    up = F.pad(up, (0, up.shape[1] % 2, 0, LANES - len(up)))
    return up.view(LANES, -1, 2).transpose(0, 1).contiguous()
