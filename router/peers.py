"""Which workers this router uses and may pair. Its log says why not, once for each worker and each pair."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from prefix_hash.compat import compat_difference
from protos import tandem_worker_pb2 as pb
from registry.model_traits import traits_difference
from router.model_info import ModelInfo
from rpc.session import PROTOCOL_VERSION

_log = logging.getLogger(__name__)


class Peers:
    """What the router checks of the registry's records. `policy` pairs only workers of equal compat digests and
    transports, and `WorkerPool` gives new requests to one kind of them."""

    def __init__(self, model: ModelInfo) -> None:
        self._model = model
        self._told: set[tuple[str, ...]] = set()
        """Incarnations of workers, and of pairs, that the log has a line of."""
        self.unused: list[str] = []
        """Ids of workers that are none for this router, each with why."""

    def look_at(self, records: Iterable[pb.WorkerRecord]) -> None:
        """Say in the log which of `records` are not used or not paired, where it has not been said before."""
        told, self._told = self._told, set()
        used, self.unused = [], []
        for record in records:
            why = why_unused(self._model, record)
            if not why:
                used.append(record)
                continue
            self.unused.append(f"{record.worker_id}: {why}")
            if self._is_news((record.incarnation,), told):
                _log.warning("worker not used", extra={"worker": record.worker_id, "why": why})
        if all(each.role == pb.Role.ROLE_DECODE for each in used):  # else pairs tell
            self._compare_decode_workers(used, told)
        for prefill in used:
            for decode in used:
                if (prefill.role, decode.role) != (pb.Role.ROLE_PREFILL, pb.Role.ROLE_DECODE):
                    continue
                why = why_unpaired(prefill, decode)
                if why and self._is_news((prefill.incarnation, decode.incarnation), told):
                    names = {"prefill": prefill.worker_id, "decode": decode.worker_id}
                    _log.warning("workers not paired", extra={**names, "why": why})

    def _compare_decode_workers(self, records: list[pb.WorkerRecord], told: set[tuple[str, ...]]) -> None:
        """Of those that are unlike the first: requests do not move between them."""
        for record in records[1:]:
            why = compat_difference(record.compat_digest, records[0].compat_digest)
            if why and self._is_news((record.incarnation, "unlike"), told):
                names = {"worker": record.worker_id, "unlike": records[0].worker_id}
                _log.warning("decode workers of two kinds", extra={**names, "why": why})

    def serves(self, record: pb.WorkerRecord) -> bool:
        """Whether the worker is one for this router."""
        return not why_unused(self._model, record)

    def _is_news(self, key: tuple[str, ...], told: set[tuple[str, ...]]) -> bool:
        self._told.add(key)
        return key not in told


def why_unpaired(prefill: pb.WorkerRecord, decode: pb.WorkerRecord) -> str:
    """Why no KV goes from one to the other; empty if it does."""
    if prefill.transport != decode.transport:
        return f"transport {prefill.transport!r} != {decode.transport!r}"
    return compat_difference(prefill.compat_digest, decode.compat_digest)


def why_unused(model: ModelInfo, record: pb.WorkerRecord) -> str:
    """Why a worker is none for a router of `model`; empty if it is one."""
    if record.protocol_version != PROTOCOL_VERSION:
        return f"protocol_version is {record.protocol_version}, ours {PROTOCOL_VERSION}"
    if record.model.vocab_size != model.vocab_size:
        return f"its vocabulary has {record.model.vocab_size} tokens, ours {model.vocab_size}"
    return traits_difference(record.traits, model.traits)
