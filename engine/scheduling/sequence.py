"""A sequence: the tokens of one request, and how many of them are computed. Integers only, no torch.

    WAITING ──schedule──> RUNNING ──stop token, length──> FINISHED
       ^                   │  │
       └─────preempt───────┘  └──first token of a prefill-only sequence──> HELD
    GRANTED ──commit──> RUNNING            abort: from any state ──> FINISHED
    WAITING, GRANTED ──> LOADING ──prefix loaded from host memory──> RUNNING

GRANTED: a decode engine has reserved the blocks, and another engine fills them. HELD: a prefill engine has computed the
blocks and keeps them until another engine has them. Progress is one integer, `num_computed_tokens`; chunked prefill,
prefix caching, preemption and hand-over all follow from it.

With layers that keep a state besides keys and values (engine/models/recurrent_states.py), a running sequence also has a
row of these states, its slot. A prompt's state is handed over in blocks of its own, behind those of its tokens. So are
snapshots kept (engine/scheduling/snapshots.py), from which later sequences with the same prefix go on. Guesses change a
state, too: if some are wrong, it is put back, and the next step computes the right ones again (drafting.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, MutableSequence
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TypeAlias

from engine.outputs import FinishReason, RequestOutput, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.scheduling.grammar import GrammarState
from engine.scheduling.speculation import DraftHistory
from engine.scheduling.thinking import Thinking

INVALID_TOKEN = -1
"""Sampled for a sequence whose logits contain a NaN: only this sequence fails."""

NO_SLOT = -1
"""The `state_slot` of a sequence that has none."""

PENDING_TOKEN = -2
"""The last token of a sequence while a launched step samples it: its value is not known yet."""


class SequenceStatus(Enum):
    WAITING = auto()
    LOADING = auto()
    RUNNING = auto()
    GRANTED = auto()
    HELD = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence of tokens. The scheduler changes it; the model runner and the sampler only read it."""

    seq_id: int
    request_id: str
    token_ids: MutableSequence[int]
    """Prompt, then answer. Stored as an array of int64, which numpy reads without copying."""
    num_prompt_tokens: int
    sampling_params: SamplingParams
    cache_salt: str = ""
    """Only sequences with the same salt share blocks."""
    lora_digest: str = ""
    """Digest of the sequence's adapter; only sequences with the same adapter share blocks. Empty: the base model."""
    lora_id: int = 0
    """The adapter's number in the engine, from 1 on; 0: none."""
    is_prefill_only: bool = False
    """Becomes HELD at its first sampled token instead of decoding on."""
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    """Tokens whose KV is in this engine's pool, or will be when the launched steps are done."""
    num_steps_in_flight: int = 0
    """Launched steps that compute the sequence. While there are any, its blocks are not given to others."""
    num_loading_blocks: int = 0
    """Blocks being loaded from host memory. While there are any, the sequence is not computed and keeps its blocks."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when the sequence was first scheduled."""
    block_table: list[int] = field(default_factory=list)
    """Block ids, in order. The block manager owns this list; others only read it."""
    num_state_blocks: int = 0
    """Blocks that its state needs to come from or go to another engine; 0: it does not, or there is no state."""
    state_block_ids: list[int] = field(default_factory=list)
    """Blocks that take its state to another engine. The block manager owns this list."""
    loaded_state_ids: list[int] = field(default_factory=list)
    """Blocks that its state comes in: from another engine, or from the prefix cache. They are dropped once the state is
    loaded. The block manager owns this list."""
    has_state_to_load: bool = False
    """The next step must first load the state from `loaded_state_ids`."""
    snapshot_points: list[int] = field(default_factory=list)
    """After how many tokens of the prompt to take snapshots of the state."""
    state_slot: int = NO_SLOT
    """The row of the recurrent states that a running sequence has, if the model has such states."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Hashes of the leading full blocks, computed on demand. They depend on the tokens alone and survive preemption."""
    num_exported_blocks: int = 0
    """Leading blocks that were offered to `on_layer_written` or that the receiver has (prefill-only sequences)."""
    num_preemptions: int = 0
    num_drafts: int = 0
    """How many of the last tokens are drafts, which may be wrong. Not 0 only in what `followed_by` returns."""
    draft_history: DraftHistory = field(default_factory=DraftHistory)
    """How well earlier drafts of this sequence went."""
    num_replayed: int = 0
    """Known tokens before the last one that the next step computes again: after wrong drafts, the states of layers that
    keep one are put back to what they were before those drafts' step."""
    num_drafted_tokens: int = 0
    """Tokens whose KV the draft model has, in the counterparts of the sequence's blocks (model_drafting.py)."""
    num_drafted_blocks: int = 0
    """Leading blocks of these tokens that are noted for later sequences."""
    grammar: GrammarState | None = None
    """Says which tokens may come next, if the request has a grammar."""
    thinking: Thinking | None = None
    """Tracks the thinking budget, if the request has one."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of the prompt's tokens from the second on, as far as computed. None: not requested, or already reported."""
    arrived_s: float = 0.0
    first_scheduled_s: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.token_ids, array):
            self.token_ids = array("q", self.token_ids)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """1 for a decoding sequence: its last sampled token, besides those computed again. More: it is still to be
        prefilled."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        return self.num_uncomputed_tokens == 1 + self.num_replayed

    @property
    def is_prefilling(self) -> bool:
        """It has more to compute than its last token, and those computed again."""
        return self.num_uncomputed_tokens > 1 + self.num_replayed

    @property
    def needs_known_tokens(self) -> bool:
        """Whether sampling the next token requires that the host knows the last one."""
        return (
            self.grammar is not None
            or self.sampling_params.has_phrases
            or (self.thinking is not None and self.thinking.hangs_on_last(self.token_ids))
        )

    @property
    def forced_token_id(self) -> int | None:
        """The only token that may come next, because the thinking budget is used up. None: no token is forced."""
        if self.thinking is None or self.token_ids[-1] == PENDING_TOKEN:
            return None
        return self.thinking.forced(self.token_ids, self.num_drafts)

    def output(
        self,
        offset: int,
        token_ids: list[int],
        finish_reason: FinishReason | None,
        *,
        logprobs: list[TokenLogprobs] | None = None,
        prompt_logprobs: list[TokenLogprobs] | None = None,
        grammar_error: str = "",
    ) -> RequestOutput:
        """Build the output that reports what a step added to the sequence."""
        return RequestOutput(
            request_id=self.request_id,
            offset=offset,
            token_ids=token_ids,
            finish_reason=finish_reason,
            num_cached_tokens=self.num_cached_tokens,
            waited_s=self.first_scheduled_s - self.arrived_s,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar_error=grammar_error,
            held_block_ids=(*self.block_table, *self.state_block_ids) if self.is_prefill_only else (),
        )

    def followed_by(self, token_ids: Seq[int]) -> Sequence:
        """Return a copy with the drafts `token_ids` appended, for the sampler to read."""
        if not token_ids:
            return self
        followed = array("q", self.token_ids)  # copies the memory; a list would be copied integer by integer
        followed.extend(token_ids)
        return replace(self, token_ids=followed, num_drafts=len(token_ids))

    @property
    def num_reusable_tokens(self) -> int:
        """How many leading tokens need not be computed if the prefix cache has their KV. The last token is always
        computed, since its logits give the next token. So are tokens whose logits give missing `prompt_logprobs`."""
        if self.prompt_logprobs is None:
            return len(self.token_ids) - 1
        return min(len(self.token_ids) - 1, len(self.prompt_logprobs))


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """A step's part for one sequence: it computes the next `num_new_tokens` tokens of `seq`, as of now, with drafts
    last."""

    seq: Sequence
    num_new_tokens: int
    """Drafts included."""
    draft_token_ids: Seq[int] = ()
    """Guesses at the tokens after the sequence's last one (engine/scheduling/speculation.py)."""
    snapshot_ids: Seq[int] = ()
    """Blocks that the sequence's state is saved to, as it is after these tokens; empty: it is not saved."""
    first: int = field(init=False)
    """Position of the first computed token."""
    num_replayed: int = field(init=False)
    """How many of the computed tokens were computed before: see `Sequence`."""
    is_sampled: bool = field(init=False)
    """Whether the step computes the sequence's last token, and so samples the next one, and one after each draft."""
    prompt_positions: range = field(init=False)
    """Computed positions whose logits give the prompt logprobs of the token after."""

    def __post_init__(self) -> None:
        seq = self.seq
        object.__setattr__(self, "first", seq.num_computed_tokens)
        object.__setattr__(self, "num_replayed", seq.num_replayed)
        num_known = self.num_new_tokens - len(self.draft_token_ids)
        object.__setattr__(self, "is_sampled", num_known == seq.num_uncomputed_tokens)
        positions = range(0)
        if seq.prompt_logprobs is not None:
            positions = range(max(self.first, len(seq.prompt_logprobs)), min(self.end, seq.num_prompt_tokens - 1))
        object.__setattr__(self, "prompt_positions", positions)

    @property
    def end(self) -> int:
        """Position after the last computed token; the last sampled token, if any, goes there."""
        return self.first + self.num_new_tokens

    @property
    def num_sampled(self) -> int:
        """How many tokens the step samples, at consecutive positions up to `end`."""
        return 1 + len(self.draft_token_ids) if self.is_sampled else 0

    @property
    def token_ids(self) -> list[int]:
        """The tokens that the step computes."""
        return [*self.seq.token_ids[self.first : self.end], *self.draft_token_ids]

    @property
    def sampled_seqs(self) -> list[Sequence]:
        """For each sampled token, the sequence with the drafts before that token."""
        return [self.seq.followed_by(self.draft_token_ids[:i]) for i in range(self.num_sampled)]


@dataclass(frozen=True, slots=True)
class DraftPart:
    """A draft model's or head's part of a step for one sequence: it computes the tokens from `first` to `end`, then
    guesses."""

    seq: Sequence
    first: int
    end: int
    """At most the number of known tokens; equal to it if tokens are to be guessed."""
    num_drafts: int
    """How many tokens to guess after the last known one; 0: the draft model only catches up."""


@dataclass(frozen=True, slots=True)
class PutBack:
    """A sequence's recurrent state is to be what it was before the last step, which kept a copy."""

    copy: int
    """Among those of the last step."""
    state_slot: int


@dataclass(frozen=True, slots=True)
class BlockExport:
    """Blocks of a sequence, from its `first_block` on, whose KV is final once this step has written it."""

    request_id: str
    first_block: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StateExport:
    """Blocks that carry a prompt's recurrent state, which is final once this step has computed the prompt's last
    token. They come after the prompt's other blocks."""

    state_slot: int
    blocks: BlockExport


def take_export(scheduled: ScheduledSequence, block_size: int) -> BlockExport:
    """Return the blocks of a prefill-only sequence that a step completes and its receiver lacks; may be empty. Each
    block is returned once, and counts as exported from then on."""
    seq, first = scheduled.seq, scheduled.seq.num_exported_blocks
    end = len(seq.block_table) if scheduled.is_sampled else scheduled.end // block_size
    seq.num_exported_blocks = max(first, end)
    return BlockExport(seq.request_id, first, tuple(seq.block_table[first:end]))


def state_export(scheduled: ScheduledSequence) -> StateExport | None:
    """The state of a prefill-only sequence, if the step completes it and there is one."""
    seq = scheduled.seq
    if not seq.state_block_ids or not scheduled.is_sampled:
        return None
    export = BlockExport(seq.request_id, len(seq.block_table), tuple(seq.state_block_ids))
    return StateExport(seq.state_slot, export)


OnLayerWritten: TypeAlias = Callable[[int, list[BlockExport]], None]
"""(layer, exports): the pool now holds this layer's KV of the step. Called on the stepping thread, which it blocks."""


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """What one step computes: the scheduler decides it, the executor does it.

    `scheduled` has decoding sequences (one new token) first, then sequences with drafts, then prefilling ones.
    """

    scheduled: list[ScheduledSequence]
    exports: list[BlockExport]
    state_exports: list[StateExport] = field(default_factory=list)
    draft_parts: list[DraftPart] = field(default_factory=list)
    """What the draft model or head must compute before: see `Scheduler.take_drafts`."""
    put_back: list[PutBack] = field(default_factory=list)
    """States that the last step has spoilt with wrong drafts. This step first puts them back; then it keeps copies of
    those of all sequences with drafts, in their order."""

    @property
    def sampled_seqs(self) -> list[Sequence]:
        """One per sampled token, in order: see `ScheduledSequence.sampled_seqs`."""
        return [seq for item in self.scheduled for seq in item.sampled_seqs]
