"""The bytes that single tokens stand for, for logprobs that show the likeliest tokens.

Decoding a single token would not do: it turns a part of a character into U+FFFD, and sentencepiece's word " the" into
"the". A vocabulary writes bytes in one of two ways:

- byte-level BPE (GPT-2, and with it Llama 3, Qwen, DeepSeek, SmolLM): each byte as one printable character;
- sentencepiece (Llama 2, Mistral): as text, a space as "▁", and bytes that are no text as "<0xE4>".

Tokens that were added to a vocabulary (special ones) are plain text in both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from string import whitespace

import tokenizers

SPACE = "\u2581"


def byte_of_char() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable Latin-1 stands for itself, the other bytes follow from U+0100 on, in order.

    A. Radford et al., 2019, section 2.2; the code that came with it fixes the order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class TokenBytes:
    """The bytes of one vocabulary's tokens."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._piece_of = backend.id_to_token
        self._added = {id_: token.content for id_, token in backend.get_added_tokens_decoder().items()}
        kinds = _decoder_kinds(backend)
        self._byte_of_char = byte_of_char() if "ByteLevel" in kinds else None
        self._has_byte_tokens = "ByteFallback" in kinds
        self._known: dict[int, bytes] = {}

    def __call__(self, token_id: int) -> bytes:
        """The bytes of a token; empty for an id that the vocabulary lacks."""
        if token_id not in self._known:
            if (piece := self._piece_of(token_id)) is None:
                return b""
            self._known[token_id] = self._added[token_id].encode() if token_id in self._added else self._read(piece)
        return self._known[token_id]

    def all_of_space(self, vocabulary: Mapping[str, int]) -> list[int]:
        """Ids of the tokens that consist of ASCII white space only. Does not fill the cache."""
        of_byte = {SPACE: ord(" ")} if self._byte_of_char is None else self._byte_of_char
        chars = whitespace + "".join(char for char, byte in of_byte.items() if chr(byte) in whitespace)
        of_text = (token_id for piece, token_id in vocabulary.items() if piece and not piece.strip(chars))
        of_bytes = (vocabulary.get(f"<0x{ord(char):02X}>") for char in whitespace if self._has_byte_tokens)
        return sorted({*of_text, *(token_id for token_id in of_bytes if token_id is not None)})

    def _read(self, piece: str) -> bytes:
        if self._byte_of_char is not None and self._byte_of_char.keys() >= set(piece):
            return bytes(self._byte_of_char[char] for char in piece)
        if self._has_byte_tokens and (match := re.fullmatch("<0x([0-9A-F]{2})>", piece)):
            return bytes([int(match[1], 16)])
        return piece.replace(SPACE, " ").encode()


def _decoder_kinds(backend: tokenizers.Tokenizer) -> set[str]:
    """Names of the steps of the tokenizer's decoder."""
    if backend.decoder is None:
        return set()
    state = json.loads(backend.decoder.__getstate__())
    return {step["type"] for step in (state, *state.get("decoders", ()))}
