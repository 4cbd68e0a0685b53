"""Simulates a cluster under load, in virtual time: what a router's choices lead to, without hardware.

The policy (`router.policy`), what it learns (`router.costs`, `router.paces`) and the pace of prompts beside streams
(`engine.scheduling.pace`) are the real ones. Workers are not: a step takes as long as a formula says (`Hardware`), and
memory never runs out. Nothing is cached, fails, or is refused.

    request ──> the router's queue ──choose_plan──> a worker's prompts ──steps──> first token
                       ^                                                             │ KV moves, if another decodes
                       └── after each step of a worker            streams ──steps──> tokens, one a step
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from engine.scheduling.pace import StepPace
from protos.tandem_inference_pb2 import Mode
from router.costs import Costs
from router.moves import LOOK_S, Loaded, PromptShares, choose_move
from router.paces import MIN_TOKENS, MIN_TOKENS_BETWEEN_PROMPTS
from router.policy import STAY_SHARE, UNKNOWN_ANSWER_S, DecodeCandidate, PolicyConfig, PrefillCandidate, choose_plan
from router.request_events import Plan, WorkerKey
from tandem.bench.outcome import Outcome, Usage
from tandem.bench.workload import Workload

BLOCK_SIZE = 16
NUM_BLOCKS = 1 << 20
"""More than any load needs."""
MAX_NUM_SEQS = 256
FIRST_PACED_TOKEN = 2
"""An answer tells the pace from this token on, as in a router (`router.account`)."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """How long the steps of one worker take."""

    fixed_s: float
    """What each step takes beside the model."""
    weights_s: float
    """The least that the model takes: reading its weights."""
    token_s: float
    """For each token that a step computes, prompts' and streams', once these take longer than the weights."""
    context_token_s: float
    """For each token of the streams' contexts: reading its KV."""
    handover_s: float
    """From a prompt's first token until its KV is where it is decoded."""
    max_itl_s: float = 0.04
    max_num_batched_tokens: int = 2048
    prefill_batch_tokens: int = 256

    def step_s(self, num_tokens: int, num_context_tokens: int) -> float:
        model_s = max(self.weights_s, self.token_s * num_tokens)
        return self.fixed_s + model_s + self.context_token_s * num_context_tokens


HARDWARE = {
    # SmolLM2-135M in bfloat16 on one core each of a Zen 4, as measured alone.
    "zen4-core": Hardware(
        fixed_s=0.0015, weights_s=0.009, token_s=0.00064, context_token_s=1.5e-6, handover_s=0.008
    ),
    # Llama-3.1-8B in bfloat16 on one H200 each (docs/gpu.md).
    "h200": Hardware(
        fixed_s=0.0003, weights_s=0.004, token_s=2.45e-5, context_token_s=3.5e-8, handover_s=0.006, max_itl_s=0.02,
        prefill_batch_tokens=512,
    ),
}  # fmt: skip


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    num_tokens: int
    """Of the prompt."""
    num_wanted: int
    """Tokens of the answer."""
    outcome: Outcome
    num_uncomputed: int
    waits_since_s: float = 0.0
    sent_s: float = 0.0
    num_to_compute: int = 0
    """Tokens of prompts at its worker when it came there, its own included."""
    mode: int = Mode.MODE_UNSPECIFIED
    decoded_by: WorkerKey = field(default=WorkerKey("", ""))
    prompt_at: WorkerKey = field(default=WorkerKey("", ""))
    """The worker that has computed its prompt, and keeps it."""
    has_moved: bool = False
    paced_since: tuple[int, float, float] = (0, 0.0, 0)
    """From when on its pace is measured: the tokens that it had, the time, and the worker's KV blocks in use."""

    @property
    def num_context_tokens(self) -> int:
        return self.num_tokens + self.outcome.num_tokens

    @property
    def num_computed(self) -> int:
        return self.num_context_tokens - self.num_uncomputed

    @property
    def num_answer_tokens(self) -> int:
        return self.outcome.num_tokens

    @property
    def max_tokens_left(self) -> int:
        return self.num_wanted - self.outcome.num_tokens

    def num_tokens_again(self, worker: WorkerKey) -> int:
        num_kept = self.num_tokens // BLOCK_SIZE * BLOCK_SIZE if worker == self.prompt_at else 0
        return self.num_context_tokens - num_kept

    def may_go_to(self, worker: WorkerKey) -> bool:
        return True

    @property
    def num_blocks(self) -> int:
        return -(-self.num_context_tokens // BLOCK_SIZE)


@dataclass(slots=True, eq=False)
class SimulatedWorker:
    key: WorkerKey
    role: Literal["prefill", "decode"]
    pace: StepPace
    prompts: deque[SimulatedRequest] = field(default_factory=deque)
    streams: list[SimulatedRequest] = field(default_factory=list)
    coming: set[SimulatedRequest] = field(default_factory=set)
    """Requests that it will decode, whose prompts another worker computes."""
    had_prompts_s: float = -1.0
    """When a step of it that computed prompts last ended."""
    slowness: float = 1.0
    """How many times as long its streams take as `Hardware` says."""
    is_stepping: bool = False
    busy_s: float = 0.0

    @property
    def num_queued_tokens(self) -> int:
        return sum(request.num_uncomputed for request in self.prompts)

    @property
    def num_used_blocks(self) -> int:
        """Those of a prompt that another worker will decode are in use as far as they are computed."""
        own = [request for request in self.prompts if request.decoded_by == self.key]
        others = sum(request.num_computed for request in self.prompts if request.decoded_by != self.key)
        return sum(request.num_blocks for request in (*own, *self.streams, *self.coming)) + others // BLOCK_SIZE

    @property
    def is_idle(self) -> bool:
        return not self.prompts and not self.is_full

    @property
    def is_full(self) -> bool:
        return len(self.prompts) + len(self.streams) + len(self.coming) >= MAX_NUM_SEQS

    def next_step(self, hardware: Hardware) -> tuple[list[SimulatedRequest], list[tuple[SimulatedRequest, int]]]:
        """The streams that get a token, and how much of which prompts is computed, as the engine's scheduler has it."""
        budget = hardware.max_num_batched_tokens - len(self.streams)
        paced = self.pace.num_prefill_tokens(len(self.prompts))
        if paced is not None and (self.streams or (self.coming and paced)):
            budget = min(budget, paced)
        num_wanted, pieces = min(budget, hardware.prefill_batch_tokens), []
        for request in self.prompts:
            if num_wanted <= 0:
                break
            num_new = min(request.num_uncomputed, budget)
            pieces.append((request, num_new))
            budget -= num_new
            num_wanted -= num_new
        return list(self.streams), pieces


class SimulatedCluster:
    """Runs one workload: `run`, once."""

    def __init__(
        self,
        num_prefill: int,
        num_decode: int,
        hardware: Hardware,
        *,
        policy: PolicyConfig | None = None,
        seed: int = 0,
    ) -> None:
        """`seed`: of the noise, a twentieth of each step's time."""
        self._hardware = hardware
        self._policy = policy or PolicyConfig()
        self._costs = Costs()
        self._noise = random.Random(seed)
        self._now_s = 0.0
        self._numbers = count()
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._queue: deque[SimulatedRequest] = deque()
        self._ended: list[SimulatedRequest] = []
        self._looked_s = -math.inf
        self._shares = PromptShares()
        self.num_moves = 0
        self.workers = {worker.key: worker for worker in self._workers(num_prefill, num_decode)}

    def _workers(self, num_prefill: int, num_decode: int) -> list[SimulatedWorker]:
        roles: list[Literal["prefill", "decode"]] = ["prefill"] * num_prefill + ["decode"] * num_decode
        return [
            SimulatedWorker(WorkerKey(f"{role}-{number}", "1"), role, StepPace(self._hardware.max_itl_s))
            for number, role in enumerate(roles, 1)
        ]

    def run(self, workload: Workload) -> list[Outcome]:
        """The outcomes of all requests, in the order in which they are due."""
        outcomes = []
        for each in workload.requests:
            num_tokens = len(each.prompt)
            usage = Usage(num_tokens, each.output_tokens, 0)
            outcome = Outcome(due_s=each.at_s, sent_s=each.at_s, usage=usage)
            outcomes.append(outcome)
            request = SimulatedRequest(num_tokens, each.output_tokens, outcome, num_tokens, each.at_s)
            self._at(each.at_s, lambda request=request: self._arrive(request))  # type: ignore[misc]
        while self._calls:
            self._now_s, _, call = heapq.heappop(self._calls)
            call()
        assert len(self._ended) == len(outcomes), "every request ends"
        return outcomes

    @property
    def modes(self) -> dict[str, int]:
        """How many requests were served in each mode."""
        counted = Counter(Mode.Name(request.mode) for request in self._ended)
        return {mode.removeprefix("MODE_").lower(): number for mode, number in counted.most_common()}

    def _at(self, at_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._calls, (at_s, next(self._numbers), call))

    # -- the router ---------------------------------------------------------------------------------------------

    def _arrive(self, request: SimulatedRequest) -> None:
        self._queue.append(request)
        self._dispatch()

    def _dispatch(self) -> None:
        while self._queue and (plan := self._plan(self._queue[0])) is not None:
            self._place(self._queue.popleft(), plan)

    def _plan(self, request: SimulatedRequest) -> Plan | None:
        return choose_plan(
            self._policy,
            self._costs,
            now_s=self._now_s,
            num_tokens=request.num_tokens,
            prefill=[_prefill_candidate(worker) for worker in self.workers.values() if worker.role == "prefill"],
            decode=[_decode_candidate(worker) for worker in self.workers.values() if worker.role == "decode"],
            avoid=frozenset(),
            num_waiting_tokens=sum(other.num_tokens for other in self._queue) - request.num_tokens,
            may_stay=self._now_s - request.waits_since_s >= STAY_SHARE * UNKNOWN_ANSWER_S,
        )

    def _place(self, request: SimulatedRequest, plan: Plan) -> None:
        request.mode, request.decoded_by = plan.mode, plan.decode
        decoding = self.workers[plan.decode]
        computing = decoding if plan.prefill is None else self.workers[plan.prefill]
        computing.prompts.append(request)
        if computing is not decoding:
            decoding.coming.add(request)
        request.sent_s, request.num_to_compute = self._now_s, computing.num_queued_tokens
        self._step(computing)

    def _move(self) -> None:
        """Move a stream, if one gains."""
        if not self._policy.rebalance or self._now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = self._now_s
        prefill = [worker for worker in self.workers.values() if worker.role == "prefill"]
        self._shares.note([(worker.key, bool(worker.prompts)) for worker in prefill], self._now_s)
        if self._queue:
            return
        chosen = choose_move(
            self._costs,
            now_s=self._now_s,
            busy=[_loaded(worker) for worker in self.workers.values() if worker.role == "decode"],
            idle=[
                _loaded(worker)._replace(prompt_share=self._shares.of(worker.key))
                for worker in prefill
                if worker.is_idle
            ],
            streams_of=lambda key: [stream for stream in self.workers[key].streams if not stream.has_moved],
        )
        if chosen is None:
            return
        stream, key = chosen
        self.workers[stream.decoded_by].streams.remove(stream)
        self.num_moves += 1
        stream.has_moved, stream.paced_since = True, (0, 0.0, 0)
        stream.num_uncomputed, stream.decoded_by = stream.num_tokens_again(key), key
        self.workers[key].prompts.append(stream)
        self._step(self.workers[key])

    # -- workers ------------------------------------------------------------------------------------------------

    def _step(self, worker: SimulatedWorker) -> None:
        """Begin a step, if the worker has anything to do and no step under way."""
        if worker.is_stepping or not (worker.prompts or worker.streams):
            return
        worker.is_stepping = True
        streams, pieces = worker.next_step(self._hardware)
        num_prompt_tokens = sum(num_new for _, num_new in pieces)
        num_context_tokens = sum(request.num_context_tokens for request in streams)
        seconds = self._hardware.step_s(num_prompt_tokens + len(streams), num_context_tokens)
        if streams:  # reading weights and KV is what streams wait for
            seconds_of_prompts = self._hardware.step_s(num_prompt_tokens, 0) if pieces else 0.0
            seconds += (worker.slowness - 1) * (seconds - seconds_of_prompts)
        seconds *= self._noise.uniform(0.95, 1.05)
        worker.busy_s += seconds

        def end() -> None:
            worker.is_stepping = False
            worker.had_prompts_s = self._now_s if pieces else worker.had_prompts_s
            worker.pace.note(num_decoding=len(streams), num_prefill_tokens=num_prompt_tokens, seconds=seconds)
            for request in streams:
                if request in worker.streams and self._token(request):  # else it has moved within the step
                    worker.streams.remove(request)
            for request, num_new in pieces:
                request.num_uncomputed -= num_new
                if not request.num_uncomputed:
                    self._first_token(worker, request)
            self._dispatch()
            self._move()
            self._step(worker)

        self._at(self._now_s + seconds, end)

    def _first_token(self, worker: SimulatedWorker, request: SimulatedRequest) -> None:
        worker.prompts.remove(request)
        if not request.has_moved:
            request.prompt_at = worker.key
            self._costs.computed(worker.key, request.num_to_compute, self._now_s - request.sent_s, self._now_s)
        decoding = self.workers[request.decoded_by]
        has_ended = self._token(request)
        if decoding is worker:
            worker.streams += [] if has_ended else [request]
        elif has_ended:
            decoding.coming.remove(request)
        else:
            self._at(self._now_s + self._hardware.handover_s, lambda: self._hand_over(request, decoding))

    def _hand_over(self, request: SimulatedRequest, worker: SimulatedWorker) -> None:
        self._costs.handed_over(request.num_tokens, self._hardware.handover_s, self._now_s)
        worker.coming.remove(request)
        worker.streams.append(request)
        self._step(worker)

    def _token(self, request: SimulatedRequest) -> bool:
        """The request has its next token. Returns whether it was the last one."""
        outcome, worker = request.outcome, self.workers[request.decoded_by]
        outcome.arrived_s.append(self._now_s)
        outcome.num_tokens += 1
        self._note_pace(request, worker)
        if outcome.num_tokens < request.num_wanted:
            return False
        outcome.ended_s = self._now_s
        self._ended.append(request)
        self._costs.paces.answered(outcome.num_tokens)
        return True

    def _note_pace(self, request: SimulatedRequest, worker: SimulatedWorker) -> None:
        num_tokens, (num_before, began_s, num_blocks_then) = request.outcome.num_tokens, request.paced_since
        num_due = MIN_TOKENS if worker.role == "decode" else MIN_TOKENS_BETWEEN_PROMPTS
        is_due = num_before > 0 and num_tokens - num_before >= num_due
        if not is_due and num_tokens != FIRST_PACED_TOKEN:
            return
        num_blocks = worker.num_used_blocks
        if is_due:
            seconds, mean_blocks = self._now_s - began_s, (num_blocks_then + num_blocks) / 2
            has_prompts = began_s <= worker.had_prompts_s
            num_tokens_since = num_tokens - num_before
            self._costs.paces.decoded(
                worker.key,
                num_tokens_since,
                seconds,
                mean_blocks,
                self._now_s,
                has_prompts=has_prompts,
                is_prefill=worker.role == "prefill",
            )
        request.paced_since = num_tokens, self._now_s, num_blocks


def _loaded(worker: SimulatedWorker) -> Loaded:
    return Loaded(worker.key, worker.num_used_blocks, BLOCK_SIZE)


def _prefill_candidate(worker: SimulatedWorker) -> PrefillCandidate:
    return PrefillCandidate(
        key=worker.key,
        kind=None,
        num_queued_tokens=worker.num_queued_tokens,
        num_cached_tokens=0,
        num_blocks=NUM_BLOCKS,
        num_available_blocks=NUM_BLOCKS - worker.num_used_blocks,
        is_full=2 * (len(worker.streams) + 1) > MAX_NUM_SEQS,
        num_used_blocks=worker.num_used_blocks,
    )


def _decode_candidate(worker: SimulatedWorker) -> DecodeCandidate:
    return DecodeCandidate(
        key=worker.key,
        kind=None,
        block_size=BLOCK_SIZE,
        num_available_blocks=NUM_BLOCKS - worker.num_used_blocks,
        num_used_blocks=worker.num_used_blocks,
        num_cached_blocks=0,
        is_full=worker.is_full,
        num_queued_tokens=worker.num_queued_tokens,
        num_running=len(worker.streams),
    )
