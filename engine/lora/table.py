"""The adapters of an engine and their numbers. Integers and names only.

    add ──> served ──another of its name is added, or remove──> leaving ──no request uses it──> its number is free
                                                                   └── requests that give its digest still get it

Adapters that the engine starts with are permanent. The numbers of other adapters are reused.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.lora.modules import LoRAModule


class AdapterGone(ValueError):  # noqa: N818 - named for what happened
    """The adapter whose digest a request gives is not here, or no longer: another engine may have it."""


class NoRoomForAdapter(ValueError):  # noqa: N818 - named for what happened
    """There are as many adapters as there may be. It may work later, once one has left."""


class AdapterTable:
    """One per engine. Used by the stepping thread; any thread may read `served` and `leaving_modules`."""

    def __init__(self, modules: Sequence[LoRAModule], num_rooms: int) -> None:
        self._fixed = {module.name for module in modules}
        self._module_of = dict(enumerate(modules, start=1))
        self._served = {module.name: number for number, module in self._module_of.items()}
        self._free = list(range(len(modules) + num_rooms, len(modules), -1))
        self.num_rooms = num_rooms
        self.served: tuple[LoRAModule, ...] = ()
        """Adapters that new requests may ask for by name."""
        self.leaving_modules: tuple[LoRAModule, ...] = ()
        """Adapters that a request only gets if it gives their digest."""
        self._note()

    def number_and_digest(self, name: str, digest: str) -> tuple[int, str]:
        """Find the adapter `name`; (0, "") if `name` is empty. With a `digest`, find the adapter that has it.

        Raises `AdapterGone` if no adapter has the digest, and `ValueError` if there is none of that name."""
        if not name:
            if digest:
                raise AdapterGone(f"lora_digest {digest[:64]!r} is given without lora_name")
            return 0, ""
        number = self._served.get(name)
        if digest and (number is None or self._module_of[number].digest != digest):
            number = self._leaving(name, digest)
            if number is None:
                raise AdapterGone(f"lora_name {name[:128]!r} with lora_digest {digest[:64]!r} is not loaded here")
        if number is None:
            there = ", ".join(self._served) or "none"
            raise ValueError(f"lora_name must be a loaded adapter ({there}), is {name[:128]!r}")
        return number, self._module_of[number].digest

    def check_may_add(self, name: str) -> None:
        """Raise what `add` would raise: `NoRoomForAdapter`, or `ValueError` if a permanent adapter has this name."""
        if name in self._fixed:
            raise ValueError(f"adapter {name!r}: lora_modules has an adapter of that name, which cannot be replaced")
        if not self._free:
            raise NoRoomForAdapter(
                f"adapter {name!r}: max_loras={self.num_rooms} are loaded, including those being removed"
            )

    def next_number(self, name: str) -> int:
        """The number that the next added adapter gets. Raises what `check_may_add` raises."""
        self.check_may_add(name)
        return self._free[-1]

    def add(self, module: LoRAModule) -> int:
        """Add an adapter and return its number. An adapter that had its name starts leaving."""
        number = self.next_number(module.name)
        self._free.pop()
        self.remove(module.name)
        self._module_of[number], self._served[module.name] = module, number
        self._note()
        return number

    def remove(self, name: str) -> bool:
        """Make an adapter leave. Returns False, and does nothing, if there is none of that name or it is permanent."""
        is_removed = name not in self._fixed and self._served.pop(name, None) is not None
        if is_removed:
            self._note()
        return is_removed

    @property
    def num_free(self) -> int:
        """How many more adapters there is room for."""
        return len(self._free)

    @property
    def leaving(self) -> list[int]:
        served = set(self._served.values())
        return [number for number in self._module_of if number not in served]

    def free(self, number: int) -> None:
        """Free the number of a leaving adapter that no request uses any more."""
        assert number in self.leaving, f"adapter {number} is served"
        del self._module_of[number]
        self._free.append(number)
        self._note()

    def _leaving(self, name: str, digest: str) -> int | None:
        for number in self.leaving:
            module = self._module_of[number]
            if (module.name, module.digest) == (name, digest):
                return number
        return None

    def _note(self) -> None:
        # In this order, so that a concurrent reader of both finds an adapter in at least one.
        self.leaving_modules = tuple(self._module_of[number] for number in self.leaving)
        self.served = tuple(self._module_of[number] for _, number in sorted(self._served.items()))
