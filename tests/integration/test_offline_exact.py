"""`tandem.LLM` against transformers: the same answers and the same logprobs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from offline_books import at_rest
from reference import Reference
from transformers import AutoModelForCausalLM

from tandem import LLM, SamplingParams


@pytest.fixture(scope="module")
def exact_llm(model_folder: Path) -> LLM:
    """An `LLM` in float32: as exact as transformers, and several times slower than bfloat16."""
    return LLM(model=str(model_folder), dtype="float32", max_model_len=1024, kv_cache_gib=0.1, num_threads=1)


def test_answers_are_transformers_own_in_the_order_of_the_prompts(exact_llm: LLM, references: list[Reference]) -> None:
    chosen = references[::3]
    prompts = [list(reference.prompt_token_ids) for reference in chosen]
    params = [
        SamplingParams(temperature=0, max_tokens=len(reference.answer_token_ids), ignore_eos=True)
        for reference in chosen
    ]
    outputs = exact_llm.generate(prompts, params)
    assert [tuple(output.outputs[0].token_ids) for output in outputs] == [r.answer_token_ids for r in chosen]
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)
    assert at_rest(exact_llm)


def test_how_likely_tokens_were_is_as_transformers_sees_it(exact_llm: LLM, model_folder: Path) -> None:
    """Even if tokens are sampled with penalties and a bias, the logprobs are the model's own."""
    asked = SamplingParams(max_tokens=12, seed=3, logprobs=3, repetition_penalty=1.2, logit_bias={198: 5}, top_k=9)
    (output,) = exact_llm.generate("The capital of France is", asked)
    answer = output.outputs[0]
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    token_ids = torch.tensor([output.prompt_token_ids + answer.token_ids])
    with torch.inference_mode():
        rows = model(token_ids).logits[0, len(output.prompt_token_ids) - 1 : -1].double().log_softmax(dim=-1)
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids) == 12
    for row, token_id, told in zip(rows, answer.token_ids, answer.logprobs, strict=True):
        top = row.topk(3)
        assert set(told) == {token_id, *top.indices.tolist()}
        for each, logprob in told.items():
            assert logprob.logprob == pytest.approx(float(row[each]), abs=2e-4)
            assert logprob.rank == int((row > row[each]).sum()) + 1
        assert told[token_id].decoded_token in answer.text
    of_answer = sum(float(row[token_id]) for row, token_id in zip(rows, answer.token_ids, strict=True))
    assert answer.cumulative_logprob == pytest.approx(of_answer, abs=1e-3)
    assert max(told[t].rank for t, told in zip(answer.token_ids, answer.logprobs, strict=True)) > 1, "one was drawn"


@pytest.mark.slow
def test_how_likely_a_prompt_was_is_as_transformers_sees_it(model_folder: Path) -> None:
    """The prompt is computed in chunks, and computed again although it is cached."""
    llm = LLM(
        model=str(model_folder), dtype="float32", max_model_len=256, kv_cache_gib=0.1, num_threads=1,
        prefill_chunk_tokens=24,
    )  # fmt: skip
    prompt = "The capital of France is Paris, and the capital of Japan is Tokyo. " * 4
    asked = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=2, logprobs=0, n=2)
    (output,) = llm.generate(prompt, asked)
    (again,) = llm.generate(prompt, asked)
    (cached,) = llm.generate(prompt, dataclasses.replace(asked, prompt_logprobs=None))
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs == again.prompt_logprobs
    assert (again.num_cached_tokens, cached.prompt_logprobs) == (0, None)
    assert cached.num_cached_tokens > 0
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    with torch.inference_mode():
        rows = model(torch.tensor([output.prompt_token_ids])).logits[0].double().log_softmax(dim=-1)
    nothing, *told = output.prompt_logprobs
    assert nothing is None
    assert len(told) == len(output.prompt_token_ids) - 1 > 48
    for row, token_id, each in zip(rows[:-1], output.prompt_token_ids[1:], told, strict=True):
        assert each is not None
        assert set(each) == {token_id, *row.topk(2).indices.tolist()}
        for alternative, logprob in each.items():
            assert logprob.logprob == pytest.approx(float(row[alternative]), abs=2e-4)
            assert logprob.rank == int((row > row[alternative]).sum()) + 1
    assert at_rest(llm)
