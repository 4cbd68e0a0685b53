"""Every Redis key of one cluster, in one place.

    {namespace}:workers                                SET     ids of workers that beat; readers prune stale ones
    {namespace}:generation                             STRING  made at random whenever it is missing: a new value tells
                                                               that Redis was emptied
    {namespace}:worker:{worker_id}                     STRING  serialised WorkerRecord; expires without heartbeats
    {namespace}:prefix:{worker_id}:{incarnation}       SET     16-byte hashes of the blocks in that process' cache
    {namespace}:prefix-seq:{worker_id}:{incarnation}   STRING  number of the last batch applied to that set
    {namespace}:prefix-new:{worker_id}:{incarnation}   SET     a whole set in the making, then renamed over the set

All but the first two expire by themselves when their worker dies. Scripts touch several keys at once: one Redis server
(with replicas if wanted), not a sharded Redis Cluster.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def check_name(kind: str, name: str) -> None:
    """Raises `ValueError` unless `name` can stand between the colons of a key."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{kind} must be 1 to 128 letters, digits, dots, dashes or underscores, is {name!r}")


@dataclass(frozen=True)
class Keys:
    """The keys of one namespace. Raises `ValueError` for names that would make keys ambiguous."""

    namespace: str

    def __post_init__(self) -> None:
        check_name("namespace", self.namespace)

    @property
    def workers(self) -> str:
        return f"{self.namespace}:workers"

    @property
    def generation(self) -> str:
        return f"{self.namespace}:generation"

    @property
    def worker_prefix(self) -> str:
        """What all worker keys begin with; the worker's id follows."""
        return f"{self.namespace}:worker:"

    def worker(self, worker_id: str) -> str:
        check_name("worker_id", worker_id)
        return f"{self.worker_prefix}{worker_id}"

    def prefix(self, worker_id: str, incarnation: str) -> str:
        return self._prefix("prefix", worker_id, incarnation)

    def prefix_seq(self, worker_id: str, incarnation: str) -> str:
        return self._prefix("prefix-seq", worker_id, incarnation)

    def prefix_new(self, worker_id: str, incarnation: str) -> str:
        return self._prefix("prefix-new", worker_id, incarnation)

    def _prefix(self, kind: str, worker_id: str, incarnation: str) -> str:
        check_name("worker_id", worker_id)
        check_name("incarnation", incarnation)
        return f"{self.namespace}:{kind}:{worker_id}:{incarnation}"
