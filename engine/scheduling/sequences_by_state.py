"""Every sequence of an engine, grouped by state (`engine.scheduling.sequence` draws the states).

    waiting ──run──> running ──stop──> gone, or held (prefill-only)          granted ──run──> running
       ^──preempt───────┘                   └──abort──> gone                 abort: from any state ──> gone
    waiting or granted, with part of the prefix in host memory: ──run──> loading ──loaded──> running

Moves sequences from state to state, and frees what they own at the one way out. The scheduler decides which ones. A
sequence's blocks are freed once no launched step and no load can write to them. Integers only, no torch.
"""

from __future__ import annotations

from collections import deque
from itertools import chain

from engine.scheduling.block_ledger import BlockOwner
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.sequence import Sequence, SequenceStatus
from engine.scheduling.state_slots import StateSlots


class SequencesByState:
    """Owns the sequences. The block manager owns their blocks."""

    def __init__(self, block_manager: BlockManager, max_num_seqs: int) -> None:
        self._block_manager = block_manager
        self._max_num_seqs = max_num_seqs
        self._slots = StateSlots(max_num_seqs if block_manager.num_state_blocks else 0)
        self._by_request_id: dict[str, Sequence] = {}
        """All sequences of the following."""
        self.waiting: deque[Sequence] = deque()
        self.loading: dict[str, Sequence] = {}
        """By `request_id`, as in `granted` and `held`."""
        self.running: list[Sequence] = []
        """The oldest first."""
        self.granted: dict[str, Sequence] = {}
        self.held: dict[str, Sequence] = {}

    # -- questions ----------------------------------------------------------------------------------------------

    def __contains__(self, request_id: object) -> bool:
        """Whether the request is in the engine, in any state, and has not ended."""
        return request_id in self._by_request_id

    @property
    def lora_ids(self) -> set[int]:
        """The adapters of all requests in the engine; contains 0 if some use no adapter."""
        return {seq.lora_id for seq in self._by_request_id.values()}

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.loading or self.running)

    @property
    def num_admitted(self) -> int:
        return len(self.loading) + len(self.running)

    @property
    def num_free_seqs(self) -> int:
        """How many more sequences `max_num_seqs` allows, regardless of blocks."""
        return max(0, self._max_num_seqs - self.num_admitted - len(self.waiting) - len(self.granted))

    @property
    def num_waiting_tokens(self) -> int:
        """How many tokens are still to be prefilled."""
        return sum(map(len, self.waiting)) + sum(seq.num_uncomputed_tokens for seq in self._prefilling())

    @property
    def num_waiting_prompts(self) -> int:
        """How many sequences wait for their first token, or, after preemption, for their next one."""
        return len(self.waiting) + len(self._prefilling())

    def _prefilling(self) -> list[Sequence]:
        """Admitted sequences that have more to compute than their last sampled token."""
        return [seq for seq in chain(self.loading.values(), self.running) if seq.is_prefilling]

    def check_integrity(self) -> list[str]:
        """Recount the rows of states. Returns one sentence per error; empty if there are none."""
        return self._slots.check_integrity(self.running)

    # -- ways in ------------------------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Queue a sequence behind all waiting ones. Its `request_id` must not be in use."""
        assert seq.status is SequenceStatus.WAITING
        self._by_request_id[seq.request_id] = seq
        self.waiting.append(seq)

    def grant(self, seq: Sequence) -> None:
        """Take in a sequence whose blocks another engine fills."""
        seq.status = SequenceStatus.GRANTED
        self._by_request_id[seq.request_id] = self.granted[seq.request_id] = seq

    # -- from state to state ------------------------------------------------------------------------------------

    def run(self, seq: Sequence) -> None:
        """Let `seq`, which is in no collection now, run from the next step on, or once all of its prefix is loaded."""
        if seq.num_loading_blocks:
            seq.status = SequenceStatus.LOADING
            self.loading[seq.request_id] = seq
        else:
            seq.status = SequenceStatus.RUNNING
            self.running.append(seq)
            self._slots.take(seq)

    def loaded(self, seq: Sequence) -> None:
        """Take in that the last block of `seq` has been loaded: let it run, or free its blocks if it has ended."""
        if seq.status is SequenceStatus.LOADING:
            self._remove(seq)
            self.run(seq)
        else:
            self.free_ended(seq)

    def preempt(self, seq: Sequence) -> None:
        """Free the blocks of a running sequence, which waits in front to be computed again."""
        assert not seq.num_steps_in_flight
        self._remove(seq)
        self._block_manager.free(seq)
        seq.num_computed_tokens = seq.num_replayed = seq.num_drafted_tokens = seq.num_drafted_blocks = 0
        seq.num_preemptions += 1
        seq.status = SequenceStatus.WAITING
        self.waiting.appendleft(seq)

    def hold(self, request_id: str) -> None:
        """Stop a prefill-only sequence in any state and keep its blocks until `abort`. Safe to repeat."""
        seq = self._by_request_id.get(request_id)
        if seq is not None:
            self._remove(seq)
            self._hold(seq)

    # -- ways out -----------------------------------------------------------------------------------------------

    def abort(self, request_id: str) -> bool:
        """End a request in any state and free its blocks. Returns False if there is no such request."""
        seq = self._by_request_id.get(request_id)
        if seq is not None:
            self._remove(seq)
            self._end(seq)
        return seq is not None

    def stop(self, seq: Sequence) -> None:
        """Stop computing `seq`: hold it if it is prefill-only, since a transfer may read its blocks, else end it."""
        self._remove(seq)
        if seq.is_prefill_only:
            self._hold(seq)
        else:
            self._end(seq)

    def free_ended(self, seq: Sequence) -> None:
        """Free the blocks of `seq` if it has ended and nothing in flight writes to them any more."""
        is_written = seq.num_steps_in_flight or seq.num_loading_blocks
        if seq.status is SequenceStatus.FINISHED and not is_written and seq.block_table:
            self._block_manager.free(seq)

    def _remove(self, seq: Sequence) -> None:
        """Remove `seq` from the collection that its status names."""
        if seq.status is SequenceStatus.WAITING:
            self.waiting.remove(seq)
        elif seq.status is SequenceStatus.RUNNING:
            self.running.remove(seq)
            self._slots.give_back(seq)
        elif seq.status is SequenceStatus.LOADING:
            del self.loading[seq.request_id]
        else:
            del (self.held if seq.status is SequenceStatus.HELD else self.granted)[seq.request_id]

    def _hold(self, seq: Sequence) -> None:
        if seq.block_table:
            self._block_manager.hand_over(seq, BlockOwner.HELD)
        seq.status = SequenceStatus.HELD
        self.held[seq.request_id] = seq

    def _end(self, seq: Sequence) -> None:
        """End a sequence: the one way out."""
        seq.status = SequenceStatus.FINISHED
        del self._by_request_id[seq.request_id]
        if seq.grammar is not None:
            seq.grammar.close()
        self.free_ended(seq)
