"""Block manager and scheduler under random histories: the books balance, no block is in two hands, nothing starves.

A model plays the executor: it remembers which (sequence, position) each slot was last written for, and checks that what
a sequence would read is what was written for the very same tokens. So sharing, copy on write, preemption, prefix reuse
and granted blocks that are filled from outside are all checked by content, not only by count.
"""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from engine.block_manager import BlockManager
from engine.config import SchedulerConfig
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import SchedulerOutput, Sequence, SequenceStatus

EOS = 1
MAX_MODEL_LEN = 40

# Prefixes of few texts, so that they are often shared; sometimes with an ending of their own.
prompts = st.builds(
    lambda text, length, end: [*text[:length], *end],
    st.sampled_from([list(range(2, 26)), [2, 3] * 12]),
    st.integers(1, 24),
    st.lists(st.integers(2, 3), max_size=3),
)


class Pool:
    """What each slot of each block was written for: the tokens up to and including its own."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots: list[list[tuple[int, ...] | None]] = [[None] * block_size for _ in range(num_blocks)]

    def write(self, seq: Sequence, start: int, end: int) -> None:
        for position in range(start, end):
            block = seq.block_table[position // self.block_size]
            self.slots[block][position % self.block_size] = tuple(seq.token_ids[: position + 1])

    def check(self, seq: Sequence, end: int) -> None:
        for position in range(end):
            block = seq.block_table[position // self.block_size]
            content = self.slots[block][position % self.block_size]
            assert content == tuple(seq.token_ids[: position + 1]), f"{seq.request_id} reads foreign KV at {position}"

    def copy(self, source: int, destination: int) -> None:
        self.slots[destination] = list(self.slots[source])


class SchedulerMachine(RuleBasedStateMachine):
    requests = Bundle("requests")

    @initialize(
        num_blocks=st.integers(12, 30),
        block_size=st.sampled_from([1, 2, 4]),
        budget=st.integers(8, 20),
        caching=st.booleans(),
    )
    def make(self, num_blocks: int, block_size: int, budget: int, caching: bool) -> None:
        # One sequence of full length must fit, as the engine's configuration demands.
        num_blocks = max(num_blocks, -(-MAX_MODEL_LEN // block_size) + 1)
        self.manager = BlockManager(
            num_blocks=num_blocks, block_size=block_size, prefix_key=b"k" * 32, enable_prefix_caching=caching
        )
        config = SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=budget,
            prefill_chunk_tokens=max(1, budget // 2),
            prefill_batch_tokens=64,
            max_itl_ms=0,
        )
        self.scheduler = Scheduler(config, self.manager, max_model_len=MAX_MODEL_LEN, eos_token_ids=frozenset({EOS}))
        self.pool = Pool(num_blocks, block_size)
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
        return seq

    @rule(target=requests, prompt=prompts, max_tokens=st.integers(1, 12))
    def add(self, prompt: list[int], max_tokens: int) -> str:
        seq = self.new_sequence(prompt, max_tokens)
        self.scheduler.add(seq)
        return seq.request_id

    @rule(target=requests, prompt=prompts)
    def add_prefill_only(self, prompt: list[int]) -> str:
        seq = self.new_sequence(prompt, 5, is_prefill_only=True)
        self.scheduler.add(seq)
        return seq.request_id

    @rule(target=requests, prompt=prompts)
    def reserve(self, prompt: list[int]) -> object:
        seq = self.new_sequence(prompt, 5)
        if not self.scheduler.reserve(seq):
            return multiple()
        self.pool.check(seq, seq.num_computed_tokens)  # what it need not receive
        return seq.request_id

    @rule(request_id=consumes(requests), token=st.integers(2, 9))
    def commit(self, request_id: str, token: int) -> None:
        seq = self.seqs[request_id]
        if seq.status is SequenceStatus.GRANTED:
            with pytest.raises(ValueError, match="num_tokens must be"):
                self.scheduler.commit(request_id, token, len(seq) + 1)
            self.pool.write(seq, seq.num_computed_tokens, len(seq))
            self.scheduler.commit(request_id, token, len(seq))

    @rule(request_id=consumes(requests))
    def abort(self, request_id: str) -> None:
        was_there = not self.seqs[request_id].status.is_finished
        assert self.scheduler.abort(request_id) == was_there

    @rule(request_id=requests)
    def hold(self, request_id: str) -> None:
        if self.seqs[request_id].is_prefill_only:
            self.scheduler.hold(request_id)

    @rule(request_id=consumes(requests))
    def release(self, request_id: str) -> None:
        if self.seqs[request_id].status is SequenceStatus.HELD:
            self.scheduler.release(request_id)

    @rule(target=requests, request_id=requests, token=st.integers(2, 9))
    def fork(self, request_id: str, token: int) -> object:
        parent = self.seqs[request_id]
        is_decoding = parent.status is SequenceStatus.RUNNING and parent.num_uncomputed_tokens == 1
        if not is_decoding or parent.is_prefill_only or len(self.scheduler.running) >= 8:
            return multiple()
        child = self.new_sequence(parent.token_ids, 12)
        child.num_prompt_tokens = parent.num_prompt_tokens
        child.token_ids[-1] = token
        self.scheduler.fork(parent, child)
        return child.request_id

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self.execute(self.scheduler.schedule(), data.draw(st.integers(1, 9)))

    def execute(self, output: SchedulerOutput, token: int) -> None:
        for source, destination in output.blocks_to_copy:
            self.pool.copy(source, destination)
        for scheduled in output.scheduled:
            seq = scheduled.seq
            assert scheduled.num_new_tokens >= 1, "nothing computed, so nothing can be sampled"
            self.pool.write(seq, seq.num_computed_tokens, seq.num_computed_tokens + scheduled.num_new_tokens)
        for scheduled in output.scheduled:
            self.pool.check(scheduled.seq, scheduled.seq.num_computed_tokens + scheduled.num_new_tokens)
        for export in output.exports:
            assert len(export.block_ids) == export.last_block - export.first_block
        self.scheduler.apply(output, [token if s.samples else None for s in output.scheduled])

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "manager"):
            assert self.manager.check_integrity() == []

    def teardown(self) -> None:
        """Nothing starves: with no newcomers everything ends, and every block comes back."""
        if not hasattr(self, "manager"):
            return
        for request_id in [*self.scheduler.granted, *self.scheduler.held]:
            self.scheduler.abort(request_id)
        num_steps = 0
        while self.scheduler.has_work:
            output = self.scheduler.schedule()
            assert output.scheduled, "work is left and nothing is scheduled"
            self.execute(output, 2)
            for request_id in list(self.scheduler.held):
                self.scheduler.release(request_id)
            num_steps += 1
            assert num_steps < 5000, "work never ends"
        ledger = self.manager.ledger()
        assert ledger.num_free + ledger.num_cached == ledger.num_blocks
        assert self.manager.check_integrity() == []


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
