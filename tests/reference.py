"""The prompts of the parity tests, and the tokens that transformers generates for them: greedy, float32, same weights.

The tokens are kept in a file; whenever they are used, transformers verifies each of them.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUM_TOKENS = 12
"""Length of each reference answer."""
ANSWERS = Path(__file__).with_name("reference_answers.json")

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
    """Return at least 20 prompts with their answers: lengths around the block size, chat, code, non-Latin text, one
    that fills 38 blocks."""
    answers = json.loads(ANSWERS.read_text())
    model = _model(folder)
    found = [Reference(name, tuple(ids), tuple(answers[name])) for name, ids in _prompts(folder).items()]
    wrong = [reference.name for reference in found if not _is_answer(model, reference)]
    assert not wrong, f"not what transformers answers: {wrong}; python tests/reference.py FOLDER makes {ANSWERS} anew"
    return found


def _model(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(2)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _is_answer(model: Any, reference: Reference) -> bool:
    """Return whether each token is the most probable one after those before it. One forward pass checks them all, in a
    tenth of the time of generating them."""
    import torch

    token_ids = torch.tensor([reference.prompt_token_ids + reference.answer_token_ids[:-1]])
    with torch.inference_mode():
        logits = model(token_ids, logits_to_keep=NUM_TOKENS).logits
    return tuple(logits[0].argmax(dim=-1).tolist()) == reference.answer_token_ids


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
    # Each prompt starts at another place of the text, so that none is a prefix of another.
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


if __name__ == "__main__":
    chosen = Path(sys.argv[1])
    transformers_model = _model(chosen)
    made = {name: _answer(transformers_model, ids) for name, ids in _prompts(chosen).items()}
    lines = (f"  {json.dumps(name)}: {list(ids)}" for name, ids in made.items())
    ANSWERS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
