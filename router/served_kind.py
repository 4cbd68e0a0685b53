"""Chooses the kind of workers that new requests go to. With several kinds, equal requests would get unlike answers.

A worker's kind is its compat digest (weights, dtype, layout). For a request with an adapter, it includes the adapter's
digest: two workers may have the same model but different adapters of the same name.

The served kind is the one that most decode workers have. Workers of another kind finish what they have begun, and take
over when they become more, as in an upgrade.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

from prefix_hash.compat import compat_difference

_log = logging.getLogger(__name__)

_T = TypeVar("_T")


class Kind(NamedTuple):
    """An answer may move between workers of one kind."""

    compat_digest: str
    lora_digest: str = ""
    """Digest of the requested adapter. Empty: no adapter is requested, or the workers' version includes its adapters in
    `compat_digest`."""


class ServedKinds:
    """The served kinds of one router."""

    def __init__(self) -> None:
        self._last: str | None = None
        self._last_of: dict[str, Kind] = {}
        """By adapter name."""

    def among(self, compat_digests: Iterable[str]) -> str | None:
        """The most frequent digest; on a tie, the one served before. None: there has been no worker yet."""
        counts = Counter(compat_digests)
        before, self._last = self._last, _most_frequent(counts, self._last)
        if before is not None and self._last is not None and self._last != before:
            facts = {"num": counts[self._last], "why": compat_difference(self._last, before)}
            _log.warning("new requests now go to workers of another kind", extra=facts)
        return self._last

    def of_adapters(self, counts: Mapping[str, Counter[Kind]]) -> dict[str, Kind]:
        """The served kind for each adapter, chosen in the same way. `counts`: by adapter name, how many workers have
        each kind."""
        before = self._last_of
        found = {name: _most_frequent(those, before.get(name)) for name, those in counts.items()}
        self._last_of = {name: kind for name, kind in found.items() if kind is not None}
        for name, kind in self._last_of.items():
            if before.get(name, kind).lora_digest != kind.lora_digest:
                facts = {"lora_name": name, "num": counts[name][kind]}
                _log.warning(
                    "new requests for an adapter now go to workers with another adapter of that name", extra=facts
                )
        return self._last_of


def _most_frequent(counts: Counter[_T], before: _T | None) -> _T | None:
    if counts and (before is None or counts[before] < max(counts.values())):
        return max(counts, key=lambda kind: counts[kind])
    return before
