"""Answers in gpt-oss' format that are held to a form: they think, and then a final message, or a call, has the form."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from grammar_cases import KINDS, grammar_text, tokenizer, write_model
from test_harmony import JSON, NEXT, TO, A, C, F
from test_reasoning import message_of
from tool_call_cases import outcome
from validation_cases import MODEL

from engine.scheduling.grammar import Grammars
from protos import tandem_inference_pb2 as pb
from router.prepared import PreparedRequest
from router.request_events import Emit
from router.served_model import Texts
from router.text.calls.call_format import Tool
from router.text.calls.harmony import WORDS
from router.text.calls.text_values import Schema
from router.text.chat_template import ChatTemplate
from router.text.harmony import Harmony
from router.text.structured_outputs import grammar_of
from router.text.tokenizer import Tokenizer
from router.text.tool_calls import ToolCallParser
from router.text.tool_formats import FORMATS, calls_grammar
from router.validation.prompt import TokenizedPrompt
from router.validation.request import validate
from router.validation.resumption import BegunAnswer, resumption_of
from tandem.requests import generate_request

RIGHT = {"json": '{"name": "a", "size": 12, "list": []}', "json_object": "{}", "regex": "abcé", "choice": "reddish",
         "grammar": "((ab))"}  # fmt: skip
TOOLS = [
    Tool(name="weather", parameters={"properties": {"city": {"type": "string", "maxLength": 5}}, "required": ["city"]}),
    Tool(name="now"),
]
NOW = [{"function": {"name": "now"}}]
CALL, FINAL = f"{TO}now{JSON}{{}}", f"{F}{{}}"
HI: list[Any] = [{"role": "user", "content": "Hi"}]


def words(*, are_added: bool = True) -> tokenizers.Tokenizer:
    made = tokenizer()
    if are_added:
        made.add_special_tokens([tokenizers.AddedToken(word, normalized=False, special=True) for word in WORDS])
    return made


@pytest.fixture(scope="module")
def made() -> tokenizers.Tokenizer:
    """A tokenizer with the format's words as special tokens, as gpt-oss' has them."""
    return words()


@pytest.fixture(scope="module")
def ends(made: tokenizers.Tokenizer) -> frozenset[int]:
    """The tokens that end an answer, as in gpt-oss' generation config."""
    return frozenset(made.token_to_id(word) for word in ("<|return|>", "<|call|>"))


@pytest.fixture(scope="module")
def grammars(made: tokenizers.Tokenizer, ends: frozenset[int], tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    folder: Path = write_model(tmp_path_factory.mktemp("model"))
    made.save(str(folder / "tokenizer.json"))
    return Grammars(folder, vocab_size=300, eos_token_ids=ends)


def held(made: tokenizers.Tokenizer, form: str, *, opened: str = "", is_calls: bool = False) -> str:
    return Harmony(opened=opened).grammar(form, tokens=Tokenizer(made).added_ids(WORDS), is_calls=is_calls)


def may_be(grammars: Grammars, made: tokenizers.Tokenizer, grammar: str, text: str) -> bool:
    """Whether `text` may be a whole answer, and may end with either of the model's end tokens."""
    state = grammars.state(grammar)
    ids: list[int] = made.encode(text).ids
    for position in range(len(ids) + 1):
        allowed = state.allowed(ids[:position])
        assert allowed is not None, state.error
        if position == len(ids):
            may_end = [bool(allowed[made.token_to_id(word)]) for word in ("<|return|>", "<|call|>")]
            assert may_end[0] == may_end[1]
            return may_end[0]
        if not allowed[ids[position]]:
            return False
    raise AssertionError


@pytest.mark.parametrize("kind", list(KINDS))
def test_an_answer_may_think_and_then_its_final_message_has_its_form(
    kind: str, grammars: Grammars, made: tokenizers.Tokenizer
) -> None:
    grammar, right = held(made, grammar_text(kind)), RIGHT[kind]
    for thought in ("", A + NEXT, f'{A}a < b <|x {{"é\n{NEXT}', f"{A}One.{NEXT}{A}Two.{NEXT}"):
        assert may_be(grammars, made, grammar, f"{thought}{F}{right}")
        for wrong in (
            f"{thought}{F}?{right}",
            f"{thought}{right}",
            f"{thought}{C}{right}",
            f"{thought}{F}{right}{NEXT}",
        ):
            assert not may_be(grammars, made, grammar, wrong)
    assert not may_be(grammars, made, grammar, f"{A}{right}")
    first = grammars.state(grammar).allowed([])
    assert first is not None
    assert np.flatnonzero(first).tolist() == [made.token_to_id("<|channel|>")], "in its token, not in others"


def test_what_the_prompt_has_begun_is_gone_on_with(grammars: Grammars, made: tokenizers.Tokenizer) -> None:
    form = grammar_text("choice")
    thinking, final = held(made, form, opened=A), held(made, form, opened=F)
    assert may_be(grammars, made, thinking, f"So.{NEXT}{A}So.{NEXT}{F}red")
    assert not may_be(grammars, made, thinking, "red")
    assert may_be(grammars, made, final, "red")
    calls = calls_grammar(FORMATS["openai"], TOOLS, is_one=True, tokens=Tokenizer(made).added_ids(WORDS)).text
    assert may_be(grammars, made, held(made, calls, opened=F, is_calls=True), f"{NEXT}{A}So.{NEXT}{TO}now{JSON}{{}}")
    assert Harmony().grammar("") == ""


def test_calls_come_after_what_is_thought(grammars: Grammars, made: tokenizers.Tokenizer) -> None:
    added = Tokenizer(made).added_ids(WORDS)

    def calls_of(**how: Any) -> str:
        return held(made, calls_grammar(FORMATS["openai"], TOOLS, tokens=added, **how).text, is_calls=True)

    oslo, now = f'{TO}weather{JSON}{{"city": "Oslo"}}', f"{TO}now{JSON}{{}}"
    for thought in ("", f"{A}I look.{NEXT}", f"{A}One.{NEXT}{A}Two.{NEXT}"):
        for is_one in (False, True):
            grammar = calls_of(is_one=is_one)
            assert may_be(grammars, made, grammar, thought + oslo)
            assert may_be(grammars, made, grammar, thought + now)
            assert may_be(grammars, made, grammar, f"{thought}{oslo}{NEXT}{now}") != is_one
            wrongs = [
                f"{TO}other{JSON}{{}}",
                f"{TO}weather{JSON}{{}}",
                f"{oslo}.",
                f"{F}Hi",
                f"{C}I look.{NEXT}{now}",
                "",
            ]
            assert [wrong for wrong in wrongs if may_be(grammars, made, grammar, thought + wrong)] == []
        either = calls_of(is_one=False, or_form={"type": "array"})
        said = [now, f"{F}[1]", f"{F}1", f"{now}{NEXT}{F}[1]"]
        assert [may_be(grammars, made, either, thought + each) for each in said] == [True, True, False, False]


def test_whatever_the_grammar_lets_be_said_is_read_as_a_thought_and_calls(
    grammars: Grammars, made: tokenizers.Tokenizer, ends: frozenset[int]
) -> None:
    added = Tokenizer(made).added_ids(WORDS)
    grammar = held(made, calls_grammar(FORMATS["openai"], TOOLS, is_one=False, tokens=added).text, is_calls=True)
    schemas = {tool.name: Schema(tool.parameters) for tool in TOOLS}
    num_read = num_thought = 0
    for seed in range(12):
        rng, state, answer = random.Random(seed), grammars.state(grammar), list[int]()
        while ends.isdisjoint(answer) and len(answer) < 300:
            mask = state.allowed(answer)
            assert mask is not None, state.error
            may_be = np.flatnonzero(mask).tolist()
            plain = [
                each for each in may_be if "\ufffd" not in made.decode([each], skip_special_tokens=False)
            ] or may_be
            wanted = [each for each in may_be if each in ends or each in added.values()]
            answer.append(rng.choice(wanted if wanted and rng.random() < 0.3 else plain))
        if ends.isdisjoint(answer):
            continue
        reader = Harmony().reader(ToolCallParser(FORMATS["openai"], schemas, lambda index: f"id-{index}"))
        told = [reader.push(made.decode(answer[:-1], skip_special_tokens=False)), reader.finish()]
        content, calls = outcome(told)
        assert calls
        assert content == ""
        num_thought += bool(told[0].reasoning)
        for arguments in (json.loads(arguments) for name, arguments in calls if name == "weather"):
            num_read += 1
            assert len(arguments["city"]) <= 5
    assert num_read
    assert num_thought


def test_words_that_are_spelled_end_a_thought_too(tmp_path: Path) -> None:
    """For a vocabulary that does not have the words as tokens."""
    spelled = words(are_added=False)
    grammar = held(spelled, grammar_text("choice"))
    folder = write_model(tmp_path)
    end = spelled.token_to_id("<eos>")
    state = Grammars(folder, vocab_size=300, eos_token_ids=frozenset({end})).state(grammar)
    ids = spelled.encode(f"{A}a < b{NEXT}{F}red").ids
    for position, token_id in enumerate([*ids, end]):
        allowed = state.allowed(ids[:position])
        assert allowed is not None, state.error
        assert allowed[token_id]


# -- in an answer -----------------------------------------------------------------------------------------------------


def harmony_model(made: tokenizers.Tokenizer, ends: frozenset[int]) -> Texts:
    model = replace(
        MODEL, tool_call_parser="openai", reasoning_parser="openai_gptoss", shows_tools=True, eos_token_ids=ends
    )
    return Texts(model, Tokenizer(made), None)


@pytest.mark.parametrize("has_tools", [False, True])
@pytest.mark.parametrize("shows_special", [False, True])
def test_an_answer_is_taken_up_at_any_token_and_tells_no_word(
    has_tools: bool, shows_special: bool, made: tokenizers.Tokenizer, ends: frozenset[int]
) -> None:
    """The format's words are special tokens, which are normally left out of the text."""
    texts = harmony_model(made, ends)
    tools = [{"function": {"name": "now"}}] if has_tools else None
    validated = validate(generate_request(HI, tools=tools, skip_special_tokens=not shows_special), texts.model)
    prepared = PreparedRequest(validated, texts.model, texts, TokenizedPrompt([0]))
    token_ids: list[int] = made.encode(f"{A}So é.{NEXT}{C}I look.{NEXT}{TO}now{JSON}{{}}<|call|>").ids
    whole = ("So é.", "I look." if has_tools else "I look.\n\n{}", "{}" if has_tools else "")

    def begin() -> Any:
        return prepared.reader(seed=1), prepared.detokenizer()

    for cut in range(len(token_ids)):
        has, _ = message_of(*begin(), 0).delta(Emit(0, token_ids[:cut], (), ()))
        reader, detokenizer = begin()
        begun = BegunAnswer(token_ids=tuple(token_ids[:cut]))
        resumption_of(begun, "", detokenizer, reader, max_tokens=10**6, stop_token_ids=ends)
        messages = message_of(reader, detokenizer, cut)
        rest, _ = messages.delta(Emit(cut, token_ids[cut:], (), ()))
        parts = [has, rest, messages.last(pb.FINISH_REASON_STOP, num_cached_tokens=0, timings=pb.Timings())]
        assert "".join(each.reasoning for each in parts) == whole[0]
        assert "".join(each.text for each in parts) == whole[1]
        assert "".join(piece.arguments for each in parts for piece in each.tool_calls) == whole[2]
        cut_off = message_of(*begin(), 0)
        first, _ = cut_off.delta(Emit(0, token_ids[:cut], (), ()))
        last = cut_off.last(pb.FINISH_REASON_LENGTH, num_cached_tokens=0, timings=pb.Timings())
        assert whole[0].startswith(first.reasoning + last.reasoning)
        assert whole[1].startswith(first.text + last.text), "no word, nor a header that a limit cuts off"


@pytest.mark.parametrize(
    ("asked", "opened", "right", "wrong"),
    [
        ({"structured_outputs": {"json_object": True}}, "", [FINAL], [CALL]),
        ({"structured_outputs": {"json_object": True}}, F, ["{}"], [CALL, FINAL]),
        ({"structured_outputs": {"json_object": True}, "tools": NOW}, "", [CALL, FINAL], [f"{F}[]"]),
        ({"tools": NOW, "tool_choice": "required"}, "", [CALL], [FINAL]),
        ({"tools": NOW, "tool_choice": "required"}, F, [f"{NEXT}{CALL}"], [CALL, FINAL]),
    ],
)
def test_what_is_asked_is_what_an_answer_is_held_to(
    asked: dict[str, Any],
    opened: str,
    right: list[str],
    wrong: list[str],
    grammars: Grammars,
    made: tokenizers.Tokenizer,
    ends: frozenset[int],
) -> None:
    texts = harmony_model(made, ends)
    validated = validate(generate_request(HI, **asked), texts.model)
    form = grammar_of(validated.sampling_params.structured_outputs)
    grammar = PreparedRequest(validated, texts.model, texts, TokenizedPrompt([0], opened), form).grammar
    assert [may_be(grammars, made, grammar, each) for each in right] == [True] * len(right)
    assert [may_be(grammars, made, grammar, each) for each in wrong] == [False] * len(wrong)
    assert may_be(grammars, made, grammar, f"{A}So.{NEXT}{right[0]}") == (not opened)


# -- templates --------------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% if tools %}<|start|>developer<|message|>{% for t in tools %}type {{ t.function.name }}{% endfor %}<|end|>"
    "{% endif %}{% for m in messages %}{% if m.tool_calls %}{% if m.content and m.thinking %}"
    "{{ raise_exception('both') }}{% endif %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ m.content or m.thinking }}<|end|><|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}"
    "<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}<|start|>assistant"
)
"""gpt-oss' template, shortened."""


def test_a_template_tells_both_and_one_goes_with_the_other() -> None:
    template, plain = ChatTemplate(TEMPLATE), ChatTemplate("{{ tools | tojson }}")
    model = MODEL.with_chat(template, "auto")
    assert (model.tool_call_parser, model.reasoning_parser) == ("openai", "openai_gptoss")
    model = MODEL.with_chat(plain, "openai")
    assert (model.tool_call_parser, model.reasoning_parser) == ("openai", "openai_gptoss")
    for source, calls, thinks in (
        (template, "auto", "none"), (template, "hermes", "auto"), (plain, "openai", "qwen3"),
        (plain, "hermes", "openai_gptoss"),
    ):  # fmt: skip
        model = MODEL.with_chat(source, calls, thinks)
        assert model.tool_call_parser == ""
        assert (
            "--tool-call-parser openai and --reasoning-parser openai_gptoss must be used together"
            in model.no_tools_because
        )


@pytest.mark.parametrize(("content", "shown"), [("", "Easy."), ("I look.", "I look.")])
def test_what_was_thought_before_a_call_goes_to_the_template_by_its_name(content: str, shown: str) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "CET"}'}}
    made: list[Any] = [
        *HI, {"role": "assistant", "content": content, "reasoning": "Easy.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
        {"role": "assistant", "content": "At 3.", "reasoning": "So it is."},
    ]  # fmt: skip
    template = ChatTemplate(TEMPLATE)
    asked = validate(generate_request(made, tools=[{"function": {"name": "now"}}]), MODEL.with_chat(template, "auto"))
    rendered = template.render(asked.prompt.messages)  # type: ignore[union-attr]
    said = (
        f"<|start|>assistant{A}{shown}<|end|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>"
    )
    assert f'{said}{{"zone": "CET"}}<|call|>' in rendered
    assert "So it is." not in rendered
