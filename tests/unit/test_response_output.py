"""Items of a response, and blocks of a message: whatever the router says at once, and in which order, they add up to
the answer."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.messages.answer import MessageAnswer
from gateway.responses.output import Output
from protos import tandem_inference_pb2 as pb
from tandem.answer import AnswerStream

SAID = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["text", "reasoning", "arguments"]), st.text("ab", min_size=1, max_size=3)),
        st.tuples(st.just("call"), st.just("")),
    ),
    max_size=12,
)
CUTS = st.lists(st.integers(min_value=1, max_value=4), min_size=12, max_size=12)


def messages_of(said: list[tuple[str, str]], cuts: list[int]) -> list[pb.GenerateResponse]:
    """The router's messages. `cuts` says how many parts of `said` each one has: their text is in one field, their calls
    in another. Arguments come only while their call was the last thing said."""
    messages, num_calls, is_open = [], 0, False
    rest = list(said)
    for offset, cut in enumerate(cuts):
        now, rest = rest[:cut], rest[cut:]
        message = pb.GenerateResponse(request_id="r", offset=offset, token_ids=[1])
        for kind, text in now:
            if kind == "call":
                message.tool_calls.add(index=num_calls, id=f"c{num_calls}", name="f")
                num_calls, is_open = num_calls + 1, True
            elif kind == "arguments" and is_open:
                message.tool_calls.add(index=num_calls - 1, arguments=text)
            elif kind == "text":
                message.text, is_open = message.text + text, False
            elif kind == "reasoning":
                message.reasoning, is_open = message.reasoning + text, False
        messages.append(message)
    usage = pb.Usage(completion_tokens=len(messages))
    end = pb.GenerateResponse(request_id="r", offset=len(messages), usage=usage, finish_reason=pb.FINISH_REASON_STOP)
    return [*messages, end]


def texts_of(items: list[dict[str, Any]], kind: str) -> str:
    return "".join(part["text"] for item in items if item["type"] == kind for part in item["content"])


@given(SAID, CUTS)
def test_items_add_up_to_the_answer(said: list[tuple[str, str]], cuts: list[int]) -> None:
    stream, output, events = AnswerStream(), Output("r", has_logprobs=True), []
    for message in messages_of(said, cuts):
        events += output.accept(stream.accept(message))
    events += output.end("completed")
    answer, items = stream.answer(), output.items()
    assert texts_of(items, "message") == answer.text
    assert texts_of(items, "reasoning") == answer.reasoning
    calls = [(each["call_id"], each["arguments"]) for each in items if each["type"] == "function_call"]
    assert calls == [(call.id, call.arguments) for call in answer.tool_calls]
    done = [each for each in events if each["type"] == "response.output_item.done"]
    assert [(each["output_index"], each["item"]) for each in done] == list(enumerate(items))
    assert len({item["id"] for item in items}) == len(items)


@given(SAID, CUTS)
def test_blocks_add_up_to_the_answer(said: list[tuple[str, str]], cuts: list[int]) -> None:
    stream, message, events = AnswerStream(), MessageAnswer(request_id="r", model="m"), []
    for each in messages_of(said, cuts):
        events += message.accept(stream.accept(each))
    answer, blocks = stream.answer(), message.whole()["content"]
    kinds = ("text", "thinking", "partial_json")
    sums = [dict.fromkeys(kinds, "") for _ in blocks]
    for event in events:
        for kind in kinds if event["type"] == "content_block_delta" else ():
            sums[event["index"]][kind] += event["delta"].get(kind, "")
    for block, told in zip(blocks, sums, strict=True):
        assert block.get("text", "") == told["text"]
        assert block.get("thinking", "") == told["thinking"]
    assert "".join(each["text"] for each in sums) == answer.text
    assert "".join(each["thinking"] for each in sums) == answer.reasoning
    calls = [
        (block["id"], told["partial_json"])
        for block, told in zip(blocks, sums, strict=True)
        if block["type"] == "tool_use"
    ]
    assert calls == [(call.id, call.arguments) for call in answer.tool_calls]
    opened = [(event["type"], event["index"]) for event in events if event["type"].startswith("content_block_st")]
    assert opened == [(f"content_block_{end}", index) for index in range(len(blocks)) for end in ("start", "stop")]
