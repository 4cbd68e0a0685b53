"""Structured outputs: which tokens may come next in an answer that a grammar constrains.

    SamplingParams.grammar ──Grammars.state──> GrammarState of one sequence ──allowed(its answer so far)──> a mask [V]
                                                                           └──propose(its answer so far)──> guesses

Owns the tokenizer that grammars are compiled with, made from the model's folder for the first grammar. What may come
next depends on the answer's tokens alone, so a sequence that is preempted, handed over or continued elsewhere after k
tokens needs no other state. No torch.

Much of such an answer is forced text, such as an object's keys and punctuation. Forced text makes good drafts
(speculation.py). It does not determine the tokens, since a text can be cut into tokens in several ways. The matcher
rolls back drafts that turn out to be wrong.

Each sequence compiles its own grammar, even if the same one was compiled before: copies of a matcher share its lexer
states, which grow with the answers of all copies up to a limit, and at the limit all copies would fail. Compiling takes
a millisecond, or a second for the worst grammar that a router accepts (router/validation/grammar_process.py) and for
the first one. It starts when the request arrives, on one thread, one grammar after the other. Meanwhile the scheduler
computes the prompt up to its last token, and other sequences.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # imported with the first grammar: llguidance may not be installed (benchmarks/gpu.py)
    from llguidance import LLMatcher, LLTokenizer

LIMITS: dict[str, Any] = {"step_max_items": 10_000, "step_lexer_fuel": 50_000, "verbose_errors": False}
"""Limits on the work for one token; usual schemas take 20 µs. A grammar that exceeds them fails its request. The router
uses the same limits."""
MAX_REASON_CHARS = 400
MAX_SPENT_S = 0.5
MAX_S_PER_TOKEN = 0.002
"""A sequence may spend MAX_SPENT_S, and MAX_S_PER_TOKEN per token of its answer (twenty times the usual cost), on
computing masks."""
MAX_SPENT_ON_DRAFTS_S = 0.05
"""A sequence may spend this, and MAX_S_PER_TOKEN per token, on drafts. Beyond that it gets no more drafts."""
COMPILE_PATIENCE_S = 0.005
"""How long a step waits for a new grammar: most are compiled within this time."""
STACK_BYTES = 16 << 20
"""Stack of the compiling thread: larger than that of the router's trial compilation, since compiling recurses as deeply
as the grammar's text nests."""


class Grammars:
    """One per engine. Used by the stepping thread."""

    def __init__(self, model_folder: str | Path, *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._path = Path(model_folder) / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._thread = ThreadPoolExecutor(1, "grammars")  # starts its thread with the first grammar
        self._tokenizer: LLTokenizer | None = None
        self.on_compiled: Callable[[], None] | None = None
        """Called, on any thread, when a grammar has been compiled, has failed or was cancelled."""

    def state(self, grammar: str) -> GrammarState:
        """Create the state of a new sequence and begin to compile. Raises `ValueError` if the model cannot follow
        grammars."""
        if not self._eos_token_ids:
            raise ValueError("grammar: the model has no end-of-sequence token, so that an answer could not end")
        if not self._path.is_file():
            raise ValueError(f"grammar: {self._path.parent} has no tokenizer.json, which says what text a token is")
        return GrammarState(lambda: self._begin_to_compile(grammar), self._vocab_size, self._eos_token_ids)

    def _begin_to_compile(self, grammar: str) -> Future[LLMatcher]:
        before = threading.stack_size(STACK_BYTES)  # applies to threads that are started from now on
        try:
            compiled = self._thread.submit(self._compile, grammar)
        finally:
            threading.stack_size(before)
        if (on_compiled := self.on_compiled) is not None:
            compiled.add_done_callback(lambda _: on_compiled())
        return compiled

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits, LLTokenizer

        if self._tokenizer is None:  # a third of a second for 49 thousand tokens
            text = self._path.read_text(encoding="utf-8")
            self._tokenizer = LLTokenizer(text, eos_token=sorted(self._eos_token_ids))
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS))


class GrammarState:
    """One per sequence: follows its answer, and the drafts after it until they are known to be wrong."""

    def __init__(
        self, compile_anew: Callable[[], Future[LLMatcher]], vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._compile_anew = compile_anew
        self._compiled = compile_anew()
        self._patient_until_s = time.monotonic() + COMPILE_PATIENCE_S
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._num_known = 0
        """Tokens of the answer, without drafts, that the matcher has consumed."""
        self._drafts: list[int] = []
        """Drafts that the matcher has consumed after them."""
        self._spent_s = 0.0
        self._spent_on_drafts_s = 0.0
        self.error = ""
        """Why `allowed` returned None."""

    def wait_briefly(self) -> bool:
        """Wait for the grammar until COMPILE_PATIENCE_S after the request came, and return whether it is compiled.
        Without this wait most requests with a grammar would need one more step. The wait ends at a fixed time, however
        many grammars are queued, since it delays all streams. Before the grammar is compiled, `allowed` blocks."""
        patience_s = max(0.0, self._patient_until_s - time.monotonic())
        return self._compiled.done() or bool(wait([self._compiled], patience_s).done)

    def wait_until_compiled(self) -> None:
        wait([self._compiled])

    def close(self) -> None:
        """The sequence has ended: cancel the compilation if it has not begun, so that queued ones need not wait."""
        self._compiled.cancel()

    def propose(self, answer: Seq[int], look_up: Callable[[list[int]], list[int]], most: int) -> list[int]:
        """Guess at most `most` tokens that follow `answer`: first the forced text, as the tokenizer cuts it into
        tokens, then what `look_up` finds to follow that, up to the first token that the grammar is known to forbid (an
        exact check would need masks). Never an end-of-sequence token. Empty once the time for drafts is used up."""
        if not self.may_guess(len(answer)):
            return []
        before_s = time.thread_time()
        matcher = self._at(answer, 0)
        if matcher is None or matcher.is_error():
            return []  # `allowed` reports the error when the next token is sampled
        forced = matcher.compute_ff_tokens()
        drafts = (forced + look_up(forced))[:most]
        num_drafts = next((i for i, token_id in enumerate(drafts) if token_id in self._eos_token_ids), len(drafts))
        num_drafts = matcher.validate_tokens(drafts[:num_drafts])
        self._spent_on_drafts_s += time.thread_time() - before_s
        if matcher.is_error():
            self._forget_drafts()
            return []
        return drafts[:num_drafts]

    def allowed(self, answer: Seq[int], num_drafts: int = 0) -> NDArray[np.bool_] | None:
        """Return the mask of tokens that may come after `answer`, [V]. End-of-sequence is allowed where the answer is
        complete, and is the only allowed token where the answer cannot go on. The last `num_drafts` tokens of `answer`
        are drafts. None: no token may come, and `error` says why; or, with drafts, computing the mask is not worth its
        time.

        A sequence that exceeds its time (MAX_SPENT_S) gets an error."""
        if num_drafts and self.error:
            return None  # the answer without drafts came to an error in this step, which is reported
        before_s = time.thread_time()
        if num_drafts:
            allowed = self._allowed(answer, num_drafts) if self.may_guess(len(answer)) else None
            self._spent_on_drafts_s += time.thread_time() - before_s
            if self.error:
                self._forget_drafts()
            return allowed
        allowed = self._allowed(answer, 0)
        self._spent_s += time.thread_time() - before_s
        if self._spent_s > MAX_SPENT_S + MAX_S_PER_TOKEN * len(answer):
            self.error = self.error or f"what may come next took {self._spent_s:.1f} s to find out: too ambiguous"
            return None
        return allowed

    def may_guess(self, num_tokens: int) -> bool:
        """Whether there is time left for drafts in an answer of `num_tokens` tokens."""
        return self._spent_on_drafts_s <= MAX_SPENT_ON_DRAFTS_S + MAX_S_PER_TOKEN * num_tokens

    def _allowed(self, answer: Seq[int], num_drafts: int) -> NDArray[np.bool_] | None:
        """Compute the mask; sets `error` where it returns None."""
        matcher = self._at(answer, num_drafts)
        if matcher is None:
            return None
        words = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():
            self.error = matcher.get_error().removesuffix("<non-verbose/>").strip()[:MAX_REASON_CHARS]
            return None
        allowed = np.zeros(self._vocab_size, dtype=np.bool_)
        bits = np.unpackbits(words, count=min(8 * len(words), self._vocab_size), bitorder="little")
        allowed[: len(bits)] = bits
        if not allowed.any():
            self.error = "no token of the model can come next"
            return None
        return allowed

    def _at(self, answer: Seq[int], num_drafts: int) -> LLMatcher | None:
        """Return the matcher after it has consumed exactly `answer`. None: there is no matcher, and `error` says
        why."""
        assert len(answer) >= self._num_known, f"an answer of {self._num_known} tokens is asked about as a shorter one"
        try:
            matcher = self._compiled.result()
        except Exception as error:  # the library raises bare exceptions for a bad tokenizer; only this request fails
            self.error = f"the model's tokenizer.json cannot be read: {error}"[:MAX_REASON_CHARS]
            return None
        behind = list(answer[self._num_known :])
        num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._drafts, behind, strict=False)))
        if num_same < len(self._drafts) and not matcher.rollback(len(self._drafts) - num_same):
            self._forget_drafts()  # some grammars cannot be rolled back, such as those with "stop="
            return self._at(answer, num_drafts)
        matcher.consume_tokens(behind[num_same:])
        self._num_known = len(answer) - num_drafts
        self._drafts = list(answer[self._num_known :])
        return matcher

    def _forget_drafts(self) -> None:
        """Start over when the matcher cannot roll back its drafts: compile the grammar again, consume the answer again,
        and propose no more drafts in this sequence."""
        self._compiled = self._compile_anew()
        self._num_known = 0
        self._drafts = []
        self._spent_on_drafts_s = float("inf")
        self.error = ""
