"""A model's tokenizer: text to token ids and back, with what transformers' AutoTokenizer does around it.

Owns reading tokenizer.json and tokenizer_config.json. Does not own chat templates (`chat_template`) nor decoding a
stream (`detokenizer`). Immutable once loaded, so one object serves all requests and threads.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers

from router.text.token_bytes import TokenBytes

ASYNC_ENCODE_CHARS = 2048
"""Texts longer than this are encoded in a thread: at about 0.5 µs a character that is 1 ms of the event loop."""

USUAL_CHARS = 8
"""Of a token, at most: no language's texts and hardly any code have so many on average. A token may have a hundred."""
CUT_TOKENS = 1024
"""What a text cut short may have beyond what it has of the whole: whatever is cut in two falls apart, be it a word or a
token of its own."""

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The named special tokens of tokenizer_config.json, all of which chat templates may use as variables."""


class TooManyTokens(ValueError):  # noqa: N818 - said of the text
    """A text has more of them than are taken."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty where there is no such file. `ValueError` where it is not a JSON object."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, holds a {type(content).__name__}")
    return content


def read_special_tokens(folder: Path) -> dict[str, str]:
    """The named special tokens of a model folder: {"bos_token": "<s>", …}, without those that it does not have."""
    named = {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}
    tokens: dict[str, str] = {}
    for name in SPECIAL_TOKEN_NAMES:
        token = named.get(name)
        if isinstance(token, dict):  # a serialised AddedToken
            token = token.get("content")
        if isinstance(token, str) and token:
            tokens[name] = token
    return tokens


class Tokenizer:
    """Encodes and decodes with a `tokenizers.Tokenizer`, which it takes over: truncation and padding are switched off.

    special_token_ids: ids that `skip_special_tokens` leaves out of text.
    special_tokens: the named ones, as text, for chat templates.
    eos_token_id: that of the one that is named so; None: none is.
    space_token_ids: of those that are white space alone, in order.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, special_tokens: Mapping[str, str] | None = None) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens: Mapping[str, str] = MappingProxyType(dict(special_tokens or {}))
        eos_token = self.special_tokens.get("eos_token")
        self.eos_token_id: int | None = None if eos_token is None else backend.token_to_id(eos_token)
        self.special_token_ids: frozenset[int] = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._added = {token.content: token_id for token_id, token in backend.get_added_tokens_decoder().items()}
        self._marks = {
            word: token_id
            for word, token_id in self._added.items()
            if word and (token_id in self.special_token_ids or (word.startswith("<") and word.endswith(">")))
        }
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self._token_bytes = TokenBytes(backend)
        self.space_token_ids = self._token_bytes.all_of_space(backend.get_vocab(with_added_tokens=True))

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Load `folder`'s tokenizer.json, with the special tokens that its tokenizer_config.json names.

        Whether bos is added is up to tokenizer.json's post-processor; add_bos_token and add_eos_token in
        tokenizer_config.json are for folders without a tokenizer.json, as in transformers 5.

        Raises `ValueError` where there is no tokenizer.json, or it cannot be read.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(
                f"{folder} has no tokenizer.json. Make one where transformers is installed: "
                f'AutoTokenizer.from_pretrained("{folder}").save_pretrained("{folder}")'
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for whatever it cannot parse
            raise ValueError(f"{path} cannot be read by tokenizers {tokenizers.__version__}: {error}") from error
        special_tokens = read_special_tokens(folder)
        # transformers makes these special even where tokenizer.json says otherwise. One that the vocabulary lacks is
        # left out: the model has no embedding for it.
        backend.add_special_tokens([t for t in special_tokens.values() if backend.token_to_id(t) is not None])
        return cls(backend, special_tokens=special_tokens)

    def encode(self, text: str, add_special_tokens: bool = True, num_kept: int | None = None) -> list[int]:
        """Token ids of `text`. `add_special_tokens`: let the post-processor add bos (and what else the model wants).
        `num_kept`: of more tokens the last ones, among them those that were added."""
        if num_kept is not None:
            return self._encode_end(text, add_special_tokens, num_kept)
        ids: list[int] = self._encoding(text, add_special_tokens).ids
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of `text`, and nothing added."""
        return self.encode(text, add_special_tokens=False)

    def _encoding(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        # encode_batch_fast leaves out character offsets, which nobody here reads, and so takes half the time of encode.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def _encode_end(self, text: str, add_special_tokens: bool, num_kept: int) -> list[int]:
        """As `encode`. Of a text of megabytes no more is read than has these tokens, however it is cut."""
        most = num_kept + CUT_TOKENS
        num_chars = USUAL_CHARS * most
        while num_chars < len(text) and len(self._encoding(text[-num_chars:], False).ids) <= most:
            num_chars *= 2
        if num_chars >= len(text) and len(ids := self.encode(text, add_special_tokens)) <= num_kept:
            return ids
        encoding = self._encoding(text[-num_chars:], False)
        num_added = self._backend.num_special_tokens_to_add(False) if add_special_tokens else 0
        if 0 < num_added < num_kept:
            encoding.truncate(num_kept - num_added, direction="left")
            encoding = self._backend.post_process(encoding, None, True)
        kept: list[int] = encoding.ids[-num_kept:]
        return kept

    def encode_up_to(self, text: str, max_tokens: int, add_special_tokens: bool = True) -> list[int]:
        """`encode`, for whoever takes at most `max_tokens`. Raises `TooManyTokens` where the text has far more: its
        beginning shows that, and nobody reads a text of megabytes for seconds to refuse it.

        Nothing is guessed from characters: how many a token may stand for has no bound where normalisation drops some.
        """
        most = max_tokens + CUT_TOKENS
        num_chars = USUAL_CHARS * most
        while num_chars < len(text):
            num_tokens = len(self.encode(text[:num_chars], add_special_tokens))
            if num_tokens > most:
                raise TooManyTokens(f"has {num_tokens} in its first {num_chars} characters")
            num_chars *= 2
        return self.encode(text, add_special_tokens)

    async def encode_async(
        self,
        text: str,
        add_special_tokens: bool = True,
        *,
        max_tokens: int | None = None,
        num_kept: int | None = None,
        threads: Executor | None = None,
    ) -> list[int]:
        """`encode`, in one of `threads` (None: of the event loop's own) where the text is long (the library lets go of
        the GIL while it works). `max_tokens`: as `encode_up_to`, where nothing is cut; None: however long it is."""
        if len(text) <= ASYNC_ENCODE_CHARS:
            return self.encode(text, add_special_tokens, num_kept)
        loop = asyncio.get_running_loop()
        if max_tokens is None or num_kept is not None:
            return await loop.run_in_executor(threads, self.encode, text, add_special_tokens, num_kept)
        return await loop.run_in_executor(threads, self.encode_up_to, text, max_tokens, add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`. Bytes that are no UTF-8 become U+FFFD; ids that the vocabulary lacks become nothing."""
        text: str = self._backend.decode(token_ids, skip_special_tokens)
        return text

    def tokens(self, token_ids: Iterable[int]) -> list[str]:
        """Each as the vocabulary writes it; empty for an id that it lacks."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def added_ids(self, texts: Iterable[str]) -> dict[str, int]:
        """Ids of those of `texts` that are one token, added to those that other texts are cut into, special or not."""
        return {text: self._added[text] for text in texts if text in self._added}

    def added_in(self, texts: Iterable[str]) -> dict[str, int]:
        """Ids of those tokens within `texts` that are no text for llguidance: special ones, and all `<...>`. Others
        come in any text, as two line breaks do. Searches for each: milliseconds for long texts."""
        joined = "\0".join(texts)
        return {word: token_id for word, token_id in self._marks.items() if word in joined}

    def hidden_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """Of those of `texts` that are tokens which `skip_special_tokens` leaves out."""
        return self.special_token_ids.intersection(map(self._backend.token_to_id, texts))

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for by itself, in UTF-8: a part of a character, maybe. Nothing for an id that the
        vocabulary lacks."""
        return self._token_bytes(token_id)
