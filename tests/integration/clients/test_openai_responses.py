"""The Responses API with OpenAI's client: the answers of chats, in its own format."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
from openai_cases import ASKING, MESSAGES, TOOLS


def test_a_response_says_what_a_chat_says(client: openai.OpenAI, model: str) -> None:
    """Whole, as events, and accumulated by OpenAI's helper."""
    asked: dict[str, Any] = {"model": model, "temperature": 0.8, "extra_body": {"seed": 5}}
    chat = client.chat.completions.create(
        **asked, messages=[{"role": "system", "content": "Be brief."}, *MESSAGES], max_tokens=24
    )
    asked |= {"instructions": "Be brief.", "input": MESSAGES, "max_output_tokens": 24}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    with client.responses.stream(**asked) as stream:
        texts = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
    expected = chat.choices[0].message.content
    assert expected
    assert whole.output_text == expected == texts[-1]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected
    end = events[-1]
    assert end.type in ("response.completed", "response.incomplete")
    assert (end.response.output_text, end.response.status) == (expected, whole.status)
    assert whole.status == ("incomplete" if chat.choices[0].finish_reason == "length" else "completed")
    assert whole.usage is not None
    assert chat.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (
        chat.usage.prompt_tokens, chat.usage.completion_tokens,
    )  # fmt: skip
    again = client.responses.create(**asked | {"input": [*MESSAGES, *whole.output, *MESSAGES]})
    assert again.usage is not None
    assert again.usage.input_tokens > whole.usage.total_tokens, "the template ends what was said"


def test_a_response_in_the_form_that_was_asked_for(client: openai.OpenAI, model: str) -> None:
    class City(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=30)
        people: int = pydantic.Field(ge=0, le=10**8)

    asked: dict[str, Any] = {
        "model": model, "input": "Name a large city, and say how many people live there, as JSON.", "temperature": 0.7,
        "max_output_tokens": 80, "extra_body": {"seed": 3},
    }  # fmt: skip
    whole = client.responses.parse(**asked, text_format=City)
    assert isinstance(whole.output_parsed, City)
    with client.responses.stream(**asked, text_format=City) as stream:
        assert stream.get_final_response().output_parsed == whole.output_parsed
    logprobs = client.responses.create(**asked, include=["message.output_text.logprobs"], top_logprobs=2)
    [message] = logprobs.output
    assert message.type == "message"
    [part] = message.content
    assert part.type == "output_text"
    said = b"".join(bytes(each.bytes) for each in part.logprobs or ())
    assert said.decode().removesuffix("<|im_end|>") == part.text
    assert all(len(each.top_logprobs) == 2 for each in part.logprobs or ())


def test_a_response_calls_a_tool_and_goes_on_with_what_came_of_it(client: openai.OpenAI, model: str) -> None:
    tools: Any = [{"type": "function", "strict": True, **tool["function"]} for tool in TOOLS]
    asked: dict[str, Any] = {"model": model, "tools": tools, "temperature": 0.9, "extra_body": {"seed": 4}}
    required = {**asked, "input": ASKING, "tool_choice": "required", "parallel_tool_calls": False}
    whole = client.responses.create(**required)
    [call] = whole.output
    assert call.type == "function_call"
    arguments = json.loads(call.arguments)
    assert set(arguments) == {"city", "unit"}
    with client.responses.stream(**required) as stream:
        [streamed] = stream.get_final_response().output
    assert streamed.type == "function_call"
    assert (streamed.call_id, streamed.arguments) == (call.call_id, call.arguments)
    assert streamed.parsed_arguments == arguments
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "709,000 people"}
    forced: dict[str, Any] = {"tool_choice": "none", "max_output_tokens": 8}
    answer = client.responses.create(**asked, **forced, input=[*ASKING, *whole.output, result])
    made = {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    of_chat: Any = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    chat = client.chat.completions.create(
        model=model, tools=of_chat, tool_choice="none", temperature=0.9, seed=4, max_tokens=8, messages=[
            *ASKING, {"role": "assistant", "tool_calls": [made]},
            {"role": "tool", "tool_call_id": call.call_id, "content": "709,000 people"},
        ],
    )  # fmt: skip
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage is not None
    assert chat.usage is not None
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
