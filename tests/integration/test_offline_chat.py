"""`LLM.chat`: messages, tools and variables go through the model's template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem import LLM, LoRARequest, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm(model_folder: Path) -> LLM:
    return LLM(model=str(model_folder), max_model_len=1024, kv_cache_gib=0.1, num_threads=1)


CHAT = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("messages", "given", "complaint"),
    [
        (None, {}, "messages must be a list of messages .*, is None"),
        ("hi", {}, "messages must be a list of messages .*, is 'hi'"),
        ({"role": "user", "content": "a"}, {}, "messages must be a list of messages"),
        ([3], {}, "messages must be a list of messages .*, holds 3"),
        ([], {}, "^messages: must not be empty$"),
        ([*CHAT, {"role": "user"}], {}, r"^messages\[1\]: a message has a role and a content, and may have"),
        ([CHAT, []], {}, r"^messages\[1\]: must not be empty$"),
        ([*CHAT, {"role": "asistant", "content": "a"}], {},
         r"^messages\[1\].role: must be one of system, .*, or one that the chat template names, is 'asistant'$"),
        ([CHAT, [{"role": "", "content": "a"}]], {}, r"^messages\[1\]\[0\].role: must not be empty$"),
        (CHAT, {"chat_template": 3}, "chat_template: must be a text, is 3"),
        (CHAT, {"chat_template_kwargs": 3}, "chat_template_kwargs: must be a dict, is 3"),
        (CHAT, {"lora_request": LoRARequest([1])}, r"lora_request: lora_name: must be a text, is \[1\]"),  # type: ignore[arg-type]
        (CHAT, {"lora_request": 3}, "lora_request must be a LoRARequest, or one or None for each prompt, is 3"),
    ],
)  # fmt: skip
def test_what_is_no_chat_is_told_what_one_is(llm: LLM, messages: Any, given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        llm.chat(messages, GREEDY, **given)


def test_chat_goes_through_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    (one,) = llm.chat(messages, GREEDY)
    assert one.prompt is not None
    assert "<|im_start|>user" in one.prompt
    answer = one.outputs[0]
    assert (answer.text, answer.finish_reason) == ("The capital of France is Paris.", "stop")
    assert len(llm.chat([messages, messages], GREEDY)) == 2
    begun = [*messages, {"role": "assistant", "content": "The capital of"}]
    (on,) = llm.chat(begun, GREEDY, continue_final_message=True)
    assert (on.prompt, on.outputs[0].text) == (f"{one.prompt}The capital of", " France is Paris.")
    (as_it_is,) = llm.chat(messages, GREEDY, add_generation_prompt=False)
    assert f"{as_it_is.prompt}<|im_start|>assistant\n" == one.prompt
    with pytest.raises(ValueError, match="continue_final_message: cannot be combined with add_generation_prompt"):
        llm.chat(begun, GREEDY, continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(ValueError, match="continue_final_message: must be True or False, is 'no'"):
        llm.chat(begun, GREEDY, continue_final_message="no")  # type: ignore[arg-type]


def test_a_chat_tells_of_tools_and_of_calls(llm: LLM) -> None:
    tool = {"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": {}}}
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages: list[Any] = [
        {"role": "user", "content": "Rain?"}, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "yes"},
    ]  # fmt: skip
    template = "{{ bos_token }}{{ tools | tojson }}{% for m in messages %}{{ m }}{% endfor %}"
    (answer,) = llm.chat(messages, GREEDY, tools=[tool], chat_template=template)
    assert answer.prompt is not None
    assert answer.prompt.startswith("<|im_start|>[{")
    # The template gets arguments as JSON text: it would print an object in Python's syntax.
    arguments = "'arguments': '{\"city\": \"Oslo\"}'"
    for shown in (arguments, "'tool_call_id': 'c', 'name': 'weather'", '"description": "Now."'):
        assert shown in answer.prompt
    with pytest.raises(ValueError, match="tools: the chat template has no place for tools; give another one"):
        llm.chat(messages[:1], GREEDY, tools=[tool])
    for wrong in ("abc", tool, [{"x": 1}], [{"function": {"name": "f", "parameters": {1, 2}}}]):
        with pytest.raises(ValueError, match="tools: "):
            llm.chat(messages[:1], GREEDY, tools=wrong, chat_template=template)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"messages\[1\].tool_calls: cannot be shown to the model: .* has no place for tools"
    ):
        llm.chat(messages, GREEDY)
    with pytest.raises(ValueError, match="a message has a role and a content"):
        llm.chat([{"role": "user"}], GREEDY)


def test_a_role_that_the_template_names_is_one(llm: LLM) -> None:
    template = "{% for m in messages %}{% if m.role == 'ipython' %}={% endif %}{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "1+1"}, {"role": "ipython", "content": "2"}]
    (answer,) = llm.chat(messages, GREEDY, chat_template=template)
    assert answer.prompt == "1+1=2"


def test_a_chat_has_variables_for_its_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes.", "reasoning": "So."}]
    template = "{{ style }}{% for m in messages %}{{ m.reasoning_content }}{{ m.content }}{% endfor %}"
    asked: dict[str, Any] = {"chat_template": template, "chat_template_kwargs": {"style": "Dry:"}}
    (answer,) = llm.chat(messages, GREEDY, **asked)
    assert answer.prompt == "Dry:HiSo.Yes."
    with pytest.raises(ValueError, match="chat_template_kwargs: must not set messages, tools"):
        llm.chat(messages, GREEDY, chat_template_kwargs={"tools": [], "messages": []})
