"""`LLM.beam_search`: against all answers of a tiny model, and against transformers' own search."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from async_llms import write_settings
from offline_books import at_rest
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tandem import LLM, BeamSearchOutput, BeamSearchParams, LoRARequest
from tandem.beam_search import BeamSearch

END, WORDS = 1, ["red", "<eos>", "green", "blue"]


@pytest.fixture(scope="module")
def four_words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a vocabulary of four tokens."""
    folder = tmp_path_factory.mktemp("four words")
    torch.manual_seed(5)
    shape: dict[str, Any] = {
        "vocab_size": 4, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 64, "initializer_range": 0.4, "eos_token_id": END,
        "bos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(folder)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="red"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.add_special_tokens(["<eos>"])
    words.save(str(folder / "tokenizer.json"))
    return folder


def all_answers(folder: Path, prompt: list[int], max_tokens: int) -> dict[tuple[int, ...], float]:
    """Return all answers that end or have the full length, with their logprobs."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = {}
    for answer in itertools.product(range(4), repeat=max_tokens):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        each = logits.double().log_softmax(dim=-1)[range(max_tokens), list(answer)]
        length = answer.index(END) + 1 if END in answer else max_tokens
        found[answer[:length]] = float(each[:length].sum())
    return found


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -2.0])
def test_the_best_of_all_answers_of_a_tiny_model(four_words: Path, length_penalty: float) -> None:
    """At most 3 * 3 unfinished answers of two tokens can get a third one: ten beams lose none of them."""
    llm = LLM(model=four_words, dtype="float32", num_threads=1, num_kv_blocks=64, block_size=4)
    text, prompt = "green blue red blue green red", [2, 3, 0, 3, 2, 0]
    answers = all_answers(four_words, prompt, 3)

    def score(answer: tuple[int, ...]) -> float:
        return answers[answer] / (len(prompt) + len(answer) - (answer[-1] == END)) ** length_penalty

    best = sorted(answers, key=score, reverse=True)[:10]
    params = BeamSearchParams(10, 3, length_penalty=length_penalty)
    outputs = llm.beam_search([text, {"prompt_token_ids": prompt, "cache_salt": "mine"}], params)
    assert [each.orig_prompt for output in outputs for each in output.sequences[:1]] == [
        {"prompt_token_ids": prompt, "prompt": text}, {"prompt_token_ids": prompt, "cache_salt": "mine"},
    ]  # fmt: skip
    for output in outputs:
        assert [tuple(each.tokens[6:]) for each in output.sequences] == best
        for each, answer in zip(output.sequences, best, strict=True):
            assert each.cum_logprob == pytest.approx(answers[answer], abs=1e-4)
            assert each.finish_reason == ("stop" if answer[-1] == END else "length")
            assert each.text == " ".join(WORDS[token_id] for token_id in each.tokens if token_id != END)
    assert {each.finish_reason for each in outputs[0].sequences} == {"stop", "length"}
    assert at_rest(llm)


def tokens_of(outputs: list[BeamSearchOutput]) -> list[list[list[int]]]:
    return [[each.tokens for each in output.sequences] for output in outputs]


def test_transformers_finds_the_same(few_layers: Path) -> None:
    """If no answer ends, both searches have the same definition."""
    llm = LLM(model=str(few_layers), dtype="float32", max_model_len=256, kv_cache_gib=0.05, num_threads=1)
    prompt = "Once upon a time, in a land of"
    token_ids = llm.get_tokenizer().encode(prompt)
    (output,) = llm.beam_search(prompt, BeamSearchParams(4, 8, ignore_eos=True, skip_special_tokens=False))
    found = AutoModelForCausalLM.from_pretrained(few_layers, dtype=torch.float32).generate(
        torch.tensor([token_ids]), num_beams=4, num_return_sequences=4, max_new_tokens=8, do_sample=False,
        eos_token_id=-1, pad_token_id=0, length_penalty=0.0, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    assert tokens_of([output]) == [found.sequences.tolist()]
    assert [each.cum_logprob for each in output.sequences] == pytest.approx(found.sequences_scores.tolist(), abs=1e-3)
    assert [each.text for each in output.sequences] == llm.get_tokenizer().batch_decode(found.sequences)


def test_prompts_do_not_concern_each_other_and_an_adapters_beams_are_its_own(tmp_path: Path) -> None:
    llm, params = LLM(**write_settings(tmp_path)), BeamSearchParams(3, 20, ignore_eos=True)
    sql = LoRARequest("sql")
    prompts, adapters = ["a red one, true green", [9] * 40, "a red one, true green"], [None, None, sql]
    together = llm.beam_search(prompts, params, adapters)
    assert [{each.lora_request for each in output.sequences} for output in together] == [{None}, {None}, {sql}]
    assert tokens_of(together)[0] != tokens_of(together)[2]
    stats = llm.llm_engine.stats
    for concurrency_limit in (1, 2):
        before = stats.num_prompt_tokens
        llm.reset_prefix_cache()
        assert tokens_of(llm.beam_search(prompts, params, adapters, concurrency_limit=concurrency_limit)) == tokens_of(
            together
        )
        num_computed = stats.num_prompt_tokens - before
        assert num_computed < 3 * (40 + 20 * 3 * 24), "of what beams have in common only the last block is computed"
    assert tokens_of(llm.beam_search(prompts[2], params, sql, use_tqdm=True)) == tokens_of(together[2:])
    assert llm.beam_search([], params) == []
    assert at_rest(llm)


def test_another_thread_is_refused_from_its_first_step_to_its_last(
    four_words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(model=four_words, dtype="float32", num_threads=1, num_kv_blocks=64, block_size=4)
    params, refusals = BeamSearchParams(2, 3, ignore_eos=True), []
    (expected,) = llm.beam_search("red", params)
    advance = BeamSearch.advance

    def advance_while_another_thread_calls(search: BeamSearch, likely: Any) -> None:
        with ThreadPoolExecutor(1) as other:
            refusals.append(other.submit(llm.generate, "green").exception(timeout=60))
        advance(search, likely)

    monkeypatch.setattr(BeamSearch, "advance", advance_while_another_thread_calls)
    assert tokens_of(llm.beam_search("red", params)) == tokens_of([expected])
    assert [type(refusal) for refusal in refusals] == [RuntimeError] * 3
    assert len(llm.generate("green")) == 1


WRONG_SINCE = BeamSearchParams(2, 3)
WRONG_SINCE.beam_width = 11


@pytest.mark.parametrize(
    ("prompts", "given", "complaint"),
    [
        ("a", {"params": {"beam_width": 3}}, r"params must be BeamSearchParams, .* is \{'beam_width': 3\}"),
        ("a", {"params": WRONG_SINCE}, r"beam_width must be in \[1, 10\], is 11"),
        ("a", {"concurrency_limit": 0}, "concurrency_limit must be a whole number, at least 1, or None, is 0"),
        ("a", {"concurrency_limit": 1.5}, "concurrency_limit must be .* is 1.5"),
        (["a", [4]], {}, r"prompts\[1\]: prompt_token_ids must be in \[0, 4\), is 4"),
        (["a", [2] * 64], {"concurrency_limit": 1}, r"prompts\[1\]: .* fewer than max_model_len=64, has 64"),
        ("a", {"lora_request": LoRARequest("sql")}, "lora_request names 'sql'"),
    ],
)
def test_what_cannot_be_searched_for_is_told_before_anything_is_computed(
    four_words: Path, prompts: Any, given: dict[str, Any], complaint: str
) -> None:
    llm = LLM(model=four_words, dtype="float32", num_threads=1, num_kv_blocks=64, block_size=4)
    with pytest.raises(ValueError, match=complaint):
        llm.beam_search(prompts, **{"params": BeamSearchParams(2, 3)} | given)
    assert llm.llm_engine.stats.num_prompt_tokens == 0
