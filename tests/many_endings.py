"""Requests that end in every way, to check that differently configured engines give the same answers."""

from __future__ import annotations

import itertools
from typing import Any

from engine.llm_engine import LLMEngine
from engine.outputs import FinishReason, RequestOutput
from engine.sampling_params import SamplingParams
from engine.scheduling.thinking import ThinkingBudget

Answers = dict[str, tuple[list[int], FinishReason | None]]

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 60, "max_position_embeddings": 256,
    "eos_token_id": 1, "torch_dtype": "float32",
}  # fmt: skip
"""The vocabulary is so small that every answer soon samples its end-of-sequence token, or a stop token."""
BAD_WORDS = ((9,), *((token_id, token_id) for token_id in range(CONFIG["vocab_size"])))
"""Bans one token altogether, and every token twice in a row."""


BUDGETS = {
    2: ThinkingBudget(num_tokens=3, end_token_id=7, has_begun=True),
    5: ThinkingBudget(num_tokens=2, end_token_id=7, begin_token_ids=(11,), has_begun=True, may_repeat=True),
    6: ThinkingBudget(num_tokens=0, end_token_id=7, begin_token_ids=(12,), may_repeat=True),
    7: ThinkingBudget(num_tokens=9, end_token_id=7, has_begun=True),
}
"""Budgets for one thought and for several, cut at once and later; by request number modulo 8."""


def prompt_of(number: int) -> list[int]:
    return [(7 * number + 3 * i) % 55 + 5 for i in range(1 + number * 3 % 50)]


def params_of(number: int) -> SamplingParams:
    """Greedy and random sampling, with and without penalties, all tokens or some allowed, endings by length and by
    tokens."""
    penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.3}
    return SamplingParams(
        temperature=0.0 if number % 4 == 0 else 1.0, seed=number, top_p=0.9 if number % 3 == 0 else 1.0,
        max_tokens=1 + number * 5 % 40, min_tokens=number % 2, ignore_eos=number % 5 == 0,
        stop_token_ids=frozenset({5, 17}) if number % 2 else frozenset(), logprobs=(None, 0, 3)[number % 3],
        allowed_token_ids=frozenset(range(1, 60, 2) if number % 8 in (3, 4) else ()),
        bad_words_token_ids=BAD_WORDS if number % 8 in (0, 1) else (), thinking_budget=BUDGETS.get(number % 8),
        prompt_logprobs=(2, None, None, None, 0, None, None)[number % 7], **(penalties if number % 3 else {}),
    )  # fmt: skip


def answers_of(engine: LLMEngine, numbers: range) -> Answers:
    """Run all requests at once; return their answers. Audit after each step; check that no block is held at the end."""
    for number in numbers:
        engine.add_request(str(number), prompt_of(number), params_of(number))
    answers: Answers = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens, _ = answers.setdefault(output.request_id, ([], None))
            assert output.offset == len(tokens)
            asked, told = params_of(int(output.request_id)).logprobs, output.logprobs
            assert (told is None) == (asked is None)
            assert [(each.sampled.token_id, len(each.top)) for each in told or ()] == [
                (token_id, asked) for token_id in output.token_ids if asked is not None
            ]
            check_told(output)
            answers[output.request_id] = tokens + output.token_ids, output.finish_reason
        assert engine.audit()[1] == []
    check_bad_words(answers)
    check_thoughts(answers)
    ledger, _ = engine.audit()
    assert ledger.num_free + ledger.num_cached == ledger.num_blocks
    return answers


def check_bad_words(answers: Answers) -> None:
    for number, (tokens, _) in answers.items():
        if params_of(int(number)).bad_words_token_ids:
            assert 9 not in tokens
            assert all(before != after for before, after in itertools.pairwise(tokens)), tokens


def check_thoughts(answers: Answers) -> None:
    """Check that no thought exceeds its budget, and that the end token comes where the budget forces it."""
    for number, (tokens, _) in answers.items():
        if (budget := params_of(int(number)).thinking_budget) is not None:
            for position, token_id in enumerate(tokens):
                assert is_free(budget, tokens[:position]) or token_id == budget.end_token_id, (budget, tokens)


def is_free(budget: ThinkingBudget, answer: list[int]) -> bool:
    """Return whether any token may follow `answer`: an independent implementation of the budget's rules."""
    begin, within, num_thought, recent = list(budget.begin_token_ids), budget.has_begun, 0, []
    for position, token_id in enumerate(answer):
        recent.append(token_id)
        if within and token_id == budget.end_token_id:
            within, recent = False, []
            if not budget.may_repeat:
                return True
        elif within and token_id not in budget.other_end_token_ids:
            num_thought += 1
        elif within and not budget.may_repeat:
            return True
        elif within:
            within, recent = False, [token_id]
        if not within and begin and recent[-len(begin) :] == begin:
            within = budget.may_repeat or budget.space_token_ids.issuperset(answer[: position + 1 - len(begin)])
    return not within or num_thought < budget.num_tokens


def check_told(output: RequestOutput) -> None:
    """Check that the prompt's logprobs come with the first token only."""
    number, told = int(output.request_id), output.prompt_logprobs
    asked = params_of(number).prompt_logprobs
    assert (told is not None) == (asked is not None and output.offset == 0)
    if told is not None:
        expected = [(token_id, asked) for token_id in prompt_of(number)[1:]]
        assert [(each.sampled.token_id, len(each.top)) for each in told] == expected


def answers_alone(engine: LLMEngine, numbers: range) -> Answers:
    """Run the requests one after the other."""
    return {
        name: answer for number in numbers for name, answer in answers_of(engine, range(number, number + 1)).items()
    }
