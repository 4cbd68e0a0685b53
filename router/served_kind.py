"""The kind of workers (weights, dtype, layout: their compat digest) that new requests go to: else equal requests would
get unlike answers.

It is that of most decode workers. Those of another kind finish what they have begun, and take over when they are more,
as in an upgrade.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

from prefix_hash.compat import compat_difference

_log = logging.getLogger(__name__)


class ServedKind:
    """Of one router."""

    def __init__(self) -> None:
        self._last: str | None = None

    def among(self, compat_digests: Iterable[str]) -> str | None:
        """The most frequent one; of as many, that which it was before. None: there has been no worker yet."""
        counts = Counter(compat_digests)
        if counts and (self._last is None or counts[self._last] < max(counts.values())):
            before, self._last = self._last, max(counts, key=lambda kind: counts[kind])
            if before is not None:
                facts = {"num": counts[self._last], "why": compat_difference(self._last, before)}
                _log.warning("new requests go to workers of another kind", extra=facts)
        return self._last
