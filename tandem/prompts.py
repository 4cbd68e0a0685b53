"""Reads the prompts of an offline caller, in all the shapes that vLLM's `LLM.generate` takes, to token ids.

text | token ids | {"prompt": text} | {"prompt_token_ids": ids}     one prompt
[ any of these, ... ]                                               several

A dict may also have a "cache_salt": cached prefixes are then shared only with prompts that have the same salt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NotRequired, TypeAlias, TypedDict

from engine.scheduling.thinking import ThinkingBudget
from router.text.tokenizer import Tokenizer
from router.validation.request import MAX_CACHE_SALT_CHARS, ROOM
from tandem.checks import check_salt, check_text, is_list, is_number, is_whole, without_array
from tandem.sampling_params import SamplingParams


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    """Their text: shown in the output, otherwise unused."""
    cache_salt: NotRequired[str]


Prompt: TypeAlias = str | Sequence[int] | TextPrompt | TokensPrompt

_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_SHAPES = "a text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}"


@dataclass(frozen=True, kw_only=True)
class ReadPrompt:
    """One prompt."""

    name: str
    """Its name in errors."""
    text: str | None
    """None if only token ids were given."""
    token_ids: list[int]
    cache_salt: str = ""
    """Empty: none, the prompt shares cached prefixes with all others without a salt."""
    thinking_budget: ThinkingBudget | None = None
    """How long its answers may think. None: there is no bound."""


@dataclass(frozen=True, kw_only=True)
class Tokenization:
    """How prompts become tokens: vLLM's `tokenization_kwargs`."""

    truncate_prompt_tokens: int | None = None
    """Use only the last tokens of a longer prompt, this many. -1: as many as the context has room for beside the
    answer."""
    add_special_tokens: bool | None = None
    """Whether to add special tokens to a text. None: True; False for a chat template's output."""

    @staticmethod
    def of(given: object, max_model_len: int) -> Tokenization:
        """From `tokenization_kwargs`. Raises `ValueError` naming what is wrong."""
        if not isinstance(given, Mapping | None):
            raise ValueError(f"tokenization_kwargs: must be a dict, is {given!r:.80}")
        known = [entry.name for entry in fields(Tokenization)]
        if unknown := [name for name in given or () if name not in known]:
            raise ValueError(f"tokenization_kwargs: may have {' and '.join(known)}, has {unknown[0]!r:.80}")
        asked = Tokenization(**dict(given or {}))
        num_kept, adds = asked.truncate_prompt_tokens, asked.add_special_tokens
        if num_kept is not None and not (is_whole(num_kept) and (num_kept == ROOM or 1 <= num_kept <= max_model_len)):
            bound = f"must be in [1, {max_model_len}] (the context), or -1 for as many as fit"
            raise ValueError(f"tokenization_kwargs: truncate_prompt_tokens {bound}, is {num_kept!r:.80}")
        if not isinstance(adds, bool | None):
            raise ValueError(f"tokenization_kwargs: add_special_tokens must be True or False, is {adds!r:.80}")
        return asked

    def num_kept(self, params: SamplingParams, max_model_len: int) -> int | None:
        """How many tokens to keep of a prompt whose answer has these `params`. None: the prompt is not cut. Raises
        `ValueError` if the answer leaves no room for a prompt."""
        if self.truncate_prompt_tokens != ROOM:
            return self.truncate_prompt_tokens
        num_kept = max_model_len - max(1, params.max_tokens or 0, params.min_tokens)
        if num_kept < 1:
            bound = f"max_tokens and min_tokens must be less than the context, {max_model_len}"
            given = f"are {params.max_tokens} and {params.min_tokens}"
            raise ValueError(f"tokenization_kwargs: truncate_prompt_tokens=-1: {bound}, {given}")
        return num_kept


def named_prompts(prompts: Any) -> list[tuple[str, Any]]:
    """One prompt or several, each with its name in errors. Raises `ValueError` if they have no such shape."""
    prompts = without_array(prompts)
    if isinstance(prompts, str | Mapping) or (is_list(prompts) and prompts and _is_numeric(prompts[0])):
        return [("prompt", prompts)]
    if not is_list(prompts):
        raise ValueError(f"prompts must be {_SHAPES}, or a list of these, is {prompts!r:.80}")
    return [(f"prompts[{i}]", prompt) for i, prompt in enumerate(prompts)]


def _is_numeric(first: Any) -> bool:
    """Whether a list that begins with `first` is, or was meant to be, a list of token ids."""
    first = without_array(first)
    return is_number(first) or isinstance(first, bool)


def read_prompt(
    name: str,
    prompt: Any,
    tokenizer: Tokenizer,
    vocab_size: int,
    *,
    add_special_tokens: bool = True,
    num_kept: int | None = None,
) -> ReadPrompt:
    """Read one prompt. Arrays and tensors of integers count as lists of token ids. Keeps only the last `num_kept`
    tokens, unless that is None.

    Raises `ValueError` naming the prompt, and what it must be.
    """
    prompt = without_array(prompt)
    if is_list(prompt):
        return ReadPrompt(name=name, text=None, token_ids=_last(_token_ids(name, prompt, vocab_size), num_kept))
    parts = {"prompt": prompt} if isinstance(prompt, str) else prompt
    if not isinstance(parts, Mapping):
        raise ValueError(f"{name} must be {_SHAPES}, is {prompt!r:.80}")
    given = {key: value for key, value in parts.items() if value is not None}
    if unknown := [key for key in given if key not in _KEYS]:
        raise ValueError(f"{name} has {unknown[0]!r:.80}, which is not served; a prompt may have {', '.join(_KEYS)}")
    salt = given.pop("cache_salt", None)
    if salt is not None:
        _check_salt(f"{name}: cache_salt", salt)
    if not given:
        raise ValueError(f"{name} must be {_SHAPES}, is {prompt!r:.80}")
    text = given.get("prompt")
    if text is not None:
        check_text(name, text)
    if "prompt_token_ids" in given:
        token_ids = _last(_token_ids(name, given["prompt_token_ids"], vocab_size), num_kept)
    else:
        token_ids = tokenizer.encode(given["prompt"], add_special_tokens, num_kept)
    return ReadPrompt(name=name, text=text, token_ids=token_ids, cache_salt=salt or "")


def _last(token_ids: list[int], num_kept: int | None) -> list[int]:
    return token_ids if num_kept is None else token_ids[-num_kept:]


def _check_salt(name: str, salt: Any) -> None:
    check_salt(name, salt)
    if len(salt) > MAX_CACHE_SALT_CHARS:
        raise ValueError(f"{name}: must be at most {MAX_CACHE_SALT_CHARS} characters, has {len(salt)}")


def _token_ids(name: str, given: Any, vocab_size: int) -> list[int]:
    given = without_array(given)
    if not is_list(given):
        raise ValueError(f"{name}: prompt_token_ids must be a list of whole numbers, is {given!r:.80}")
    given = [without_array(each) for each in given]
    for position, token_id in enumerate(given):
        if not is_whole(token_id):
            raise ValueError(f"{name}: prompt_token_ids must be whole numbers, is {token_id!r:.80} at {position}")
        if not 0 <= token_id < vocab_size:
            raise ValueError(
                f"{name}: prompt_token_ids must be in [0, {vocab_size}), is {token_id!r:.80} at {position}"
            )
    return [int(token_id) for token_id in given]
