"""`LLM.chat` with a thinking_token_budget: a thought is cut off at the same place as behind a router."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from offline_books import at_rest
from tiny_cluster import Cluster, make_model

from tandem import LLM, RequestOutput, SamplingParams, StructuredOutputsParams

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] }}\n{% endfor %}"
OPENING = TEMPLATE + "{% if add_generation_prompt %}assistant: <think>\n{% endif %}"
GRANITE = "{{ messages[0].content }}{% if thinking %}Here is my thought process: Here is my response:{% endif %}"
END_OF_THOUGHT = 49_153
CHAT = [{"role": "user", "content": "Why?"}]
BEGUN = [*CHAT, {"role": "assistant", "content": [{"type": "text", "text": "<think>Well,"}]}]
QUOTED = [{"role": "user", "content": "Why <think>?"}, {"role": "assistant", "content": "Well,"}]


@pytest.fixture
def tiny_model(tmp_path: Path, model_folder: Path) -> Path:
    """A model whose tokenizer and template have <think> and </think>."""
    folder = make_model(tmp_path / "model", model_folder / "tokenizer.json", vocab_size=49_154)
    words = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    words.add_tokens([tokenizers.AddedToken(word, normalized=False) for word in ("<think>", "</think>")])
    assert words.token_to_id("</think>") == END_OF_THOUGHT
    words.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(OPENING)
    return folder


def llm_of(model: Path) -> LLM:
    return LLM(model=model, load_format="dummy", num_threads=1, num_kv_blocks=300, attention_backend="torch")


def asked(**params: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "seed": 5, "ignore_eos": True} | params)


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [answer.token_ids for output in outputs for answer in output.outputs]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("messages", "ending", "has_begun"),
    [
        (CHAT, {}, True),
        (BEGUN, {"continue_final_message": True}, True),
        (QUOTED, {"continue_final_message": True}, False),
        (QUOTED[:1], {"add_generation_prompt": False}, False),
    ],
    ids=["the prompt begins it", "the message begins it", "another message quotes it", "the only message quotes it"],
)
async def test_thoughts_end_where_they_do_behind_a_router(
    tiny_cluster: Cluster, tiny_model: Path, messages: Any, ending: dict[str, bool], has_begun: bool
) -> None:
    llm = llm_of(tiny_model)
    await tiny_cluster.start_decode_worker("w", tiny_model)
    await tiny_cluster.wait_for_workers("w")
    for budget in (0, 4, -1):
        [answer] = tokens_of(llm.chat(messages, asked(thinking_token_budget=budget), **ending))
        served = await tiny_cluster.client.generate(
            messages, max_tokens=12, seed=5, ignore_eos=True, thinking_token_budget=budget, **ending
        )
        assert answer == served.token_ids
        is_cut = budget >= 0 and has_begun
        assert [place for place, token in enumerate(answer) if token == END_OF_THOUGHT] == [budget] * is_cut


def test_each_of_several_answers_has_its_own(tiny_model: Path) -> None:
    llm = llm_of(tiny_model)
    budgets = [asked(n=2, thinking_token_budget=3), asked(n=2), asked(n=2, thinking_token_budget=0)]
    answers = tokens_of(llm.chat([CHAT] * 3, budgets))
    assert [answer.index(END_OF_THOUGHT) if END_OF_THOUGHT in answer else None for answer in answers] == [
        3, 3, None, None, 0, 0,
    ]  # fmt: skip
    form = StructuredOutputsParams(regex="[ab]{9}")
    held = asked(structured_outputs=form, ignore_eos=False, thinking_token_budget=1)
    for template in (None, GRANITE):
        [answer] = llm.chat(CHAT, held, chat_template=template)
        assert set(answer.outputs[0].text) <= {"a", "b"}, "which has no thoughts"
    own = asked(thinking_token_budget=2)
    [other] = tokens_of(llm.chat(CHAT, own, chat_template=OPENING.replace("</think>", "x").replace("<think>", "x")))
    assert END_OF_THOUGHT not in other, "of a template that knows no thoughts"
    assert at_rest(llm)


def test_what_cannot_be_bounded_is_told(tiny_model: Path) -> None:
    llm = llm_of(tiny_model)
    for wrong, said in (
        ({"thinking_token_budget": -2}, "thinking_token_budget must be -1 or more, is -2"),
        ({"thinking_token_budget": 2**31}, "thinking_token_budget must be -1 or more, is 2147483648"),
        ({"thinking_token_budget": 1.5}, "thinking_token_budget must be a whole number or None, is 1.5"),
        (
            {"thinking_token_budget": 3, "allowed_token_ids": [5]},
            "thinking_token_budget cannot be combined with allowed_",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{said}"):
            asked(**wrong)
    asked(thinking_token_budget=-1, allowed_token_ids=[5])
    bound = asked(thinking_token_budget=3)
    with pytest.raises(ValueError, match=r"^prompts\[1\]: thinking_token_budget is only for LLM.chat: reasoning"):
        llm.generate(["a", "b"], [asked(), bound])
    with pytest.raises(ValueError, match=r"^thinking_token_budget: cannot be used: .* which is not one token"):
        llm.chat(CHAT, bound, chat_template=GRANITE)
    assert llm.llm_engine.stats.num_prompt_tokens == 0
