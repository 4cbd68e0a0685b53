"""`tandem.LLM`: a prompt's cache salt and truncation, and the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem import LLM, SamplingParams, TokensPrompt
from tandem.prompts import Prompt

GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def llm(few_layers: Path) -> LLM:
    return LLM(model=str(few_layers), max_model_len=1024, kv_cache_gib=0.1, num_threads=1)


def test_its_tokenizer_reads_prompts_and_writes_answers_as_it_does(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert llm.get_tokenizer() is tokenizer
    (output,) = llm.generate("The capital of France is", GREEDY)
    assert tokenizer.encode("The capital of France is") == output.prompt_token_ids
    assert tokenizer.decode(output.outputs[0].token_ids) == output.outputs[0].text
    chat = [{"role": "user", "content": "Hello!"}]
    (output,) = llm.chat(chat, GREEDY)
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == output.prompt


def num_cached(llm: LLM, prompt: Prompt | list[Prompt]) -> list[int]:
    return [output.num_cached_tokens for output in llm.generate(prompt, GREEDY)]


def test_prefixes_are_shared_within_a_salt(llm: LLM) -> None:
    ids = list(range(1000, 1064))
    salted: TokensPrompt = {"prompt_token_ids": ids, "cache_salt": "tenant 1"}
    assert num_cached(llm, salted) == [0]
    assert num_cached(llm, salted) == [48]
    assert num_cached(llm, ids) == [0], "not of who has no salt"
    assert num_cached(llm, [{**salted, "cache_salt": "tenant 2"}, ids, salted]) == [0, 48, 48]
    assert llm.generate(salted, GREEDY)[0].outputs == llm.generate(ids, GREEDY)[0].outputs


def test_a_text_may_have_a_salt_too_and_none_is_none(llm: LLM) -> None:
    text = "One prompt, many tenants. " * 8
    (output,) = llm.generate({"prompt": text, "cache_salt": "tenant 1"}, GREEDY)
    assert (output.prompt, output.num_cached_tokens) == (text, 0)
    assert num_cached(llm, {"prompt": text, "cache_salt": None}) == [0]  # type: ignore[typeddict-item]
    assert num_cached(llm, text)[0] > 0


@pytest.mark.slow
def test_of_a_long_prompt_the_end_is_used(llm: LLM) -> None:
    ids, text = list(range(1000, 2100)), "One prompt, and no end. " * 8
    of_text = llm.get_tokenizer().encode(text)
    for kept, expected in (({"truncate_prompt_tokens": 20}, 20), ({"truncate_prompt_tokens": -1}, 1020)):
        cut, short = llm.generate([{"prompt_token_ids": ids}, text], GREEDY, tokenization_kwargs=kept)
        assert cut.prompt_token_ids == ids[-expected:]
        assert short.prompt_token_ids == of_text[-expected:]
    [chat] = llm.chat([{"role": "user", "content": text}], GREEDY, tokenization_kwargs={"truncate_prompt_tokens": 9})
    assert len(chat.prompt_token_ids) == 9
    for wrong, said in (
        ({"truncate_prompt_tokens": 0}, r"truncate_prompt_tokens must be in \[1, 1024\] .* is 0"),
        ({"truncate_prompt_tokens": 5.0}, r"truncate_prompt_tokens must be in \[1, 1024\] .* is 5.0"),
        ({"add_special_tokens": 1}, "add_special_tokens must be True or False, is 1"),
        ({"max_length": 9}, "may have truncate_prompt_tokens and add_special_tokens, has 'max_length'"),
        ("no", "must be a dict, is 'no'"),
    ):
        with pytest.raises(ValueError, match=f"tokenization_kwargs: {said}"):
            llm.generate(text, GREEDY, tokenization_kwargs=wrong)  # type: ignore[arg-type]
    all_of_it = SamplingParams(max_tokens=1500)  # offline this means: up to the end of the context
    with pytest.raises(ValueError, match="max_tokens and min_tokens must be less than the context, 1024, are 1500 and"):
        llm.generate([[5] * 600], all_of_it, tokenization_kwargs={"truncate_prompt_tokens": -1})


def test_several_answers_share_their_prompt_within_its_salt(llm: LLM) -> None:
    stats = llm.llm_engine.stats
    computed_before = stats.num_prompt_tokens
    llm.generate({"prompt_token_ids": list(range(2000, 2064)), "cache_salt": "tenant 1"}, SamplingParams(n=3))
    assert stats.num_prompt_tokens - computed_before == 64 + 2 * 16


@pytest.mark.parametrize(
    ("prompts", "complaint"),
    [
        ({"prompt": "a", "cache_salt": 5}, "prompt: cache_salt: must be a text, is 5"),
        (["a", {"prompt": "a", "cache_salt": ""}], "prompts[1]: cache_salt: must not be empty; without one, leave it"),
        ({"prompt": "a", "cache_salt": "s" * 129}, "prompt: cache_salt: must be at most 128 characters, has 129"),
        ({"cache_salt": "s"}, "prompt must be a text, a list of token ids, {'prompt': text} or"),
        ({"prompt": "a", "salt": "s"}, "prompt has 'salt', which is not served; a prompt may have prompt, prompt_tok"),
    ],
)
def test_what_is_no_salt_is_named(llm: LLM, prompts: Any, complaint: str) -> None:
    with pytest.raises(ValueError) as raised:
        llm.generate(prompts, GREEDY)
    assert str(raised.value).startswith(complaint)


def test_who_asks_for_no_chat_needs_no_template(few_layers: Path, tmp_path: Path) -> None:
    """`generate`, and `chat` with the caller's own template, work although the model's template is broken."""
    for path in few_layers.glob("token*.json"):
        (tmp_path / path.name).symlink_to(path)
    shape = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 49_152, "hidden_size": 48, "intermediate_size": 80,
        "num_hidden_layers": 1, "num_attention_heads": 6, "max_position_embeddings": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    (tmp_path / "chat_template.jinja").write_text("{% if")
    llm = LLM(tmp_path, load_format="dummy", num_kv_blocks=20, block_size=4, device="cpu")
    one, messages = SamplingParams(max_tokens=1), [{"role": "user", "content": "Hi"}]
    assert llm.generate("Hi", one)
    assert llm.chat(messages, one, chat_template="{{ messages[0].content }}")
    with pytest.raises(ValueError, match="chat template is broken"):
        llm.chat(messages, one)
