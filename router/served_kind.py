"""Chooses the kind of workers that new requests go to. With several kinds, equal requests would get unlike answers.

A worker's kind is its compat digest (weights, dtype, layout). For a request with an adapter, it includes the adapter's
digest: two workers may have the same model but different adapters of the same name.

The served kind is the one that most decode workers have; if two have equally many, the one of these two that more
prefill workers have. Workers of another kind finish what they have begun, and take over when they become more, as in an
upgrade.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

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

    def among(self, decode: Iterable[str], prefill: Iterable[str]) -> str | None:
        """The digest of most decode workers; on a tie, of most prefill workers too; then, the one served before. None:
        there has been no decode worker yet. `decode`, `prefill`: the digests of these workers."""
        num_decode, num_prefill = Counter(decode), Counter(prefill)
        counts = {digest: (num, num_prefill[digest]) for digest, num in num_decode.items()}
        before, self._last = self._last, _most_frequent(counts, self._last)
        if before is not None and self._last is not None and self._last != before:
            facts = {"num": num_decode[self._last], "why": compat_difference(self._last, before)}
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


def _most_frequent(counts: Mapping[_T, Any], before: _T | None) -> _T | None:
    """`counts`: numbers, or tuples of numbers of which the first that differs decides."""
    if counts and (before is None or before not in counts or counts[before] < max(counts.values())):
        return max(counts, key=lambda kind: counts[kind])
    return before
