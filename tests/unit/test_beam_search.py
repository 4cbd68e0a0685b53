"""Which beams survive, and which are best: compared with all possible answers, and with a plain version of the
algorithm."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest

from tandem.beam_search import BeamSearch
from tandem.offline_answer import Logprob
from tandem.prompts import ReadPrompt
from tandem.sampling_params import BeamSearchParams

PROMPT = [7, 8, 9]
END = 1
VOCAB = range(5)
Likely = dict[int, Logprob]


def likely_after(tokens: list[int], seed: int, num: int) -> Likely:
    """The `num` likeliest tokens of a random model."""
    drawn = random.Random(f"{seed} {tokens}")
    logits = [drawn.gauss(0, 1.5) for _ in VOCAB]
    total = math.log(sum(map(math.exp, logits)))
    ordered = sorted(VOCAB, key=lambda token_id: -logits[token_id])[:num]
    return {
        token_id: Logprob(logprob=logits[token_id] - total, rank=rank, decoded_token="")
        for rank, token_id in enumerate(ordered, 1)
    }


def params_of(width: int, max_tokens: int, **others: Any) -> BeamSearchParams:
    """Parameters with a beam width that the constructor may refuse."""
    params = BeamSearchParams(1, max_tokens, **others)
    params.beam_width = width
    return params


def search(params: BeamSearchParams, seed: int, max_model_len: int = 100) -> BeamSearch:
    prompt = ReadPrompt(name="prompt", text=None, token_ids=PROMPT)
    beams = BeamSearch(prompt, params, max_model_len=max_model_len, end_token_ids={END})
    while not beams.is_over:
        asked = beams.prompts()
        assert [prompt.token_ids for prompt in asked] == [beam.tokens for beam in beams.alive]
        beams.advance([likely_after(prompt.token_ids, seed, 2 * params.beam_width) for prompt in asked])
    return beams


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_beams_without_end_find_the_best_of_all_answers(length_penalty: float, ignore_eos: bool) -> None:
    """With as many beams as there are answers, none is lost."""
    max_tokens, seed = 4, 3
    answers = []
    for length in range(1, max_tokens + 1):
        for answer in itertools.product(VOCAB, repeat=length):
            ends = answer[-1] == END and not ignore_eos
            if (END in answer[:-1] and not ignore_eos) or not (ends or length == max_tokens):
                continue
            each = [likely_after([*PROMPT, *answer[:i]], seed, 5)[token_id] for i, token_id in enumerate(answer)]
            cum = sum(one.logprob for one in each)
            answers.append((cum / (len(PROMPT) + length - ends) ** length_penalty, list(answer), cum))
    answers.sort(reverse=True)
    found = search(params_of(5**4, max_tokens, ignore_eos=ignore_eos, length_penalty=length_penalty), seed).best()
    assert [each.tokens for each in found] == [PROMPT + answer for _, answer, _ in answers]
    assert [each.cum_logprob for each in found] == pytest.approx([cum for _, _, cum in answers])
    assert len(found) == (5**4 if ignore_eos else 4**4 + 4**3 + 4**2 + 4 + 1)


def plainly(width: int, max_tokens: int, length_penalty: float, seed: int) -> list[tuple[list[int], float]]:
    """The plain algorithm: it keeps all ended beams, and never stops before `max_tokens`."""
    alive: list[tuple[list[int], float]] = [(PROMPT, 0.0)]
    ended: list[tuple[list[int], float]] = []
    for _ in range(max_tokens):
        grown = [
            ([*tokens, token_id], cum + each.logprob)
            for tokens, cum in alive
            for token_id, each in likely_after(tokens, seed, 2 * width).items()
        ]
        ended += [(tokens, cum) for tokens, cum in grown if tokens[-1] == END]
        alive = sorted(((t, c) for t, c in grown if t[-1] != END), key=lambda beam: -beam[1])[:width]

    def score(beam: tuple[list[int], float]) -> float:
        tokens, cum = beam
        return cum / (len(tokens) - (tokens[-1] == END)) ** length_penalty

    return sorted(ended + alive, key=score, reverse=True)[:width]


@pytest.mark.parametrize("length_penalty", [-3.0, -1.0, 0.0, 0.5, 1.0, 2.0])
def test_what_can_be_no_more_is_not_looked_for_and_changes_nothing(length_penalty: float) -> None:
    num_steps = []
    for seed, width in itertools.product(range(30), (1, 2, 3)):
        beams = search(params_of(width, 12, length_penalty=length_penalty), seed)
        found = [(each.tokens, each.cum_logprob) for each in beams.best()]
        assert found == plainly(width, 12, length_penalty, seed)
        num_steps.append(beams.num_steps)
    assert min(num_steps) < 12


def test_what_is_told_of_each() -> None:
    beams = search(params_of(3, 3, length_penalty=0.0), seed=1)
    found = beams.best()
    assert {each.finish_reason for each in found} == {"stop", "length"}
    for each in found:
        answer = each.tokens[len(PROMPT) :]
        has_ended = each.finish_reason == "stop"
        assert (answer[-1] == END, each.stop_reason) == (has_ended, END if has_ended else None)
        assert has_ended or len(answer) == 3
        assert each.orig_prompt == {"prompt_token_ids": PROMPT}
        assert [len(one) for one in each.logprobs] == [5] * len(answer), "of 6 that are asked for there are 5"
        cum = sum(one[token_id].logprob for one, token_id in zip(each.logprobs, answer, strict=True))
        assert each.cum_logprob == pytest.approx(cum)
    assert PROMPT == [7, 8, 9]


def test_answers_are_as_long_as_there_is_room() -> None:
    beams = search(params_of(2, 50, ignore_eos=True), seed=1, max_model_len=8)
    assert [len(each.tokens) for each in beams.best()] == [8, 8]
    for wrong, num_tokens in (([], 0), ([5] * 8, 8)):
        prompt = ReadPrompt(name="prompts[2]", text=None, token_ids=wrong)
        with pytest.raises(ValueError, match=rf"^prompts\[2\]: .* fewer than max_model_len=8, has {num_tokens}$"):
            BeamSearch(prompt, params_of(2, 1), max_model_len=8, end_token_ids={END})


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"beam_width": 0}, "beam_width must be in [1, 10], is 0"),
        ({"beam_width": 11}, "beam_width must be in [1, 10], is 11"),
        ({"beam_width": 2.0}, "beam_width must be a whole number, is 2.0"),
        ({"beam_width": True}, "beam_width must be a whole number, is True"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, is 0"),
        ({"max_tokens": None}, "max_tokens must be a whole number, is None"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, is 1"),
        ({"temperature": -0.5}, "temperature must be at least 0 and finite, is -0.5"),
        ({"temperature": float("nan")}, "temperature must be at least 0 and finite, is nan"),
        ({"length_penalty": "1"}, "length_penalty must be a number, is '1'"),
        ({"length_penalty": float("nan")}, "length_penalty must be in [-10, 10], is nan"),
        ({"length_penalty": 10.5}, "length_penalty must be in [-10, 10], is 10.5"),
        ({"include_stop_str_in_output": "no"}, "include_stop_str_in_output must be True or False, is 'no'"),
        ({"skip_special_tokens": None}, "skip_special_tokens must be True or False, is None"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs must be None, nothing else is served; is {"),
        ({"watermarking": True}, "watermarking must be None or False, nothing else is served; is True"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError) as raised:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 8} | given)
    assert str(raised.value).startswith(complaint)


def test_parameters_come_in_vllms_order() -> None:
    params = BeamSearchParams(3, 9, True, 0.5, 2.0, True, None, False, False)
    assert params == BeamSearchParams(
        beam_width=3, max_tokens=9, ignore_eos=True, temperature=0.5, length_penalty=2.0,
        include_stop_str_in_output=True, skip_special_tokens=False, watermarking=False,
    )  # fmt: skip


def test_parameters_are_shown_without_what_has_no_effect() -> None:
    assert "watermarking" not in repr(BeamSearchParams(beam_width=2, max_tokens=3))
