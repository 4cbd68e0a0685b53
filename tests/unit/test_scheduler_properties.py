"""Block manager and scheduler in random histories: the books balance, no block is used twice, nothing starves.

A model plays the executor: it remembers which (sequence, position) each slot was last written for, and checks that what
a sequence would read was written for the very same tokens. This checks sharing, preemption, prefix reuse and granted
blocks that are filled from outside by their content, not only by count.

Up to two steps are in flight, during which anything may happen to their sequences. The model writes as late as a device
may, just before the tokens are known. So if a block is given away too early, the model finds another sequence's content
in it.

Copies to host memory and back end in any order, perhaps late. The model lets them read as late as they end, and fills
what they write to with rubbish until then.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import count

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from engine.config import SchedulerConfig
from engine.sampling_params import SamplingParams
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.offloading import BlockCopy
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import INVALID_TOKEN, PENDING_TOKEN, SchedulerOutput, Sequence, SequenceStatus
from engine.scheduling.speculation import SpeculativeConfig

EOS = 1
MAX_MODEL_LEN = 40

TEXTS = [list(range(2, 26)), [2, 3] * 12, list(range(26, 50)), [4, 5, 6] * 8]
# Prefixes of few texts, so that sequences often share them; sometimes with an ending of their own.
prompts = st.builds(
    lambda text, length, end: [*text[:length], *end],
    st.sampled_from(TEXTS[:2]),
    st.integers(1, 24),
    st.lists(st.integers(2, 3), max_size=3),
)


class Pool:
    """For each slot of each block, what it was written for: the salt, and the tokens up to and including its own."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots: list[list[tuple[str | int, ...] | None]] = [[None] * block_size for _ in range(num_blocks)]

    def take(self, block_id: int, content: list[tuple[str | int, ...] | None]) -> None:
        self.slots[block_id] = list(content)

    def write(self, block_table: list[int], seq: Sequence, start: int, end: int) -> None:
        # If a sequence ended with the previous token, what is computed for it is useless, but it is written.
        token_ids = [*seq.token_ids] + [PENDING_TOKEN] * (end - len(seq))
        for position in range(start, end):
            block = block_table[position // self.block_size]
            self.slots[block][position % self.block_size] = (seq.cache_salt, *token_ids[: position + 1])

    def check(self, block_table: list[int], seq: Sequence, end: int) -> None:
        for position in range(end):
            block = block_table[position // self.block_size]
            content = self.slots[block][position % self.block_size]
            expected = (seq.cache_salt, *seq.token_ids[: position + 1])
            assert content == expected, f"foreign KV is read at {position} of {seq.token_ids}"

    @staticmethod
    def state_of(seq: Sequence, end: int) -> tuple[str | int, ...]:
        return ("state", seq.cache_salt, *seq.token_ids[:end])

    def write_state(self, block_ids: list[int], state: tuple[str | int, ...]) -> None:
        for number, block_id in enumerate(block_ids):
            self.slots[block_id] = [(number, *state)] * self.block_size

    def check_state(self, block_ids: list[int], seq: Sequence, end: int) -> None:
        for number, block_id in enumerate(block_ids):
            assert self.slots[block_id][0] == (number, *self.state_of(seq, end)), f"a foreign state in block {block_id}"


@dataclass
class Launched:
    """A launched step, with the block tables and rows of that time."""

    output: SchedulerOutput
    tables: list[list[int]]
    rows: list[int]
    """Each sequence's row of recurrent states."""
    loads: list[list[int]]
    """For each sequence, the blocks that its row is loaded from first."""


class SchedulerMachine(RuleBasedStateMachine):
    requests = Bundle("requests")

    @initialize(
        num_blocks=st.integers(12, 30),
        block_size=st.sampled_from([1, 2, 4]),
        budget=st.integers(8, 20),
        caching=st.booleans(),
        num_drafts=st.integers(0, 6),
    )
    def make(self, num_blocks: int, block_size: int, budget: int, caching: bool, num_drafts: int) -> None:
        self.begin(num_blocks, block_size, budget, caching, num_drafts, num_host_blocks=0)

    def begin(
        self,
        num_blocks: int,
        block_size: int,
        budget: int,
        caching: bool,
        num_drafts: int,
        num_host_blocks: int,
        num_state_blocks: int = 0,
        min_snapshot_tokens: int = 0,
    ) -> None:
        # One sequence of full length must fit, as the engine's configuration demands.
        num_blocks = max(num_blocks, -(-MAX_MODEL_LEN // block_size) + 1 + num_state_blocks)
        self.manager = BlockManager(
            num_blocks=num_blocks,
            block_size=block_size,
            prefix_key=b"k" * 32,
            enable_prefix_caching=caching,
            num_host_blocks=num_host_blocks,
            num_state_blocks=num_state_blocks,
            min_snapshot_tokens=min_snapshot_tokens,
        )
        speculation = SpeculativeConfig(num_speculative_tokens=max(1, num_drafts), prompt_lookup_min=1)
        config = SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=budget,
            prefill_chunk_tokens=max(1, budget // 2),
            prefill_batch_tokens=64,
            max_itl_ms=0,
            stream_interval=1,
            async_scheduling=False,
            speculation=speculation if num_drafts else None,
            draft_batch_tokens=12,
        )
        self.scheduler = Scheduler(config, self.manager, max_model_len=MAX_MODEL_LEN, eos_token_ids=frozenset({EOS}))
        self.pool = Pool(num_blocks, block_size)
        self.host = Pool(num_host_blocks, block_size)
        self.copies: list[BlockCopy] = []
        self.findable: set[bytes] = set()
        """The cached hashes, according to the cache events."""
        self.in_flight: deque[Launched] = deque()
        self.ids = count()
        self.seqs: dict[str, Sequence] = {}

    def new_sequence(self, prompt: list[int], max_tokens: int, **extra: object) -> Sequence:
        number = next(self.ids)
        seq = Sequence(
            seq_id=number,
            request_id=f"r{number}",
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            sampling_params=SamplingParams(max_tokens=max_tokens),
            **extra,  # type: ignore[arg-type]
        )
        self.seqs[seq.request_id] = seq
        seq.num_state_blocks = self.manager.num_state_blocks if seq.is_prefill_only else 0
        return seq

    @rule(target=requests, prompt=prompts, max_tokens=st.integers(1, 12))
    def add(self, prompt: list[int], max_tokens: int) -> str:
        seq = self.new_sequence(prompt, max_tokens)
        self.scheduler.sequences.add(seq)
        return seq.request_id

    @rule(target=requests, prompt=prompts)
    def add_prefill_only(self, prompt: list[int]) -> str:
        seq = self.new_sequence(prompt, 5, is_prefill_only=True)
        self.scheduler.sequences.add(seq)
        return seq.request_id

    @rule(target=requests, prompt=prompts)
    def reserve(self, prompt: list[int]) -> object:
        return self.reserve_of(self.new_sequence(prompt, 5))

    def reserve_of(self, seq: Sequence) -> object:
        seq.num_state_blocks = self.manager.num_state_blocks
        if not self.scheduler.reserve(seq):
            return multiple()
        if not seq.num_loading_blocks:
            self.pool.check(seq.block_table, seq, seq.num_computed_tokens)  # the part it need not receive
        return seq.request_id

    @rule(request_id=consumes(requests), token=st.integers(2, 9))
    def commit(self, request_id: str, token: int) -> None:
        seq = self.seqs[request_id]
        if seq.status is SequenceStatus.GRANTED:
            with pytest.raises(ValueError, match="num_tokens must be"):
                self.scheduler.commit(request_id, token, len(seq) + 1)
            self.pool.write(seq.block_table, seq, seq.num_computed_tokens, len(seq))
            self.pool.write_state(seq.loaded_state_ids, self.pool.state_of(seq, len(seq)))
            self.scheduler.commit(request_id, token, len(seq))

    @rule(request_id=consumes(requests))
    def abort(self, request_id: str) -> None:
        seq = self.seqs[request_id]
        if (
            seq.status is SequenceStatus.HELD
            and seq.block_table
            and not seq.num_loading_blocks + seq.num_steps_in_flight
        ):
            self.pool.check(seq.block_table, seq, seq.num_computed_tokens)  # a transfer could read it until now
            if seq.num_computed_tokens >= seq.num_prompt_tokens:
                self.pool.check_state(seq.state_block_ids, seq, seq.num_computed_tokens)
        was_there = seq.status is not SequenceStatus.FINISHED
        assert self.scheduler.sequences.abort(request_id) == was_there

    @rule(request_id=requests)
    def hold(self, request_id: str) -> None:
        if self.seqs[request_id].is_prefill_only:
            self.scheduler.sequences.hold(request_id)

    @rule()
    def launch(self) -> None:
        if len(self.in_flight) < 2:
            self.launch_next()

    @rule(token=st.integers(1, 9))
    def collect(self, token: int) -> None:
        if self.in_flight:
            self.finish(self.in_flight.popleft(), token)

    @rule()
    def forget_prefixes(self) -> None:
        is_empty = self.manager.forget_prefixes()
        assert self.manager.ledger().num_cached == 0 or self.manager.is_copying
        assert is_empty == (not self.manager.prefixes)

    @rule(number=st.integers(0, 5))
    def copy(self, number: int) -> None:
        if self.copies:
            self.end_copy(self.copies.pop(number % len(self.copies)))

    def begin_copies(self) -> None:
        for copy in self.manager.take_copies():
            assert copy.block_id not in {other.block_id for other in self.copies}, "a block is copied twice at once"
            (self.pool if copy.is_load else self.host).take(
                copy.block_id if copy.is_load else copy.host_block_id, [(-1,)] * self.pool.block_size
            )
            self.copies.append(copy)

    def end_copy(self, copy: BlockCopy) -> None:
        if copy.is_load:
            self.pool.take(copy.block_id, self.host.slots[copy.host_block_id])
        else:
            self.host.take(copy.host_block_id, self.pool.slots[copy.block_id])
        self.scheduler.take_copied([copy])

    def launch_next(self) -> bool:
        output = self.scheduler.schedule()
        self.begin_copies()
        if not output.scheduled:
            return False
        assert all(scheduled.num_new_tokens >= 1 for scheduled in output.scheduled), "nothing computed, nothing sampled"
        seqs = [scheduled.seq for scheduled in output.scheduled]
        loads = [list(seq.loaded_state_ids) if seq.has_state_to_load else [] for seq in seqs]
        rows = [seq.state_slot for seq in seqs]
        self.in_flight.append(Launched(output, [list(seq.block_table) for seq in seqs], rows, loads))
        self.scheduler.begin(output)
        return True

    def finish(self, launched: Launched, token: int) -> None:
        scheduled = launched.output.scheduled
        self.compute_states(launched)
        for item, table in zip(scheduled, launched.tables, strict=True):
            self.pool.write(table, item.seq, item.first, item.end)
        for item, table in zip(scheduled, launched.tables, strict=True):
            if item.seq.status is SequenceStatus.RUNNING:
                self.pool.check(table, item.seq, item.end)
        drafts = {item.seq.request_id: item.draft_token_ids for item in scheduled}
        outputs = self.scheduler.apply(launched.output, [[token] * item.num_sampled for item in scheduled])
        for output in outputs:
            seq = self.seqs[output.request_id]
            position = seq.num_prompt_tokens + output.offset
            end = position + len(output.token_ids)
            assert list(seq.token_ids[position:end]) == output.token_ids == [token] * len(output.token_ids)
            if output.token_ids:
                assert list(drafts[output.request_id][: len(output.token_ids) - 1]) == output.token_ids[:-1]
            assert PENDING_TOKEN not in seq.token_ids[:end]
            assert output.offset + len(output.token_ids) <= seq.sampling_params.max_tokens

    def compute_states(self, launched: Launched) -> None:
        assert not any(launched.loads)

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "manager"):
            assert self.scheduler.check_integrity() == []
            assert self.scheduler.stats.num_loaded_tokens <= self.scheduler.stats.num_prefix_hits_tokens
            for event in self.manager.take_cache_events():
                assert event.is_stored != (event.block_hash in self.findable), "told twice"
                (self.findable.add if event.is_stored else self.findable.remove)(event.block_hash)
            assert self.findable == set(self.manager.cached_hashes())

    def teardown(self) -> None:
        """Nothing starves: without new requests everything ends, and every block becomes free or cached."""
        if not hasattr(self, "manager"):
            return
        for request_id in [*self.scheduler.sequences.granted, *self.scheduler.sequences.held]:
            self.scheduler.sequences.abort(request_id)
        num_steps = 0
        while self.scheduler.sequences.has_work or self.in_flight:
            has_launched = len(self.in_flight) < 2 and self.launch_next()
            if not has_launched and self.in_flight:
                self.finish(self.in_flight.popleft(), 2)
            elif not has_launched:
                assert self.copies, "work is left and nothing is scheduled"
                self.end_copy(self.copies.pop())
            for request_id in list(self.scheduler.sequences.held):
                self.scheduler.sequences.abort(request_id)
            num_steps += 1
            assert num_steps < 5000, "work never ends"
        self.begin_copies()
        while self.copies:
            self.end_copy(self.copies.pop())
            self.begin_copies()
        ledger = self.manager.ledger()
        assert ledger.num_free + ledger.num_cached == ledger.num_blocks
        assert self.manager.check_integrity() == []
        host = self.manager.host_ledger()
        assert host.num_free + host.num_kept == host.num_blocks


class RecurrentMachine(SchedulerMachine):
    """The same for a model whose layers keep a state, which moves from and to rows in blocks of its own."""

    @initialize(
        num_blocks=st.integers(12, 60),
        block_size=st.sampled_from([1, 2, 4]),
        budget=st.integers(8, 20),
        caching=st.booleans(),
        num_state_blocks=st.integers(1, 9),
        min_snapshot_tokens=st.integers(1, 6),
    )
    def make(
        self,
        num_blocks: int,
        block_size: int,
        budget: int,
        caching: bool,
        num_state_blocks: int,
        min_snapshot_tokens: int,
    ) -> None:
        self.begin(num_blocks, block_size, budget, caching, 0, 0, num_state_blocks, min_snapshot_tokens)
        self.rows: dict[int, tuple[str | int, ...]] = {}

    @rule(
        target=SchedulerMachine.requests,
        text=st.sampled_from(TEXTS[:2]),
        length=st.integers(12, 24),
        end=st.lists(st.integers(2, 3), min_size=3, max_size=12),
        salt=st.sampled_from(["", "", "salt"]),
        is_prefill_only=st.booleans(),
        steps=st.sampled_from([0, 1, 8, 8]),
        fails=st.booleans(),
    )
    def serve(
        self, text: list[int], length: int, end: list[int], salt: str, is_prefill_only: bool, steps: int, fails: bool
    ) -> str:
        """A prompt that goes on from another one's snapshot, or leaves one, or both."""
        seq = self.new_sequence([*text[:length], *end], 2, cache_salt=salt, is_prefill_only=is_prefill_only)
        self.scheduler.sequences.add(seq)
        for _ in range(steps):
            if self.in_flight and fails and self.in_flight[0].output.scheduled[-1].is_sampled:
                self.fail()
            elif self.in_flight:
                self.finish(self.in_flight.popleft(), 2)
            self.launch_next()
        return seq.request_id

    @rule()
    def fail(self) -> None:
        """A step samples no token: some state or block holds NaN, and no later request may find it in the cache."""
        if not self.in_flight:
            return
        launched = self.in_flight.popleft()
        all_fail = all(item.is_sampled for item in launched.output.scheduled)  # others may keep equal snapshots
        failing = [item.seq for item in launched.output.scheduled if item.seq.status is SequenceStatus.RUNNING]
        self.finish(launched, INVALID_TOKEN)
        kept = [self.manager.prefixes.snapshots.longest(seq.block_hashes) for seq in failing]
        assert not all_fail or not any(match.num_reused for match in kept)

    @rule(
        target=SchedulerMachine.requests,
        text=st.sampled_from(TEXTS),
        length=st.integers(1, 24),
        is_launched=st.booleans(),
    )
    def take_over(self, text: list[int], length: int, is_launched: bool) -> object:
        """A prompt from another engine, whose first step may be in flight while the next one comes."""
        seq = self.new_sequence(text[:length], 5)
        self.reserve_of(seq)
        self.commit(seq.request_id, 3)
        if is_launched:
            self.launch()
        return seq.request_id if seq.status is SequenceStatus.RUNNING else multiple()

    @invariant()
    def only_prompts_for_others_have_blocks_for_them(self) -> None:
        if hasattr(self, "scheduler"):
            assert all(seq.is_prefill_only or not seq.state_block_ids for seq in self.scheduler.sequences.running)

    def compute_states(self, launched: Launched) -> None:
        """Load, go on from what the rows hold, save. Steps do so in the order of their launches."""
        assert len(set(launched.rows)) == len(launched.rows), "two sequences have one row"
        for item, row, loaded in zip(launched.output.scheduled, launched.rows, launched.loads, strict=True):
            is_wanted = item.seq.status is SequenceStatus.RUNNING
            if loaded and is_wanted:
                self.pool.check_state(loaded, item.seq, item.first)
            if loaded or not item.first:
                self.rows[row] = self.pool.state_of(item.seq, item.first)
            assert not is_wanted or self.rows[row] == self.pool.state_of(item.seq, item.first), "a foreign state"
            self.rows[row] = self.pool.state_of(item.seq, item.end)
            self.pool.write_state(list(item.snapshot_ids), self.rows[row])
        for export in launched.output.state_exports:
            self.pool.write_state(list(export.blocks.block_ids), self.rows[export.state_slot])


class OffloadingMachine(SchedulerMachine):
    """The same with host memory, and a pool with room for two or three requests."""

    @initialize(num_host_blocks=st.sampled_from([1, 2, 6, 12, 40]), num_drafts=st.sampled_from([0, 0, 4]))
    def make(self, num_host_blocks: int, num_drafts: int) -> None:
        self.begin(12, 4, 20, True, num_drafts, num_host_blocks)

    @rule(
        target=SchedulerMachine.requests,
        text=st.sampled_from(TEXTS),
        length=st.sampled_from([12, 24]),
        salt=st.sampled_from(["", "", "salt"]),
        is_prefill_only=st.booleans(),
        copies_wait=st.booleans(),
        steps=st.sampled_from([1, 8, 8]),
    )
    def serve(
        self, text: list[int], length: int, salt: str, is_prefill_only: bool, copies_wait: bool, steps: int
    ) -> str:
        """Serve a request for as many steps as end it and reuse the blocks of ended ones, or only admit it."""
        seq = self.new_sequence(text[:length], 2, cache_salt=salt, is_prefill_only=is_prefill_only)
        self.scheduler.sequences.add(seq)
        for _ in range(steps):
            if self.in_flight:
                self.finish(self.in_flight.popleft(), 2)
            while self.copies and not copies_wait:
                self.end_copy(self.copies.pop())
            self.launch_next()
        if is_prefill_only and seq.status is SequenceStatus.LOADING:
            self.hold(seq.request_id)
        return seq.request_id

    @rule(
        target=SchedulerMachine.requests,
        text=st.sampled_from(TEXTS),
        length=st.sampled_from([12, 24]),
        then=st.sampled_from(["", "commit", "abort", "both"]),
    )
    def reserve_again(self, text: list[int], length: int, then: str) -> object:
        """Granted blocks may still be coming from the host when the commit or the end of the request arrives."""
        seq = self.new_sequence(text[:length], 5)
        self.reserve_of(seq)
        if then in ("commit", "both"):
            self.commit(seq.request_id, 3)
        if then in ("abort", "both") and seq.status is not SequenceStatus.WAITING:
            self.abort(seq.request_id)
        return seq.request_id if seq.status in (SequenceStatus.GRANTED, SequenceStatus.LOADING) else multiple()

    @rule()
    def fail(self) -> None:
        """A step samples no token: some block holds NaN, and no later request may find it in the cache."""
        if not self.in_flight:
            return
        launched = self.in_flight.popleft()
        all_fail = all(item.is_sampled for item in launched.output.scheduled)  # others may store equal blocks
        suspects = {
            self.manager.prefixes.hash_of(block_id)
            for item in launched.output.scheduled
            if item.seq.status is SequenceStatus.RUNNING
            for block_id in item.seq.block_table
            if block_id in self.manager.prefixes
        }
        self.finish(launched, INVALID_TOKEN)
        assert not all_fail or suspects.isdisjoint(self.manager.cached_hashes())


TestSchedulerMachine = SchedulerMachine.TestCase
TestOffloadingMachine = OffloadingMachine.TestCase
TestRecurrentMachine = RecurrentMachine.TestCase
TestSchedulerMachine.settings = TestOffloadingMachine.settings = TestRecurrentMachine.settings = settings(
    max_examples=150, stateful_step_count=40, suppress_health_check=list(HealthCheck)
)
