"""The kinds of workers that new requests go to: else equal requests would get unlike answers.

A worker's kind is its compat digest (weights, dtype, layout); for who asks for an adapter, with that adapter's digest:
two workers may have the same model, and adapters of one name that are not the same.

What is served is what most decode workers have. Those of another kind finish what they have begun, and take over when
they are more, as in an upgrade.
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
    """Between workers of one kind an answer may move."""

    compat_digest: str
    lora_digest: str = ""
    """Of the adapter that is asked for. Empty: none is, or the workers' version has adapters in `compat_digest`."""


class ServedKinds:
    """Of one router."""

    def __init__(self) -> None:
        self._last: str | None = None
        self._last_of: dict[str, Kind] = {}
        """By adapter."""

    def among(self, compat_digests: Iterable[str]) -> str | None:
        """The most frequent one; of as many, that which it was before. None: there has been no worker yet."""
        counts = Counter(compat_digests)
        before, self._last = self._last, _most_frequent(counts, self._last)
        if before is not None and self._last is not None and self._last != before:
            facts = {"num": counts[self._last], "why": compat_difference(self._last, before)}
            _log.warning("new requests go to workers of another kind", extra=facts)
        return self._last

    def of_adapters(self, counts: Mapping[str, Counter[Kind]]) -> dict[str, Kind]:
        """The same for each adapter; `counts`: by its name, how many workers have each of that name."""
        before = self._last_of
        found = {name: _most_frequent(those, before.get(name)) for name, those in counts.items()}
        self._last_of = {name: kind for name, kind in found.items() if kind is not None}
        for name, kind in self._last_of.items():
            if before.get(name, kind).lora_digest != kind.lora_digest:
                facts = {"lora_name": name, "num": counts[name][kind]}
                _log.warning("new requests for an adapter go to workers that have another of its name", extra=facts)
        return self._last_of


def _most_frequent(counts: Counter[_T], before: _T | None) -> _T | None:
    if counts and (before is None or counts[before] < max(counts.values())):
        return max(counts, key=lambda kind: counts[kind])
    return before
