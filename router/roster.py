"""A snapshot of which workers take new work and which kind is served. Every request needs these facts about all
workers, so `Roster` computes them once per change of the workers: there may be many workers, and many more requests
than changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from protos import tandem_worker_pb2 as pb
from router.needs import FEATURES
from router.request_events import WorkerKey
from router.served_kind import Kind, ServedKinds
from router.worker_handle import WorkerHandle


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """Immutable by convention: do not write to its dicts and lists."""

    num_changes: int
    """`KnownWorkers.num_changes` at the time of the snapshot."""
    compat_digest: str | None
    """The compat digest of the workers that new requests go to. None: there has been no decode worker yet."""
    kinds_of_adapters: dict[str, Kind]
    """By adapter name: the kind of the workers that new requests for this adapter go to."""
    adapters_of_all: frozenset[str]
    """Adapters that all workers in `served_decode` have, with the same digest."""
    features_of_all: frozenset[str]
    """Those of `needs.FEATURES` that all workers in `served_decode` have."""
    expected_decode: Sequence[WorkerHandle]
    """Decode workers of any kind that take new work, or will in a moment."""
    served_decode: Sequence[pb.WorkerRecord]
    """Those of `expected_decode` whose compat digest is served."""
    usable: Sequence[WorkerHandle]
    """Workers that take new work."""
    usable_by: dict[tuple[pb.Role, str | None], list[WorkerHandle]]
    """`usable` by role and compat digest."""
    usable_by_prefix: dict[tuple[bytes, int], list[WorkerKey]]
    """`usable` by the key of their prefix hashes and their block size."""

    @classmethod
    def of(cls, handles: Iterable[WorkerHandle], num_changes: int, served_kinds: ServedKinds) -> Roster:
        """`served_kinds` chooses the served kinds among the workers that are usable, or expected to be."""
        handles = list(handles)
        expected = [h for h in handles if h.is_expected and h.facts.role == pb.ROLE_DECODE]
        prefill = [h for h in handles if h.is_expected and h.facts.role == pb.ROLE_PREFILL]
        compat_digest = served_kinds.among(
            decode=(h.facts.compat_digest for h in expected), prefill=(h.facts.compat_digest for h in prefill)
        )
        served = [h for h in expected if h.facts.compat_digest == compat_digest]
        by_adapter: dict[str, Counter[Kind]] = {}
        for (digest, adapters), num in Counter((h.facts.compat_digest, h.facts.adapters) for h in served).items():
            for name, lora_digest in adapters:
                by_adapter.setdefault(name, Counter())[Kind(digest, lora_digest)] += num
        kinds_of_adapters = served_kinds.of_adapters(by_adapter)
        usable = [h for h in handles if h.is_usable]
        usable_by: dict[tuple[pb.Role, str | None], list[WorkerHandle]] = {}
        usable_by_prefix: dict[tuple[bytes, int], list[WorkerKey]] = {}
        for handle in usable:
            usable_by.setdefault((handle.facts.role, handle.facts.compat_digest), []).append(handle)
            prefix = handle.record.prefix_key, handle.facts.block_size
            usable_by_prefix.setdefault(prefix, []).append(handle.key)
        return cls(
            num_changes=num_changes,
            compat_digest=compat_digest,
            kinds_of_adapters=kinds_of_adapters,
            adapters_of_all=frozenset(
                name for name, kind in kinds_of_adapters.items() if by_adapter[name][kind] == len(served)
            ),
            features_of_all=frozenset(FEATURES).intersection(*(h.facts.features for h in served)),
            expected_decode=expected,
            served_decode=[h.record for h in served],
            usable=usable,
            usable_by=usable_by,
            usable_by_prefix=usable_by_prefix,
        )

    def kind_for(self, lora_name: str) -> Kind | None:
        """The kind of the workers that new requests for this adapter (empty: for none) go to. None: no worker has
        it."""
        if lora_name:
            return self.kinds_of_adapters.get(lora_name)
        return None if self.compat_digest is None else Kind(self.compat_digest)
