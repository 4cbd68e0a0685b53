"""A model's tokenizer: text to token ids and back, including what transformers' AutoTokenizer adds.

Reads tokenizer.json and tokenizer_config.json. Does not handle chat templates (`chat_template`), nor the decoding of a
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
"""Upper bound for the average number of characters per token: no language's texts and hardly any code reach it. A
single token may have a hundred."""
CUT_TOKENS = 1024
"""How many extra tokens a text may have because it was cut: a word, or an added token, that is cut in two falls apart
into more tokens."""

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The named special tokens of tokenizer_config.json, all of which chat templates may use as variables."""


class TooManyTokens(ValueError):  # noqa: N818 - said of the text
    """A text has more tokens than are accepted."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty if there is no such file. Raises `ValueError` if it is not a JSON object."""
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
    """Encodes and decodes with a `tokenizers.Tokenizer`, which it takes over: it switches off truncation and padding.

    special_token_ids: ids that `skip_special_tokens` leaves out of text.
    special_tokens: the named special tokens, as text, for chat templates.
    eos_token_id: id of the token named eos_token; None: there is none.
    space_token_ids: ids of tokens that consist of white space only, in order.
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

        tokenizer.json's post-processor decides whether bos is added; add_bos_token and add_eos_token in
        tokenizer_config.json are for folders without a tokenizer.json, as in transformers 5.

        Raises `ValueError` if tokenizer.json is missing or cannot be read.
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
        # transformers makes these special even if tokenizer.json says otherwise. A token that the vocabulary lacks is
        # left out: the model has no embedding for it.
        backend.add_special_tokens([t for t in special_tokens.values() if backend.token_to_id(t) is not None])
        return cls(backend, special_tokens=special_tokens)

    def encode(self, text: str, add_special_tokens: bool = True, num_kept: int | None = None) -> list[int]:
        """Token ids of `text`. `add_special_tokens`: let the post-processor add bos (and what else the model wants).
        `num_kept`: if there are more tokens than this, return the last ones, added special tokens included."""
        if num_kept is not None:
            return self._encode_end(text, add_special_tokens, num_kept)
        ids: list[int] = self._encoding(text, add_special_tokens).ids
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of `text`, without special tokens added."""
        return self.encode(text, add_special_tokens=False)

    def _encoding(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        # encode_batch_fast computes no character offsets, which are not needed here, and takes half the time of encode.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def _encode_end(self, text: str, add_special_tokens: bool, num_kept: int) -> list[int]:
        """As `encode` with `num_kept`. Of a text of megabytes, encodes only as much of its end as surely has these
        tokens."""
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
        """`encode`, for a caller that accepts at most `max_tokens`. Raises `TooManyTokens` if the text has far more:
        its beginning shows that, so that no text of megabytes is encoded for seconds only to be refused.

        Does not estimate by characters: one token may stand for any number of them if normalisation drops some.
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
        """`encode`, in one of `threads` (None: the event loop's own) if the text is long; the library releases the GIL
        while it works. `max_tokens`: as in `encode_up_to`, unless `num_kept` is given; None: no bound."""
        if len(text) <= ASYNC_ENCODE_CHARS:
            return self.encode(text, add_special_tokens, num_kept)
        loop = asyncio.get_running_loop()
        if max_tokens is None or num_kept is not None:
            return await loop.run_in_executor(threads, self.encode, text, add_special_tokens, num_kept)
        return await loop.run_in_executor(threads, self.encode_up_to, text, max_tokens, add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`. Invalid UTF-8 becomes U+FFFD; ids that the vocabulary lacks are left out."""
        text: str = self._backend.decode(token_ids, skip_special_tokens)
        return text

    def tokens(self, token_ids: Iterable[int]) -> list[str]:
        """Each token as the vocabulary writes it; empty for an id that it lacks."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def added_ids(self, texts: Iterable[str]) -> dict[str, int]:
        """Ids of those of `texts` that are added tokens, special or not."""
        return {text: self._added[text] for text in texts if text in self._added}

    def added_in(self, texts: Iterable[str]) -> dict[str, int]:
        """Ids of the tokens occurring in `texts` that llguidance does not treat as text: special ones, and all `<...>`.
        (Other added tokens, such as two line breaks, occur in any text.) Searches for each: milliseconds for long
        texts."""
        joined = "\0".join(texts)
        return {word: token_id for word, token_id in self._marks.items() if word in joined}

    def hidden_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """Ids of those of `texts` that are special tokens, which `skip_special_tokens` leaves out."""
        return self.special_token_ids.intersection(map(self._backend.token_to_id, texts))

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that a token stands for by itself, perhaps only a part of a character. Empty for an id that
        the vocabulary lacks."""
        return self._token_bytes(token_id)
