"""The requests that are open at one router, by the names by which clients and workers know them. Names are unique.

enter ──> being prepared ──begin──> its answers are made ──> leave
             └─ aborted: they are stopped as they begin
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from router.lifecycle import Lifecycle
from router.request_events import Stopped
from router.sequences import Sequences
from rpc.errors import RequestExists


@dataclass(slots=True)
class _OpenRequest:
    names: Sequence[str]
    """The names by which workers know its answers."""
    sequences: Sequences | None = None
    """None while it is being prepared."""
    is_aborted: bool = False


class OpenRequests:
    """One per router."""

    def __init__(self) -> None:
        self._by_id: dict[str, _OpenRequest] = {}
        self._names: set[str] = set()
        """The names of all open requests."""
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def lifecycles(self) -> list[Lifecycle]:
        """The life cycles of all answers that are being made."""
        begun = [each.sequences for each in self._by_id.values() if each.sequences is not None]
        return [lifecycle for sequences in begun for lifecycle in sequences.lifecycles]

    def enter(self, request_id: str, names: Sequence[str]) -> None:
        """Open a request, until `leave`. Raises `RequestExists` if an open request has its id or one of its names."""
        if request_id in self._by_id or not self._names.isdisjoint(names):
            raise RequestExists(
                f"request_id {request_id!r} is in use by a running request; choose another, or leave it empty"
            )
        self._by_id[request_id] = _OpenRequest(names)
        self._names.update(names)
        self._is_empty.clear()

    def begin(self, request_id: str, sequences: Sequences) -> None:
        """The request is prepared; `sequences` are its answers."""
        request = self._by_id[request_id]
        request.sequences = sequences
        if request.is_aborted:
            sequences.stop(Stopped())

    def abort(self, request_id: str) -> bool:
        """Stop a request. Returns whether it was open."""
        request = self._by_id.get(request_id)
        if request is None:
            return False
        request.is_aborted = True
        if request.sequences is not None:
            request.sequences.stop(Stopped())
        return True

    def leave(self, request_id: str) -> Sequences | None:
        """Close a request and free its names. Returns its answers, if they were begun."""
        request = self._by_id.pop(request_id)
        self._names.difference_update(request.names)
        if not self._by_id:
            self._is_empty.set()
        return request.sequences

    async def wait_until_empty(self) -> None:
        await self._is_empty.wait()
