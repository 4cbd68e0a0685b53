"""Every interleaving of one request with its workers, with up to two faults, through the code that the router runs.

The model is a prefill and a decode worker, each with a stream of messages on its way to the router. From every state
the search tries all that can happen next: a worker makes its next step, is busy, fails, dies or stalls; a message
arrives; the stream moves to the other worker; the client leaves. In each state it checks: positions are contiguous and
tokens right; the end comes once; at the end, no worker is left with work for the request; something can always still
happen; a worker is credited only with what it did and blamed only for what it failed itself, once an attempt; there are
no more retries than the budget allows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import pytest
from cloning import clone

from protos import tandem_inference_pb2 as inference_pb
from protos import tandem_worker_pb2 as pb
from protos.tandem_kv_transfer_pb2 import Grant
from router.request_events import (
    AccountOverdue,
    Action,
    Emit,
    End,
    EnterQueue,
    Event,
    NoteFault,
    NoteSuccess,
    Plan,
    Planned,
    Rebalanced,
    SendCancel,
    SendGenerate,
    SendPrefill,
    SendReserve,
    Stopped,
    WorkerKey,
    WorkerLost,
    WorkerPair,
    WorkerSaid,
    WorkerStalled,
)
from router.request_state import Phase, RequestState
from router.retry_budget import RetryBudget

P, D = WorkerKey("p", "1"), WorkerKey("d", "1")
PAIR = WorkerPair(P, D)
NUM_TOKENS = 3
LENGTH = inference_pb.FINISH_REASON_LENGTH

Deed: TypeAlias = tuple[WorkerKey | WorkerPair, int]
"""What a worker, or a pair of workers, did in an attempt."""


@dataclass
class Work:
    """One attempt on one worker, and the worker's next step."""

    attempt: int
    step: str
    """ "reserve", "granted", "generate", "prefill", "commit", "acknowledge", or "decode"."""
    next_index: int


@dataclass
class World:
    """The router's state machine, both workers, and the messages between them."""

    state: RequestState
    num_faults: int
    may_move: bool = False
    """The stream may move, once."""
    is_queued: bool = False
    wanted: WorkerKey | None = None
    """While it is queued: the worker that it moves to."""
    work: dict[WorkerKey, Work] = field(default_factory=dict)
    inbox: dict[WorkerKey, list[WorkerSaid]] = field(default_factory=lambda: {P: [], D: []})
    emitted: list[int] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    at_fault: set[Deed] = field(default_factory=set)
    """Which worker, or pair, failed which attempt by its own fault."""
    did_well: set[Deed] = field(default_factory=set)
    noted: set[Deed] = field(default_factory=set)
    """The deeds that the state machine has noted."""

    def key(self) -> str:
        state = self.state
        inbox = [[said.event.SerializeToString(deterministic=True) for said in line] for line in self.inbox.values()]
        early = [(t.index, t.finish_reason) for t in state._early]
        mind = (state.phase, state.attempt, state.num_futile, state.plan, state._first_index, early)
        mind += (state._has_left_stalled,)
        deeds = [sorted((repr(who), n) for who, n in each) for each in (self.at_fault, self.did_well, self.noted)]
        budget, moves = state.budget.num_tokens, (self.may_move, self.is_queued, self.wanted)
        return repr((mind, state._finish_reason, self.num_faults, moves, self.work, inbox, self.emitted, deeds, budget))


def say(world: World, worker: WorkerKey, attempt: int, **event: object) -> None:
    message = pb.WorkerEvent(request_id="r", attempt=attempt, **event)  # type: ignore[arg-type]
    world.inbox[worker].append(WorkerSaid(worker, message))


def tokens(index: int) -> pb.Tokens:
    is_last = index == NUM_TOKENS - 1
    return pb.Tokens(index=index, token_ids=[100 + index], finish_reason=LENGTH if is_last else 0)  # type: ignore[arg-type]


def do(world: World, actions: list[Action]) -> None:
    """Do what the router's shell and the network do with the actions of the state machine."""
    for action in actions:
        match action:
            case EnterQueue(wanted=wanted):
                assert not world.is_queued
                world.is_queued, world.wanted = True, wanted
            case SendReserve(worker):
                world.work[worker] = Work(world.state.attempt, "reserve", len(world.emitted))
            case SendGenerate(worker):
                world.work[worker] = Work(world.state.attempt, "generate", len(world.emitted))
            case SendPrefill(worker, _):
                world.work[worker] = Work(world.state.attempt, "prefill", len(world.emitted))
            case SendCancel(worker, attempt):
                if worker in world.work and world.work[worker].attempt == attempt:
                    del world.work[worker]
            case Emit(offset, token_ids):
                assert offset == len(world.emitted), "a gap or a repetition"
                world.emitted += token_ids
                assert world.emitted == [100 + i for i in range(len(world.emitted))], "wrong tokens"
            case NoteSuccess(who):
                note(world, who, world.did_well)
            case NoteFault(who):
                note(world, who, world.at_fault)
            case End():
                world.ends.append(action)
    assert len(world.ends) <= 1, "ended twice"
    assert (world.state.phase is Phase.DONE) == bool(world.ends)


def note(world: World, who: WorkerKey | WorkerPair, deserved: set[Deed]) -> None:
    deed = (who, world.state.attempt)
    assert deed in deserved, f"{deed} is said to have done what it did not"
    assert deed not in world.noted, "noted twice"
    world.noted.add(deed)


def deliver(world: World, event: Event) -> World:
    do(world, world.state.on(event))
    return world


def successors(world: World) -> Iterator[World]:
    """All worlds that one event leads to."""

    def fork() -> World:
        return clone(world)

    for worker, events in world.inbox.items():
        if events:
            after = fork()
            yield deliver(after, after.inbox[worker].pop(0))
    if world.is_queued and world.state.phase is Phase.QUEUED:
        moved = [] if world.wanted is None else [Plan(world.wanted, None, is_stay=True)]
        for plan in (Plan(D, P), Plan(D, None), *moved):
            after = fork()
            after.is_queued = False
            yield deliver(after, Planned(plan))
    if world.state.phase is Phase.SETTLING:
        yield deliver(fork(), AccountOverdue())
    if world.may_move and world.state.phase is Phase.DECODING:  # at other times it is asked in vain
        after = fork()
        after.may_move = False
        yield deliver(after, Rebalanced(P))
    for worker in world.work:
        after = fork()
        if work_on(after, worker):
            yield after
    if world.num_faults:
        yield from faults(world)


def work_on(world: World, worker: WorkerKey) -> bool:
    """Make the worker's next step. Returns False if it must wait for the other worker."""
    work = world.work[worker]
    match work.step:
        case "reserve":
            say(world, worker, work.attempt, granted=Grant(grant_id=work.attempt))
            work.step = "granted"
        case "granted":
            return False  # waits until the prefill worker commits
        case "prefill":
            say(world, worker, work.attempt, tokens=tokens(work.next_index))
            work.step = "commit"
            if work.next_index == NUM_TOKENS - 1:
                world.did_well.add((worker, work.attempt))
                del world.work[worker]
        case "commit":
            decode = world.work.get(D)
            if decode is None or decode.attempt != work.attempt or decode.step != "granted":
                say(world, worker, work.attempt, failed=pb.Failed(code=10, message="grant gone", can_retry=True))
                world.at_fault.add((PAIR, work.attempt))
                del world.work[worker]
            else:
                decode.step, decode.next_index = "decode", work.next_index + 1
                work.step = "acknowledge"
        case "acknowledge":
            say(world, worker, work.attempt, handed_over=pb.HandedOver())
            world.did_well |= {(worker, work.attempt), (PAIR, work.attempt)}
            del world.work[worker]
        case "generate" | "decode":
            say(world, worker, work.attempt, tokens=tokens(work.next_index))
            work.next_index += 1
            work.step = "decode"
            if work.next_index == NUM_TOKENS:
                world.did_well.add((worker, work.attempt))
                del world.work[worker]
    return True


def faults(world: World) -> Iterator[World]:
    def fork() -> World:
        after = clone(world)
        after.num_faults -= 1
        return after

    yield deliver(fork(), Stopped())
    for worker, work in world.work.items():
        if work.step in ("reserve", "generate"):
            after = fork()
            say(after, worker, work.attempt, busy=pb.Busy())
            del after.work[worker]
            yield after
        after = fork()
        say(after, worker, work.attempt, failed=pb.Failed(code=13, message="no", can_retry=True))
        after.at_fault.add((worker, work.attempt))
        del after.work[worker]
        yield after
    for worker in (P, D):
        after = fork()  # it dies: its messages that have not arrived are lost with it
        after.work.pop(worker, None)
        after.inbox[worker] = []
        yield deliver(after, WorkerLost(worker))
        yield deliver(fork(), WorkerStalled(worker))  # it may go on at any time, and its messages still arrive


def nothing_follows(ended: World) -> None:
    """Check that late or repeated events do nothing to a request that has ended."""
    late: list[Event] = [event for events in ended.inbox.values() for event in events]
    key = ended.key()
    late += [Planned(PAIR), Stopped(), WorkerLost(P), WorkerLost(D), WorkerStalled(D), Rebalanced(P), AccountOverdue()]
    for event in late:
        do(ended, ended.state.on(event))
        assert ended.key() == key, f"{event} after the end"


def explore(num_faults: int, max_attempts: int, budget: int = 0, *, may_move: bool = False) -> tuple[int, int]:
    """Visit every reachable world. Returns the number of worlds, and how many of them are ends."""
    first = World(RequestState(max_attempts=max_attempts, budget=RetryBudget(budget)), num_faults, may_move)
    do(first, first.state.start())
    frontier, seen, num_ends = deque([first]), {first.key()}, 0
    while frontier:
        world = frontier.popleft()
        if world.ends:
            num_ends += 1
            assert not world.work, f"left behind: {world.work}"
            nothing_follows(world)
            if world.ends[0].error is None and world.ends[0].finish_reason == LENGTH:
                assert len(world.emitted) == NUM_TOKENS
            continue
        assert world.state.num_futile <= 1 + budget, "tried again without budget"
        following = list(successors(world))
        assert following, f"nothing can happen any more: {world.key()}"
        for after in following:
            key = after.key()
            if key not in seen:
                seen.add(key)
                frontier.append(after)
    return len(seen), num_ends


@pytest.mark.parametrize(
    ("num_faults", "budget", "may_move"),
    [
        (0, 1, True),
        (1, 1, True),
        pytest.param(2, 0, False, marks=pytest.mark.slow),
        pytest.param(2, 0, True, marks=pytest.mark.slow),
        pytest.param(2, 1, True, marks=pytest.mark.slow),
    ],
)
def test_every_interleaving(num_faults: int, budget: int, may_move: bool) -> None:
    num_worlds, num_ends = explore(num_faults, max_attempts=3, budget=budget, may_move=may_move)
    assert num_worlds > 20
    assert num_ends > 0


def test_the_explorer_sees_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mechanisms are removed, one at a time: the explorer must notice each removal."""

    def believe_everything(self: RequestState, worker: WorkerKey, said: pb.WorkerEvent) -> list[Action]:
        said.attempt = self.attempt
        return original_on_worker(self, worker, said)

    original_on_worker = RequestState._on_worker
    monkeypatch.setattr(RequestState, "_on_worker", believe_everything)
    with pytest.raises(AssertionError):
        explore(2, max_attempts=3, budget=1)
    monkeypatch.undo()

    def move_without_a_word(self: RequestState, worker: WorkerKey) -> list[Action]:
        self.plan, self.phase = None, Phase.QUEUED
        return [EnterQueue(is_return=True, wanted=worker)]

    monkeypatch.setattr(RequestState, "_on_rebalanced", move_without_a_word)
    with pytest.raises(AssertionError):
        explore(0, max_attempts=3, may_move=True)
    monkeypatch.undo()

    monkeypatch.setattr("router.request_state.BETWEEN_WORKERS", ())
    with pytest.raises(AssertionError, match="said to have done"):
        explore(1, max_attempts=3)
    monkeypatch.undo()

    monkeypatch.setattr(RetryBudget, "take", lambda self, num_failures: True)
    with pytest.raises(AssertionError, match="without budget"):
        explore(2, max_attempts=3)
    monkeypatch.undo()

    monkeypatch.setattr(RequestState, "_cancel_attempt", lambda self: [])
    with pytest.raises(AssertionError):
        explore(1, max_attempts=3)
    monkeypatch.undo()

    def hear_after_the_end(self: RequestState, event: Event) -> list[Action]:
        if self.phase is Phase.DONE and isinstance(event, Stopped):
            return [End(event.finish_reason)]
        return original_on(self, event)

    original_on = RequestState.on
    monkeypatch.setattr(RequestState, "on", hear_after_the_end)
    with pytest.raises(AssertionError, match="ended twice"):
        explore(0, max_attempts=3)
