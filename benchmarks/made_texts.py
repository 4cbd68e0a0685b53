"""Texts that a model makes up by itself: questions with its answers, and tasks about those answers and about code."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.speculation import prompts as measured_prompts
from tandem import LLM, SamplingParams

ANSWER_TOKENS = 256
QUESTION_TOKENS = 96
LEAST_TEXTS = 8
OPENINGS = (*[""] * 8, "Write a", "Write a Python function", "Explain", "Write a letter", "Describe", "Create a JSON")
"""How questions begin; the model continues them. Most are all its own."""
TEXT_TASKS = (
    "Sum this up:", "Summarise this text in three sentences:", "Repeat this text word for word:", "Improve this text:",
    "Quote the most important sentences of this text:", "Turn this into a list of bullet points:",
)  # fmt: skip
CODE_TASKS = (
    "Write this code again, with `{name}` renamed to `{other}`:", "Add comments to this code:", "Add type hints:",
    "Repeat this code, unchanged:", "Explain this code:", "Write this module again, with docstrings:",
)  # fmt: skip


@dataclass(frozen=True)
class Text:
    token_ids: list[int]
    """Prompt and answer."""
    num_prompt_tokens: int


def make_texts(llm: LLM, num_tokens: int, rng: random.Random) -> Iterator[Text]:
    """Conversations of one question each, until their answers have `num_tokens` tokens together. Leaves out those that
    benchmarks/speculation.py asks. The last texts can be held out from training: no task is about their answers."""
    measured = {tuple(ids) for of_kind in measured_prompts(llm).values() for ids in of_kind}
    made: set[str] = set()
    answers: list[str] = []
    num_made = 0
    print(f"{'seconds':>8}{'texts':>8}{'tokens':>9}   (of answers)")
    start_s = time.perf_counter()
    while num_made < num_tokens:
        asked = _questions(llm, rng, 96) + [code_task(rng) for _ in range(32)]
        asked += [f"{rng.choice(TEXT_TASKS)}\n\n{rng.choice(answers)}" for _ in range(32) if answers]
        rng.shuffle(asked)
        chats = [[{"role": "user", "content": text}] for text in dict.fromkeys(asked) if text not in made]
        made.update(asked)
        params = [
            SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.8 * (i % 2), seed=rng.getrandbits(32))
            for i in range(len(chats))
        ]
        for output in llm.chat(chats, params, use_tqdm=False):
            answer, prompt = output.outputs[0], output.prompt_token_ids
            if tuple(prompt) not in measured:
                num_made += len(answer.token_ids)
                answers.append(answer.text)
                yield Text([*prompt, *answer.token_ids], len(prompt))
        print(f"{time.perf_counter() - start_s:8.0f}{len(answers):8}{num_made:9}", flush=True)


def _questions(llm: LLM, rng: random.Random, count: int) -> list[str]:
    """Questions that the model makes up when it has read only the beginning of a user's turn."""
    tokenizer = llm.get_tokenizer()
    mark = "QUESTION"
    turn = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False).partition(mark)[0]
    openings = [rng.choice(OPENINGS) for _ in range(count)]
    begun = [tokenizer.encode(turn + opening, add_special_tokens=False) for opening in openings]
    params = [
        SamplingParams(max_tokens=QUESTION_TOKENS, temperature=1.0, top_p=0.95, seed=rng.getrandbits(32)) for _ in begun
    ]
    outputs = [output.outputs[0] for output in llm.generate(begun, params, use_tqdm=False)]
    # Those that go on and on are rarely questions.
    return [opening + o.text for opening, o in zip(openings, outputs, strict=True) if o.finish_reason == "stop"]


def code_task(rng: random.Random) -> str:
    """A task about some lines of a module of Python's library."""
    modules = sorted(Path(random.__file__).parent.glob("*.py"))
    lines = rng.choice(modules).read_text(errors="replace").splitlines()
    first = rng.randrange(max(1, len(lines) - 20))
    code = "\n".join(lines[first : first + rng.randint(10, 45)])[:1500]
    names = re.findall(r"(?:def|class) (\w+)", code) or re.findall(r"\w{4,}", code) or ["x"]
    name = rng.choice(names)
    return f"{rng.choice(CODE_TASKS).format(name=name, other=f'new_{name}')}\n\n{code}"


def kept_texts(path: Path) -> list[Text]:
    """Raises `ValueError` if `path` is not a file of texts."""
    try:
        texts = [Text(**json.loads(line)) for line in path.read_text().splitlines()]
    except TypeError as error:
        raise ValueError(f"{path} has other lines than this program writes") from error
    if len(texts) < LEAST_TEXTS:
        raise ValueError(f"{path} must have at least {LEAST_TEXTS} texts, has {len(texts)}")
    return texts
