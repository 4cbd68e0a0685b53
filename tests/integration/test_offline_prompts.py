"""`tandem.LLM`: what goes with a prompt, and the tokenizer that reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def llm(model_folder: Path) -> LLM:
    return LLM(model=str(model_folder), max_model_len=1024, kv_cache_gib=0.1, num_threads=1)


def test_its_tokenizer_is_the_one_that_reads_prompts_and_writes_answers(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    (output,) = llm.generate("The capital of France is", GREEDY)
    assert tokenizer.encode("The capital of France is") == output.prompt_token_ids
    assert tokenizer.decode(output.outputs[0].token_ids) == output.outputs[0].text
