"""Decides which workers this router uses and may pair. The log tells once for each unused worker why it is not used.
For workers that cannot be paired, it tells once for all pairs of two kinds, and again when a worker joins one of
them."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b

from prefix_hash.compat import compat_difference
from protos import tandem_worker_pb2 as pb
from registry.model_traits import traits_difference
from router.model_info import ModelInfo
from rpc.session import PROTOCOL_VERSION

_log = logging.getLogger(__name__)


class Peers:
    """Checks the registry's records. (`policy` pairs only workers of equal kinds and transports, and `WorkerPool` gives
    new requests to one kind of workers.)"""

    def __init__(self, model: ModelInfo) -> None:
        self._model = model
        self._told: set[tuple[str, ...]] = set()
        """What the log has told already: each key is a worker's id, followed by its process or by what was told about
        it."""
        self.unused: list[str] = []
        """Workers that this router cannot use, as "id: reason"."""

    def look_at(self, records: Collection[pb.WorkerRecord]) -> list[pb.WorkerRecord]:
        """The `records` of the workers that this router uses. Logs which ones are not used, or not paired, unless the
        log has told so before."""
        told, self._told = self._told, set()
        used, self.unused = [], []
        for record in records:
            self._tell_of_rival(record, told)
            why = why_unused(self._model, record)
            if not why:
                used.append(record)
                continue
            self.unused.append(f"{record.worker_id}: {why}")
            if self._is_news((record.worker_id, record.incarnation), told):
                _log.warning("worker not used", extra={"worker": record.worker_id, "why": why})
        if all(each.role == pb.Role.ROLE_DECODE for each in used):  # else `_compare_kinds` tells of differences
            self._compare_decode_workers(used, told)
        self._compare_kinds(used, told)
        rivals = {record.worker_id for record in records if record.rival_address}
        self._told |= {key for key in told if key[0] in rivals}  # the rival's record will soon come again
        return used

    def _tell_of_rival(self, record: pb.WorkerRecord, told: set[tuple[str, ...]]) -> None:
        """Log that two workers share one id, in the same words whichever of the two wrote the record last."""
        addresses = sorted((record.address, record.rival_address))
        if record.rival_address and self._is_news((record.worker_id, *addresses), told):
            what_to_do = {"addresses": " and ".join(addresses), "fix": "drain one, or give it another --worker-id"}
            _log.warning("two workers of one id", extra={"worker": record.worker_id, **what_to_do})

    def _compare_kinds(self, records: list[pb.WorkerRecord], told: set[tuple[str, ...]]) -> None:
        """Compare the kinds of prefill workers with those of decode workers. Comparing worker by worker, with a
        thousand workers of which half are of another kind during an upgrade, would block the router for seconds and log
        a hundred thousand lines."""
        prefill, decode = (_by_kind(records, role) for role in (pb.Role.ROLE_PREFILL, pb.Role.ROLE_DECODE))
        for prefill_kind, senders in prefill.items():
            for decode_kind, receivers in decode.items():
                if not (why := why_unpaired(senders[0], receivers[0])):
                    continue
                sender = self._newest(senders, decode_kind, told)
                receiver = self._newest(receivers, prefill_kind, told)
                if sender is None and receiver is None:
                    continue
                names = {
                    "prefill": (sender or senders[0]).worker_id,
                    "decode": (receiver or receivers[0]).worker_id,
                    "num_pairs": len(senders) * len(receivers),
                }
                _log.warning("workers not paired", extra={**names, "why": why})

    def _newest(
        self, records: Sequence[pb.WorkerRecord], unlike: tuple[str, str], told: set[tuple[str, ...]]
    ) -> pb.WorkerRecord | None:
        """The last of `records` about which the log has not told yet that it differs from the kind `unlike`. None: it
        has told so about all."""
        news = [r for r in records if self._is_news((r.worker_id, r.incarnation, *unlike), told)]
        return news[-1] if news else None

    def _compare_decode_workers(self, records: list[pb.WorkerRecord], told: set[tuple[str, ...]]) -> None:
        """Log which decode workers differ from the first one: requests cannot move between them."""
        for record in records[1:]:
            why = compat_difference(record.compat_digest, records[0].compat_digest)
            if why and self._is_news((record.worker_id, record.incarnation, "unlike"), told):
                names = {"worker": record.worker_id, "unlike": records[0].worker_id}
                _log.warning("decode workers of two kinds", extra={**names, "why": why})

    def _is_news(self, key: tuple[str, ...], told: set[tuple[str, ...]]) -> bool:
        self._told.add(key)
        return key not in told


def _by_kind(records: Iterable[pb.WorkerRecord], role: pb.Role) -> dict[tuple[str, str], list[pb.WorkerRecord]]:
    """The records with that role, by (transport, compat digest), which decide about pairing."""
    by_kind: defaultdict[tuple[str, str], list[pb.WorkerRecord]] = defaultdict(list)
    for record in records:
        if record.role == role:
            by_kind[record.transport, record.compat_digest].append(record)
    return by_kind


def why_unpaired(prefill: pb.WorkerRecord, decode: pb.WorkerRecord) -> str:
    """Why no KV can be sent from one to the other; empty if it can."""
    if prefill.transport != decode.transport:
        return f"transport {prefill.transport!r} != {decode.transport!r}"
    return compat_difference(prefill.compat_digest, decode.compat_digest)


def why_unused(model: ModelInfo, record: pb.WorkerRecord) -> str:
    """Why a router of `model` cannot use a worker; empty if it can."""
    if record.protocol_version != PROTOCOL_VERSION:
        return f"protocol_version is {record.protocol_version}, ours {PROTOCOL_VERSION}"
    if record.model.vocab_size != model.vocab_size:
        return f"its vocabulary has {record.model.vocab_size} tokens, ours {model.vocab_size}"
    for what, number in (("blocks", record.model.block_size), ("context", record.model.max_model_len)):
        if not number:  # planning divides by it, for every request
            return f"it does not say how many tokens its {what} may have"
    if len(record.prefix_key) > blake2b.MAX_KEY_SIZE:
        return f"its prefix_key has {len(record.prefix_key)} bytes, a key at most {blake2b.MAX_KEY_SIZE}"
    return traits_difference(record.traits, model.traits)
