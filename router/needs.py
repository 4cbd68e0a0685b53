"""What a request requires of the workers that compute it, and which workers meet that. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from protos import tandem_worker_pb2 as pb
from router.served_kind import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The requirements of one request. An older worker would ignore fields that it does not know and answer anyway, so
    it must not get a request that uses them."""

    kind: Kind | None = None
    """Kind of the worker on which its answer has begun: no other model may continue it. None: it has not begun."""
    has_grammar: bool = False
    """Only workers that understand grammars may get it."""
    has_cache_salt: bool = False
    """Only workers that keep its prefixes apart from others may get it."""
    has_allowed_token_ids: bool = False
    """Only workers that sample no other tokens may get it."""
    has_bad_words: bool = False
    """Only workers that sample none of these words may get it."""
    has_thinking_budget: bool = False
    """Only workers that end its thinking in time may get it."""
    lora_name: str = ""
    """Only workers that have this adapter may get it. Empty: it asks for none."""

    @property
    def group(self) -> tuple[Kind | None, str]:
        """Requests with the same group wait for the same workers."""
        return self.kind, self.lora_name

    def are_met_by(self, record: pb.WorkerRecord) -> bool:
        """Whether the worker understands all fields that the request uses. Does not check kind and adapter: the pool
        does."""
        return (
            (not self.has_grammar or record.takes_grammars)
            and (not self.has_cache_salt or record.takes_cache_salts)
            and (not self.has_allowed_token_ids or record.takes_allowed_token_ids)
            and (not self.has_bad_words or record.takes_bad_words)
            and (not self.has_thinking_budget or record.takes_thinking_budgets)
        )

    def __str__(self) -> str:
        """For an error message: "no decode worker{needs} is available"."""
        fields = [
            ("structured_outputs", self.has_grammar),
            ("cache_salt", self.has_cache_salt),
            ("allowed_token_ids", self.has_allowed_token_ids),
            ("bad_words", self.has_bad_words),
            ("thinking_token_budget", self.has_thinking_budget),
        ]
        asked = " and ".join(field for field, is_asked in fields if is_asked)
        kind = " of the kind that began this answer" if self.kind is not None else ""
        which = f" with the adapter {self.lora_name!r}" if self.lora_name else ""
        return kind + which + (f" that takes {asked}" if asked else "")


NO_NEEDS = Needs()
"""Any worker will do."""
