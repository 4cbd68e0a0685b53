"""Who takes new work, and whose kind is served, as of one moment. What is asked about all workers for each request is
found out here, once for each change of them: there may be many more requests than changes, and many workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from protos import tandem_worker_pb2 as pb
from router.request_events import WorkerKey
from router.served_kind import Kind, ServedKinds
from router.worker_handle import WorkerHandle


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """Not to be written to."""

    num_changes: int
    """As `KnownWorkers` counted them then."""
    compat_digest: str | None
    """Of workers that new requests go to."""
    kinds_of_adapters: dict[str, Kind]
    """Of those of them that new requests for an adapter go to, by its name."""
    adapters_of_all: frozenset[str]
    """Those adapters that all of them have, the same one."""
    expected_decode: Sequence[WorkerHandle]
    """Decode workers that take new work, or will in a moment; of any kind."""
    served_decode: Sequence[pb.WorkerRecord]
    """Those whose compat digest is served."""
    usable: Sequence[WorkerHandle]
    """That take new work."""
    usable_by: dict[tuple[pb.Role, str | None], list[WorkerHandle]]
    """The same by role and compat digest."""
    usable_by_prefix: dict[tuple[bytes, int], list[WorkerKey]]
    """The same by the key of their prefix hashes and the size of their blocks."""

    @classmethod
    def of(cls, handles: Iterable[WorkerHandle], num_changes: int, served_kinds: ServedKinds) -> Roster:
        """`served_kinds` chooses, by the decode workers that are expected."""
        handles = list(handles)
        expected = [h for h in handles if h.is_expected and h.facts.role == pb.ROLE_DECODE]
        compat_digest = served_kinds.among(h.facts.compat_digest for h in expected)
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
            expected_decode=expected,
            served_decode=[h.record for h in served],
            usable=usable,
            usable_by=usable_by,
            usable_by_prefix=usable_by_prefix,
        )

    def kind_for(self, lora_name: str) -> Kind | None:
        """Of the workers that new requests for this adapter (empty: for none) go to. None: nobody has it."""
        if lora_name:
            return self.kinds_of_adapters.get(lora_name)
        return None if self.compat_digest is None else Kind(self.compat_digest)
