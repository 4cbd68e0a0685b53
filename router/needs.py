"""What a request asks of whoever computes it, and who has that. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from protos import tandem_worker_pb2 as pb
from router.served_kind import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """An older worker would leave out what it does not know, and answer all the same: it may not have the request."""

    kind: Kind | None = None
    """Of the worker that its answer has begun on: another model must not go on with it. None: it has not begun."""
    has_grammar: bool = False
    """Only workers that know what a grammar is may have it."""
    has_cache_salt: bool = False
    """Only workers that keep its prefixes apart may have it."""
    has_allowed_token_ids: bool = False
    """Only workers that sample no others may have it."""
    has_bad_words: bool = False
    """Only workers that sample none of them may have it."""
    has_thinking_budget: bool = False
    """Only workers that end its thoughts may have it."""
    lora_name: str = ""
    """Only workers that have this adapter may have it. Empty: it asks for none."""

    @property
    def group(self) -> tuple[Kind | None, str]:
        """What those have in common who wait for the same workers."""
        return self.kind, self.lora_name

    def are_met_by(self, record: pb.WorkerRecord) -> bool:
        """Whether the worker understands all that is asked for. Of its kind, and of its adapters, nothing is said here:
        of those that have not begun the pool chooses them."""
        return (
            (not self.has_grammar or record.takes_grammars)
            and (not self.has_cache_salt or record.takes_cache_salts)
            and (not self.has_allowed_token_ids or record.takes_allowed_token_ids)
            and (not self.has_bad_words or record.takes_bad_words)
            and (not self.has_thinking_budget or record.takes_thinking_budgets)
        )

    def __str__(self) -> str:
        """For an error that says whom there is none of: "no decode worker{needs} is available"."""
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
