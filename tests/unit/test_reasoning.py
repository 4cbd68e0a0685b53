"""A model's thoughts, apart from its answer: told as they arrive, the same however the text is cut."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import grammar_cases
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tools import of_template
from validation_cases import MODEL, byte_tokenizer

from protos import tandem_inference_pb2 as pb
from router.answer_messages import AnswerMessages
from router.args import RouterArgs
from router.asked_answer import AskedAnswer
from router.prepared import PreparedRequest
from router.request_events import Emit
from router.sequences import _as_one
from router.served_model import Texts
from router.text.calls.text_values import Schema
from router.text.chat_template import ChatTemplate
from router.text.detokenizer import IncrementalDetokenizer
from router.text.reasoning import NO_REASONING, PARSERS, THINK, Reasoning, ReasoningParser, opened_by, reasoning_of
from router.text.tokenizer import Tokenizer
from router.text.tool_calls import ToolCallParser
from router.text.tool_formats import FORMATS
from router.validation.prompt import ChatPrompt, TokenizedPrompt, tokenize_prompt
from router.validation.request import validate
from router.validation.resumption import BegunAnswer, Resumption, resumption_of
from tandem.cluster_args import ClusterArgs
from tandem.requests import generate_request

Outcome = tuple[str, str, list[str]]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
HI: list[Any] = [{"role": "user", "content": "Hi"}]


def parser(is_open: bool, has_tools: bool = False) -> ReasoningParser:
    calls = ToolCallParser(FORMATS["hermes"], {"f": Schema(None)}, str) if has_tools else None
    return ReasoningParser(THINK, is_open=is_open, calls=calls)


def parse(is_open: bool, pieces: list[str], *, has_tools: bool = False, is_whole: bool = True) -> Outcome:
    """What is thought, what is said, and the arguments of calls."""
    reader = parser(is_open, has_tools)
    told = [reader.push(piece) for piece in pieces]
    if is_whole:
        told.append(reader.finish())
    arguments: dict[int, str] = {}
    for piece in (piece for each in told for piece in each.calls):
        arguments[piece.index] = arguments.get(piece.index, "") + piece.arguments
    return "".join(each.reasoning for each in told), "".join(each.content for each in told), list(arguments.values())


CASES: list[tuple[bool, str, str, str]] = [
    # is_open, the text, what is thought, what is said
    (False, "<think>\nSo.\n</think>\n\nYes.\n", "So.", "Yes.\n"),
    (False, " \n<think>a  b</think>c", "a  b", "c"),
    (True, "\nSo.\n\nThen.\n</think>\n\n Yes. ", "So.\n\nThen.", "Yes. "),
    (False, "Yes. <think>no</think>", "", "Yes. <think>no</think>"),
    (False, "  Yes.", "", "  Yes."),
    (False, " \n", "", " \n"),
    (False, " <thin", "", " <thin"),
    (False, "<thinking>", "", "<thinking>"),
    (False, "So.</think>Yes.", "", "So.</think>Yes."),
    (False, "<think>\n\n</think>\n\nYes.", "", "Yes."),
    (True, "</think>Yes.", "", "Yes."),
    (True, " \n </think> \n ", "", ""),
    # what follows the end of a thought is content, whatever it is
    (True, "a</think>b</think> <think>c", "a", "b</think> <think>c"),
    (True, "a</think></think>", "a", "</think>"),
    (True, "a < b </ c </think", "a < b </ c </think", ""),
    (True, "a </thi nk> </think>b", "a </thi nk>", "b"),
    (True, "a<</think>b", "a<", "b"),
    (True, "a</</think>b", "a</", "b"),
    # answers that are cut off
    (True, "So", "So", ""),
    (True, "So \n", "So", ""),
    (False, "<think>So \n</", "So \n</", ""),
    (False, "<think>", "", ""),
    (True, "", "", ""),
    (False, "", "", ""),
    (True, "<think>a</think>", "<think>a", ""),
]


@pytest.mark.parametrize(("is_open", "text", "thought", "said"), CASES)
def test_what_is_thought_and_what_is_said(is_open: bool, text: str, thought: str, said: str) -> None:
    assert parse(is_open, [text]) == (thought, said, [])
    assert parse(is_open, list(text)) == (thought, said, [])


@given(
    is_open=st.booleans(),
    text=st.lists(st.sampled_from(["<think>", "</think>", "</", "<", "a", " ", "\n", CALL]), max_size=12).map("".join),
    data=st.data(),
)
@settings(max_examples=500)
def test_what_is_told_depends_on_the_text_so_far_alone(is_open: bool, text: str, data: st.DataObject) -> None:
    """So an answer can go on at a router that gets its beginning at once. Calls, too: they are read only in what is
    said."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[begin:until] for begin, until in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for has_tools in (False, True):
        for is_whole in (False, True):
            told = parse(is_open, pieces, has_tools=has_tools, is_whole=is_whole)
            assert told == parse(is_open, [text], has_tools=has_tools, is_whole=is_whole)
    thought, said, _ = parse(is_open, [text])
    assert "</think>" not in thought
    assert thought == thought.strip()
    words = text if is_open else text.replace("<think>", "", 1)
    assert "".join((thought + said).split()) in (
        "".join(text.split()),
        "".join(words.replace("</think>", "", 1).split()),
    )


def test_it_is_told_as_it_is_thought() -> None:
    reader = parser(True)
    assert reader.push("\nWell").reasoning == "Well"
    assert reader.push(" \n").reasoning == ""
    assert reader.push("so </th").reasoning == " \nso"
    assert reader.push("an").reasoning == " </than"
    told = reader.push("</think>\nYes")
    assert (told.reasoning, told.content) == ("", "Yes")


def test_a_call_is_one_after_the_thought_and_none_within() -> None:
    assert parse(True, [f"I call {CALL}?</think>\n\n{CALL}"], has_tools=True) == (f"I call {CALL}?", "", ['{"a": 1}'])
    assert parse(True, [f"{CALL}"], has_tools=True) == (CALL, "", [])
    assert parse(False, [f"Now {CALL}"], has_tools=True) == ("", "Now", ['{"a": 1}'])
    assert parse(False, [" <thi"], has_tools=True) == ("", " <thi", [])


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("piece", [" " * 80, "<" * 80, "</think", "<think>", "</think>"])
def test_no_text_takes_long(is_open: bool, piece: str) -> None:
    reader = parser(is_open)
    began_s = time.process_time()
    for _ in range(4000):
        reader.push(piece)
    reader.finish()
    assert time.process_time() - began_s < 2


# -- in an answer -----------------------------------------------------------------------------------------------------


def message_of(reader: ReasoningParser, detokenizer: IncrementalDetokenizer, num_tokens: int) -> AnswerMessages:
    return AnswerMessages(
        AskedAnswer(
            request_id="r", name="r", prompt_token_ids=[1], sampling_params=pb.SamplingParams(), arrived_s=0.0,
            detokenizer=detokenizer, reader=reader, resumption=Resumption(token_ids=range(num_tokens)),
        )
    )  # fmt: skip


def test_an_answer_is_taken_up_at_any_token() -> None:
    tokenizer, text = Tokenizer(grammar_cases.tokenizer()), f"<think>\nSo é.\n</think>\n{CALL} Yes <tool"
    token_ids = tokenizer.encode(text, False)
    whole = parse(False, [text], has_tools=True)
    assert whole[0] == "So é."
    assert whole[2] == ['{"a": 1}']
    for cut in range(len(token_ids)):
        # What the client already has, as the first router's reader has told it.
        first = message_of(parser(False, True), IncrementalDetokenizer(tokenizer), 0)
        has, _ = first.delta(Emit(0, token_ids[:cut], (), ()))
        detokenizer, reader = IncrementalDetokenizer(tokenizer), parser(False, True)
        begun = BegunAnswer(token_ids=tuple(token_ids[:cut]))
        resumption_of(begun, "", detokenizer, reader, max_tokens=10**6, stop_token_ids=())
        messages = message_of(reader, detokenizer, cut)
        rest, _ = messages.delta(Emit(cut, token_ids[cut:], (), ()))
        last = messages.last(pb.FINISH_REASON_STOP, num_cached_tokens=0, timings=pb.Timings())
        parts = [has, rest, last]
        assert "".join(each.reasoning for each in parts) == whole[0]
        assert last.usage.reasoning_tokens == len("\nSo é.\n"), "a character is a token here"
        assert "".join(each.text for each in parts) == whole[1]
        pieces = [piece for each in parts for piece in each.tool_calls]
        assert "".join(piece.arguments for piece in pieces) == whole[2][0]
        assert last.usage.completion_tokens == len(token_ids)


def test_what_an_end_cuts_off_comes_with_the_last_message() -> None:
    tokenizer = Tokenizer(grammar_cases.tokenizer())
    messages = message_of(parser(True), IncrementalDetokenizer(tokenizer), 0)
    said, _ = messages.delta(Emit(0, tokenizer.encode("So </th", False), (), ()))
    last = messages.last(pb.FINISH_REASON_LENGTH, num_cached_tokens=0, timings=pb.Timings())
    assert (said.reasoning, last.reasoning, last.text) == ("So", " </th", "")


async def test_an_answer_in_one_message_has_all_of_the_thought() -> None:
    async def messages() -> Any:
        yield pb.GenerateResponse(token_ids=[7], reasoning="a")
        yield pb.GenerateResponse(offset=1, token_ids=[8], reasoning="b", text="c")
        yield pb.GenerateResponse(offset=2, text="d", finish_reason=pb.FINISH_REASON_STOP)

    (whole,) = [message async for message in _as_one(messages())]
    assert (whole.reasoning, whole.text) == ("ab", "cd")


@pytest.mark.parametrize("is_special", [True, False])
def test_a_word_that_ends_a_thought_is_not_hidden_for_being_special(is_special: bool) -> None:
    """Other special tokens are hidden, also when the word itself is not special."""
    words = ["a", "<think>", "</think>", "<pad>", "<end>"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a")
    )
    backend.add_special_tokens(["<pad>", "<end>", *(words[1:3] if is_special else [])])
    validated = validate(generate_request(HI), MODEL)
    for parser, text in (("qwen3", "a</think>a"), ("", "aa" if is_special else "a</think>a")):
        model = replace(MODEL, eos_token_ids=frozenset({9}), reasoning_parser=parser)
        texts = Texts(model, Tokenizer(backend), None)
        detokenizer = PreparedRequest(validated, model, texts, TokenizedPrompt([0, 1])).detokenizer()
        said = detokenizer.push([0, 3, 2, 0, 4]).text + detokenizer.finish()
        assert said.replace(" ", "") == text


def test_what_is_read() -> None:
    assert reasoning_of("", "<think>", has_form=False) == NO_REASONING
    assert reasoning_of("qwen3", "", has_form=True) == NO_REASONING, "a form is all that is said"
    assert reasoning_of("qwen3", "<think>", has_form=True) == Reasoning(marks=THINK, is_open=True)
    assert reasoning_of("qwen3", "", has_form=False) == Reasoning(marks=THINK)
    calls = ToolCallParser(FORMATS["hermes"], {"f": Schema(None)}, str)
    assert NO_REASONING.reader(calls) is calls
    assert NO_REASONING.reader(None) is None


# -- templates --------------------------------------------------------------------------------------------------------

THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n"
    "{% endif %}{{ m.content }}<end>{% endfor %}<|assistant|>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
"""Qwen 3's way."""
OPENED = "{{ messages[0].content.split('</think>')[-1] + '<think>\n' }}"
"""DeepSeek R1's way."""


async def opened(source: str, **asked: Any) -> tuple[bool, str]:
    """Whether the prompt opens a thought, and the prompt."""
    tokenizer = Tokenizer(grammar_cases.tokenizer())
    prompt = await tokenize_prompt(
        validate(generate_request(HI, **asked), MODEL).prompt, tokenizer, ChatTemplate(source)
    )
    return bool(prompt.thought_opened_by), tokenizer.decode(prompt.token_ids, False)


async def test_a_prompt_tells_whether_an_answer_begins_with_a_thought() -> None:
    assert await opened(THINKING) == (False, "<|user|>Hi<end><|assistant|>")
    closed = "<|user|>Hi<end><|assistant|><think>\n\n</think>\n\n"
    assert await opened(THINKING, chat_template_kwargs={"enable_thinking": False}) == (False, closed)
    assert (await opened(THINKING, chat_template_kwargs={"enable_thinking": True}))[1] == (await opened(THINKING))[1]
    assert await opened(OPENED) == (True, "Hi<think>\n")
    assert [bool(opened_by(text)) for text in ("<think>", "<think> \n", "<think>.", "")] == [True, True, False, False]
    tokenizer = byte_tokenizer()
    text = validate(generate_request("Hi <think>"), MODEL)
    assert not (await tokenize_prompt(text.prompt, tokenizer, None)).thought_opened_by
    assert not text.is_chat


@pytest.mark.parametrize(
    ("said", "is_open"),
    [
        ("Well, I", False), ("<think>", True), ("<think>\nWell, I ", True), ("<think>Well.</think> I", False),
        ("<think>Well.</think>", False), ("I <think>?</think><think>a", True), ("", False),
    ],
)  # fmt: skip
async def test_a_message_that_goes_on_may_be_in_a_thought(said: str, is_open: bool) -> None:
    messages = [{"role": "assistant", "content": said}]
    source = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<end>{% endfor %}"
    request = generate_request(messages, continue_final_message=True)
    tokenizer = Tokenizer(grammar_cases.tokenizer())
    prompt = await tokenize_prompt(validate(request, MODEL).prompt, tokenizer, ChatTemplate(source))
    assert tokenizer.decode(prompt.token_ids, False) == f"<|assistant|>{said}"
    assert bool(prompt.thought_opened_by) is is_open
    within = prompt.is_within_thought
    reader = reasoning_of("qwen3", prompt.thought_opened_by, has_form=False, is_within=within).reader(None)
    assert reader is not None
    told = reader.push(" know.</think> Yes.")
    if is_open:
        begins_it = said.rstrip().endswith("<think>")
        assert (told.reasoning, told.content) == ("know." if begins_it else " know.", "Yes.")
    else:
        assert told.content == " know.</think> Yes."


def test_what_was_thought_before_is_told_to_the_template() -> None:
    told: list[Any] = [
        {"role": "user", "content": "1+1?", "reasoning": "not a user's"},
        {"role": "assistant", "content": "2", "reasoning": "Easy."},
        {"role": "assistant", "content": "3", "reasoning_content": "Hard."},
        {"role": "assistant", "content": "4", "reasoning": ["no text"], "reasoning_content": None},
    ]
    prompt = validate(generate_request(told), MODEL).prompt
    assert isinstance(prompt, ChatPrompt)
    assert [message.to_template().get("reasoning") for message in prompt.messages] == [None, "Easy.", "Hard.", None]
    rendered = ChatTemplate(THINKING).render(prompt.messages)
    assert "<|assistant|><think>\nEasy.\n</think>\n2<end><|assistant|><think>\nHard.\n</think>\n3<end>" in rendered
    assert "<|assistant|>4<end>" in rendered
    assert "a user's" not in rendered


@pytest.mark.parametrize(
    ("source", "asked", "known"),
    [
        (THINKING, "auto", "qwen3"),
        (OPENED, "auto", "deepseek_r1"),
        ("{{ messages }}", "auto", ""),
        ("{# </think> #}{{ messages }}", "auto", ""),
        ("{{ messages }}", "qwen3", "qwen3"),
        (THINKING, "deepseek_r1", "deepseek_r1"),
        (THINKING, "none", ""),
        (None, "qwen3", ""),
    ],
)
def test_how_a_model_thinks_is_what_its_template_knows_or_what_was_said(
    source: str | None, asked: str, known: str
) -> None:
    template = ChatTemplate(source) if source is not None else None
    model = MODEL.with_chat(template, "auto", asked)
    assert model.to_proto().reasoning_parser == model.reasoning_parser == known


def test_a_template_for_tools_may_be_the_one_that_knows() -> None:
    assert MODEL.with_chat(ChatTemplate("plain", tool_source=OPENED), "auto").reasoning_parser == "deepseek_r1"
    assert of_template(OPENED).reasoning_parser == "deepseek_r1"


def test_another_parser_is_named_with_those_there_are() -> None:
    for known in ("auto", *PARSERS, "none"):
        assert RouterArgs(model="m", reasoning_parser=known).reasoning_parser == known
    known = (
        "auto, qwen3, deepseek_r1, deepseek_v3, glm45, glm47, minimax_m2, nemotron_v3, olmo3, ernie45, "
        "hunyuan_a13b, kimi_k2, seed_oss, mistral, gemma4, granite, openai_gptoss, none"
    )
    with pytest.raises(ValueError, match=f"reasoning_parser must be one of {known}, is 'r1'"):
        RouterArgs(model="m", reasoning_parser="r1")
    with pytest.raises(ValueError, match=f"--reasoning-parser must be one of {known}, is 'r1'"):
        ClusterArgs(reasoning_parser="r1")


@pytest.mark.parametrize("is_taken_up", [False, True])
def test_the_last_message_names_the_stop_string(is_taken_up: bool) -> None:
    """Also if the client has all the rest of the answer already."""
    tokenizer = Tokenizer(grammar_cases.tokenizer())
    token_ids = tokenizer.encode("a b", False)
    for stop, named in (("b", "b"), ("c", "")):
        detokenizer = IncrementalDetokenizer(tokenizer, stop=["x", stop])
        if is_taken_up:
            begun = BegunAnswer(token_ids=tuple(token_ids))
            resumption_of(begun, "", detokenizer, max_tokens=10**6, stop_token_ids=())
            messages = message_of(parser(False), detokenizer, len(token_ids))
        else:
            messages = message_of(parser(False), detokenizer, 0)
            messages.delta(Emit(0, token_ids, (), ()))
        last = messages.last(pb.FINISH_REASON_STOP, num_cached_tokens=0, timings=pb.Timings())
        assert last.stop_reason == named
