"""A stream that breaks continues where it was: at the same address, which another router may answer by then. Pure.

    ASKED ── accepted ──> OPEN ── the stream breaks ──> BROKEN ── wait ──> asked for what is missing ──> OPEN
      └─ refused: the caller's                             └─ `resume_s` without a message: the error is raised

What has been received is handed to the router as the beginning of the answer; with the seed and the kind of workers
that it began with, the continuation is what would have followed. If nothing has been received yet, the whole request is
sent again, if a router had accepted it; otherwise the caller gets the error at once, or after one try at another
router, if there may be several. (If that one says that the request is running, it is the first router, whose word of
accepting it was lost.) The same holds for a router that named no kind of workers: it is older than this feature. Each
of several answers continues where it was; those that are complete are not requested again.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Iterable

from protos import tandem_inference_pb2 as pb
from rpc.errors import DeadlinePassed, Draining, NoWorker, Overloaded, RequestExists, TandemError, Unreachable
from rpc.metadata import ACCEPTED_KEY
from tandem.answer import AnswersStream

ROOM = -1
"""For truncate_prompt_tokens: as many as the context has room for."""
FIRST_WAIT_S = 0.05
LAST_WAIT_S = 1.0
"""Between two tries, without a word of the router's about it."""

LOST = (Unreachable, Draining)
"""The router is gone, or leaves. Its word that it has given a request up (`NoWorker`) is not to be gone around."""
NOT_YET = (*LOST, NoWorker, Overloaded, RequestExists)
"""What may pass at the next router. NoWorker: it does not know its workers yet. RequestExists: it is the same one, and
has not noticed yet that the stream broke."""


OnBroken = Callable[[TandemError, float], None]
"""(why a stream broke, for how many seconds at most it waits for a router now)."""


class ResumableStream:
    """One request, through as many calls as it takes. `n` answers to it are checked as they come."""

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
        """`request` gets a seed, if it has none. `metadata`: of every call. `timeout_s`: for all calls together.
        `has_others`: the next call may reach another router, now. `resume_s`: how long a broken stream may stay so; 0:
        its error is raised at once. `jitter`: what a wait is multiplied with, so that not all clients of a router come
        back at once."""
        if not request.sampling_params.HasField("seed"):
            request.sampling_params.seed = secrets.randbits(63)
        self._request = request
        self.metadata = metadata
        self._n = max(1, request.sampling_params.n)
        self._answers = AnswersStream(self._n)
        self._begun: dict[int, pb.AnswerSoFar] = {}
        """Of several, by sequence: parts of `_request`."""
        self._now_s = now_s
        self._jitter = jitter
        self._resume_s = resume_s
        self._may_ask_another = has_others
        self._may_be_running = False
        """At a router that was lost before it said so."""
        self._on_broken = on_broken
        self._deadline_s = None if timeout_s is None else now_s() + timeout_s
        self._broken_s: float | None = None
        """Since when nothing has come."""
        self._wait_s = FIRST_WAIT_S
        self._has_received = False
        self.is_accepted = False
        """A router has said that the request is its own."""
        self.num_resumed = 0
        """How often the answer went on in another call."""

    def request(self) -> pb.GenerateRequest:
        """For the next call: what is missing."""
        return self._request

    def timeout_s(self) -> float | None:
        """Of the next call. Raises `DeadlinePassed` where no time is left for one."""
        if self._deadline_s is None:
            return None
        left_s = self._deadline_s - self._now_s()
        if left_s <= 0:
            raise DeadlinePassed("the request's deadline passed while its stream waited for a router")
        return left_s

    def note_metadata(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
        """What the router says before its first message."""
        self.is_accepted = self.is_accepted or any(key == ACCEPTED_KEY for key, _ in metadata or ())

    def accept(self, message: pb.GenerateResponse) -> pb.GenerateResponse:
        """Returns `message`. Raises `StreamBroken` where it is not what was to come."""
        self._answers.accept(message)
        self._has_received = True
        self._take_down(message)
        if self._broken_s is not None:
            self._broken_s, self._wait_s = None, FIRST_WAIT_S
            self.num_resumed += 1
        return message

    def _take_down(self, message: pb.GenerateResponse) -> None:
        """What the next call begins with: the prompt as it was cut, too, whatever the next router has room for."""
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
        """How long to wait before the next call, after one ended with `error`. Raises it where there is none."""
        if self._may_ask_another and not (self.is_accepted or self._has_received) and isinstance(error, LOST):
            self._may_ask_another = False
            self._may_be_running = isinstance(error, Unreachable)
            return 0.0
        now_s, has_just_broken = self._now_s(), self._broken_s is None
        if self._broken_s is None:
            if not self._may_go_on(error):
                raise error
            self._broken_s = now_s
        left_s = self._broken_s + self._resume_s - now_s
        if not isinstance(error, NOT_YET) or left_s <= 0:
            raise error
        if self._deadline_s is not None:
            left_s = min(left_s, max(0.0, self._deadline_s - now_s))
        if has_just_broken:
            self._on_broken(error, left_s)
        wait_s = max(self._wait_s, error.retry_after_s or 0.0) * self._jitter()
        self._wait_s = min(2 * self._wait_s, LAST_WAIT_S)
        return min(wait_s, left_s)

    def _may_go_on(self, error: Exception) -> bool:
        if isinstance(error, RequestExists):
            return self._may_be_running
        if not isinstance(error, LOST):
            return False
        if not self._has_received:  # nothing is to be taken up: all of it is asked anew, of whoever answers now
            return self.is_accepted
        if self._n == 1:
            return bool(self._request.worker_kind)
        return all(answer.worker_kind or answer.is_complete for answer in self._begun.values())

    @property
    def has_ended(self) -> bool:
        """Whether the last message of each answer has come: nothing is missing then, whatever becomes of the call."""
        return self._answers.has_ended

    def answers(self) -> AnswersStream:
        """All that has come."""
        return self._answers
