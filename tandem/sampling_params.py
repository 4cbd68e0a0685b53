"""Sampling parameters of an offline caller: vLLM's `SamplingParams` and `BeamSearchParams`.

The engine knows token ids only, so it has a smaller class of its own (`engine.sampling_params`); the class here adds
what concerns text, and a seed that may be absent.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence, Set
from dataclasses import InitVar, dataclass, field, fields
from enum import Enum
from functools import lru_cache
from numbers import Integral, Real
from typing import Any

from engine import sampling_params as engine_params
from protos import tandem_inference_pb2 as pb
from router.seeds import RANDOM, seed_of_sequence
from router.text.structured_outputs import grammar_of
from router.validation.sampling import MAX_BAD_WORD_CHARS, MAX_BAD_WORDS, MAX_N
from tandem.checks import check_names, check_text, is_list, is_number, is_whole, without_array
from tandem.structured_outputs import StructuredOutputsParams

UNLIMITED_TOKENS = 2**31 - 1
"""The engine's max_tokens if there is no bound: the context ends the answer first."""

_KINDS: dict[str, tuple[str, Any, Any]] = {
    "int": ("a whole number", Integral, int), "float": ("a number", Real, float), "bool": ("True or False", bool, bool),
}  # fmt: skip
"""By a field's type: its name in errors, the type that may be given, and the type to which the value is converted."""

_DONE_ANYWAY: dict[str, tuple[Any, ...]] = {
    "detokenize": (True,), "spaces_between_special_tokens": (True, False), "logits_processors": (None, []),
    "truncate_prompt_tokens": (None,), "extra_args": (None, {}), "flat_logprobs": (False,),
    "logprob_token_ids": (None, []), "repetition_detection": (None,), "skip_clone": (False,),
    "stream_interval": (None, 1), "watermarking": (None, False),
}  # fmt: skip
"""vLLM's fields that may only have these values, in the order of the class."""


class RequestOutputKind(Enum):
    """What each output of `AsyncLLM.generate` contains."""

    CUMULATIVE = 0
    """Everything so far of all answers."""
    DELTA = 1
    """Only what is new, and only of answers that have something new."""
    FINAL_ONLY = 2
    """Everything: there is one output, at the end."""


@dataclass(kw_only=True)
class SamplingParams:
    """Names, meanings and bounds are vLLM's, and so is which fields may be None.

    Raises `ValueError` naming the field, its bound and its value, and `TypeError` for an unknown name. Fields may be
    assigned, as vLLM's users do with the result of `LLM.get_default_sampling_params`: `check` validates all of them
    when they are used.
    """

    n: int = 1
    """Answers per prompt, which is prefilled once. With a seed, answer i is the one to seed + i."""
    max_tokens: int | None = 16
    """None: as many as the context has room for."""
    min_tokens: int = 0
    """Before this many tokens neither end-of-sequence, stop tokens nor stop strings end the answer."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1 keeps the whole vocabulary."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: str | Sequence[str] | None = ()
    """The answer ends before any of these texts."""
    stop_token_ids: Sequence[int] | None = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    """None or -1: a seed is drawn for each request."""
    skip_special_tokens: bool = True
    allowed_token_ids: Sequence[int] | None = None
    """No other token is ever sampled. None: any token may be."""
    bad_words: Sequence[str] | None = None
    """Texts that the answer must not contain: see protos/tandem_inference.proto."""
    logit_bias: Mapping[int, float] | None = field(default_factory=dict)
    logprobs: int | None = None
    """Return the logprob of each token, and of this many of the likeliest ones. None: return none."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens. For that, the whole prompt is computed, whatever is cached."""
    structured_outputs: StructuredOutputsParams | None = None
    """What constrains the answer. None: any text."""
    thinking_token_budget: int | None = None
    """For `LLM.chat`: after this many tokens of reasoning, the answer must begin. None or -1: there is no bound."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """For `AsyncLLM`. `LLM` returns whole answers in any case."""

    # Parameters of vLLM that are accepted with values that ask for nothing special. They are not stored as fields.
    detokenize: InitVar[bool] = True
    spaces_between_special_tokens: InitVar[bool] = True
    logits_processors: InitVar[Sequence[Any] | None] = None
    truncate_prompt_tokens: InitVar[int | None] = None
    extra_args: InitVar[Mapping[str, Any] | None] = None
    flat_logprobs: InitVar[bool] = False
    logprob_token_ids: InitVar[Sequence[int] | None] = None
    repetition_detection: InitVar[object] = None
    skip_clone: InitVar[bool] = False
    stream_interval: InitVar[int | None] = None
    watermarking: InitVar[bool | None] = None

    def __new__(cls, *_: object, **given: object) -> SamplingParams:
        names = [name for name in given if name not in _DONE_ANYWAY]
        check_names("SamplingParams", names, [entry.name for entry in fields(cls)])
        return super().__new__(cls)

    def __post_init__(self, *done_anyway: object) -> None:
        for name, value in zip(_DONE_ANYWAY, done_anyway, strict=True):
            _check_done_anyway(name, value)
        self.check()

    def __setattr__(self, name: str, value: object) -> None:
        if name in _DONE_ANYWAY:
            _check_done_anyway(name, value)
            return
        if name not in self.__dataclass_fields__:
            try:
                check_names("SamplingParams", [name], [entry.name for entry in fields(self)])
            except TypeError as error:
                raise AttributeError(str(error)) from None
        super().__setattr__(name, value)

    def check(self) -> None:
        """Raise `ValueError` naming the field, its bound and its value, if one is wrong."""
        for entry in fields(self):
            _plain(entry.name, str(entry.type), getattr(self, entry.name))
        if not 1 <= self.n <= MAX_N:
            raise ValueError(f"n must be an integer in [1, {MAX_N}], is {self.n!r}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must fit 64 bits, is {self.seed!r:.80}")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise ValueError(f"output_kind must be a RequestOutputKind, is {self.output_kind!r:.80}")
        _check_stop(self.stop)
        _check_bad_words(self.bad_words)
        some_word = ((0,),) if self.bad_words else ()
        allowed = self.for_engine(0, bad_words_token_ids=some_word).allowed_token_ids  # checks the bounds
        if not -1 <= (self.thinking_token_budget or 0) < 2**31:
            raise ValueError(f"thinking_token_budget must be -1 or more, is {self.thinking_token_budget!r:.80}")
        if self.bounds_thinking and allowed:
            said = "they may lack the token that ends the reasoning"
            raise ValueError(f"thinking_token_budget cannot be combined with allowed_token_ids: {said}")
        if self.allowed_token_ids is not None and not allowed:
            raise ValueError("allowed_token_ids must not be empty: for any token, leave it out")

    def clone(self) -> SamplingParams:
        """A copy that shares nothing with this one."""
        return copy.deepcopy(self)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def bounds_thinking(self) -> bool:
        return self.thinking_token_budget is not None and self.thinking_token_budget >= 0

    def for_engine(
        self, drawn_seed: int, sequence: int = 0, *, bad_words_token_ids: Sequence[tuple[int, ...]] = ()
    ) -> engine_params.SamplingParams:
        """The engine's parameters for answer `sequence`. `drawn_seed`: used if no seed is given. `bad_words_token_ids`:
        the token ids of `bad_words` (`router.text.bad_words`)."""
        values = {
            entry.name: _plain(entry.name, str(entry.type), getattr(self, entry.name))
            for entry in fields(self)
            if entry.name in _AS_THEY_ARE
        }
        if self.max_tokens is None:
            values["max_tokens"] = UNLIMITED_TOKENS
        return engine_params.SamplingParams(
            **values,
            stop_token_ids=_token_ids("stop_token_ids", self.stop_token_ids),
            allowed_token_ids=_token_ids("allowed_token_ids", self.allowed_token_ids),
            bad_words_token_ids=tuple(bad_words_token_ids),
            logit_bias=_biases(self.logit_bias),
            seed=seed_of_sequence(drawn_seed if self.seed in (None, RANDOM) else int(self.seed), sequence),
            grammar=self._grammar(),
        )

    def _grammar(self) -> str | None:
        if self.structured_outputs is None:
            return None
        if not isinstance(self.structured_outputs, StructuredOutputsParams):
            raise ValueError(
                f"structured_outputs must be StructuredOutputsParams or None, is {self.structured_outputs!r:.80}"
            )
        try:
            return _grammar_of(self.structured_outputs.to_proto().SerializeToString(deterministic=True))
        except ValueError as error:
            raise ValueError(f"structured_outputs: {error}") from error


MAX_BEAM_WIDTH = engine_params.MAX_LOGPROBS // 2
"""A step needs logprobs of twice as many tokens."""
MAX_LENGTH_PENALTY = 10.0


@dataclass
class BeamSearchParams:
    """Parameters of `LLM.beam_search`. Names, their order and meanings are vLLM's. Raises `ValueError` as
    `SamplingParams` does.

    Fields may be assigned: `check` validates all of them when they are used.
    """

    beam_width: int
    """How many answers to follow and return."""
    max_tokens: int
    ignore_eos: bool = False
    """Treat tokens that end answers like any others."""
    temperature: float = 0.0
    """No effect: beams compete by the model's own logprobs, as in vLLM."""
    length_penalty: float = 1.0
    """Beams compete by the sum of their logprobs, divided by tokens ** length_penalty: higher values favour long
    answers. 0: only the sum counts."""
    include_stop_str_in_output: bool = False
    """No effect, as in vLLM's `LLM`: the token that ended an answer is always among its tokens."""
    structured_outputs: None = None
    """vLLM's field; only None is supported."""
    skip_special_tokens: bool = True
    watermarking: bool | None = field(default=None, repr=False)
    """vLLM's field; only None and False are supported."""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Convert numbers to Python's own types. Raise `ValueError` naming the field, its bound and its value, if one
        is wrong."""
        _check_is_one_of("structured_outputs", self.structured_outputs, (None,))
        _check_is_one_of("watermarking", self.watermarking, (None, False))
        for entry in fields(self):
            setattr(self, entry.name, _plain(entry.name, str(entry.type), getattr(self, entry.name)))
        if not 1 <= self.beam_width <= MAX_BEAM_WIDTH:
            raise ValueError(f"beam_width must be in [1, {MAX_BEAM_WIDTH}], is {self.beam_width!r}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, is {self.max_tokens!r}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be at least 0 and finite, is {self.temperature!r}")
        if not -MAX_LENGTH_PENALTY <= self.length_penalty <= MAX_LENGTH_PENALTY:
            bound = f"must be in [{-MAX_LENGTH_PENALTY:g}, {MAX_LENGTH_PENALTY:g}]"
            raise ValueError(f"length_penalty {bound}, is {self.length_penalty!r}")

    def of_step(self) -> SamplingParams:
        """The parameters of one step of each beam."""
        return SamplingParams(max_tokens=1, temperature=0, logprobs=2 * self.beam_width)


@lru_cache(maxsize=64)
def _grammar_of(message: bytes) -> str:
    """The grammar, cached: many prompts have the same structured outputs."""
    return grammar_of(pb.StructuredOutputs.FromString(message))


_AS_THEY_ARE = {entry.name for entry in fields(engine_params.SamplingParams)} - {
    "seed", "stop_token_ids", "allowed_token_ids", "bad_words_token_ids", "logit_bias", "grammar",
}  # fmt: skip


def _plain(name: str, kind: str, value: Any) -> Any:
    """A number or bool in Python's own type. Raises `ValueError` if it is neither."""
    kind, _, none = kind.partition(" | ")
    if kind not in _KINDS or (none and value is None):
        return value
    named, wanted, plain = _KINDS[kind]
    wrong = f"{name} must be {named}{' or None' if none else ''}, is {value!r:.80}"
    if not isinstance(value, wanted) or (isinstance(value, bool) and plain is not bool):
        raise ValueError(wrong)
    try:
        return plain(value)
    except OverflowError as error:
        raise ValueError(wrong) from error


def _check_done_anyway(name: str, value: object) -> None:
    _check_is_one_of(name, value, _DONE_ANYWAY[name])


def _check_is_one_of(name: str, value: object, may_be: tuple[Any, ...]) -> None:
    if not any(value is one or (isinstance(value, list | dict) and value == one) for one in may_be):
        raise ValueError(f"{name} must be {' or '.join(map(repr, may_be))}, nothing else is served; is {value!r:.80}")


def _check_stop(stop: Any) -> None:
    if stop is None:
        return
    texts = [stop] if isinstance(stop, str) else stop
    if not is_list(texts) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"stop must be a text, a list of texts or None, is {stop!r:.80}")
    for text in texts:
        check_text("stop", text)
    if not all(texts):
        raise ValueError("stop must not hold empty strings")


def _check_bad_words(words: Any) -> None:
    if words is None:
        return
    if not is_list(words) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"bad_words must be a list of texts or None, is {words!r:.80}")
    if len(words) > MAX_BAD_WORDS:
        raise ValueError(f"bad_words must have at most {MAX_BAD_WORDS} words, has {len(words)}")
    for word in words:
        check_text("bad_words", word)
        if not word.strip() or len(word) > MAX_BAD_WORD_CHARS:
            bound = f"1 to {MAX_BAD_WORD_CHARS} characters long, not all of them spaces"
            raise ValueError(f"bad_words must be {bound}, has {word!r:.80}")


def _token_ids(name: str, given: Any) -> frozenset[int]:
    ids = () if given is None else without_array(given)
    if not (is_list(ids) or isinstance(ids, Set)) or not all(map(is_whole, ids)):
        raise ValueError(f"{name} must be a list of whole numbers or None, is {given!r:.80}")
    return frozenset(map(int, ids))


def _biases(given: Any) -> dict[int, float]:
    biases = {} if given is None else given
    is_map = isinstance(biases, Mapping)
    if not is_map or not all(is_whole(token_id) and is_number(bias) for token_id, bias in biases.items()):
        raise ValueError(
            f"logit_bias must be a dict of token ids (whole numbers) and numbers, or None, is {given!r:.80}"
        )
    return {int(token_id): _plain("logit_bias", "float", bias) for token_id, bias in biases.items()}
