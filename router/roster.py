"""Who takes new work, and whose kind is served, as of one moment. What is asked about all workers for each request is
found out here, once for each change of them: there may be many more requests than changes, and many workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from protos import tandem_worker_pb2 as pb
from router.request_events import WorkerKey
from router.worker_handle import WorkerHandle


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """Not to be written to."""

    num_changes: int
    """As `KnownWorkers` counted them then."""
    kind: str | None
    """The compat digest of workers that new requests go to."""
    expected_decode: Sequence[pb.WorkerRecord]
    """Of decode workers that take new work, or will in a moment; of any kind."""
    served_decode: Sequence[pb.WorkerRecord]
    """Those of the kind that is served."""
    usable: Sequence[WorkerHandle]
    """That take new work."""
    usable_by: dict[tuple[pb.Role, str | None], list[WorkerHandle]]
    """The same by role and compat digest."""
    usable_by_prefix: dict[tuple[bytes, int], list[WorkerKey]]
    """The same by the key of their prefix hashes and the size of their blocks."""

    @classmethod
    def of(
        cls,
        handles: Iterable[WorkerHandle],
        num_changes: int,
        choose_kind: Callable[[Iterable[str]], str | None],
    ) -> Roster:
        """`choose_kind`: of the digests of all decode workers that are expected."""
        handles = list(handles)
        expected = [h for h in handles if h.is_expected and h.facts.role == pb.ROLE_DECODE]
        kind = choose_kind(h.facts.compat_digest for h in expected)
        usable = [h for h in handles if h.is_usable]
        usable_by: dict[tuple[pb.Role, str | None], list[WorkerHandle]] = {}
        usable_by_prefix: dict[tuple[bytes, int], list[WorkerKey]] = {}
        for handle in usable:
            usable_by.setdefault((handle.facts.role, handle.facts.compat_digest), []).append(handle)
            prefix = handle.record.prefix_key, handle.facts.block_size
            usable_by_prefix.setdefault(prefix, []).append(handle.key)
        return cls(
            num_changes=num_changes,
            kind=kind,
            expected_decode=[h.record for h in expected],
            served_decode=[h.record for h in expected if h.facts.compat_digest == kind],
            usable=usable,
            usable_by=usable_by,
            usable_by_prefix=usable_by_prefix,
        )
