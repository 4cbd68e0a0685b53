"""The room that a plan counts as taken on its workers until their reported load includes the request.

    TAKEN ──settle_decode──> prompt still counted ──settle──> SETTLED ──end──> its trials end, too
            the decode worker                      the prompt is computed,
            has answered                           or will not be

Each part is given back once; repeating it is harmless.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from protos import tandem_worker_pb2 as pb
from router.ejection import Trial
from router.request_events import Plan
from router.served_kind import Kind
from router.worker_handle import WorkerHandle


class TakenRoom:
    """The room of one attempt. Its `trials` record how the workers did."""

    def __init__(
        self,
        decode: WorkerHandle,
        prefill: WorkerHandle | None,
        num_tokens: int,
        *,
        kind: Kind,
        num_cached_tokens: int = 0,
        num_blocks_held: int = 0,
        num_blocks_shared: int = 0,
        trials: Sequence[Trial] = (),
        on_end: Callable[[TakenRoom], None] = lambda _: None,
    ) -> None:
        """
        kind: the workers' kind for this request.
        num_tokens: tokens of the prompt.
        num_cached_tokens: those that the worker which computes the prompt has cached.
        num_blocks_held: blocks of the prompt that the decode worker has cached.
        num_blocks_shared: those of them that another answer keeps in use, so that they take no room.
        on_end: called when the attempt has ended.
        """
        is_stay = decode.facts.role == pb.Role.ROLE_PREFILL
        self.plan = Plan(decode.key, prefill.key if prefill else None, is_stay=is_stay)
        self.num_tokens = num_tokens
        self.trials = tuple(trials)
        self._on_end = on_end
        self.kind = kind
        self.decode = decode
        self._is_decode_settled = False
        self.prefiller = prefill or decode
        """The worker that computes the prompt."""
        self._is_prompt_settled = False
        self.num_tokens_to_prefill = max(1, num_tokens - num_cached_tokens)
        """Tokens of the prompt that are not cached where it is computed."""
        self.num_cached_tokens = num_cached_tokens
        self._num_blocks = decode.facts.num_blocks(num_tokens) - num_blocks_shared
        if prefill is not None:
            self._num_blocks += decode.facts.num_state_blocks
        self.num_tokens_to_move = max(0, num_tokens - num_blocks_held * decode.facts.block_size)
        """Tokens whose KV moves to the decode worker if another worker computes the prompt."""
        decode.num_planned_blocks += self._num_blocks
        decode.num_planned_seqs += 1
        self.prefiller.num_prefill_tokens += self.num_tokens_to_prefill
        self.num_tokens_to_compute = self.prefiller.num_queued_tokens
        """Tokens that `prefiller` has queued: the prompt's, and those before it."""

    def taken(self) -> list[tuple[WorkerHandle, str, int]]:
        """What this plan still counts as taken, as (worker, "blocks", "sequences" or "tokens", how many)."""
        taken = []
        if not self._is_decode_settled:
            taken += [(self.decode, "blocks", self._num_blocks), (self.decode, "sequences", 1)]
        if not self._is_prompt_settled:
            taken.append((self.prefiller, "tokens", self.num_tokens_to_prefill))
        return taken

    @property
    def is_settled(self) -> bool:
        return self._is_decode_settled and self._is_prompt_settled

    def settle_decode(self) -> None:
        """The decode worker has answered."""
        if not self._is_decode_settled:
            self.decode.num_planned_blocks -= self._num_blocks
            self.decode.num_planned_seqs -= 1
            self._is_decode_settled = True

    def settle(self) -> None:
        """The prompt is computed, or will not be."""
        self.settle_decode()
        if not self._is_prompt_settled:
            self.prefiller.num_prefill_tokens -= self.num_tokens_to_prefill
            self._is_prompt_settled = True

    def end(self) -> None:
        """The attempt is over."""
        self.settle()
        for trial in self.trials:
            trial.end()
        self._on_end(self)
