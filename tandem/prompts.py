"""Prompts of an offline caller, in all the shapes that vLLM's `LLM.generate` takes: read once, to token ids.

text | token ids | {"prompt": text} | {"prompt_token_ids": ids}     one prompt
[ any of these, ... ]                                               several

A dict may also have a "cache_salt": cached prefixes are shared with prompts of the same one alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypeAlias, TypedDict

from router.text.tokenizer import Tokenizer
from router.validation.request import MAX_CACHE_SALT_CHARS
from tandem.checks import check_salt, check_text, is_list, is_number, is_whole, without_array


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    """What they stand for: shown in the output, read by nobody."""
    cache_salt: NotRequired[str]


Prompt: TypeAlias = str | Sequence[int] | TextPrompt | TokensPrompt

_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_SHAPES = "a text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}"


@dataclass(frozen=True, kw_only=True)
class ReadPrompt:
    """One prompt."""

    name: str
    """What errors call it."""
    text: str | None
    """None where token ids came alone."""
    token_ids: list[int]
    cache_salt: str = ""
    """Empty: none, the cache is everybody's."""


def read_prompts(prompts: Any, tokenizer: Tokenizer, vocab_size: int) -> list[ReadPrompt]:
    """One prompt or several. Arrays and tensors of integers are lists of token ids, too.

    Raises `ValueError` naming the prompt, and what it must be.
    """
    prompts = without_array(prompts)
    if isinstance(prompts, str | Mapping) or (is_list(prompts) and prompts and _is_numeric(prompts[0])):
        return [_read("prompt", prompts, tokenizer, vocab_size)]
    if not is_list(prompts):
        raise ValueError(f"prompts must be {_SHAPES}, or a list of these, is {prompts!r:.80}")
    return [_read(f"prompts[{i}]", prompt, tokenizer, vocab_size) for i, prompt in enumerate(prompts)]


def _is_numeric(first: Any) -> bool:
    """Whether a list that begins so is one of token ids, or was meant to be."""
    first = without_array(first)
    return is_number(first) or isinstance(first, bool)


def _read(name: str, prompt: Any, tokenizer: Tokenizer, vocab_size: int) -> ReadPrompt:
    prompt = without_array(prompt)
    if is_list(prompt):
        return ReadPrompt(name=name, text=None, token_ids=_token_ids(name, prompt, vocab_size))
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
    if "prompt_token_ids" not in given:
        return ReadPrompt(name=name, text=text, token_ids=tokenizer.encode(given["prompt"]), cache_salt=salt or "")
    token_ids = _token_ids(name, given["prompt_token_ids"], vocab_size)
    return ReadPrompt(name=name, text=text, token_ids=token_ids, cache_salt=salt or "")


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
