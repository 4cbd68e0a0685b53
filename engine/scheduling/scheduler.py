"""Decides what each engine step computes, and takes in its results. Integers only, no torch.

Owns every sequence of the engine, by its state (see `engine.scheduling.sequence`):

    waiting ──admit──> running ──finish──> gone
       ^──preempt────────┘  └─first token of a prefill-only sequence─> held ──abort──> gone
    granted ──commit──> running
    admitted or committed, and a part of its prefix lies in host memory: ──> loading ──take_copied──> running

One step: `schedule` picks tokens up to the budget. Decoding sequences come first, so that a long prompt never makes the
others wait for more than one chunk. Prompts are taken one after the other once they are enough to keep the device busy,
so that the first does not wait for the last. `begin` counts the tokens as computed; `apply` takes in what was sampled.
A sequence is admitted when the pool has blocks for all its tokens; when a running one cannot grow, the youngest running
sequence is preempted and later recomputed. First come, first served: nothing overtakes the head of `waiting`, so
nothing starves.

The next step may be scheduled before the previous step's tokens are known (`engine.llm_engine` says when):

    schedule(k) begin(k) ── schedule(k+1) begin(k+1) ── apply(k) ── schedule(k+2) begin(k+2) ── apply(k+1) ── …

A sequence that step k samples continues in step k+1 from a token that only the device knows yet (`PENDING_TOKEN`). If
it turns out to be the last one, what k+1 computes for it is thrown away. A sequence with a grammar, or with bad words
of several tokens, continues in step k+2 instead, since what may come next depends on the token itself. While its
grammar is still being compiled it is not sampled at all, unless there is nothing else to do: the step, and all others
in it, would wait for the grammar. When a sequence ends, in whatever way, its blocks are freed once no launched step,
and no load, can write to them any more; and nothing is preempted before the launched steps are done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from types import MappingProxyType

from engine.config import SchedulerConfig
from engine.outputs import FinishReason, RequestOutput, TokenLogprobs, has_numbers
from engine.scheduling.block_ledger import BlockOwner
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.drafting import Drafting
from engine.scheduling.grammar import GrammarState
from engine.scheduling.offloading import BlockCopy
from engine.scheduling.sequence import (
    INVALID_TOKEN,
    PENDING_TOKEN,
    ScheduledSequence,
    SchedulerOutput,
    Sequence,
    SequenceStatus,
    take_export,
)
from engine.scheduling.stats import SchedulerStats
from engine.scheduling.stop_rule import StopRule


class Scheduler:
    """Continuous batching with chunked prefill over one block pool."""

    def __init__(
        self, config: SchedulerConfig, block_manager: BlockManager, *, max_model_len: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._config = config
        self.block_manager = block_manager
        self.waiting: deque[Sequence] = deque()
        self.loading: dict[str, Sequence] = {}
        self.running: list[Sequence] = []
        self.granted: dict[str, Sequence] = {}
        self.held: dict[str, Sequence] = {}
        self._seqs: dict[str, Sequence] = {}
        """All of these, by `request_id`."""
        self.stats = SchedulerStats()
        self._stop_rule = StopRule(max_model_len=max_model_len, eos_token_ids=eos_token_ids)
        self._drafting = Drafting(config, block_manager, self._stop_rule, self.stats)
        self._num_steps_in_flight = 0
        self._missing_grammar: GrammarState | None = None
        """The first for which the last `schedule` left a token out."""
        # Growth of what runs comes before admission: this much of the pool is not given to newcomers.
        self._num_spare_blocks = max(1, block_manager.num_blocks // 100)

    # -- questions ----------------------------------------------------------------------------------------------

    @property
    def lora_ids(self) -> set[int]:
        """Of all requests that are here; 0 among them where some ask for none."""
        return {seq.lora_id for seq in self._seqs.values()}

    def __contains__(self, request_id: object) -> bool:
        """It has come and has not ended, wherever it is."""
        return request_id in self._seqs

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.loading or self.running)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that are still to be prefilled."""
        return sum(map(len, self.waiting)) + sum(seq.num_uncomputed_tokens for seq in self._prefilling())

    @property
    def num_waiting_prompts(self) -> int:
        """Sequences that wait for their first token, or, preempted, for the next."""
        return len(self.waiting) + len(self._prefilling())

    @property
    def num_free_seqs(self) -> int:
        """How many more sequences there may be, whatever their blocks."""
        return max(0, self._config.max_num_seqs - self._num_admitted - len(self.waiting) - len(self.granted))

    def has_room(self, newcomer: Sequence) -> bool:
        """Whether a sequence would get its blocks at once, after all that wait already. Blocks that it shares with
        other running sequences (several answers to a prompt) are not counted."""
        if not self.num_free_seqs:
            return False
        seqs = [newcomer, *self.waiting]
        num_needed = sum(self.block_manager.num_blocks_for(len(seq)) for seq in seqs) + self._num_spare()
        num_missing = num_needed - self.block_manager.num_available
        return num_missing <= 0 or num_missing <= sum(map(self.block_manager.num_shared_blocks, seqs))

    @property
    def _num_admitted(self) -> int:
        return len(self.loading) + len(self.running)

    def _prefilling(self) -> list[Sequence]:
        """Those that are admitted, and have more to compute than the token sampled last."""
        return [seq for seq in chain(self.loading.values(), self.running) if seq.num_uncomputed_tokens > 1]

    def _num_spare(self) -> int:
        return self._num_spare_blocks if self._num_admitted else 0

    # -- a sequence's life --------------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Queue a sequence behind all that wait. Its `request_id` must not be in use here."""
        assert seq.status is SequenceStatus.WAITING
        self._seqs[seq.request_id] = seq
        self.waiting.append(seq)

    def reserve(self, seq: Sequence) -> bool:
        """Grant blocks for all tokens of `seq`, to be filled from outside. False if there are too few."""
        if not self.has_room(seq) or not self._allocate(seq, BlockOwner.GRANT, len(seq)):
            return False
        seq.status = SequenceStatus.GRANTED
        self._seqs[seq.request_id] = self.granted[seq.request_id] = seq
        return True

    def commit(self, request_id: str, token_id: int, num_tokens: int) -> None:
        """The blocks of a granted sequence now hold the KV of all its tokens; `token_id` was sampled after them.

        Raises `ValueError` if these are not `num_tokens`.
        """
        if len(self.granted[request_id]) != num_tokens:
            raise ValueError(f"num_tokens must be {len(self.granted[request_id])}, is {num_tokens}")
        seq = self.granted.pop(request_id)
        seq.num_computed_tokens = len(seq)
        self.block_manager.hand_over(seq, BlockOwner.SEQUENCE)
        self.block_manager.register_computed(seq, num_tokens)
        seq.token_ids.append(token_id)
        self._run(seq)

    def hold(self, request_id: str) -> None:
        """Stop a prefill-only sequence wherever it is, keeping its blocks until `abort`. Repeating it is harmless."""
        seq = self._seqs.get(request_id)
        if seq is not None:
            self._remove(seq)
            self._hold(seq)

    def abort(self, request_id: str) -> bool:
        """End a request in any state and free its blocks. Returns False if there is no such request."""
        seq = self._seqs.get(request_id)
        if seq is not None:
            self._remove(seq)
            self._end(seq)
        return seq is not None

    def take_copied(self, copies: Iterable[BlockCopy]) -> None:
        """These blocks have been copied. A sequence that waited for the last of its blocks continues."""
        for copy in copies:
            self.stats.count_copy(copy)
            for seq in self.block_manager.end_copy(copy):
                if seq.status is SequenceStatus.LOADING:
                    self._remove(seq)
                    self._run(seq)
                else:
                    self._free_ended(seq)

    # -- one step -----------------------------------------------------------------------------------------------

    def schedule(self, max_prefill_tokens: int | None = None) -> SchedulerOutput:
        """Decide what the next step computes. That is nothing if there is no work, or no memory for any, or while steps
        are in flight whose outcome has to be known first.

        `max_prefill_tokens` bounds the prompts' part of a step in which something decodes. It also holds where a
        granted sequence may begin to at any moment: its client has the first token, and must not wait for a long step.
        """
        self._missing_grammar = None
        max_tokens = self._config.max_num_batched_tokens
        seqs = [seq for seq in self.running if seq.num_uncomputed_tokens == 1 and not self._must_wait(seq)][:max_tokens]
        if self._num_steps_in_flight and not self.block_manager.can_append(*seqs):
            return SchedulerOutput([], [])
        decodes = self._schedule_decodes(seqs)
        budget = prefill_budget = max_tokens - len(decodes)
        if max_prefill_tokens is not None and (decodes or (self.granted and max_prefill_tokens)):
            prefill_budget = min(budget, max_prefill_tokens)
        prefills = self._schedule_prefills(prefill_budget)
        budget -= sum(each.num_new_tokens for each in prefills)
        scheduled = self._drafting.add(decodes, budget) + prefills
        exports = [take_export(each, self.block_manager.block_size) for each in scheduled if each.seq.is_prefill_only]
        return SchedulerOutput(scheduled, [export for export in exports if export.block_ids])

    def wait_for_grammar(self) -> bool:
        """For when there is nothing else to do: wait for the first grammar that `schedule` just missed. Returns False
        if there is none."""
        if self._missing_grammar is not None:
            self._missing_grammar.wait_until_compiled()
        return self._missing_grammar is not None

    def _misses_grammar(self, seq: Sequence) -> bool:
        """Whether what may come next in `seq` is still being compiled, and cannot be sampled in this step."""
        if seq.grammar is None or seq.grammar.wait_briefly():
            return False
        self._missing_grammar = self._missing_grammar or seq.grammar
        return True

    def _must_wait(self, seq: Sequence) -> bool:
        """Whether `seq` must wait for its grammar, or for the token that a launched step samples. Either nothing comes
        after that, whatever it is, or the host has to know it first, to ask a grammar or to look drafts up."""
        if seq.token_ids[-1] != PENDING_TOKEN:
            return self._misses_grammar(seq)
        needs_token = seq.needs_known_tokens or self._config.speculation is not None
        return needs_token or seq.is_prefill_only or self._stop_rule.num_left(seq, len(seq)) <= 0

    def _schedule_decodes(self, seqs: list[Sequence]) -> list[ScheduledSequence]:
        """Make room for one more token of each of these, oldest first. Where there is none, the youngest running
        sequence is preempted, but none that is prefilled for another engine: its blocks are being read. While blocks
        are being copied nothing is: who has no room sits this step out, and soon there is some, or somebody younger."""
        decodes: list[ScheduledSequence] = []
        for seq in seqs:
            has_room = self.block_manager.can_append(seq)
            while not has_room and seq.status is SequenceStatus.RUNNING and not self.block_manager.is_copying:
                youngest = next(each for each in reversed(self.running) if each is seq or not each.is_prefill_only)
                self._preempt(youngest)
                has_room = self.block_manager.can_append(seq)
            if has_room and seq.status is SequenceStatus.RUNNING:
                self.block_manager.append(seq)
                decodes.append(ScheduledSequence(seq, 1))
        return decodes

    def _schedule_prefills(self, budget: int) -> list[ScheduledSequence]:
        """At most so many tokens of prompts, one after the other until `prefill_batch_tokens` are together."""
        num_wanted_tokens = min(budget, self._config.prefill_batch_tokens)
        prefills: list[ScheduledSequence] = []
        candidates = self._prefill_candidates()
        while num_wanted_tokens > 0 and (seq := next(candidates, None)) is not None:
            num_new_tokens = min(seq.num_uncomputed_tokens, self._config.prefill_chunk_tokens, budget)
            if num_new_tokens == seq.num_uncomputed_tokens and self._misses_grammar(seq):
                num_new_tokens -= 1  # what is sampled behind the last one may have to wait, and all of the step with it
            if not num_new_tokens:
                continue
            prefills.append(ScheduledSequence(seq, num_new_tokens))
            budget -= num_new_tokens
            num_wanted_tokens -= num_new_tokens
        return prefills

    def _prefill_candidates(self) -> Iterator[Sequence]:
        """Running sequences that still prefill, then newly admitted ones: each is admitted as it is taken."""
        yield from [seq for seq in self.running if seq.num_uncomputed_tokens > 1]
        while self.waiting and self._num_admitted + len(self.granted) < self._config.max_num_seqs:
            seq = self.waiting[0]
            if not self._allocate(seq, BlockOwner.SEQUENCE, seq.num_reusable_tokens):
                return
            self.waiting.popleft()
            self._run(seq)
            if seq.status is SequenceStatus.RUNNING:
                yield seq

    def _allocate(self, seq: Sequence, owner: BlockOwner, num_reusable_tokens: int) -> bool:
        """Blocks for all that a newcomer has. False if there are too few."""
        is_allocated = self.block_manager.allocate(
            seq, owner, num_reusable_tokens=num_reusable_tokens, num_spare_blocks=self._num_spare()
        )
        if is_allocated and not seq.num_preemptions:  # a preempted one finds its own blocks: that is no hit
            seq.num_cached_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)
            self.stats.count_prefix(seq, self.block_manager.block_size)
        return is_allocated

    def _run(self, seq: Sequence) -> None:
        """From the next step on, or when all of its prefix is there."""
        if seq.num_loading_blocks:
            seq.status = SequenceStatus.LOADING
            self.loading[seq.request_id] = seq
        else:
            seq.status = SequenceStatus.RUNNING
            self.running.append(seq)

    def _preempt(self, seq: Sequence) -> None:
        assert not seq.num_steps_in_flight
        self.running.remove(seq)
        self.block_manager.free(seq)
        seq.num_computed_tokens = 0
        seq.num_preemptions += 1
        seq.status = SequenceStatus.WAITING
        self.waiting.appendleft(seq)
        self.stats.num_preemptions += 1

    def begin(self, output: SchedulerOutput) -> None:
        """`output` is launched: its tokens count as computed, and each sequence that samples has one token more."""
        self._num_steps_in_flight += 1
        for scheduled in output.scheduled:
            seq = scheduled.seq
            seq.num_steps_in_flight += 1
            seq.num_computed_tokens = scheduled.end
            if scheduled.is_sampled:
                seq.token_ids.extend(scheduled.draft_token_ids)
                seq.token_ids.append(PENDING_TOKEN)

    def apply(
        self,
        output: SchedulerOutput,
        sampled: list[list[int]],
        logprobs: Mapping[int, list[TokenLogprobs]] = MappingProxyType({}),
        prompt_logprobs: Mapping[int, list[TokenLogprobs]] = MappingProxyType({}),
    ) -> list[RequestOutput]:
        """Take in what the oldest launched step computed: so many tokens per scheduled sequence as it samples.

        `logprobs`: of sequences that ask, by `seq_id`; passed on as they are. `prompt_logprobs`: likewise, of tokens
        after `ScheduledSequence.prompt_positions`; passed on with the first token.
        """
        self._num_steps_in_flight -= 1
        outputs = []
        for scheduled, sampled_ids in zip(output.scheduled, sampled, strict=True):
            seq = scheduled.seq
            seq.num_steps_in_flight -= 1
            if seq.status is not SequenceStatus.RUNNING:
                self._free_ended(seq)  # it ended, or was held, while this was computed
                continue
            if seq.prompt_logprobs is not None:
                seq.prompt_logprobs += prompt_logprobs.get(seq.seq_id, ())
            num_wrong = self._drafting.drop_wrong(scheduled, sampled_ids) if scheduled.draft_token_ids else 0
            end, token_ids = scheduled.end - num_wrong, sampled_ids[: len(sampled_ids) - num_wrong]
            self.block_manager.register_computed(seq, end)
            if token_ids:
                outputs.append(self._put_tokens(seq, end, token_ids, logprobs.get(seq.seq_id)))
        return outputs

    def _put_tokens(
        self, seq: Sequence, position: int, token_ids: list[int], logprobs: list[TokenLogprobs] | None
    ) -> RequestOutput:
        """Take in what was sampled for `seq`: the last token in the place of the pending one, at `position`. Those
        before it stand there already, as drafts that were right."""
        offset = position + 1 - len(token_ids) - seq.num_prompt_tokens
        # What a sliding window hides from the answer may have spoilt what is told of the prompt.
        if token_ids == [INVALID_TOKEN] or not has_numbers(seq.prompt_logprobs or ()):
            return self._fail(seq, offset)
        seq.token_ids[position] = token_ids[-1]
        prompt_logprobs, seq.prompt_logprobs = seq.prompt_logprobs, None
        finish_reason = self._stop_rule.finish_reason(seq, position + 1)
        if seq.is_prefill_only or finish_reason is not None:
            self._stop(seq)
        return seq.output(
            offset,
            token_ids,
            finish_reason,
            logprobs=None if logprobs is None else logprobs[: len(token_ids)],
            prompt_logprobs=prompt_logprobs,
        )

    def _fail(self, seq: Sequence, offset: int) -> RequestOutput:
        grammar_error = "" if seq.grammar is None else seq.grammar.error
        if not grammar_error:  # it may be a block that holds no numbers: the next one with that prefix would fail, too
            self.block_manager.forget(seq)
        self._stop(seq)
        return seq.output(offset, [], FinishReason.ERROR, grammar_error=grammar_error)

    # -- ends ---------------------------------------------------------------------------------------------------

    def _remove(self, seq: Sequence) -> None:
        """From where its status says that it is."""
        if seq.status is SequenceStatus.WAITING:
            self.waiting.remove(seq)
        elif seq.status is SequenceStatus.RUNNING:
            self.running.remove(seq)
        elif seq.status is SequenceStatus.LOADING:
            del self.loading[seq.request_id]
        else:
            del (self.held if seq.status is SequenceStatus.HELD else self.granted)[seq.request_id]

    def _stop(self, seq: Sequence) -> None:
        """Nothing more is computed for it. Of a prefill-only one a transfer may read what was computed before."""
        self._remove(seq)
        if seq.is_prefill_only:
            self._hold(seq)
        else:
            self._end(seq)

    def _hold(self, seq: Sequence) -> None:
        if seq.block_table:
            self.block_manager.hand_over(seq, BlockOwner.HELD)
        seq.status = SequenceStatus.HELD
        self.held[seq.request_id] = seq

    def _end(self, seq: Sequence) -> None:
        """The one way out: every sequence that ends frees its blocks here, or when nothing in flight writes to them."""
        seq.status = SequenceStatus.FINISHED
        del self._seqs[seq.request_id]
        if seq.grammar is not None:
            seq.grammar.close()
        self._free_ended(seq)

    def _free_ended(self, seq: Sequence) -> None:
        is_written = seq.num_steps_in_flight or seq.num_loading_blocks
        if seq.status is SequenceStatus.FINISHED and not is_written and seq.block_table:
            self.block_manager.free(seq)
