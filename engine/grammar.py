"""What may come next in an answer that a grammar constrains: structured outputs.

    SamplingParams.grammar ──Grammars.state──> GrammarState of one sequence ──allowed(its answer so far)──> a mask [V]

Owns the tokenizer that grammars are read with, made from the model's folder when the first one comes. What may come
next is a function of the answer's tokens alone: a sequence that is preempted, handed over or goes on elsewhere after k
tokens needs nothing but them. No torch.

Each sequence compiles its grammar for itself, also one that was compiled before: copies share what they have learned of
the text so far, which grows with all their answers up to a limit, and then all would end. It takes a millisecond, or
a second for the worst that a router lets in (router/grammar_checker.py); begins when the request comes, in a thread of
its own; and is waited for when the first token is drawn: the prompt is computed meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
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

    def state(self, grammar: str) -> GrammarState:
        """For a new sequence. Raises `ValueError` where the model cannot be held to a grammar."""
        if not self._eos_token_ids:
            raise ValueError("grammar: the model has no end-of-sequence token, so that an answer could not end")
        if not self._path.is_file():
            raise ValueError(f"grammar: {self._path.parent} has no tokenizer.json, which says what text a token is")
        before = threading.stack_size(STACK_BYTES)  # of threads that are begun now
        try:
            compiled = self._thread.submit(self._compile, grammar)
        finally:
            threading.stack_size(before)
        return GrammarState(compiled, self._vocab_size)

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits, LLTokenizer

        if self._tokenizer is None:  # a third of a second for 49 thousand tokens
            text = self._path.read_text(encoding="utf-8")
            self._tokenizer = LLTokenizer(text, eos_token=sorted(self._eos_token_ids))
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS))


class GrammarState:
    """Of one sequence: follows its answer."""

    def __init__(self, compiled: Future[LLMatcher], vocab_size: int) -> None:
        self._compiled = compiled
        self._vocab_size = vocab_size
        self._spent_s = 0.0
        self._num_taken = 0
        """Of the answer's tokens."""
        self.error = ""
        """Why `allowed` found nothing."""

    def allowed(self, answer: Seq[int]) -> NDArray[np.bool_] | None:
        """As `_allowed`, and within its time: what takes a thousand times as long as others ends its request."""
        before_s = time.thread_time()
        allowed = self._allowed(answer)
        self._spent_s += time.thread_time() - before_s
        if self._spent_s > MAX_SPENT_S + MAX_S_PER_TOKEN * len(answer):
            self.error = self.error or f"what may come next took {self._spent_s:.1f} s to find out: too ambiguous"
            return None
        return allowed

    def _allowed(self, answer: Seq[int]) -> NDArray[np.bool_] | None:
        """Whether each token of the vocabulary may come after `answer`: [V]. End-of-sequence may where the answer is
        complete, and is alone where it cannot go on. None: nothing may, `error` says why."""
        try:
            matcher = self._compiled.result()
        except Exception as error:  # of the tokenizer: bare ones of a library, and the request's end
            self.error = f"the model's tokenizer.json cannot be read: {error}"[:MAX_REASON_CHARS]
            return None
        new, self._num_taken = list(answer[self._num_taken :]), len(answer)
        matcher.consume_tokens(new)
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
