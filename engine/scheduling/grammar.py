"""What may come next in an answer that a grammar constrains: structured outputs.

    SamplingParams.grammar ──Grammars.state──> GrammarState of one sequence ──allowed(its answer so far)──> a mask [V]
                                                                           └──propose(its answer so far)──> guesses

Owns the tokenizer that grammars are read with, made from the model's folder when the first one comes. What may come
next is a function of the answer's tokens alone: a sequence that is preempted, handed over or goes on elsewhere after k
tokens needs nothing but them. No torch.

Much of such an answer is no choice: the names in an object, and all between them. What alone may come is a good guess
at what comes (speculation.py), if none of the tokens themselves, as a text may be cut into tokens in several
ways. What a grammar has been asked about tokens that turn out to be wrong is taken back.

Each sequence compiles its grammar for itself, also one that was compiled before: copies share what they have learned of
the text so far, which grows with all their answers up to a limit, and then all would end. It takes a millisecond, or
a second for the worst that a router lets in (router/validation/grammar_checker.py), and for the first one of all; and
begins when the request comes, in a thread of its own, one after the other. Meanwhile the scheduler goes on with the
prompt but for its last token, and with others.
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

if TYPE_CHECKING:  # imported with the first grammar: a machine may have none of it (benchmarks/gpu.py)
    from llguidance import LLMatcher, LLTokenizer

LIMITS: dict[str, Any] = {"step_max_items": 10_000, "step_lexer_fuel": 50_000, "verbose_errors": False}
"""Of the work for one token, for which schemas as people write them take 20 µs. A grammar that passes them ends its
request. As the router's."""
MAX_REASON_CHARS = 400
MAX_SPENT_S = 0.5
MAX_S_PER_TOKEN = 0.002
"""That finding out what may come next may take in one sequence: twenty times as long as a rule, and half a second."""
MAX_SPENT_ON_DRAFTS_S = 0.05
"""That guesses may take, and MAX_S_PER_TOKEN beside it. Past it nothing is guessed, and nothing ends for it."""
COMPILE_PATIENCE_S = 0.005
"""Most grammars are compiled within this time."""
STACK_BYTES = 16 << 20
"""Of the thread that compiles: more than what a router tries a grammar on, which nests as deeply as its text says."""


class Grammars:
    """Of one engine. Used by the stepping thread."""

    def __init__(self, model_folder: str | Path, *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._path = Path(model_folder) / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._thread = ThreadPoolExecutor(1, "grammars")  # which is begun with the first grammar
        self._tokenizer: LLTokenizer | None = None
        self.on_compiled: Callable[[], None] | None = None
        """Called, on any thread, where a grammar has come, or is not going to."""

    def state(self, grammar: str) -> GrammarState:
        """For a new sequence. Raises `ValueError` where the model cannot be held to a grammar."""
        if not self._eos_token_ids:
            raise ValueError("grammar: the model has no end-of-sequence token, so that an answer could not end")
        if not self._path.is_file():
            raise ValueError(f"grammar: {self._path.parent} has no tokenizer.json, which says what text a token is")
        return GrammarState(lambda: self._begin_to_compile(grammar), self._vocab_size, self._eos_token_ids)

    def _begin_to_compile(self, grammar: str) -> Future[LLMatcher]:
        before = threading.stack_size(STACK_BYTES)  # of threads that are begun now
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
    """Of one sequence: follows its answer, and drafts behind it for as long as they are not known to be wrong."""

    def __init__(
        self, compile_anew: Callable[[], Future[LLMatcher]], vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._compile_anew = compile_anew
        self._compiled = compile_anew()
        self._patient_until_s = time.monotonic() + COMPILE_PATIENCE_S
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._num_known = 0
        """Tokens of the answer that the matcher has taken, and that are no drafts."""
        self._drafts: list[int] = []
        """Drafts that it has taken behind them."""
        self._spent_s = 0.0
        self._spent_on_drafts_s = 0.0
        self.error = ""
        """Why `allowed` found nothing."""

    def wait_briefly(self) -> bool:
        """Whether it is compiled, or is within COMPILE_PATIENCE_S of when the request came: without waiting so long
        most would take a step more. No longer, however many have come behind one that takes long: streams wait for who
        asks. Until it is compiled, `allowed` waits for it."""
        patience_s = max(0.0, self._patient_until_s - time.monotonic())
        return self._compiled.done() or bool(wait([self._compiled], patience_s).done)

    def wait_until_compiled(self) -> None:
        wait([self._compiled])

    def close(self) -> None:
        """Its sequence has ended: what has not begun to be compiled need not be, for those behind it."""
        self._compiled.cancel()

    def propose(self, answer: Seq[int], look_up: Callable[[list[int]], list[int]], most: int) -> list[int]:
        """Guesses at what follows `answer`, at most so many: what alone may come, as the tokenizer cuts its text, and
        behind it what `look_up` knows to follow it, up to what may not come (not all that may not: that would take
        masks). No ends. None where guessing has taken its time."""
        if not self._may_guess(len(answer)):
            return []
        before_s = time.thread_time()
        matcher = self._at(answer, 0)
        if matcher is None or matcher.is_error():
            return []  # said when the next token is drawn
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
        """Whether each token of the vocabulary may come after `answer`: [V]. End-of-sequence may where the answer is
        complete, and is alone where it cannot go on. None: nothing may, and `error` says why; or with drafts, the last
        `num_drafts` of `answer`, what may is not worth finding out.

        Within its time: what takes a thousand times as long as others ends its request."""
        if num_drafts and self.error:
            return None  # in the step in which the answer itself came to an error, which is told
        before_s = time.thread_time()
        if num_drafts:
            allowed = self._allowed(answer, num_drafts) if self._may_guess(len(answer)) else None
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

    def _may_guess(self, num_tokens: int) -> bool:
        return self._spent_on_drafts_s <= MAX_SPENT_ON_DRAFTS_S + MAX_S_PER_TOKEN * num_tokens

    def _allowed(self, answer: Seq[int], num_drafts: int) -> NDArray[np.bool_] | None:
        """Sets `error` where it is None."""
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
        """The matcher when it has taken `answer` and nothing else. None: there is none, `error` says why."""
        try:
            matcher = self._compiled.result()
        except Exception as error:  # of the tokenizer: bare ones of a library, and the request's end
            self.error = f"the model's tokenizer.json cannot be read: {error}"[:MAX_REASON_CHARS]
            return None
        behind = list(answer[self._num_known :])
        num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._drafts, behind, strict=False)))
        if num_same < len(self._drafts) and not matcher.rollback(len(self._drafts) - num_same):
            self._forget_drafts()  # some grammars know no way back, such as ones with "stop="
            return self._at(answer, num_drafts)
        matcher.consume_tokens(behind[num_same:])
        self._num_known = len(answer) - num_drafts
        self._drafts = list(answer[self._num_known :])
        return matcher

    def _forget_drafts(self) -> None:
        """Begin anew where the matcher has taken drafts that it cannot give back: the grammar is compiled again, the
        answer read again, and nothing is guessed in it any more."""
        self._compiled = self._compile_anew()
        self._num_known = 0
        self._drafts = []
        self._spent_on_drafts_s = float("inf")
        self.error = ""
