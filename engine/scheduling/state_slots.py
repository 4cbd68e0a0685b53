"""Which running sequence has which row of the recurrent states. Integers only, no torch."""

from __future__ import annotations

from collections.abc import Iterable

from engine.scheduling.sequence import NO_SLOT, Sequence


class StateSlots:
    """As many rows as sequences may run. A sequence has one exactly while it runs.

    A row is given back when its sequence leaves, although launched steps may still write to it: they come before every
    step that is launched for the row's next sequence, which does not read what was there.
    """

    def __init__(self, num_slots: int) -> None:
        """`num_slots`: 0 for models whose layers keep only keys and values."""
        self._num_slots = num_slots
        self._free = list(reversed(range(num_slots)))

    def take(self, seq: Sequence) -> None:
        if self._num_slots:
            assert seq.state_slot == NO_SLOT
            seq.state_slot = self._free.pop()

    def give_back(self, seq: Sequence) -> None:
        if self._num_slots:
            self._free.append(seq.state_slot)
            seq.state_slot = NO_SLOT

    def check_integrity(self, running: Iterable[Sequence]) -> list[str]:
        """Recount the rows. Returns one sentence per error; empty if there are none."""
        taken = [seq.state_slot for seq in running] if self._num_slots else []
        if sorted([*self._free, *taken]) == list(range(self._num_slots)):
            return []
        return [f"of {self._num_slots} rows of states, {len(self._free)} are free and {len(taken)} taken: {taken}"]
