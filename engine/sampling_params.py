"""The sampling parameters of a request. Integers and floats only, validated at construction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from engine.scheduling.thinking import ThinkingBudget

MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_BAD_WORDS = 512
"""Token sequences: twice as many as words, since a word has different tokens within a text and at its beginning."""
MOST_OF = {
    "stop_token_ids": (MAX_STOP_TOKEN_IDS, "ids"), "logit_bias": (MAX_LOGIT_BIAS, "entries"),
    "allowed_token_ids": (MAX_ALLOWED_TOKEN_IDS, "ids"), "bad_words_token_ids": (MAX_BAD_WORDS, "words"),
}  # fmt: skip
"""By field: the maximum number of items, and what the items are called."""
MAX_LOGPROBS = 20
"""vLLM's `--max-logprobs`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request, with vLLM's names, meanings and bounds.

    Text-level parameters (`stop`, `skip_special_tokens`) are not here: the detokeniser's owner applies them.

    Raises `ValueError` naming the field and its bound.
    """

    max_tokens: int = 16
    """The answer's maximum length, at least 1. Includes `output_token_ids` that the sequence was started with."""
    min_tokens: int = 0
    """Before this many tokens neither end-of-sequence nor stop tokens can be sampled."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1 keeps the whole vocabulary."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Also applies to tokens of the prompt."""
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    seed: int = 0
    """Draws depend only on (seed, position), so that any worker can continue the same stream."""
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    allowed_token_ids: frozenset[int] = frozenset()
    """No other token is ever sampled. Empty: no restriction."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """The last token of a word is not sampled if its other tokens precede it in the answer. vLLM's name."""
    logprobs: int | None = None
    """Return the logprob of each token of the answer, and of this many likeliest ones. None: none."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, all but the first. These tokens are computed even if the cache has their KV."""
    grammar: str | None = None
    """Structured outputs: the grammar of the answer's text, in llguidance's format (`engine.scheduling.grammar`). None:
    any text."""
    thinking_budget: ThinkingBudget | None = None
    """How many tokens the answer may think, and what ends a thought (`engine.scheduling.thinking`). None: no limit."""

    def __post_init__(self) -> None:
        def check(ok: bool, message: str) -> None:
            if not ok:
                raise ValueError(message)

        check(self.max_tokens >= 1, f"max_tokens must be at least 1, is {self.max_tokens}")
        check(
            0 <= self.min_tokens <= self.max_tokens,
            f"min_tokens must be in [0, max_tokens={self.max_tokens}], is {self.min_tokens}",
        )
        check(0 <= self.temperature < float("inf"), f"temperature must be at least 0 and finite, is {self.temperature}")
        check(0 < self.top_p <= 1, f"top_p must be in (0, 1], is {self.top_p}")
        check(self.top_k >= -1, f"top_k must be -1 or more, is {self.top_k}")
        check(0 <= self.min_p <= 1, f"min_p must be in [0, 1], is {self.min_p}")
        for name in ("presence_penalty", "frequency_penalty"):
            check(-2 <= getattr(self, name) <= 2, f"{name} must be in [-2, 2], is {getattr(self, name)}")
        check(0 < self.repetition_penalty <= 2, f"repetition_penalty must be in (0, 2], is {self.repetition_penalty}")
        check(-(2**63) <= self.seed < 2**63, f"seed must fit 64 bits, is {self.seed}")
        for name, (most, items) in MOST_OF.items():
            num_items = len(getattr(self, name))
            check(num_items <= most, f"{name} must have at most {most} {items}, has {num_items}")
        for token_id, bias in self.logit_bias.items():
            check(-100 <= bias <= 100, f"logit_bias must be in [-100, 100], is {bias} for token {token_id}")
        check(
            self.grammar is None or not self.allowed_token_ids,
            "allowed_token_ids cannot be combined with structured outputs: no token might be left that may come next",
        )
        check(all(self.bad_words_token_ids), "bad_words_token_ids must hold no empty word")
        check(
            not self.bad_words_token_ids or (self.grammar is None and not self.allowed_token_ids),
            "bad_words cannot be combined with structured outputs or allowed_token_ids: no token might be left",
        )
        check(
            self.thinking_budget is None or not self.allowed_token_ids,
            "thinking_token_budget cannot be combined with allowed_token_ids: what ends a thought might not be allowed",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            check(
                value is None or (type(value) is int and 0 <= value <= MAX_LOGPROBS),
                f"{name} must be an integer in [0, {MAX_LOGPROBS}], is {value!r}",
            )
        # An answer that is complete and cannot go on must end.
        for name in ("min_tokens", "ignore_eos"):
            check(
                self.grammar is None or not getattr(self, name),
                f"{name} cannot be combined with structured outputs, is {getattr(self, name)}",
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_phrases(self) -> bool:
        """Whether bad words of several tokens make the allowed tokens depend on the previous ones."""
        return any(len(word) > 1 for word in self.bad_words_token_ids)

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1
