"""Token ids equal those of transformers, whatever the folder's files say, and the event loop is not blocked."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from engine.model_loader import resolve_model
from router.text.tokenizer import ASYNC_ENCODE_CHARS, Tokenizer, TooManyTokens, read_special_tokens

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "<|im_start|>user\nWhat is 1+1?<|im_end|>\n",
    "naïve café 你好 🎉👩‍👩‍👧‍👦 \u0000 \ufffd",
    "def f(x):\n    return x ** 2\n\n\n",
]


@pytest.fixture(scope="module")
def default_model() -> Path:
    return resolve_model("smollm2-135m-instruct")


def write_folder(folder: Path, config: dict[str, Any], *, post_processor: bool = True, truncation: int = 0) -> Path:
    """A byte-level tokenizer with <s> and </s>, whose tokenizer.json adds <s> if `post_processor`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    backend.add_tokens(["</s>", "<tool>"])
    if post_processor:
        backend.post_processor = TemplateProcessing(single="<s>:0 $A:0", special_tokens=[("<s>", 256)])
    if truncation:
        backend.enable_truncation(truncation)
        backend.enable_padding(length=truncation)
    backend.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**named, **config}))
    return folder


def test_the_default_models_ids_are_those_of_transformers(default_model: Path) -> None:
    reference = AutoTokenizer.from_pretrained(default_model)
    tokenizer = Tokenizer.from_folder(default_model)
    assert tokenizer.vocab_size == len(reference)
    for text in TEXTS:
        for add_special_tokens in (True, False):
            ids = tokenizer.encode(text, add_special_tokens)
            assert ids == reference.encode(text, add_special_tokens=add_special_tokens)
            for skip in (True, False):
                assert tokenizer.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)
    assert dict(tokenizer.special_tokens) == reference.special_tokens_map
    assert tokenizer.special_token_ids >= set(reference.all_special_ids)


@pytest.mark.parametrize("post_processor", [True, False])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_eos_token": True},
        {"bos_token": {"content": "<s>", "lstrip": False, "special": True, "__type": "AddedToken"}},
    ],
)
def test_bos_and_eos_are_those_of_transformers(tmp_path: Path, config: dict[str, Any], post_processor: bool) -> None:
    folder = write_folder(tmp_path, config, post_processor=post_processor)
    reference = AutoTokenizer.from_pretrained(folder)
    tokenizer = Tokenizer.from_folder(folder)
    for text in ("", "ab", "a</s><tool>b"):
        assert tokenizer.encode(text) == reference.encode(text)
        assert tokenizer.encode(text, False) == reference.encode(text, add_special_tokens=False)
    ids = reference.encode("a</s><tool>b")
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True) == "a<tool>b"


@pytest.mark.parametrize("post_processor", [True, False])
@pytest.mark.parametrize("num_kept", [1, 2, 3, 7, 8, 9])
def test_a_text_that_is_cut_is_that_of_transformers(tmp_path: Path, num_kept: int, post_processor: bool) -> None:
    """The cut text keeps its beginning-of-sequence token."""
    folder = write_folder(tmp_path, {}, post_processor=post_processor)
    reference = AutoTokenizer.from_pretrained(folder, truncation_side="left")
    tokenizer = Tokenizer.from_folder(folder)
    for special in (True, False):
        ids = tokenizer.encode("abcdefg", special, num_kept)
        if num_kept > 1:  # a beginning and nothing else
            cut = {"truncation": True, "max_length": num_kept}
            assert ids == reference.encode("abcdefg", add_special_tokens=special, **cut)
        assert len(ids) == min(num_kept, 7 + (special and post_processor))


def test_of_a_text_that_is_cut_no_more_is_read_than_its_end(
    default_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.from_folder(default_model)
    text = "The quick brown fox jumps over the lazy dog, 北京 🍕. " * 2_000
    whole = tokenizer.encode(text)
    nums_read: list[int] = []
    encoding = tokenizer._encoding

    def counted(text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        nums_read.append(len(text))
        return encoding(text, add_special_tokens)

    monkeypatch.setattr(tokenizer, "_encoding", counted)
    for num_kept in (1, 10, 1000, 5000):
        assert tokenizer.encode(text, True, num_kept) == whole[-num_kept:]
        assert max(nums_read) <= 8 * (num_kept + 1024) < len(text)


def test_truncation_and_padding_of_training_are_off(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, {}, truncation=8))
    assert len(tokenizer.encode("x" * 50)) == 51
    assert len(tokenizer.encode("x")) == 2


def test_special_tokens_are_read_as_text_or_as_added_tokens(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "pad_token": "<pad>", "eos_token": "<old>"})
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "unk_token": None}))
    assert read_special_tokens(tmp_path) == {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>"}


def test_a_folder_without_tokenizer_json_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer\.json.*AutoTokenizer.*save_pretrained"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_broken_files_are_named(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path, {})
    (tmp_path / name).write_text('{"version": ')
    with pytest.raises(ValueError, match=name):
        Tokenizer.from_folder(tmp_path)


async def test_long_texts_leave_the_event_loop_free(default_model: Path) -> None:
    tokenizer = Tokenizer.from_folder(default_model)
    text = "The quick brown fox jumps over the lazy dog. " * 20_000
    longest_s = 0.0

    async def watch() -> None:
        nonlocal longest_s
        while True:
            started = time.perf_counter()
            await asyncio.sleep(0.001)
            longest_s = max(longest_s, time.perf_counter() - started)

    watcher = asyncio.create_task(watch())
    started = time.perf_counter()
    ids = await tokenizer.encode_async(text)
    took_s = time.perf_counter() - started
    watcher.cancel()
    assert ids == tokenizer.encode(text)
    assert longest_s < took_s / 3, f"the loop stood still for {longest_s:.3f} s of {took_s:.3f} s"


class Counting(Tokenizer):
    """Counts the characters that it has tokenized."""

    num_chars = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.num_chars += len(text)
        return super().encode(text, add_special_tokens)


async def test_of_a_text_far_too_long_so_much_is_read_as_shows_that(default_model: Path) -> None:
    most = 2000
    for unit, num_chars_most in (("The lazy dog. ", 30_000), ("x", 800_000)):  # a token of the second has 64 characters
        tokenizer = Counting.from_folder(default_model)
        with pytest.raises(TooManyTokens, match=r"^has \d+ in its first \d+ characters$"):
            await tokenizer.encode_async(unit * (3_000_000 // len(unit)), max_tokens=most)
        assert tokenizer.num_chars <= num_chars_most


async def test_what_is_long_in_few_tokens_or_a_little_too_long_is_read_to_its_end(default_model: Path) -> None:
    tokenizer = Tokenizer.from_folder(default_model)
    for text, most in ((" " * 100_000, 1_600), ("The lazy dog. " * 1000, 3_000)):
        assert await tokenizer.encode_async(text, max_tokens=most) == tokenizer.encode(text)


class Threads(ThreadPoolExecutor):
    num_used = 0

    def submit(self, *arguments: Any, **more: Any) -> Any:
        self.num_used += 1
        return super().submit(*arguments, **more)


async def test_short_texts_do_not_pay_for_a_thread(tmp_path: Path) -> None:
    tokenizer, short = Tokenizer.from_folder(write_folder(tmp_path, {})), "x" * ASYNC_ENCODE_CHARS
    with Threads(1) as threads:
        assert len(await tokenizer.encode_async(short, add_special_tokens=False, threads=threads)) == len(short)
        assert threads.num_used == 0
        assert len(await tokenizer.encode_async(short + "x", threads=threads)) == len(short) + 2
        assert threads.num_used == 1
