"""Speculative decoding: guesses an answer's next tokens, so that one step can produce several of them. Named after
vLLM's `speculative_config` with the methods `ngram`, `draft_model`, `eagle3` and `mtp`.

    the tokens so far ──propose──> drafts ──a step computes them behind the last token, and samples after each
    ──the drafts before the first that differs from the sampled token, and one more sampled token, extend the answer

As everywhere, a sampled token depends only on the tokens before it and on its position (engine/sampling/sampler.py). So
drafts change when a token is computed, never which token. Wrong drafts cost the time to compute them.

`ngram`: drafts come from a lookup: if the last few tokens occurred before, what followed them there may follow again,
as in edited code, quotations and summaries. After A. Saxena, Prompt lookup decoding (2023). In an answer with a
grammar, the text that the grammar forces comes first (grammar.py).

`draft_model`: a smaller model continues the text (model_drafting.py). After Y. Leviathan et al., Fast inference from
transformers via speculative decoding, and C. Chen et al. (both 2023); but drafts are verified as above, so the draft
model cannot change a token.

`eagle3`: a head of one layer continues it from the model's own hidden states (head_drafting.py,
engine/models/eagle_head.py), verified in the same way. `mtp`: so does the head that the model's checkpoint brings along
(engine/models/mtp_head.py).

Owns nothing. No torch.
"""

from __future__ import annotations

import json
from collections.abc import MutableSequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

NAMING_A_MODEL = ("draft_model", "eagle3")
"""Methods whose configuration names what guesses."""
HEADS = ("eagle3", "mtp")
"""Methods by which a head guesses from the model's hidden states."""
OLD_MTP = "_mtp"
"""The end of vLLM's older names of the method `mtp`, one for each family: `deepseek_mtp`, `glm4_moe_mtp`."""
MAX_DRAFTS = 16
"""Upper bound of the drafts of one sequence in one step."""
MAX_PAUSE = 32
"""Upper bound of the tokens without drafts after wrong drafts."""
MAX_LOOKUP = 64
"""Upper bound of the tokens that are looked up."""


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Raises `ValueError`, which starts with `speculative_config` and names the field and its bound."""

    num_speculative_tokens: int
    """Maximum drafts of one sequence in one step."""
    method: str = "ngram"
    model: str = ""
    """The draft model, with `draft_model`: a folder, a .gguf file, a hub id or the default model's name. With `eagle3`,
    the head: a folder or a hub id."""
    quantization: str = "auto"
    """The draft model's or head's, as `EngineArgs.quantization`. With `mtp`, the head has the model's."""
    prompt_lookup_max: int = 5
    """The most last tokens to look up: longer matches are preferred."""
    prompt_lookup_min: int = 2
    """The fewest last tokens to look up."""

    def __post_init__(self) -> None:
        _check_method(self.method)
        for name in ("model", "quantization"):
            value = getattr(self, name)
            _check(isinstance(value, str), f"{name} must be a text, is {value!r:.80}")
        needs_model = self.method in NAMING_A_MODEL
        _check(bool(self.model) == needs_model, f"model must {_MODEL_OF[self.method]}, is {self.model!r:.80}")
        is_auto = self.quantization == "auto"
        _check(needs_model or is_auto, f"quantization must be 'auto' without a model, is {self.quantization!r:.80}")
        most_of = {
            "num_speculative_tokens": MAX_DRAFTS,
            "prompt_lookup_max": MAX_LOOKUP,
            "prompt_lookup_min": MAX_LOOKUP,
        }
        for name, most in most_of.items():
            value = getattr(self, name)
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            _check(is_whole and 1 <= value <= most, f"{name} must be a whole number in [1, {most}], is {value!r}")
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        _check(least <= most, f"prompt_lookup_min must be at most prompt_lookup_max={most}, is {least}")

    @property
    def has_head(self) -> bool:
        """A head guesses from the model's hidden states."""
        return self.method in HEADS

    @classmethod
    def parse(cls, text: str) -> SpeculativeConfig | None:
        """Parse the flag's JSON. Returns None, for no speculation, if `text` is empty."""
        if not text:
            return None
        try:
            given: Any = json.loads(text)
        except (ValueError, TypeError, RecursionError):
            given = None
        _check(isinstance(given, dict), f"must be a JSON object, such as {EXAMPLE}, is {str(text)[:80]!r}")
        if given.get("model"):
            is_head = "eagle3" in Path(str(given["model"])).name.lower()
            given.setdefault("method", "eagle3" if is_head else "draft_model")
        if str(given.get("method")).endswith(OLD_MTP):
            given["method"] = "mtp"
        _check_method(given.get("method", cls.method))  # first: other methods have other fields
        num_ranks = given.pop("draft_tensor_parallel_size", None)
        is_one = num_ranks is None or (num_ranks == 1 and not isinstance(num_ranks, bool))
        _check(is_one, f"draft_tensor_parallel_size must be 1, since rank 0 guesses for all, is {num_ranks!r:.80}")
        names = [field.name for field in fields(cls)]
        unknown = sorted(set(given) - set(names))
        _check(not unknown, f"has no {', '.join(unknown)}; there are {', '.join(names)}")
        _check("num_speculative_tokens" in given, f"must have num_speculative_tokens, such as {EXAMPLE}")
        if given.get("prompt_lookup_max") == 1:
            given.setdefault("prompt_lookup_min", 1)
        return cls(**given)


def _check_method(method: object) -> None:
    known = (
        "'ngram' (the text itself is looked up), 'draft_model' (a smaller model guesses), 'eagle3' (a head that was "
        "trained for the model guesses) or 'mtp' (the head in the model's own checkpoint guesses)"
    )
    _check(isinstance(method, str) and method in _MODEL_OF, f"method must be {known}, is {method!r:.80}")


_MODEL_OF = {
    "ngram": "be empty with the method 'ngram'",
    "draft_model": "name the draft model: a folder, a .gguf file or a hub id",
    "eagle3": "name the EAGLE-3 head: a folder or a hub id",
    "mtp": "be empty with the method 'mtp', whose head is in the model's checkpoint",
}
EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(f"speculative_config {message}")


def propose(token_ids: MutableSequence[int], config: SpeculativeConfig, num_wanted: int) -> list[int]:
    """Guess at most `num_wanted` tokens that follow `token_ids`: those that followed an earlier occurrence of its last
    `prompt_lookup_max` tokens, or of fewer, down to `prompt_lookup_min`. The longest match counts, and the latest of
    several. Returns an empty list if nothing is found.

    If the tokens after the match run into the end of `token_ids`, the text repeats itself, and the guess repeats it on.
    """
    if num_wanted < 1:
        return []
    tokens = np.asarray(token_ids)  # no view of it may outlive this: the array could not grow
    places = np.flatnonzero(tokens[:-1] == tokens[-1])
    found = None
    for length in range(1, config.prompt_lookup_max + 1):
        if length > 1:
            places = places[places >= length - 1]
            places = places[tokens[places - (length - 1)] == tokens[-length]]
        if not len(places):
            break
        if length >= config.prompt_lookup_min:
            found = int(places[-1]) + 1
    if found is None:
        return []
    period = len(tokens) - found
    drafts: list[int] = tokens[found + np.arange(num_wanted) % period].tolist()
    return drafts


@dataclass(slots=True)
class DraftHistory:
    """Adapts the number of drafts of one sequence to how earlier drafts went. If all were right, twice as many come
    next; if some were, as many as were right; if none was, a single one. If single drafts were wrong, several times in
    a row, drafting pauses, each time for twice as long."""

    max_drafts: int = MAX_DRAFTS
    num_wrong: int = 0
    """How many single drafts have been wrong in a row."""
    pause: int = 0
    """The current pause in tokens; 0: none since a draft was right."""
    next_length: int = 0
    """Length of the sequence at which drafting may resume."""

    def num_wanted(self, length: int) -> int:
        """How many drafts to try for a sequence of `length` tokens."""
        return self.max_drafts if length >= self.next_length else 0

    def note(self, num_drafts: int, num_right: int, length: int, *, patience: int = 1) -> None:
        """Record that `num_right` of `num_drafts` drafts were right. `length`: the sequence's, with the token after the
        right drafts. `patience`: how many single drafts in a row may be wrong before drafting pauses."""
        if num_right:
            self.max_drafts = min(MAX_DRAFTS, 2 * num_drafts) if num_right == num_drafts else num_right
            self.num_wrong = self.pause = 0
        else:
            self.max_drafts = 1
            self.num_wrong += num_drafts == 1
            if self.num_wrong >= patience:
                self.pause = min(MAX_PAUSE, 2 * self.pause or 1)
        self.next_length = length + self.pause
