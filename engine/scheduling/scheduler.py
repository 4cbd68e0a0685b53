"""Decides what each engine step computes, and applies its results. Integers only, no torch.

Decides over the sequences of `SequencesByState`, which moves and ends them.

One step: `schedule` picks tokens up to the budget. Decoding sequences come first, so that a long prompt never makes
them wait for more than one chunk. A step takes prompts only until it has enough tokens to keep the device busy, so that
the first prompt does not wait for the last. `begin` counts the tokens as computed; `apply` takes in the sampled tokens.
A sequence is admitted when the pool has blocks for all its tokens. When a running sequence cannot grow, the youngest
running sequence is preempted and later recomputed. Order is first come, first served: nothing overtakes the head of
`waiting`, so nothing starves.

The next step may be scheduled before the previous step's tokens are known (`engine.llm_engine` says when):

    schedule(k) begin(k) ── schedule(k+1) begin(k+1) ── apply(k) ── schedule(k+2) begin(k+2) ── apply(k+1) ── …

Step k+1 continues a sequence that step k samples from a token that only the device knows yet (`PENDING_TOKEN`). If that
token ends the sequence, step k+1's result for it is discarded. A sequence with a grammar, or with bad words of several
tokens, continues in step k+2 instead, since what may come next depends on the token itself. While its grammar is still
being compiled, a sequence is not sampled, unless there is nothing else to do: otherwise the whole step would wait for
the grammar. Nothing is preempted while steps are in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
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
    state_export,
    take_export,
)
from engine.scheduling.sequences_by_state import SequencesByState
from engine.scheduling.stats import SchedulerStats
from engine.scheduling.stop_rule import StopRule


class Scheduler:
    """Continuous batching with chunked prefill over one block pool."""

    def __init__(
        self, config: SchedulerConfig, block_manager: BlockManager, *, max_model_len: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._config = config
        self.block_manager = block_manager
        self.sequences = SequencesByState(block_manager, config.max_num_seqs)
        self.stats = SchedulerStats()
        self._stop_rule = StopRule(max_model_len=max_model_len, eos_token_ids=eos_token_ids)
        self._drafting = Drafting(config, block_manager, self._stop_rule, self.stats)
        self._num_steps_in_flight = 0
        self._missing_grammar: GrammarState | None = None
        """The first grammar that was not ready in the last `schedule`."""
        # Running sequences grow before new ones are admitted: new ones must leave this much of the pool available.
        self._num_spare_blocks = max(1, block_manager.num_blocks // 100)

    # -- questions ----------------------------------------------------------------------------------------------

    def check_integrity(self) -> list[str]:
        """Recount blocks and rows of states. Returns one sentence per error; empty if there are none."""
        return self.block_manager.check_integrity() + self.sequences.check_integrity()

    def has_room(self, newcomer: Sequence) -> bool:
        """Whether a new sequence would get its blocks at once, behind all waiting ones. Blocks that it shares with
        other sequences (such as several answers to one prompt) are not counted."""
        if not self.sequences.num_free_seqs:
            return False
        seqs = [newcomer, *self.sequences.waiting]
        num_needed = sum(map(self.block_manager.num_blocks_needed, seqs)) + self._num_spare()
        num_missing = num_needed - self.block_manager.num_available
        return num_missing <= 0 or num_missing <= sum(map(self.block_manager.num_shared_blocks, seqs))

    def _num_spare(self) -> int:
        return self._num_spare_blocks if self.sequences.num_admitted else 0

    # -- a sequence's life --------------------------------------------------------------------------------------

    def reserve(self, seq: Sequence) -> bool:
        """Reserve blocks for all tokens of `seq`, which another engine fills. Returns False if there are too few."""
        if not self.has_room(seq) or not self._allocate(seq, BlockOwner.GRANT, len(seq)):
            return False
        self.sequences.grant(seq)
        return True

    def commit(self, request_id: str, token_id: int, num_tokens: int) -> None:
        """Run a granted sequence: its blocks now hold the KV of all its tokens, and `token_id` was sampled after them.

        Raises `KeyError` if it is not granted, and `ValueError` if it does not have `num_tokens` tokens.
        """
        granted = self.sequences.granted
        if len(granted[request_id]) != num_tokens:
            raise ValueError(f"num_tokens must be {len(granted[request_id])}, is {num_tokens}")
        seq = granted.pop(request_id)
        seq.num_computed_tokens = len(seq)
        self.block_manager.hand_over(seq, BlockOwner.SEQUENCE)
        # After preemption, the state is computed from its tokens.
        seq.has_state_to_load, seq.num_state_blocks = seq.num_state_blocks > 0, 0
        self.block_manager.register_computed(seq, num_tokens)
        seq.token_ids.append(token_id)
        self.sequences.run(seq)

    def take_copied(self, copies: Iterable[BlockCopy]) -> None:
        """Take in finished copies. A sequence whose last block has been loaded continues."""
        for copy in copies:
            self.stats.count_copy(copy)
            for seq in self.block_manager.end_copy(copy):
                self.sequences.loaded(seq)

    # -- one step -----------------------------------------------------------------------------------------------

    def schedule(self, max_prefill_tokens: int | None = None) -> SchedulerOutput:
        """Decide what the next step computes: nothing if there is no work, no memory for any, or if the results of
        steps in flight must be known first.

        `max_prefill_tokens` limits the prompt tokens of a step in which sequences decode. It also applies while a
        granted sequence may start to decode at any moment: its client has the first token already, and must not wait
        for a long step.
        """
        self._missing_grammar = None
        max_tokens = self._config.max_num_batched_tokens
        seqs = self._decoding(max_tokens)
        if self._num_steps_in_flight and not self.block_manager.can_append(*seqs):
            return SchedulerOutput([], [])
        decodes = self._schedule_decodes(seqs)
        budget = prefill_budget = max_tokens - sum(each.num_new_tokens for each in decodes)
        if max_prefill_tokens is not None and (decodes or (self.sequences.granted and max_prefill_tokens)):
            prefill_budget = min(budget, max_prefill_tokens)
        prefills = self._schedule_prefills(prefill_budget)
        budget -= sum(each.num_new_tokens for each in prefills)
        decodes, draft_parts = self._drafting.add(decodes, budget)
        scheduled = decodes + prefills
        for_others = [each for each in scheduled if each.seq.is_prefill_only]
        exports = [take_export(each, self.block_manager.block_size) for each in for_others]
        return SchedulerOutput(
            scheduled,
            [export for export in exports if export.block_ids],
            [export for export in map(state_export, for_others) if export is not None],
            draft_parts,
            self._drafting.put_back() if scheduled else [],
        )

    def take_drafts(self, output: SchedulerOutput, drafts: list[list[int]]) -> SchedulerOutput:
        """Return the step with `drafts`, the draft model's guesses for each of `output.draft_parts`."""
        return replace(output, scheduled=self._drafting.add_models(output, drafts))

    def wait_for_grammar(self) -> bool:
        """Wait for the first grammar that was not ready in the last `schedule`; call it only if there is nothing else
        to do. Returns False if there is none."""
        if self._missing_grammar is not None:
            self._missing_grammar.wait_until_compiled()
        return self._missing_grammar is not None

    def _decoding(self, max_tokens: int) -> list[Sequence]:
        """Running sequences of which one more token can be sampled, the oldest first; as many as have at most
        `max_tokens` to compute."""
        seqs: list[Sequence] = []
        for seq in self.sequences.running:
            if seq.is_decoding and not self._must_wait(seq):
                max_tokens -= seq.num_uncomputed_tokens
                if max_tokens < 0:
                    break
                seqs.append(seq)
        return seqs

    def _misses_grammar(self, seq: Sequence) -> bool:
        """Whether the grammar of `seq` is still being compiled, so that this step cannot sample it."""
        if seq.grammar is None or seq.grammar.wait_briefly():
            return False
        self._missing_grammar = self._missing_grammar or seq.grammar
        return True

    def _must_wait(self, seq: Sequence) -> bool:
        """Whether `seq` must wait for its grammar, or for the token that a launched step samples. It waits for that
        token if no token can follow it, or if the host needs it for a grammar or for looking up drafts."""
        if seq.token_ids[-1] != PENDING_TOKEN:
            return self._misses_grammar(seq)
        needs_token = seq.needs_known_tokens or self._config.speculation is not None
        return needs_token or seq.is_prefill_only or self._stop_rule.num_left(seq, len(seq)) <= 0

    def _schedule_decodes(self, seqs: list[Sequence]) -> list[ScheduledSequence]:
        """Make room for one more token of each of `seqs`, oldest first. If there is no room, preempt the youngest
        running sequence, except those prefilled for another engine, whose blocks are being read. While blocks are being
        copied, preempt nothing: a sequence without room skips this step, since the copies soon free blocks, or let
        loading sequences run, which are younger and can be preempted."""
        decodes: list[ScheduledSequence] = []
        for seq in seqs:
            has_room = self.block_manager.can_append(seq)
            while not has_room and seq.status is SequenceStatus.RUNNING and not self.block_manager.is_copying:
                running = reversed(self.sequences.running)
                youngest = next(each for each in running if each is seq or not each.is_prefill_only)
                self.sequences.preempt(youngest)
                self.stats.num_preemptions += 1
                has_room = self.block_manager.can_append(seq)
            if has_room and seq.status is SequenceStatus.RUNNING:
                self.block_manager.append(seq)
                decodes.append(ScheduledSequence(seq, seq.num_uncomputed_tokens))
        return decodes

    def _schedule_prefills(self, budget: int) -> list[ScheduledSequence]:
        """Pick at most `budget` prompt tokens, one prompt after the other until there are `prefill_batch_tokens`."""
        num_wanted_tokens = min(budget, self._config.prefill_batch_tokens)
        prefills: list[ScheduledSequence] = []
        candidates = self._prefill_candidates()
        while num_wanted_tokens > 0 and (seq := next(candidates, None)) is not None:
            num_new_tokens = min(seq.num_uncomputed_tokens, self._config.prefill_chunk_tokens, budget)
            if num_new_tokens == seq.num_uncomputed_tokens and self._misses_grammar(seq):
                num_new_tokens -= 1  # computing the last token would sample, and make the step wait for the grammar
            if not num_new_tokens:
                continue
            scheduled = self._take_snapshot(seq, num_new_tokens) or ScheduledSequence(seq, num_new_tokens)
            prefills.append(scheduled)
            budget -= scheduled.num_new_tokens
            num_wanted_tokens -= scheduled.num_new_tokens
        return prefills

    def _take_snapshot(self, seq: Sequence, num_new_tokens: int) -> ScheduledSequence | None:
        """End the sequence's part of the step where a snapshot of its state is due, if that is within the next
        `num_new_tokens` tokens, nobody else takes it, and there is room beside what running sequences may need next."""
        first = seq.num_computed_tokens
        num_tokens = next((point - first for point in seq.snapshot_points if point > first), num_new_tokens + 1)
        if num_tokens > num_new_tokens:
            return None
        num_spare_blocks = self._num_spare() + len(self.sequences.running)
        snapshot_ids = self.block_manager.begin_snapshot(seq, first + num_tokens, num_spare_blocks)
        return ScheduledSequence(seq, num_tokens, snapshot_ids=snapshot_ids) if snapshot_ids else None

    def _prefill_candidates(self) -> Iterator[Sequence]:
        """Yield running sequences that still prefill, then waiting ones, admitting each as it is yielded."""
        sequences = self.sequences
        yield from [seq for seq in sequences.running if seq.is_prefilling]
        while sequences.waiting and sequences.num_admitted + len(sequences.granted) < self._config.max_num_seqs:
            seq = sequences.waiting[0]
            if not self._allocate(seq, BlockOwner.SEQUENCE, seq.num_reusable_tokens):
                return
            sequences.waiting.popleft()
            sequences.run(seq)
            if seq.status is SequenceStatus.RUNNING:
                yield seq

    def _allocate(self, seq: Sequence, owner: BlockOwner, num_reusable_tokens: int) -> bool:
        """Allocate blocks for all tokens of a new sequence. Returns False if there are too few."""
        is_allocated = self.block_manager.allocate(
            seq, owner, num_reusable_tokens=num_reusable_tokens, num_spare_blocks=self._num_spare()
        )
        if is_allocated and not seq.num_preemptions:  # a preempted sequence finding its own blocks is no cache hit
            seq.num_cached_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)
            self.stats.count_prefix(seq, self.block_manager.block_size)
        return is_allocated

    def begin(self, output: SchedulerOutput) -> None:
        """`output` has been launched: count its tokens as computed, and append drafts and a pending token to each
        sequence that samples."""
        self._num_steps_in_flight += 1
        self._drafting.begin(output)
        for scheduled in output.scheduled:
            seq = scheduled.seq
            seq.num_steps_in_flight += 1
            seq.num_computed_tokens = scheduled.end
            seq.num_replayed = 0
            seq.has_state_to_load = False
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
        """Apply the results of the oldest launched step. `sampled` has `num_sampled` tokens per scheduled sequence.

        `logprobs`: by `seq_id`, of the sequences that ask for them; passed on unchanged. `prompt_logprobs`: likewise,
        of the tokens after `ScheduledSequence.prompt_positions`; passed on with the first token.
        """
        self._num_steps_in_flight -= 1
        outputs = []
        for scheduled, sampled_ids in zip(output.scheduled, sampled, strict=True):
            seq = scheduled.seq
            seq.num_steps_in_flight -= 1
            if seq.status is not SequenceStatus.RUNNING:
                self.sequences.free_ended(seq)  # it ended or was held while the step was computed
                continue
            if seq.loaded_state_ids:
                self.block_manager.drop_loaded(seq)  # the step has loaded them
            if seq.prompt_logprobs is not None:
                seq.prompt_logprobs += prompt_logprobs.get(seq.seq_id, ())
            num_wrong = self._drafting.drop_wrong(scheduled, sampled_ids) if scheduled.draft_token_ids else 0
            end, token_ids = scheduled.end - num_wrong, sampled_ids[: len(sampled_ids) - num_wrong]
            self.block_manager.register_computed(seq, min(end, seq.num_computed_tokens))
            if scheduled.snapshot_ids:
                self.block_manager.keep_snapshot(seq, end)
            if token_ids:
                outputs.append(self._put_tokens(seq, end, token_ids, logprobs.get(seq.seq_id)))
        return outputs

    def _put_tokens(
        self, seq: Sequence, position: int, token_ids: list[int], logprobs: list[TokenLogprobs] | None
    ) -> RequestOutput:
        """Apply the tokens sampled for `seq`. The last one replaces the pending token at `position`; those before it
        are accepted drafts, which are in the sequence already."""
        offset = position + 1 - len(token_ids) - seq.num_prompt_tokens
        # With a sliding window, a NaN in the prompt may spoil the prompt's logprobs without reaching the sampled token.
        if token_ids == [INVALID_TOKEN] or not has_numbers(seq.prompt_logprobs or ()):
            return self._fail(seq, offset)
        seq.token_ids[position] = token_ids[-1]
        prompt_logprobs, seq.prompt_logprobs = seq.prompt_logprobs, None
        finish_reason = self._stop_rule.finish_reason(seq, position + 1)
        if seq.is_prefill_only or finish_reason is not None:
            self.sequences.stop(seq)
        return seq.output(
            offset,
            token_ids,
            finish_reason,
            logprobs=None if logprobs is None else logprobs[: len(token_ids)],
            prompt_logprobs=prompt_logprobs,
        )

    def _fail(self, seq: Sequence, offset: int) -> RequestOutput:
        grammar_error = "" if seq.grammar is None else seq.grammar.error
        if not grammar_error:  # a cached block may hold NaNs, which would fail the next request with that prefix, too
            self.block_manager.forget(seq)
        self.sequences.stop(seq)
        return seq.output(offset, [], FinishReason.ERROR, grammar_error=grammar_error)
