"""The thinking budget: how many tokens of an answer may be thoughts, and which token ends a thought.

    SamplingParams.thinking_budget ──> Thinking of one sequence ──forced(its answer so far)──> the token that must come

    OUTSIDE ── begin_token_ids ──> WITHIN ── end_token_id ──> OUTSIDE, or OVER if one thought is all there is
                                    │ └─ budget is used up: end_token_id is all that may come
                                    └─ one of other_end_token_ids ──> OUTSIDE

Which token must come depends on the answer's tokens alone, so a sequence that is preempted, handed over or continued
elsewhere needs no other state. Each token is read once; drafts, which may be wrong, are not remembered. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

MAX_BEGIN_TOKENS = 16
MAX_OTHER_ENDS = 16
MAX_SPACE_TOKENS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class ThinkingBudget:
    """Raises `ValueError` naming the field and its bound."""

    num_tokens: int
    """Tokens of all thoughts of an answer together, without those that begin and end a thought."""
    end_token_id: int
    """The token that ends a thought."""
    begin_token_ids: tuple[int, ...] = ()
    """The tokens that, in this order, begin a thought. The first one must not occur again."""
    has_begun: bool = False
    """The prompt has already begun the first thought."""
    may_repeat: bool = False
    """An answer may have several thoughts."""
    other_end_token_ids: frozenset[int] = frozenset()
    """Other tokens that end a thought, even without `end_token_id`: those that begin the next message, which
    `begin_token_ids` may start with."""
    space_token_ids: frozenset[int] = frozenset()
    """White space. If an answer has only one thought and the prompt has not begun it, only these tokens may come before
    it: where `begin_token_ids` occur later, the answer merely quotes them."""

    def __post_init__(self) -> None:
        if self.num_tokens < 0:
            raise ValueError(f"thinking_budget.num_tokens must be at least 0, is {self.num_tokens}")
        if not self.begin_token_ids and not self.has_begun:
            raise ValueError("thinking_budget.begin_token_ids must not be empty where the prompt has begun nothing")
        if len(self.begin_token_ids) > MAX_BEGIN_TOKENS:
            bound = f"must have at most {MAX_BEGIN_TOKENS} ids, has {len(self.begin_token_ids)}"
            raise ValueError(f"thinking_budget.begin_token_ids {bound}")
        if len(self.other_end_token_ids) > MAX_OTHER_ENDS:
            bound = f"must have at most {MAX_OTHER_ENDS} ids, has {len(self.other_end_token_ids)}"
            raise ValueError(f"thinking_budget.other_end_token_ids {bound}")
        if len(self.space_token_ids) > MAX_SPACE_TOKENS:
            bound = f"must have at most {MAX_SPACE_TOKENS} ids, has {len(self.space_token_ids)}"
            raise ValueError(f"thinking_budget.space_token_ids {bound}")
        if self.begin_token_ids[:1] and self.begin_token_ids[0] in self.begin_token_ids[1:]:
            raise ValueError("thinking_budget.begin_token_ids must not have its first id again")


@dataclass(slots=True)
class _Place:
    """The state of one answer: see the drawing above."""

    is_within: bool
    num_seen: int = 0
    """Tokens of the answer that have been read."""
    num_thought: int = 0
    num_begun: int = 0
    """How many of `begin_token_ids` the last read tokens match."""
    is_over: bool = False
    """No further thought can begin."""

    def take(self, token_ids: Iterable[int], budget: ThinkingBudget) -> None:
        begin = budget.begin_token_ids
        for token_id in token_ids:
            self.num_seen += 1
            if self.is_within:
                self.is_within = token_id != budget.end_token_id and token_id not in budget.other_end_token_ids
                self.num_thought += self.is_within
                self.is_over = not self.is_within and not budget.may_repeat
            if not self.is_within and begin and not self.is_over:
                if token_id == begin[self.num_begun]:
                    self.num_begun += 1
                elif budget.may_repeat:
                    self.num_begun = int(token_id == begin[0])
                else:
                    self.is_over = self.num_begun > 0 or token_id not in budget.space_token_ids
                if self.num_begun == len(begin):
                    self.is_within, self.num_begun = True, 0


class Thinking:
    """One per sequence: follows its answer, which starts after `num_prompt_tokens` in `token_ids`."""

    def __init__(self, budget: ThinkingBudget, num_prompt_tokens: int) -> None:
        self._budget = budget
        self._num_prompt_tokens = num_prompt_tokens
        self._place = _Place(is_within=budget.has_begun)

    def forced(self, token_ids: Seq[int], num_drafts: int = 0) -> int | None:
        """Return the token that must come after `token_ids`, the last `num_drafts` of which are drafts, or None."""
        num_known = len(token_ids) - num_drafts
        self._follow(token_ids, num_known)
        place = self._place
        if num_drafts and not place.is_over:
            place = replace(place)
            place.take(token_ids[num_known:], self._budget)
        is_used_up = place.is_within and place.num_thought >= self._budget.num_tokens
        return self._budget.end_token_id if is_used_up else None

    def hangs_on_last(self, token_ids: Seq[int]) -> bool:
        """Whether what may come after `token_ids` depends on the last of them, which is not known yet."""
        self._follow(token_ids, len(token_ids) - 1)
        place, budget = self._place, self._budget
        if place.is_over or place.num_thought + place.is_within < budget.num_tokens:
            return False
        return place.is_within or place.num_begun + 1 == len(budget.begin_token_ids)

    def _follow(self, token_ids: Seq[int], num_known: int) -> None:
        place = self._place
        if not place.is_over:
            place.take(token_ids[self._num_prompt_tokens + place.num_seen : num_known], self._budget)
