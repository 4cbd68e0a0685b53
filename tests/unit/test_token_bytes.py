"""The bytes that single tokens stand for: in both kinds of vocabulary, the bytes of all of a text's tokens are the
text."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from router.text.token_bytes import TokenBytes, byte_of_char

TEXTS = ["Hello wörld, 你好 🙂", "\n\t x  y\r\n", "naïve — “café” ▁ <0x41>", "\x00\x7f\xa0\xad"]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(["the quick brown fox", "Hello the world", "你好 你好"], trainer)
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Llama 2's kind: text with a mark for spaces, and bytes for what the vocabulary lacks."""
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "H",
        "e",
        "l",
        "o",
        "w",
        "r",
        "d",
        "你",
        "▁w",
        "lo",
    ]
    merges = [("▁", "w"), ("l", "o")]
    model = models.BPE({piece: n for n, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def test_the_alphabet_is_that_of_byte_level_bpe() -> None:
    assert sorted(byte_of_char()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_of_char().values()) == list(range(256))


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_tokens_add_up_to_their_text(text: str) -> None:
    tokenizer = byte_level()
    bytes_of = TokenBytes(tokenizer)
    assert b"".join(map(bytes_of, tokenizer.encode(text).ids)) == text.encode()


@pytest.mark.parametrize("text", ["Hello world", "你好, wörld 🙂", "low  w"])
def test_sentencepiece_tokens_add_up_to_their_text(text: str) -> None:
    tokenizer = sentencepiece()
    bytes_of = TokenBytes(tokenizer)
    assert b"".join(map(bytes_of, tokenizer.encode(text).ids)) == text.encode()
    assert bytes_of(tokenizer.token_to_id("▁w")) == b" w"


def test_added_tokens_are_plain_text_and_unknown_ids_nothing() -> None:
    for tokenizer in (byte_level(), sentencepiece()):
        tokenizer.add_special_tokens(["<|end▁of▁text|>"])
        tokenizer.add_tokens([AddedToken("Ġé", normalized=False)])
        bytes_of = TokenBytes(tokenizer)
        assert bytes_of(tokenizer.token_to_id("<|end▁of▁text|>")) == "<|end▁of▁text|>".encode()
        assert bytes_of(tokenizer.token_to_id("Ġé")) == "Ġé".encode()
        assert bytes_of(10**6) == b""


def test_a_vocabulary_that_nothing_decodes() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    assert TokenBytes(tokenizer)(1) == b"b"


def test_white_space_is_found_however_a_vocabulary_writes_it() -> None:
    for tokenizer in (byte_level(), sentencepiece()):
        tokenizer.add_tokens([AddedToken("\n\n", normalized=False), AddedToken("\u00a0x", normalized=False)])
        bytes_of, vocabulary = TokenBytes(tokenizer), tokenizer.get_vocab()
        found = bytes_of.all_of_space(vocabulary)
        assert found == [number for number in sorted(vocabulary.values()) if bytes_of(number).isspace()]
        assert {b" ", b"\n", b"\n\n", b"\t", b"\r"} <= set(map(bytes_of, found))
