"""The prompts of the parity tests, and the tokens that transformers gives for them: greedy, float32, same weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUM_TOKENS = 12
"""Length of each reference answer."""

_STORY = "The lighthouse keeper climbed the stairs every evening, counting each step and each wave that broke below. "

_TEXTS = {
    "question": "What is the capital of France?",
    "story": _STORY,
    "list": "The first ten prime numbers are 2, 3, 5,",
    "code": "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return ",
    "json": '{"name": "Ada Lovelace", "born": 1815, "languages": [',
    "sql": "SELECT name, count(*) FROM orders JOIN customers ON ",
    "chinese": "北京是中国的首都。上海是",
    "russian": "Столица России — город",
    "arabic": "عاصمة مصر هي مدينة",
    "emoji": "I love pizza 🍕 and ice cream 🍦 because",
    "math": "If 3x + 5 = 20, then x =",
    "shout": "ONCE UPON A TIME THERE WAS A DRAGON WHO",
}
_CHATS = {
    "chat": "What is the capital of France?",
    "chat code": "Write a Python function that reverses a string.",
    "chat poem": "Write two lines about the sea.",
}
_LENGTHS = (1, 15, 16, 17, 31, 32, 33, 64, 200, 600)


@dataclass(frozen=True)
class Reference:
    """One prompt and its answer, as token ids."""

    name: str
    prompt_token_ids: tuple[int, ...]
    answer_token_ids: tuple[int, ...]


def references(folder: Path) -> list[Reference]:
    """At least 20 prompts: lengths round the block size, chat, code, non-Latin text, one that fills 38 blocks."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    return [Reference(name, tuple(ids), _answer(model, ids)) for name, ids in _prompts(folder).items()]


def _prompts(folder: Path) -> dict[str, list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = {name: tokenizer(text)["input_ids"] for name, text in _TEXTS.items()}
    for name, text in _CHATS.items():
        messages = [{"role": "user", "content": text}]
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        prompts[name] = encoded["input_ids"]
    long_text = " ".join(f"Chapter {number}. {_STORY}" for number in range(120))
    long_ids = tokenizer(long_text)["input_ids"]
    # Each length starts elsewhere, so that no prompt is another's prefix.
    for index, length in enumerate(_LENGTHS):
        prompts[f"{length} tokens"] = long_ids[7 * index + 3 : 7 * index + 3 + length]
    return prompts


def _answer(model: Any, prompt_token_ids: list[int]) -> tuple[int, ...]:
    import torch

    inputs = torch.tensor([prompt_token_ids])
    with torch.inference_mode():
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            pad_token_id=0,
            eos_token_id=None,
        )
    return tuple(output[0, len(prompt_token_ids) :].tolist())
