"""Sends one request's commands to workers, and attaches its inbox to their sessions. Decides nothing.

From the first command to a worker on, the worker's events for the request go to the request's inbox, until `cancel` or
`hang_up`.
"""

from __future__ import annotations

from typing import Any

from protos import tandem_worker_pb2 as pb
from protos.tandem_kv_transfer_pb2 import Grant
from router.asked_answer import AskedAnswer
from router.needs import Needs
from router.request_events import WorkerKey, WorkerLost
from router.served_kind import Kind
from router.worker_pool import WorkerPool
from router.worker_session import Inbox

_ROUTERS_OWN = (
    "stop",
    "n",
    "structured_outputs",
    "priority",
    "bad_words",
    "thinking_token_budget",
    "is_thinking_token_budget_target",
    "is_max_tokens_target",
)
"""Sampling parameters that the router itself handles, and that workers do not get."""


class WorkerCommands:
    """The commands of one request. Attempts follow one another, each with a number and the tokens that exist before
    it."""

    def __init__(self, pool: WorkerPool, inbox: Inbox, asked: AskedAnswer) -> None:
        self.name = asked.name
        self._pool = pool
        self._inbox = inbox
        self._request = pb.EngineRequest(
            request_id=asked.name,
            prompt_token_ids=asked.prompt_token_ids,
            sampling_params=asked.sampling_params,
            grammar=asked.grammar,
            cache_salt=asked.cache_salt,
            lora_name=asked.lora_name,
            bad_words=[pb.BadWord(token_ids=word) for word in asked.bad_words],
            thinking_budget=asked.thinking_budget,
        )
        for field in _ROUTERS_OWN:
            self._request.sampling_params.ClearField(field)
        self._told: set[WorkerKey] = set()
        """Workers that were sent a command."""
        self._num_frees_when_asked = 0
        """The decode worker's `num_frees` when the running attempt was sent to it (see `WorkerHandle.note_busy`)."""

    def needs(self, kind: Kind | None) -> Needs:
        """The request's needs. `kind`: the kind of the worker on which the answer has begun, if it has."""
        request = self._request
        uses = {
            "takes_grammars": request.grammar,
            "takes_cache_salts": request.cache_salt,
            "takes_allowed_token_ids": request.sampling_params.allowed_token_ids,
            "takes_bad_words": request.bad_words,
            "takes_thinking_budgets": request.HasField("thinking_budget"),
        }
        features = frozenset(name for name, used in uses.items() if used)
        return Needs(kind=kind, lora_name=request.lora_name, features=features)

    def reserve(self, worker: WorkerKey, kind: Kind, attempt: int, output_token_ids: list[int]) -> None:
        """Begin an attempt on workers of that kind, which continues after these tokens: reserve its memory."""
        self._begin(kind, attempt, output_token_ids)
        self._ask(worker, pb.DecodeCommand(reserve=self._request))

    def generate(self, worker: WorkerKey, kind: Kind, attempt: int, output_token_ids: list[int]) -> None:
        """Begin an attempt that one worker computes completely."""
        self._begin(kind, attempt, output_token_ids)
        self._ask(worker, self._in_words_of(worker, generate=self._request))

    def prefill(self, worker: WorkerKey, grant: Grant) -> None:
        """Have the prompt of the begun attempt computed: `grant` is its memory on the decode worker."""
        self._send(worker, pb.PrefillCommand(prefill=pb.PrefillRequest(request=self._request, grant=grant)))

    def cancel(self, worker: WorkerKey, attempt: int) -> None:
        """Cancel the attempt, and stop listening to the worker."""
        handle = self._pool.get(worker)
        if handle is None or handle.session is None:
            return
        handle.session.detach(self.name)
        cancel = pb.Cancel(request_id=self.name, attempt=attempt)
        handle.session.send(self._in_words_of(worker, cancel=cancel))

    def note_busy(self, worker: WorkerKey) -> None:
        """The worker has said Busy to the last command."""
        if (handle := self._pool.get(worker)) is not None:
            handle.note_busy(self._num_frees_when_asked)

    def hang_up(self) -> None:
        """The request is over: stop listening to all workers."""
        for key in self._told:
            if (handle := self._pool.get(key)) is not None and handle.session is not None:
                handle.session.detach(self.name)

    def _begin(self, kind: Kind, attempt: int, output_token_ids: list[int]) -> None:
        self._request.lora_digest = kind.lora_digest
        self._request.attempt = attempt
        self._request.output_token_ids[:] = output_token_ids

    def _in_words_of(self, key: WorkerKey, **command: Any) -> pb.PrefillCommand | pb.DecodeCommand:
        """The command in the message type of the worker's role. (A worker that is gone gets no command anyway.)"""
        handle = self._pool.get(key)
        is_prefill = handle is not None and handle.facts.role == pb.Role.ROLE_PREFILL
        return pb.PrefillCommand(**command) if is_prefill else pb.DecodeCommand(**command)

    def _ask(self, key: WorkerKey, command: pb.PrefillCommand | pb.DecodeCommand) -> None:
        """Send a command that the worker may answer with Busy."""
        if (handle := self._pool.get(key)) is not None:
            self._num_frees_when_asked = handle.num_frees
        self._send(key, command)

    def _send(self, key: WorkerKey, command: pb.PrefillCommand | pb.DecodeCommand) -> None:
        handle = self._pool.get(key)
        if handle is None or handle.session is None or handle.session.is_lost:
            self._inbox(WorkerLost(key))
            return
        self._told.add(key)
        handle.session.attach(self.name, self._inbox)
        handle.session.send(command)
