"""Which adapters an engine has, and by what numbers. Integers and names alone.

    add ──> served ──another of its name is added, or remove──> leaving ──nobody uses it──> its number is free
                                                                   └── who means it by its digest may still have it

Those that the engine begins with stay. The numbers of others are reused.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.lora.modules import LoRAModule


class AdapterGone(ValueError):  # noqa: N818 - named for what happened
    """The adapter that a request means is not here, or not any more: another engine may have it."""


class NoRoomForAdapter(ValueError):  # noqa: N818 - named for what happened
    """As many are here as there may be. Some day one may have left."""


class AdapterTable:
    """Of one engine. Used by the stepping thread; `served` and `leaving_modules` may be read by any."""

    def __init__(self, modules: Sequence[LoRAModule], num_rooms: int) -> None:
        self._fixed = {module.name for module in modules}
        self._module_of = dict(enumerate(modules, start=1))
        self._served = {module.name: number for number, module in self._module_of.items()}
        self._free = list(range(len(modules) + num_rooms, len(modules), -1))
        self.num_rooms = num_rooms
        self.served: tuple[LoRAModule, ...] = ()
        """What new requests may ask for, by name."""
        self.leaving_modules: tuple[LoRAModule, ...] = ()
        """What only those get who mean it."""
        self._note()

    def number_and_digest(self, name: str, digest: str) -> tuple[int, str]:
        """Of the adapter of that name, 0 and nothing for none. With a `digest`, the one that has it.

        Raises `AdapterGone`, and `ValueError` where there is none of that name."""
        if not name:
            if digest:
                raise AdapterGone(f"lora_digest {digest[:64]!r} is given without lora_name")
            return 0, ""
        number = self._served.get(name)
        if digest and (number is None or self._module_of[number].digest != digest):
            number = self._leaving(name, digest)
            if number is None:
                raise AdapterGone(f"lora_name {name[:128]!r} with lora_digest {digest[:64]!r} is not here")
        if number is None:
            there = ", ".join(self._served) or "none"
            raise ValueError(f"lora_name must be an adapter that is here ({there}), is {name[:128]!r}")
        return number, self._module_of[number].digest

    def check_may_add(self, name: str) -> None:
        """Raises `NoRoomForAdapter`, and `ValueError` where there will never be any, as `add` does."""
        if name in self._fixed:
            raise ValueError(f"adapter {name!r}: lora_modules has one of that name, which stays")
        if not self._free:
            raise NoRoomForAdapter(
                f"adapter {name!r}: max_loras={self.num_rooms} are here, those that are leaving included"
            )

    def next_number(self, name: str) -> int:
        """That one of that name has if it is added next. Raises as `check_may_add`."""
        self.check_may_add(name)
        return self._free[-1]

    def add(self, module: LoRAModule) -> int:
        """Its number. One that had its name is leaving."""
        number = self.next_number(module.name)
        self._free.pop()
        self.remove(module.name)
        self._module_of[number], self._served[module.name] = module, number
        self._note()
        return number

    def remove(self, name: str) -> bool:
        """It is served no more. False: nothing happens, as there is none of that name, or one that stays."""
        is_removed = name not in self._fixed and self._served.pop(name, None) is not None
        if is_removed:
            self._note()
        return is_removed

    @property
    def num_free(self) -> int:
        """How many more there is room for."""
        return len(self._free)

    @property
    def leaving(self) -> list[int]:
        served = set(self._served.values())
        return [number for number in self._module_of if number not in served]

    def free(self, number: int) -> None:
        """Of one that is leaving: nobody uses it any more."""
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
        # In this order: whoever reads both misses none of those that leave just now.
        self.leaving_modules = tuple(self._module_of[number] for number in self.leaving)
        self.served = tuple(self._module_of[number] for _, number in sorted(self._served.items()))
