"""A small, fast model with a real tokenizer, and requests whose answers a grammar constrains."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
from many_endings import CONFIG, prompt_of
from tokenizers import decoders, models, pre_tokenizers

from engine.llm_engine import LLMEngine
from engine.outputs import FinishReason
from engine.sampling_params import SamplingParams
from router.text.structured_outputs import grammar_of
from tandem.structured_outputs import StructuredOutputsParams

EOS = 1
Answers = dict[str, tuple[list[int], FinishReason | None]]
MERGES = ['{"', '":', '",', "ab", "abc", "re", "red", "ee", "en", "tr", "tru", "12", "123", "é", " ", "]}"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"enum": ["red", "green", 12]},
        "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "size", "list"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "json": {"json": SCHEMA},
    "json_object": {"json_object": True},
    "regex": {"regex": "[a-e]{3,20}(é|123)"},
    "choice": {"choice": ["red", "green", "reddish", "true"]},
    "grammar": {"grammar": 'start: "(" (start | "ab"){1,3} ")"'},
}


def tokenizer() -> tokenizers.Tokenizer:
    """A tokenizer of 256 bytes, an end token and some longer tokens, so that one text has several tokenizations."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<eos>": EOS, **{char: number for number, char in enumerate(alphabet, 2)}}
    merges: list[tuple[str, str]] = []
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in MERGES:
        whole = byte_level.pre_tokenize_str(text)[0][0]
        for end in range(2, len(whole) + 1):
            if whole[:end] not in vocabulary:
                merges.append((whole[: end - 1], whole[end - 1]))
                vocabulary[whole[:end]] = len(vocabulary)
    made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = byte_level
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<pad>", "<eos>"])
    return made


def write_model(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer().save(str(folder / "tokenizer.json"))
    # Some of the model's ids have no token, as in models that round their vocabulary up.
    config = {**CONFIG, "vocab_size": 300, "eos_token_id": EOS, "initializer_range": 0.3}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def text_of(token_ids: list[int]) -> str:
    return str(tokenizer().decode([token_id for token_id in token_ids if token_id != EOS], skip_special_tokens=False))


def params_of(number: int) -> SamplingParams:
    """Every kind of grammar, greedy and random sampling, with and without filters and penalties."""
    kind = list(KINDS)[number % len(KINDS)]
    rng = random.Random(number)
    return SamplingParams(
        temperature=rng.choice([0.0, 1.0, 1.5]), seed=number, top_p=rng.choice([1.0, 0.9]), max_tokens=60,
        repetition_penalty=rng.choice([1.0, 1.3]), logprobs=rng.choice([None, 2]),
        logit_bias={rng.randrange(300): 20.0} if number % 4 == 0 else {}, grammar=grammar_text(kind),
    )  # fmt: skip


def grammar_text(kind: str) -> str:
    return grammar_of(StructuredOutputsParams(**KINDS[kind]).to_proto())


def unconstrained(number: int) -> SamplingParams:
    return replace(params_of(number), grammar=None)


def answers_of(
    engine: LLMEngine, numbers: range, params: Callable[[int], SamplingParams] = params_of, num_given: int = 0,
    given: Answers | None = None,
) -> Answers:  # fmt: skip
    """Run all requests at once; return their answers. `given`: resume each after its first `num_given` tokens."""
    answers: Answers = {}
    for number in numbers:
        begun = given[str(number)][0][:num_given] if given else []
        if given and len(given[str(number)][0]) <= num_given:
            answers[str(number)] = given[str(number)]
            continue
        answers[str(number)] = (begun, None)
        engine.add_request(str(number), prompt_of(number), params(number), output_token_ids=begun)
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens, _ = answers[output.request_id]
            assert output.offset == len(tokens)
            answers[output.request_id] = tokens + output.token_ids, output.finish_reason
    ledger, problems = engine.audit()
    assert not problems
    assert ledger.num_free + ledger.num_cached == ledger.num_blocks
    return answers
