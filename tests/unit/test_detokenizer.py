"""Incremental text equals the text of decoding all tokens at once, whatever the tokens are and however they arrive."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from itertools import chain, pairwise

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from router.text.detokenizer import KEPT_TOKENS, MAX_PENDING_TOKENS, IncrementalDetokenizer, StopStrings
from router.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
SAMPLES = [
    "Hello, world! It's a fine day.",
    "naïve café, e\u0301 with a combining accent, ﬁ",
    "你好，世界。日本語も。",
    "🎉👩‍👩‍👧‍👦🏳️‍🌈 flags 🇩🇪",
    "  two  spaces\n\n\tand\ttabs ",
    "Привет नमस्ते שלום",
]


def byte_level_tokenizer() -> Tokenizer:
    """A tokenizer with all 256 bytes as tokens, some merges, also across characters, and two special tokens."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = characters + [a + b for text in SAMPLES for a, b in _byte_pairs(text)]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<bos>", "<eos>"])
    backend.add_tokens([AddedToken("<tool>", special=False)])
    return Tokenizer(backend)


def _byte_pairs(text: str) -> list[tuple[str, str]]:
    encoded = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]
    return list(zip(encoded[::2], encoded[1::2], strict=False))


def sentencepiece_tokenizer() -> Tokenizer:
    """Llama's kind of tokenizer: "▁" for a space, and bytes as <0x..> for characters that the vocabulary lacks."""
    words = ["▁", "▁Hello", "▁wor", "ld", ",", "!", "a", "b", "c", "▁▁", "你", "é", "▁the"]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[("▁", "▁")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend)


def metaspace_tokenizer() -> Tokenizer:
    pieces = ["<unk>", "▁Hello", "▁world", "▁", "ly", "▁你好", "🎉", "e\u0301"]
    backend = tokenizers.Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend)


BYTE_LEVEL = byte_level_tokenizer()
SENTENCEPIECE = sentencepiece_tokenizer()
METASPACE = metaspace_tokenizer()


def answer_text(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], *, skip: bool = True) -> str:
    """The expected text of the answer, decoded at once. The prompt must end in a whole character."""
    prompt_text = tokenizer.decode(list(prompt), skip)
    text = tokenizer.decode([*prompt, *ids], skip)
    assert text.startswith(prompt_text)
    return text[len(prompt_text) :].removesuffix(REPLACEMENT)


def stopped_text(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    ids: Sequence[int],
    *,
    stop: Sequence[str],
    min_tokens: int = 0,
    includes_stop: bool = False,
) -> tuple[str, str | None, int]:
    """The expected text, stop string and number of tokens, found by decoding everything again after each token."""
    num_seen = 0
    for num_tokens in range(1, len(ids) + 1):
        text = answer_text(tokenizer, prompt, ids[:num_tokens]).rstrip(REPLACEMENT)  # it may still become a character
        for end in range(num_seen + 1, len(text) + 1):
            found = [s for s in stop if text[:end].endswith(s)]
            if found and num_tokens > min_tokens:
                longest = max(found, key=len)
                return (text[:end] if includes_stop else text[: end - len(longest)]), longest, num_tokens
        num_seen = len(text)
    return answer_text(tokenizer, prompt, ids), None, len(ids)


def run(detokenizer: IncrementalDetokenizer, chunks: Sequence[Sequence[int]]) -> tuple[str, str | None, int]:
    text, num_tokens = "", 0
    for chunk in chunks:
        delta = detokenizer.push(chunk)
        text += delta.text
        num_tokens += delta.num_tokens
        if detokenizer._stops is None:  # else the text behind it may be held back
            assert not text.endswith(REPLACEMENT), "said what may yet become a character"
        if delta.is_stopped:
            return text + detokenizer.finish(), delta.stop, num_tokens
    return text + detokenizer.finish(), None, num_tokens


def split(ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    bounds = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in pairwise(bounds)]


def token_sequences(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Random tokens: single bytes in any order, mixed with texts cut into tokens."""
    token = st.integers(0, tokenizer.vocab_size - 1)
    text = st.sampled_from(SAMPLES).map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    return st.lists(st.one_of(token.map(lambda t: [t]), text), max_size=12).map(
        lambda parts: list(chain.from_iterable(parts))
    )


CUTS = st.lists(st.integers(0, 200), max_size=6)


@settings(max_examples=300)
@given(ids=token_sequences(BYTE_LEVEL), prompt=st.sampled_from(["", *SAMPLES]), cuts=CUTS, skip=st.booleans())
def test_byte_level_text_equals_decoding_at_once(ids: list[int], prompt: str, cuts: list[int], skip: bool) -> None:
    prompt_ids = BYTE_LEVEL.encode(prompt)
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, prompt_token_ids=prompt_ids, skip_special_tokens=skip)
    text, stop, num_tokens = run(detokenizer, split(ids, cuts))
    assert text == answer_text(BYTE_LEVEL, prompt_ids, ids, skip=skip)
    assert (stop, num_tokens) == (None, len(ids))


@settings(max_examples=200)
@given(data=st.binary(max_size=150), repeat=st.integers(1, 4), cuts=CUTS)
def test_any_bytes_give_what_decoding_at_once_gives(data: bytes, repeat: int, cuts: list[int]) -> None:
    """Includes long runs of bytes that are not UTF-8, longer than the window, between characters."""
    ids = [_byte_id(byte) for byte in data * repeat]
    text, _, _ = run(IncrementalDetokenizer(BYTE_LEVEL), split(ids, cuts))
    assert text == (data * repeat).decode("utf-8", "replace").removesuffix(REPLACEMENT)


@settings(max_examples=60)
@given(
    lead=st.sampled_from([b"", b"\xe4", b"\xf0\x9f\x8e", b"\x80"]),
    num_invalid=st.integers(KEPT_TOKENS, 3 * MAX_PENDING_TOKENS),
    invalid=st.lists(st.sampled_from([0x80, 0xBD, 0xE4, 0xF0, 0xFF]), min_size=1, max_size=5),
    tail=st.sampled_from(["", "x", "你", "🎉!"]),
)
def test_long_runs_of_invalid_bytes(lead: bytes, num_invalid: int, invalid: list[int], tail: str) -> None:
    data = lead + bytes(invalid * num_invalid)[:num_invalid] + tail.encode()
    text, _, _ = run(IncrementalDetokenizer(BYTE_LEVEL), [[_byte_id(byte)] for byte in data])
    assert text == data.decode("utf-8", "replace").removesuffix(REPLACEMENT)


def test_a_shrunk_window_never_counts_half_a_character() -> None:
    """Wherever the cut falls. Here a character ends in a token that also begins another one, which stays incomplete."""
    end_and_begin = BYTE_LEVEL._backend.token_to_id(_piece(0xA0) + _piece(0xE5))
    assert end_and_begin is not None
    for num_before in range(MAX_PENDING_TOKENS + 2):
        ids = [*[_byte_id(0xFF)] * num_before, _byte_id(0xE4), _byte_id(0xBD), end_and_begin]
        ids += [*[_byte_id(0xFF)] * MAX_PENDING_TOKENS, *BYTE_LEVEL.encode("x")]
        assert run(IncrementalDetokenizer(BYTE_LEVEL), [ids])[0] == BYTE_LEVEL.decode(ids)


def test_a_shrunk_window_that_reads_differently_is_given_up() -> None:
    """One wrong byte token makes its whole run invalid; the half of the run that is kept would read as letters."""
    letters = [1 + ord("a")] * MAX_PENDING_TOKENS
    ids = [1 + 0xFF, *letters, 1 + 0xFF, SENTENCEPIECE._backend.token_to_id("▁Hello")]
    expected = REPLACEMENT * (MAX_PENDING_TOKENS + 2) + " Hello"
    assert run(IncrementalDetokenizer(SENTENCEPIECE), [ids])[0] == expected == SENTENCEPIECE.decode(ids)


def _piece(byte: int) -> str:
    alphabet = {ord(c): c for c in pre_tokenizers.ByteLevel.alphabet()}
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's table: these bytes stand for themselves
    others = [b for b in range(256) if b not in kept]
    return alphabet[byte] if byte in kept else alphabet[256 + others.index(byte)]


def _byte_id(byte: int) -> int:
    token_id = BYTE_LEVEL._backend.token_to_id(_piece(byte))
    assert token_id is not None
    return int(token_id)


@st.composite
def sentencepiece_ids(draw: st.DrawFn) -> list[int]:
    """What a model really generates: words, special tokens, and characters spelled in byte tokens."""
    ids: list[int] = []
    for part in draw(st.lists(st.one_of(st.integers(257, SENTENCEPIECE.vocab_size - 1), st.sampled_from("你é🎉ß")))):
        ids += [1 + byte for byte in part.encode()] if isinstance(part, str) else [part]
    return ids


@settings(max_examples=300)
@given(ids=sentencepiece_ids(), prompt=st.sampled_from(["", "Hello", "ab 你 the", "ß"]), cuts=CUTS)
def test_sentencepiece_text_equals_decoding_at_once(ids: list[int], prompt: str, cuts: list[int]) -> None:
    prompt_ids = SENTENCEPIECE.encode(prompt)
    detokenizer = IncrementalDetokenizer(SENTENCEPIECE, prompt_token_ids=prompt_ids)
    assert run(detokenizer, split(ids, cuts))[0] == answer_text(SENTENCEPIECE, prompt_ids, ids)


@settings(max_examples=300)
@given(
    ids=st.lists(st.one_of(st.integers(1 + 0x80, SENTENCEPIECE.vocab_size - 1), st.sampled_from(range(1 + 0xE4, 260)))),
    cuts=CUTS,
)
def test_sentencepiece_never_loses_or_repeats_a_word(ids: list[int], cuts: list[int]) -> None:
    """Also with bytes of half a character, or of none, in between. Decoded at once, a wrong byte makes the whole run
    before it invalid. Text that was sent cannot be taken back, so only the words around it are compared."""
    text, _, _ = run(IncrementalDetokenizer(SENTENCEPIECE), split(ids, cuts))
    words = [SENTENCEPIECE._backend.id_to_token(i) for i in ids if i > 256 and i not in SENTENCEPIECE.special_token_ids]
    for letter in "Hwdtabc,!":
        assert text.count(letter) == sum(word.count(letter) for word in words)


@settings(max_examples=100)
@given(ids=st.lists(st.integers(0, METASPACE.vocab_size - 1), max_size=30), cuts=CUTS)
def test_metaspace_text_equals_decoding_at_once(ids: list[int], cuts: list[int]) -> None:
    assert run(IncrementalDetokenizer(METASPACE), split(ids, cuts))[0] == answer_text(METASPACE, [], ids)


STOPS = st.lists(
    st.one_of(
        st.text(alphabet="abl o!你🎉\n", min_size=1, max_size=4),
        st.sampled_from(SAMPLES).flatmap(lambda s: st.integers(0, len(s) - 1).map(lambda i: s[i : i + 5])),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=250)
@given(
    ids=token_sequences(BYTE_LEVEL),
    stop=STOPS,
    min_tokens=st.integers(0, 30),
    includes_stop=st.booleans(),
    cuts=CUTS,
)
def test_stop_strings_cut_like_a_search_of_the_whole_text(
    ids: list[int], stop: list[str], min_tokens: int, includes_stop: bool, cuts: list[int]
) -> None:
    detokenizer = IncrementalDetokenizer(
        BYTE_LEVEL, stop=stop, min_tokens=min_tokens, include_stop_str_in_output=includes_stop
    )
    expected = stopped_text(BYTE_LEVEL, [], ids, stop=stop, min_tokens=min_tokens, includes_stop=includes_stop)
    assert run(detokenizer, split(ids, cuts)) == expected


def pushes(tokenizer: Tokenizer, text: str, **settings: object) -> list[str]:
    """The text of each character's push, then that of `finish`."""
    detokenizer = IncrementalDetokenizer(tokenizer, **settings)  # type: ignore[arg-type]
    said = []
    for char in text:
        delta = detokenizer.push(tokenizer.encode(char))
        said.append(delta.text)
        if delta.is_stopped:
            break
    return [*said, detokenizer.finish()]


def test_text_that_may_begin_a_stop_string_waits() -> None:
    assert pushes(BYTE_LEVEL, "aENx", stop=["END"]) == ["a", "", "", "ENx", ""]
    assert pushes(BYTE_LEVEL, "aEND", stop=["END"]) == ["a", "", "", "", ""]
    assert pushes(BYTE_LEVEL, "aEN", stop=["END"]) == ["a", "", "", "EN"], "the rest is said at the end"
    assert pushes(BYTE_LEVEL, "abc", stop=["ab"], min_tokens=2) == ["", "ab", "c", ""], "nor can this go on"
    assert pushes(BYTE_LEVEL, "aaab", stop=["aab"]) == ["", "", "a", "", ""], "only what can still match is held"


def test_nothing_is_held_where_the_stop_string_is_said_anyway() -> None:
    assert pushes(BYTE_LEVEL, "aENDx", stop=["END"], include_stop_str_in_output=True) == ["a", "E", "N", "D", ""]


def test_the_stop_string_that_is_complete_first_wins_and_of_two_the_longer() -> None:
    assert pushes(BYTE_LEVEL, "xabcd", stop=["abcd", "bc"]) == ["x", "", "", "a", ""]
    assert pushes(BYTE_LEVEL, "xabcd", stop=["c", "abc"]) == ["x", "", "", "", ""]


def test_stop_strings_before_min_tokens_are_text() -> None:
    """The last character of the stop string must come from a token after the first `min_tokens`; its beginning need
    not."""
    assert "".join(pushes(BYTE_LEVEL, "aEbEc", stop=["E"], min_tokens=2)) == "aEb"
    assert "".join(pushes(BYTE_LEVEL, "aEbEc", stop=["E"], min_tokens=1)) == "a"
    assert "".join(pushes(BYTE_LEVEL, "abcd", stop=["bc"], min_tokens=2)) == "a"
    assert "".join(pushes(BYTE_LEVEL, "abcd", stop=["bc"], min_tokens=3)) == "abcd"


def test_num_tokens_counts_up_to_the_token_that_completes_the_stop() -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, stop=["cd"])
    delta = detokenizer.push(BYTE_LEVEL.encode("abcdef"))
    assert (delta.text, delta.stop, delta.num_tokens) == ("ab", "cd", 4)
    with pytest.raises(AssertionError, match="after a stop"):
        detokenizer.push([1])


def test_an_incomplete_character_is_not_said_but_what_is_before_it_is() -> None:
    ids = [_byte_id(byte) for byte in "a你".encode()]
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL)
    assert [detokenizer.push([token_id]).text for token_id in ids] == ["a", "", "", "你"]
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL)
    assert detokenizer.push(ids[:3]).text + detokenizer.finish() == "a"


def test_an_answer_completes_the_character_that_its_prompt_breaks_off_in() -> None:
    ids = [_byte_id(byte) for byte in "a你b".encode()]
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, prompt_token_ids=ids[:3])
    assert run(detokenizer, [ids[3:]])[0] == "你b"
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, prompt_token_ids=ids[:3])
    assert run(detokenizer, [BYTE_LEVEL.encode("xy")])[0] == "xy", "nothing of the prompt is said"
    prompt = BYTE_LEVEL.encode("broken: \ufffd")
    assert run(IncrementalDetokenizer(BYTE_LEVEL, prompt_token_ids=prompt), [BYTE_LEVEL.encode("x")])[0] == "x"


def test_a_space_between_prompt_and_answer_stays() -> None:
    """sentencepiece puts this space into the answer's first token, and drops it at the beginning of a text."""
    ids = [SENTENCEPIECE._backend.token_to_id("▁the")]
    assert run(IncrementalDetokenizer(SENTENCEPIECE), [ids])[0] == "the"
    prompt = [*SENTENCEPIECE.encode("Hello"), *[SENTENCEPIECE._backend.token_to_id("</s>")] * 60]
    assert run(IncrementalDetokenizer(SENTENCEPIECE, prompt_token_ids=prompt), [ids])[0] == " the"
    ids = [*[SENTENCEPIECE.vocab_size + 1] * 100, *ids]  # ids of a padded embedding have no text
    assert run(IncrementalDetokenizer(SENTENCEPIECE, prompt_token_ids=prompt), [ids])[0] == " the"


def test_a_byte_that_makes_said_bytes_invalid_takes_nothing_back() -> None:
    """The DecodeStream of tokenizers raises "Invalid prefix" here."""
    ids = [*(1 + byte for byte in "你".encode()), 1 + 0xE5, SENTENCEPIECE._backend.token_to_id("a")]
    assert run(IncrementalDetokenizer(SENTENCEPIECE), [[i] for i in ids])[0] == "你" + REPLACEMENT + "a"


def test_special_and_stop_tokens_are_not_said() -> None:
    bos, eos, tool = (BYTE_LEVEL._backend.token_to_id(t) for t in ("<bos>", "<eos>", "<tool>"))
    a, b = BYTE_LEVEL.encode("ab")
    assert run(IncrementalDetokenizer(BYTE_LEVEL), [[bos, a, tool, eos]])[0] == "a<tool>"
    shown = IncrementalDetokenizer(BYTE_LEVEL, skip_special_tokens=False)
    assert run(shown, [[bos, a, tool, eos]])[0] == "<bos>a<tool><eos>"
    stopped = IncrementalDetokenizer(BYTE_LEVEL, skip_special_tokens=False, stop_token_ids=[b, eos])
    assert run(stopped, [[bos, a, b]])[0] == "<bos>a"
    included = IncrementalDetokenizer(BYTE_LEVEL, stop_token_ids=[b], include_stop_str_in_output=True)
    assert run(included, [[a, b]])[0] == "ab"


def test_empty_stop_strings_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


def test_a_token_costs_the_same_however_long_the_answer() -> None:
    """For text, bytes that never become a character, tokens without text, and text that almost completes a stop
    string."""
    rng = random.Random(0)
    eos = BYTE_LEVEL._backend.token_to_id("<eos>")
    answers = {
        "text": [token_id for _ in range(200) for token_id in BYTE_LEVEL.encode(rng.choice(SAMPLES))],
        "invalid bytes": [_byte_id(0xBD)] * 8000,
        "special tokens": [eos] * 8000,
        "unknown tokens": [BYTE_LEVEL.vocab_size + 5] * 8000,
        "nearly a stop": BYTE_LEVEL.encode("a" * 8000),
    }
    for name, ids in answers.items():
        detokenizer = IncrementalDetokenizer(BYTE_LEVEL, stop=["a" * 255 + "b", "b" * 256])
        started = time.process_time()
        detokenizer.push(ids)
        us_per_token = (time.process_time() - started) / len(ids) * 1e6
        # Measured: 2 to 10 µs. Decoding everything again would take hundreds.
        assert us_per_token < 100, f"{name}: {us_per_token:.0f} µs a token"
        window = detokenizer._window
        assert len(window._ids) <= 2 * MAX_PENDING_TOKENS + 1, name
        assert len(detokenizer._held) <= 255, name


def test_offsets_say_where_each_tokens_text_begins() -> None:
    """All tokens of a character have its offset; a special token has the offset of the text after it."""
    text = "h\u00e9 \U0001f642\u4f60!"
    bos = BYTE_LEVEL.encode("<bos>", add_special_tokens=False)
    ids = [*bos, *(token for char in text for token in BYTE_LEVEL.encode(char)), *bos]
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL)
    offsets = [offset for token_id in ids for offset in detokenizer.push([token_id]).offsets]
    said = b"".join(BYTE_LEVEL.token_bytes(token_id) for token_id in ids[len(bos) : -len(bos)])
    assert said.decode() == text
    begins = [sum(len(char.encode()) for char in text[:n]) for n in range(len(text) + 1)]
    position = 0
    for token_id, offset in zip(ids[len(bos) : -len(bos)], offsets[len(bos) : -len(bos)], strict=True):
        assert begins[offset] <= position < begins[offset + 1]
        position += len(BYTE_LEVEL.token_bytes(token_id))
    assert offsets[: len(bos)] == [0] * len(bos)
    assert offsets[-len(bos) :] == [len(text)] * len(bos)


def test_offsets_of_a_stop_string_held_back() -> None:
    ids = [token for char in "abXYc" for token in BYTE_LEVEL.encode(char)]
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, stop=["XYZ"])
    assert detokenizer.push(ids).offsets == [0, 1, 2, 3, 4]
    assert IncrementalDetokenizer(BYTE_LEVEL, stop=["XY"]).push(ids).offsets == [0, 1, 2, 3]


def test_several_answers_may_share_their_stop_strings() -> None:
    """They share thousands of states, which never change. Each answer has its own position."""
    tokenizer, stops = byte_level_tokenizer(), StopStrings(["abcd", "bx"])
    one, other = (IncrementalDetokenizer(tokenizer, stop=stops) for _ in range(2))
    assert one._stops is other._stops is stops
    assert [one.push(tokenizer.encode("zab")).text, other.push(tokenizer.encode("ya")).text] == ["z", "y"]
    assert one.push(tokenizer.encode("cd")).stop == "abcd"
    assert other.push(tokenizer.encode("bx")).stop == "bx"
