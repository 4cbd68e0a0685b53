"""What a request requires of the workers that compute it, and which workers meet that. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from protos import tandem_worker_pb2 as pb
from router.served_kind import Kind

FEATURES = {
    "takes_grammars": "structured_outputs",
    "takes_cache_salts": "cache_salt",
    "takes_allowed_token_ids": "allowed_token_ids",
    "takes_bad_words": "bad_words",
    "takes_thinking_budgets": "thinking_token_budget",
}
"""By field of `WorkerRecord`: the clients' field that only workers with it understand."""


def features_of(record: pb.WorkerRecord) -> frozenset[str]:
    """Those of `FEATURES` that a worker has."""
    return frozenset(name for name in FEATURES if getattr(record, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The requirements of one request."""

    kind: Kind | None = None
    """Kind of the worker on which its answer has begun: no other model may continue it. None: it has not begun."""
    lora_name: str = ""
    """Only workers that have this adapter may get it. Empty: it asks for none."""
    features: frozenset[str] = frozenset()
    """Only workers with these of `FEATURES` may get it: others would ignore fields that they do not know, and answer
    anyway."""

    @property
    def group(self) -> tuple[Kind | None, str, frozenset[str]]:
        """Requests with the same group wait for the same workers."""
        return self.kind, self.lora_name, self.features

    def __str__(self) -> str:
        """For an error message: "no decode worker{needs} is available"."""
        asked = " and ".join(field for name, field in FEATURES.items() if name in self.features)
        kind = " of the kind that began this answer" if self.kind is not None else ""
        which = f" with the adapter {self.lora_name!r}" if self.lora_name else ""
        return kind + which + (f" that takes {asked}" if asked else "")


NO_NEEDS = Needs()
"""Any worker will do."""
