"""A sequence: one request's tokens and how far they are computed. Integers only, no torch.

    WAITING ──schedule──> RUNNING ──stop token, length──> FINISHED
       ^                   │  │
       └─────preempt───────┘  └──first token of a prefill-only sequence──> HELD
    GRANTED ──commit──> RUNNING            abort: from any state ──> FINISHED
    WAITING, GRANTED ──> LOADING ──a prefix is back from host memory──> RUNNING

GRANTED: a decode engine reserved the blocks, another engine fills them. HELD: a prefill engine has computed them and
keeps them until another engine has them. Progress is one integer, `num_computed_tokens`: chunked prefill, prefix
caching, preemption and handing over all follow from it.
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
"""Sampled for a sequence whose logits hold a NaN: it fails, and its neighbours go on."""

PENDING_TOKEN = -2
"""Stands last in a sequence for the token that a launched step samples, until it is known."""


class SequenceStatus(Enum):
    WAITING = auto()
    LOADING = auto()
    RUNNING = auto()
    GRANTED = auto()
    HELD = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence of tokens. The scheduler changes it; model runner and sampler only read it."""

    seq_id: int
    request_id: str
    token_ids: MutableSequence[int]
    """Prompt, then answer. Kept as an array of machine words, which numpy reads as it lies."""
    num_prompt_tokens: int
    sampling_params: SamplingParams
    cache_salt: str = ""
    """Its blocks are shared with sequences of the same salt alone."""
    lora_digest: str = ""
    """Of the adapter that computes it, whose blocks are its own; empty: the model by itself."""
    lora_id: int = 0
    """That adapter's number in the engine, from 1 on; 0: none."""
    is_prefill_only: bool = False
    """Ends as HELD at its first sampled token instead of decoding on."""
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    """Tokens whose KV is in this engine's pool, or will be when the launched steps are done."""
    num_steps_in_flight: int = 0
    """Launched steps that compute it. While there are some, its blocks are not given to anybody else."""
    num_loading_blocks: int = 0
    """Of its blocks, on their way from host memory. While there are some, it is not computed, and keeps its blocks."""
    num_cached_tokens: int = 0
    """Of the prompt, found in the prefix cache when the sequence was first scheduled."""
    block_table: list[int] = field(default_factory=list)
    """Block ids, in order. The block manager's list; everybody else only reads it."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Of its full blocks, as far as somebody has asked. They hang on its tokens alone, and stay when its blocks go."""
    num_exported_blocks: int = 0
    """Blocks already offered to `on_layer_written`, or that the receiver needs no more (prefill-only sequences)."""
    num_preemptions: int = 0
    num_drafts: int = 0
    """How many of its last tokens are drafts, and may be wrong. 0 but in what `followed_by` makes for a sampler."""
    draft_history: DraftHistory = field(default_factory=DraftHistory)
    """How guessing what comes next went so far."""
    grammar: GrammarState | None = None
    """What may come next, where the request has a grammar: follows the tokens, and only the sampler asks it."""
    thinking: Thinking | None = None
    """How much of its budget is thought, where the request has one: follows the tokens, too."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of the prompt's tokens from the second on, as far as they are computed. None: nobody asks, or has been told."""
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
        """1 is what a decoding sequence has: the token sampled last. More are still to be prefilled."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def needs_known_tokens(self) -> bool:
        """Its next token cannot be sampled before the host knows the one before."""
        return (
            self.grammar is not None
            or self.sampling_params.has_phrases
            or (self.thinking is not None and self.thinking.hangs_on_last(self.token_ids))
        )

    @property
    def forced_token_id(self) -> int | None:
        """What alone may come next, as it has thought for as long as it may. None: it may go on as it likes."""
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
        """What a step added to it."""
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
            held_block_ids=tuple(self.block_table) if self.is_prefill_only else (),
        )

    def followed_by(self, token_ids: Seq[int]) -> Sequence:
        """What it would be with these drafts at its end, for a sampler to look at."""
        if not token_ids:
            return self
        followed = array("q", self.token_ids)  # copied as it lies, where a list would be made number by number
        followed.extend(token_ids)
        return replace(self, token_ids=followed, num_drafts=len(token_ids))

    @property
    def num_reusable_tokens(self) -> int:
        """How many leading tokens need not be computed where a cache has their KV. The last one always is, since its
        logits give the next token; and so are those whose logits give the `prompt_logprobs` that are still due."""
        if self.prompt_logprobs is None:
            return len(self.token_ids) - 1
        return min(len(self.token_ids) - 1, len(self.prompt_logprobs))


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """This step computes the next `num_new_tokens` tokens of `seq` in its present state: those that it has, and drafts
    after them."""

    seq: Sequence
    num_new_tokens: int
    """Drafts included."""
    draft_token_ids: Seq[int] = ()
    """Guesses at the tokens after its last one (engine/scheduling/speculation.py)."""
    first: int = field(init=False)
    """Position of the first of them."""
    is_sampled: bool = field(init=False)
    """Whether they reach the last token, so that the next one is sampled, and one after each draft."""
    prompt_positions: range = field(init=False)
    """Positions among them whose logits give a `prompt_logprobs` of the token after."""

    def __post_init__(self) -> None:
        seq = self.seq
        object.__setattr__(self, "first", seq.num_computed_tokens)
        num_known = self.num_new_tokens - len(self.draft_token_ids)
        object.__setattr__(self, "is_sampled", num_known == seq.num_uncomputed_tokens)
        positions = range(0)
        if seq.prompt_logprobs is not None:
            positions = range(max(self.first, len(seq.prompt_logprobs)), min(self.end, seq.num_prompt_tokens - 1))
        object.__setattr__(self, "prompt_positions", positions)

    @property
    def end(self) -> int:
        """Position after the last of them: of the last sampled token, where one is."""
        return self.first + self.num_new_tokens

    @property
    def num_sampled(self) -> int:
        """Tokens that are sampled, in consecutive positions up to `end`."""
        return 1 + len(self.draft_token_ids) if self.is_sampled else 0

    @property
    def token_ids(self) -> list[int]:
        """Those that are computed."""
        return [*self.seq.token_ids[self.first : self.end], *self.draft_token_ids]

    @property
    def sampled_seqs(self) -> list[Sequence]:
        """As each sampled token finds its sequence: with the drafts before it."""
        return [self.seq.followed_by(self.draft_token_ids[:i]) for i in range(self.num_sampled)]


@dataclass(frozen=True, slots=True)
class BlockExport:
    """Blocks of a sequence, from its `first_block` on, that hold their final KV once this step has written them."""

    request_id: str
    first_block: int
    block_ids: tuple[int, ...]


def take_export(scheduled: ScheduledSequence, block_size: int) -> BlockExport:
    """What a step completes of a prefill-only sequence, and its receiver still lacks: perhaps nothing. Each block is
    taken once, and counts as exported from then on."""
    seq, first = scheduled.seq, scheduled.seq.num_exported_blocks
    end = len(seq.block_table) if scheduled.is_sampled else scheduled.end // block_size
    seq.num_exported_blocks = max(first, end)
    return BlockExport(seq.request_id, first, tuple(seq.block_table[first:end]))


OnLayerWritten: TypeAlias = Callable[[int, list[BlockExport]], None]
"""(layer, exports): that layer's KV of the step is in the pool. Called on the stepping thread, which waits for it."""


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """What one step computes: decided by the scheduler, done by the executor.

    `scheduled` has decoding sequences (one new token) before ones with drafts, and these before prefilling ones.
    """

    scheduled: list[ScheduledSequence]
    exports: list[BlockExport]

    @property
    def sampled_seqs(self) -> list[Sequence]:
        """Of each token that is sampled, in order: see `ScheduledSequence.sampled_seqs`."""
        return [seq for item in self.scheduled for seq in item.sampled_seqs]
