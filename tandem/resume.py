"""Resumes a broken stream where it was: at the same address, where another router may answer by then. Pure.

    ASKED ── accepted ──> OPEN ── the stream breaks ──> BROKEN ── wait ──> asked for what is missing ──> OPEN
      └─ refused: the caller's, unless by a router         └─ `resume_s` without a message: the error is raised
         that leaves or is too old, one of several

The client sends what it has received to the router as the beginning of the answer. With the seed, and the kind of
workers on which the answer began, the continuation is the one that would have followed. If nothing has been received
yet, the client sends the whole request again, provided that a router had accepted it; otherwise the caller gets the
error at once, or, if there may be several routers, after one try at another one. (If that router answers that the
request is running, it is the first router, whose acceptance was lost.) If a router refused because it leaves, or is
too old for the request, more tries follow, for up to `ANOTHER_ROUTER_S`: its successor runs already, or starts, and is
found within that time. The caller also gets the error if the router named no kind of workers, since it is older than
this feature. Each of several answers continues where it was; complete ones are not requested again.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable

from protos import tandem_inference_pb2 as pb
from router.seeds import drawn_seed, has_seed
from rpc.errors import DeadlinePassed, Draining, NoWorker, Outdated, Overloaded, RequestExists, TandemError, Unreachable
from rpc.metadata import ACCEPTED_KEY
from tandem.answer import AnswersStream

ROOM = -1
"""Value of truncate_prompt_tokens: as many as the context has room for."""
FIRST_WAIT_S = 0.05
LAST_WAIT_S = 1.0
"""First and longest wait between two tries, unless the router names a time."""

ANOTHER_ROUTER_S = 10.0
"""How long a request that nobody has accepted waits for another router, if one refused it because it leaves or is too
old: longer than a `SpreadChannel` takes to look up the routers' addresses again."""

LOST = (Unreachable, Draining, Outdated)
"""The router is gone, is leaving, or is older than the request. Not `NoWorker`: a router that gives a request up must
be believed."""
NOT_YET = (*LOST, NoWorker, Overloaded, RequestExists)
"""Errors that a further try may not have. NoWorker: the next router does not know its workers yet. RequestExists: it is
the same router, and has not noticed yet that the stream broke."""


OnBroken = Callable[[TandemError, float], None]
"""Called when a stream begins to wait for a router: with the reason, and the seconds that it waits at most."""


class ResumableStream:
    """One request, over as many calls as necessary. Checks its `n` answers as they come."""

    def __init__(
        self,
        request: pb.GenerateRequest,
        *,
        timeout_s: float | None,
        resume_s: float,
        has_others: bool = False,
        metadata: tuple[tuple[str, str], ...] = (),
        on_broken: OnBroken = lambda error, left_s: None,
        now_s: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = lambda: random.uniform(0.5, 1.0),
    ) -> None:
        """
        request: gets a seed, if it has none.
        timeout_s: for all calls together; None: no limit.
        resume_s: how long a broken stream may wait; 0: its error is raised at once.
        has_others: whether the next call may reach another router.
        metadata: sent with every call.
        jitter: a factor for each wait, so that not all clients of a router return at once.
        """
        if not has_seed(request.sampling_params):
            request.sampling_params.seed = drawn_seed()
        self._request = request
        self.metadata = metadata
        self._n = max(1, request.sampling_params.n)
        self._answers = AnswersStream(self._n)
        self._begun: dict[int, pb.AnswerSoFar] = {}
        """With several answers, by sequence: what was received of each. These messages are parts of `_request`."""
        self._now_s = now_s
        self._jitter = jitter
        self._resume_s = resume_s
        self._has_others = has_others
        self._refused_s: float | None = None
        """When the first router did not accept the request; None before."""
        self._has_successor = False
        """A router refused the request because it leaves, or is too old."""
        self._has_told_of_refusals = False
        self._may_be_running = False
        """The request may be running at a router that was lost before it could accept it."""
        self._on_broken = on_broken
        self._deadline_s = None if timeout_s is None else now_s() + timeout_s
        self._broken_s: float | None = None
        """When the stream broke; None while messages come."""
        self._wait_s = FIRST_WAIT_S
        self._has_received = False
        self.is_accepted = False
        """A router has accepted the request."""
        self.num_resumed = 0
        """How often the answers continued in another call."""

    def request(self) -> pb.GenerateRequest:
        """The request for the next call: it asks for what is missing."""
        return self._request

    def timeout_s(self) -> float | None:
        """The timeout of the next call. Raises `DeadlinePassed` if no time is left."""
        if self._deadline_s is None:
            return None
        left_s = self._deadline_s - self._now_s()
        if left_s <= 0:
            raise DeadlinePassed("the request's deadline passed while its stream waited for a router")
        return left_s

    def note_metadata(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
        """Take in the router's initial metadata, which says that it accepts the request."""
        self.is_accepted = self.is_accepted or any(key == ACCEPTED_KEY for key, _ in metadata or ())

    def accept(self, message: pb.GenerateResponse) -> pb.GenerateResponse:
        """Take in a message, and return it. Raises `StreamBroken` if it is not the one that was due."""
        self._answers.accept(message)
        self._has_received, self._wait_s = True, FIRST_WAIT_S
        self._take_down(message)
        if self._broken_s is not None:
            self._broken_s = None
            self.num_resumed += 1
        return message

    def _take_down(self, message: pb.GenerateResponse) -> None:
        """Add `message` to the request of a next call. This also fixes how the prompt was cut, whatever room the next
        router has."""
        if self._request.truncate_prompt_tokens == ROOM and message.prompt_tokens:
            self._request.truncate_prompt_tokens = message.prompt_tokens
        if self._n == 1:
            self._request.output_token_ids.extend(message.token_ids)
            self._request.worker_kind = self._request.worker_kind or message.worker_kind
            return
        if message.sequence not in self._begun:
            self._begun[message.sequence] = self._request.answers_so_far.add(sequence=message.sequence)
        answer = self._begun[message.sequence]
        answer.token_ids.extend(message.token_ids)
        answer.worker_kind = answer.worker_kind or message.worker_kind
        if message.HasField("usage"):
            answer.is_complete = True
            answer.ClearField("token_ids")

    def wait_s(self, error: Exception) -> float:
        """How long to wait before the next call, after one ended with `error`. Raises `error` if there is no next
        call."""
        now_s, has_just_broken = self._now_s(), self._broken_s is None
        if has_just_broken and self._has_others and not (self.is_accepted or self._has_received):
            wait_s = self._wait_for_another_s(error, now_s)
            if wait_s is not None:
                return wait_s
        if self._broken_s is None:
            if not self._may_go_on(error):
                raise error
            self._broken_s = now_s
        left_s = self._broken_s + self._resume_s - now_s
        if not isinstance(error, NOT_YET) or left_s <= 0:
            raise error
        left_s = min(left_s, self._deadline_left_s(now_s))
        if has_just_broken:
            self._on_broken(error, left_s)
        return min(max(self._next_wait_s(), (error.retry_after_s or 0.0) * self._jitter()), left_s)

    def _wait_for_another_s(self, error: Exception, now_s: float) -> float | None:
        """How long to wait before asking another router for a request that none has accepted; None if none is to be
        asked. The time to retry that such a router names is for those who know no other."""
        if not isinstance(error, LOST):
            return None
        self._may_be_running = self._may_be_running or isinstance(error, Unreachable)
        self._has_successor = self._has_successor or isinstance(error, Draining | Outdated)
        if self._refused_s is None:
            self._refused_s = now_s
            return 0.0
        left_s = self._refused_s + min(self._resume_s, ANOTHER_ROUTER_S) - now_s
        if not self._has_successor or left_s <= 0:
            return None
        left_s = min(left_s, self._deadline_left_s(now_s))
        if not self._has_told_of_refusals:
            self._has_told_of_refusals = True
            self._on_broken(error, left_s)
        return min(self._next_wait_s(), left_s)

    def _next_wait_s(self) -> float:
        wait_s = self._wait_s * self._jitter()
        self._wait_s = min(2 * self._wait_s, LAST_WAIT_S)
        return wait_s

    def _deadline_left_s(self, now_s: float) -> float:
        return math.inf if self._deadline_s is None else max(0.0, self._deadline_s - now_s)

    def _may_go_on(self, error: Exception) -> bool:
        if isinstance(error, RequestExists):
            return self._may_be_running
        if not isinstance(error, LOST):
            return False
        if not self._has_received:  # there is nothing to continue: the whole request is sent again
            return self.is_accepted
        if self._n == 1:
            return bool(self._request.worker_kind)
        return all(answer.worker_kind or answer.is_complete for answer in self._begun.values())

    @property
    def has_ended(self) -> bool:
        """Whether the last message of each answer has come: then nothing is missing, however the call ends."""
        return self._answers.has_ended

    def answers(self) -> AnswersStream:
        """The answers so far."""
        return self._answers
