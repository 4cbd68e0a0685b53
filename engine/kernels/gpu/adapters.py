"""Adapters computed by the Triton kernels (lora.py): `TritonAdapters` replaces `Adapters`.

    assign ──tiles, on the device──> two more launches for each product with adapters; none if no row has an adapter
    reserve_decodes ──tiles at a fixed address──> recorded with the launches that read them
          └── refill, before each replay

Shapes: T rows (tokens), G tiles, I rows of a tile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from engine.kernels.gpu.lora import StackedAdapters, add_adapters, max_tiles, tiles_of
from engine.layers import Linear
from engine.lora.adapters import AdapterIds, Adapters, Added
from engine.lora.modules import LoRAModule, LoRARoom
from engine.to_device import fill, to_device
from engine.weight_cut import CutOf


class TritonAdapters(Adapters):
    """Keep their addresses, as `engine.running.decode_graphs.AdapterKeeper` requires."""

    def __init__(
        self,
        modules: Sequence[LoRAModule],
        dtype: str,
        device: str,
        cut_of: CutOf,
        room: LoRARoom,
    ) -> None:
        super().__init__(modules, dtype, device, cut_of=cut_of, room=room)
        self._num_at_start, self._num_adapters = len(modules), len(modules) + room.num
        self.tiles_GI: torch.Tensor | None = None
        """Tiles of the current step; None: no row has an adapter."""

    def assign(self, adapter_ids: AdapterIds) -> None:
        if not adapter_ids.any():
            self.tiles_GI = None
            return
        # Always the maximum for this number of rows, so the time of a step does not depend on which adapters the rows
        # use.
        tiles = tiles_of(adapter_ids, max_tiles(len(adapter_ids), self._num_adapters))
        self.tiles_GI = to_device(tiles, self._device)

    def reserve_decodes(self, num_rows: int) -> torch.Tensor:
        """Return tiles for `num_rows` rows, without adapters yet. All launches from now on read them."""
        tiles = tiles_of(np.zeros(num_rows, dtype=np.int64), max_tiles(num_rows, self._num_adapters))
        self.tiles_GI = to_device(tiles, self._device)
        return self.tiles_GI

    def refill(self, tiles_GI: torch.Tensor, adapter_ids: AdapterIds) -> None:
        """Write the adapters of a step's rows into the tiles that `reserve_decodes` returned."""
        fill(tiles_GI, tiles_of(adapter_ids, len(tiles_GI)))

    def _adapted(self, linear: Linear, added: Added, outputs: Mapping[str, int], inputs: int) -> Linear:
        stacked = StackedAdapters.of(
            added, list(outputs.values()), inputs, self._num_at_start,
            room=self._room, dtype=self._dtype, device=self._device,
        )  # fmt: skip
        return self._with_place(TritonAdaptedLinear(linear, stacked, self), {}, outputs, inputs)


class TritonAdaptedLinear(Linear):
    """A product of all rows, plus what the adapters add to it."""

    def __init__(self, linear: Linear, stacked: StackedAdapters, adapters: TritonAdapters) -> None:
        self._linear = linear
        self._stacked = stacked
        self._adapters = adapters
        self.prepare, self.remove = stacked.prepare, stacked.remove

    def put(self, adapter_id: int, prepared: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._stacked.put(adapter_id, *prepared)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out]"""
        y = self._linear(x)
        if self._adapters.tiles_GI is not None:
            add_adapters(x.contiguous(), self._stacked, self._adapters.tiles_GI, y)
        return y
