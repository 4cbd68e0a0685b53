"""Text with tags: what fits, what does not, and which forms are refused, compared with an independent reader of such
texts."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from grammar_cases import EOS, text_of, tokenizer, write_model
from lifecycle_bench import Bench
from tool_call_cases import is_in
from validation_cases import MODEL

from engine.scheduling.grammar import Grammars
from protos import tandem_inference_pb2 as pb
from router.prepared import prepare
from router.served_model import Texts
from router.text import structured_outputs
from router.text.reasoning import reasoning_of
from router.text.structured_outputs import grammar_of, texts_in
from router.text.tokenizer import Tokenizer
from router.validation.grammar_checker import GrammarChecker
from router.validation.request import compile_grammar, validate
from rpc.errors import InvalidRequest

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}},
    "required": ["city"],
    "additionalProperties": False,
}
OF_CITY = {"type": "json_schema", "json_schema": CITY}
TAGS: list[dict[str, Any]] = [
    {"begin": "<f=weather>", "content": OF_CITY, "end": "</f>"},
    {"begin": "<f=now>", "content": {"type": "json_schema", "json_schema": {"enum": [1, 23]}}, "end": "</f>"},
]
OLD = {
    "type": "structural_tag",
    "structures": [{"begin": tag["begin"], "schema": tag["content"]["json_schema"], "end": "</f>"} for tag in TAGS],
    "triggers": ["<f="],
}
TRIGGERED: dict[str, Any] = {"type": "triggered_tags", "triggers": ["<f="], "tags": TAGS}
WEATHER, NOW = '<f=weather>{"city": "Oslo"}</f>', "<f=now>23</f>"


def asked(form: dict[str, Any]) -> pb.StructuredOutputs:
    is_whole = not form or "format" in form or "structures" in form
    given = form if is_whole else {"type": "structural_tag", "format": form}
    return pb.StructuredOutputs(structural_tag=json.dumps(given))


def tag(begin: str, content: dict[str, Any], end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


ANY = {"type": "any_text"}
YES = {"type": "const_string", "value": "yes"}
SEPARATED = {"type": "tags_with_separator", "separator": "\n", "tags": TAGS}
LISTED = tag("<calls>", SEPARATED, "\n</calls>")
THINKING = {"type": "sequence", "elements": [tag("<think>", ANY, "</think>"), TRIGGERED]}
FITS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "old": (
        OLD,
        ["", "hi", "a < b, <f", "<<f", WEATHER, f"It is {NOW}, <f{WEATHER}{NOW} it is.", "</f>"],
        ["<f=", "a <f=x", "<f=now>", "<f=now>5</f>", "<f=now>23", '<f=weather>{"city": 5}</f>', f"{NOW}<f=a"],
    ),
    "triggered": (TRIGGERED, ["", "hi <f", NOW, f"a{NOW}<{WEATHER}c"], ["<f=", "<f=now>5</f>", "<f=now>23</f"]),
    "at least one": (
        {**TRIGGERED, "at_least_one": True},
        [NOW, f"{WEATHER} and {NOW}, too"],
        ["", "hi", f" {NOW}", f"{NOW}<f="],
    ),
    "stop after first": (
        {**TRIGGERED, "stop_after_first": True}, ["", "hi", NOW, f"a{NOW}"], [f"{NOW} ", f"{NOW}{NOW}"],
    ),
    "exactly one": (
        {**TRIGGERED, "at_least_one": True, "stop_after_first": True}, [NOW, WEATHER], ["", f"a{NOW}", f"{NOW}{NOW}"],
    ),
    "several triggers": (
        {
            "type": "triggered_tags", "triggers": ["<f=", "[g", "```json\n"],
            "tags": [*TAGS, tag("[g]", YES, ""), tag("```json\n", OF_CITY, "\n```")],
        },
        ["[ g", "[[g]yes", f"`[g]yes```{NOW}````json\n" '{"city": "a"}\n```.', "```js", "```\njson"],
        ["[g", "[g]no", "```json\n{}\n```", "```json\na", "[g]ye"],
    ),
    "without a word": ({**TRIGGERED, "excludes": ["no\n"]}, ["no", "n\n", f"no{NOW}"], ["no\n", f"{NOW}no\n"]),
    "tag": (tag("<a>", YES, "</a>"), ["<a>yes</a>"], ["", "<a>yes", "yes", "<a>yes</a> "]),
    "one of two ends": (
        tag("<a>", ANY, ["</a>", "\n\n"]), ["<a>b\n</a>", "<a>\n\n", "<a></a>"], ["<a>\n\n</a>", "<a>"],
    ),
    "text in a tag": (
        tag("<a>", ANY, "</a>"), ["<a></a>", "<a></</a>", "<a>é\n</a>"], ["<a></a></a>", "<a>", "<a></a>b"],
    ),
    "tags in a tag": (
        tag("<a>", TRIGGERED, "</a>"), ["<a></a>", f"<a>b{NOW}c</a>", f"<a>{NOW}{WEATHER}</</a>"],
        [f"<a></a>{NOW}</a>", "<a><f=</a>", f"<a>{NOW}"],
    ),
    "the first tag in a tag": (
        tag("<a>", {**TRIGGERED, "stop_after_first": True}, "</a>"), ["<a>b</a>", f"<a>b{NOW}</a>"], [f"<a>{NOW}c</a>"],
    ),
    "separated": (SEPARATED, ["", NOW, f"{NOW}\n{WEATHER}\n{NOW}"], ["\n", f"{NOW}\n", f"{NOW}{NOW}", "a"]),
    "separated, some": ({**SEPARATED, "at_least_one": True}, [NOW, f"{NOW}\n{NOW}"], [""]),
    "separated, one": ({**SEPARATED, "stop_after_first": True}, ["", NOW], [f"{NOW}\n{NOW}"]),
    "separated in a tag": (
        LISTED, ["<calls>\n</calls>", f"<calls>{NOW}\n{WEATHER}\n</calls>"], [f"<calls>{NOW}</calls>", "<calls>"],
    ),
    "regex": ({"type": "regex", "pattern": "[a/]+\n?"}, ["a/", "aa\n"], ["", "b"]),
    "regex in a tag": (
        tag("<", {"type": "regex", "pattern": "a|b.*"}, ">a"), ["<a>a", "<b>>a", "<b>ab>a"], ["<a", "<c>a", "<b>ab"],
    ),
    "or": (
        {"type": "or", "elements": [YES, OF_CITY, tag("<", ANY, ">")]},
        ["yes", '{"city": ""}', "<a>"], ["", "no", "yes<a>"],
    ),
    "thinking": (THINKING, ["<think>a</think>", f"<think>{NOW}</think>\n{NOW}b"], ["<think>a", "</think>", "a"]),
    "any text": (ANY, ["", "a\n<é"], []),
    "anything but": ({**ANY, "excludes": ["ab", "<"]}, ["", "aab"[:2], "ba"], ["ab", "<", "xaab"]),
    "json": (OF_CITY, ['{"city": "a"}'], ["", '{"city":"a"}', "{}"]),
}  # fmt: skip


@pytest.mark.parametrize("name", list(FITS))
def test_what_fits_and_what_does_not(name: str) -> None:
    form, right, wrong = FITS[name]
    grammar = grammar_of(asked(form))
    assert [text for text in right if not is_in(grammar, text)] == []
    assert [text for text in wrong if is_in(grammar, text)] == []


@pytest.mark.parametrize(
    "char", ["\n", "\t", "\r", "/", "\\", '"', "é", "[", "^", "-", "&", "~", "#", " ", "☃", "\x07", "\x7f", "\0"]
)
def test_words_may_have_any_characters(char: str) -> None:
    form = {"type": "triggered_tags", "triggers": [f"<{char}{char}"], "tags": [tag(f"<{char}{char}>", ANY, f"{char};")]}
    grammar = grammar_of(asked(form))
    assert is_in(grammar, f"<{char}.<{char}{char}>a{char}.{char};<{char}")
    assert not is_in(grammar, f"a<{char}{char}.")
    grammar = grammar_of(asked({**SEPARATED, "separator": char}))
    assert is_in(grammar, f"{NOW}{char}{NOW}")
    assert not is_in(grammar, f"{NOW}{char}")


def test_the_two_forms_are_one() -> None:
    assert grammar_of(asked(OLD)) == grammar_of(asked(TRIGGERED))


MANY = [{"begin": f"<f={number}>", "content": ANY, "end": "</f>"} for number in range(129)]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "must have format, or (older form) structures and triggers"),
    ({"format": []}, "format must be an object, is []"),
    ({"format": ANY, "triggers": ["a"]}, "triggers is not known; known are type, format"),
    ({"structures": [], "triggers": ["a"]}, "structures must have 1 to 128 entries, has 0"),
    ({"structures": OLD["structures"]}, "triggers must be a list, is null"),
    ({**OLD, "triggers": ["<g="]}, 'structures[0].begin must begin with one of triggers, is "<f=weather>"'),
    ({**OLD, "structures": [{"begin": "<f=", "schema": {"type": "objekt"}, "end": ""}]},
     "structures[0].schema: Invalid type: objekt"),
    ({"type": "xml", "format": ANY}, 'type must be structural_tag, is "xml"'),
    ({"type": "token_triggered_tags"}, "format.type must be one of triggered_tags, tags_with_separator, tag, sequence, "
     'or, json_schema, regex, const_string, any_text, is "token_triggered_tags"'),
    ({**TRIGGERED, "triggers": []}, "format.triggers must have 1 to 6 entries, has 0"),
    ({**TRIGGERED, "triggers": [f"<{x}" for x in "abcdefg"]}, "format.triggers must have 1 to 6 entries, has"),
    ({**TRIGGERED, "triggers": ["<f=", ""]}, "format.triggers[1] must not be empty"),
    ({**TRIGGERED, "triggers": ["<f=", 5]}, "format.triggers[1] must be a text, is 5"),
    ({**TRIGGERED, "triggers": ["é" * 33]}, "format.triggers[0] must have at most 64 bytes, has 66"),
    ({**TRIGGERED, "triggers": ["<f=", "\ud800"]}, "format.triggers[1] must be valid Unicode, has half"),
    ({**TRIGGERED, "triggers": ["<f=", "<f=now"]}, "format.triggers[1] is \"<f=now\", and another one \"<f=\":"),
    ({**TRIGGERED, "triggers": ["<f=", "<g="]}, 'format.triggers[1] is "<g=", which no tag begins with'),
    ({**TRIGGERED, "tags": [*TAGS, tag("<g>", ANY, "</g>")]}, "format.tags[2].begin must begin with one of"),
    ({**TRIGGERED, "tags": [tag("", ANY, "</g>")]}, "format.tags[0].begin must begin with one of"),
    ({**TRIGGERED, "tags": MANY}, "format.tags must have 1 to 128 entries, has 129"),
    ({**TRIGGERED, "at_least_one": 1}, "format.at_least_one must be true or false, is 1"),
    ({**TRIGGERED, "stop_words": []}, "format.stop_words is not known; known are type, triggers, tags, at_least_one"),
    ({**TRIGGERED, "tags": [{**TAGS[0], "type": "any_text"}]}, 'format.tags[0].type must be tag, is "any_text"'),
    ({**TRIGGERED, "tags": [tag("<f=", ANY, "")]}, "format.tags[0].content: any_text must be the content of a tag or"),
    ({**TRIGGERED, "tags": [tag("<f=" + "a" * 4096, YES, "")]}, "format.tags[0].begin must have at most 4096 bytes"),
    (tag("<a>", ANY, "a" * 65), "format.content: 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa must have at most 64 char"),
    ({**TRIGGERED, "excludes": list("abcdex")}, "format: free text may end at or exclude at most 6 words, has 7"),
    (tag("<a>", ANY, ["</a>", ""]), "format.end must not be empty"),
    (tag("<a>", {**TRIGGERED, "excludes": ["</"]}, "</a>"), "format.content: '</a>' contains '</', and could never"),
    (tag("<a>", {"type": "json_schema"}, ""), "format.content.json_schema must be a schema that some text fits, is"),
    ({"type": "json_schema", "json_schema": {"maximum": 1 << 63}}, "format.json_schema: maximum must be within 64"),
    ({"type": "json_schema", "json_schema": {"uniqueItems": True}}, "format.json_schema: Unimplemented keys"),
    ({"type": "json_schema", "json_schema": {}, "style": "xml"}, 'format.style must be json, is "xml"'),
    ({"type": "regex", "pattern": "(a"}, "unclosed group"),
    (tag("<", {"type": "regex", "pattern": "a)|(b"}, ">"), "format.content.pattern: invalid regex"),
    ({"type": "sequence", "elements": [ANY, YES]}, "format.elements[0]: any_text must be the content of"),
    ({"type": "sequence", "elements": [TRIGGERED, YES]}, "format.elements[0]: triggered_tags must be the c"),
    ({"type": "sequence", "elements": []}, "format.elements must have 1 to 128 entries, has 0"),
    ({"type": "const_string", "value": ""}, "format.value must not be empty"),
    ({"type": "\ud800é"}, 'any_text, is "\\ud800é"'),
    ({"type": "any_text", "\udfff": 1}, "format.\\udfff is not known; known are type, excludes"),
]  # fmt: skip


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker()
    yield checker
    await checker.close()


async def refused(form: pb.StructuredOutputs, checker: GrammarChecker) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await compile_grammar(pb.SamplingParams(structured_outputs=form), checker)
    [violation] = caught.value.violations
    assert violation.field == "sampling_params.structured_outputs"
    assert len(violation.description) < 500
    return violation.description


async def test_what_is_wrong_is_refused_by_name(checker: GrammarChecker) -> None:
    for form, why in WRONG:
        assert (await refused(asked(form), checker)).startswith("structural_tag: ")
        assert why in await refused(asked(form), checker), form
    for text, why in (("{", "is not JSON: "), ("[]", "must be an object, is []"), ('{"format": NaN}', "is not JSON: ")):
        assert why in await refused(pb.StructuredOutputs(structural_tag=text), checker)
    child = checker._process._child
    assert child is not None
    assert child.returncode is None, "none of these ends the process that compiles"


async def test_what_takes_too_long_is_refused_and_the_next_one_compiled(checker: GrammarChecker) -> None:
    deep: dict[str, Any] = YES
    for _ in range(17):
        deep = tag("<", deep, ">")
    assert "formats may be nested at most 16 deep" in await refused(asked(deep), checker)
    text = '{"format": ' + '{"type": "or", "elements": [' * 2000 + json.dumps(YES) + "]}" * 2000 + "}"
    assert await refused(pb.StructuredOutputs(structural_tag=text), checker)
    ends = [
        {"type": "or", "elements": [tag(f"{n}", ANY, [f"A{n}{'x' * 40}", f"B{n}{'y' * 40}", "<"])]} for n in range(40)
    ]
    with pytest.raises(ValueError, match="makes a grammar of "):
        grammar_of(asked({"type": "or", "elements": ends}))
    assert await refused(asked({"type": "or", "elements": ends}), checker), "maybe for its time, on a busy machine"
    schema = {"type": "integer", "allOf": [{"multipleOf": number} for number in (101, 103, 107, 109)]}
    heavy = {**TRIGGERED, "tags": [tag("<f=", {"type": "json_schema", "json_schema": schema}, "")]}
    assert "to compile; make it simpler" in await refused(asked(heavy), checker)
    fine = await compile_grammar(pb.SamplingParams(structured_outputs=asked(TRIGGERED)), checker)
    assert is_in(fine, f"a{NOW}")


async def test_words_that_are_tokens_are_said_by_number_and_not_in_the_routers_process(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work on a stranger's tag must not block the streams of others."""
    monkeypatch.setattr(structured_outputs, "StructuralTag", None)
    params = pb.SamplingParams(structured_outputs=asked(TRIGGERED))
    assert "<[77]>" in await compile_grammar(params, checker, tokens={"<f=": 77})
    assert "<[" not in await compile_grammar(params, checker)


def test_words_are_said_by_number_where_their_tokens_are_no_text(tmp_path: Path) -> None:
    """An added token that is two line breaks does not begin a tag by itself: ordinary text has it, too."""
    made = tokenizer()
    made.add_tokens([tokenizers.AddedToken(word, normalized=False) for word in ("NN", "<t>", "<t><t>")])
    made.add_special_tokens(["[s]"])
    form = asked({"type": "triggered_tags", "triggers": ["NN<t>"], "tags": [tag("NN<t><t><t>[s]", YES, ">")]})
    tokens = Tokenizer(made).added_in(texts_in(form))
    assert set(tokens) == {"<t>", "<t><t>", "[s]"}
    grammar = grammar_of(form, tokens)
    folder = write_model(tmp_path / "model")
    made.save(str(folder / "tokenizer.json"))
    text = "aNNbNN<t><t><t>[s]yes>"
    state = Grammars(folder, vocab_size=VOCABULARY, eos_token_ids=frozenset({EOS})).state(grammar)
    ids = list(made.encode(text).ids)
    for number, token_id in enumerate([*ids, EOS]):
        allowed = state.allowed(ids[:number])
        assert allowed is not None, state.error
        assert allowed[token_id], number


async def test_words_that_are_tokens_are_looked_for_beside_the_routers_event_loop(checker: GrammarChecker) -> None:
    """A tokenizer may have thousands of such words, and a tag 64 KiB."""
    looked: list[bool] = []

    class Watched(Tokenizer):
        def added_in(self, texts: Iterable[str]) -> dict[str, int]:
            looked.append(threading.current_thread() is threading.main_thread())
            return super().added_in(texts)

    texts = Texts(MODEL, Watched(words("special")), None)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]))
    pool = Bench().pool
    await prepare(validate(request, MODEL), MODEL, texts, checker, pool)
    assert looked == []
    request.sampling_params.structured_outputs.CopyFrom(asked(TRIGGERED))
    prepared = await prepare(validate(request, MODEL), MODEL, texts, checker, pool)
    assert looked == [False]
    assert "<[" in prepared.grammar


def test_what_is_no_json_has_no_words() -> None:
    for text in ("", "[" * 60_000, "{"):
        assert texts_in(pb.StructuredOutputs(structural_tag=text)) == []
    assert texts_in(pb.StructuredOutputs(regex="a")) == []
    assert set(texts_in(asked(TRIGGERED))) >= {"<f=", "<f=now>", "</f>"}


# -- token by token ----------------------------------------------------------------------------------------------------

VOCABULARY = 300
WALKED = {
    "triggered": TRIGGERED, "at least one": {**TRIGGERED, "at_least_one": True}, "thinking": THINKING, "listed": LISTED,
    "in a tag": tag("<a>", TRIGGERED, "\n</a>"), "short trigger": {**TRIGGERED, "triggers": ["<f"]},
}  # fmt: skip


MEANT = ["<f=now>", "<f=weather>", "</think>", "\n</calls>", "\n</a>", "</f>", '"}', "<f", "a"]


def has_form(name: str, text: str) -> bool:
    """Whether the text has the form, found by a search for what begins and ends each part."""
    if name == "thinking":
        head, found, text = text.partition("</think>")
        return bool(found) and head.startswith("<think>") and has_form("triggered", text)
    if name == "listed":
        inner = re.fullmatch(r"<calls>(.*)\n</calls>", text, re.DOTALL)
        return inner is not None and all(has_form("at least one", each) for each in inner[1].split("\n") if inner[1])
    if name == "in a tag":
        inner = re.fullmatch(r"<a>(.*)\n</a>", text, re.DOTALL)
        return inner is not None and "\n</a>" not in inner[1] and has_form("triggered", inner[1])
    if name == "at least one":
        return text.startswith("<f=") and has_form("triggered", text)
    while "<f=" in text:
        text = text[text.index("<f=") :]
        begin = next((each["begin"] for each in TAGS if text.startswith(each["begin"])), None)
        if begin is None:
            return False
        value, end = json.JSONDecoder().raw_decode(text, len(begin))
        if value not in (1, 23) if begin == "<f=now>" else (list(value) != ["city"] or len(value["city"]) > 6):
            return False
        if not text.startswith("</f>", end):
            return False
        text = text[end + len("</f>") :]
    return True


def words(kind: str) -> tokenizers.Tokenizer:
    """The same vocabulary, in which some words are tokens of their own, special or not."""
    made = tokenizer()
    if kind != "spelled":
        added = [
            tokenizers.AddedToken(word, normalized=False) for word in ("<f=", "</f>", "</think>", "<calls>", "</a>")
        ]
        (made.add_special_tokens if kind == "special" else made.add_tokens)(added)
    return made


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", ["spelled", "added", "special"])
@pytest.mark.parametrize("name", list(WALKED))
def test_whatever_is_drawn_has_the_form(name: str, kind: str, tmp_path: Path) -> None:
    """Random walks that often begin a tag. The masks depend on the tokens alone, not on how they were reached."""
    made, form = words(kind), asked(WALKED[name])
    folder = write_model(tmp_path / "model")
    made.save(str(folder / "tokenizer.json"))
    reader = Tokenizer(made)
    tokens = reader.added_in(texts_in(form))
    assert bool(tokens) == (kind != "spelled")
    grammar = grammar_of(form, tokens)
    state_of = Grammars(folder, vocab_size=VOCABULARY, eos_token_ids=frozenset({EOS}))
    num_tags = num_by_token = 0
    for seed in range(8):
        rng, answer, state = random.Random(seed), list[int](), state_of.state(grammar)
        meant: list[int] = []
        while True:
            allowed = state.allowed(answer)
            assert allowed is not None, state.error
            other = state_of.state(grammar).allowed(answer) if len(answer) % 16 == 0 else allowed
            assert np.array_equal(other, allowed)
            ids = np.flatnonzero(allowed).tolist()
            if EOS in ids and len(answer) > 40:
                break
            if not meant and rng.random() < 0.5:
                meant = list(made.encode(rng.choice(MEANT)).ids)
            if meant and meant[0] not in ids:
                meant = []
            token_id = meant.pop(0) if meant else rng.choice(ids)
            if token_id == EOS:
                break
            answer.append(token_id)
            assert len(answer) < 600
        text = made.decode(answer, skip_special_tokens=False)
        assert has_form(name, text), text
        num_tags += text.count("</f>")
        num_by_token += sum(token_id == made.token_to_id("<f=") for token_id in answer)
    assert num_tags > 0
    assert (num_by_token > 0) == (kind != "spelled")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", [name for name in FITS if FITS[name][1]])
def test_what_fits_may_be_said_in_the_tokens_of_a_real_model(name: str, model_folder: Path) -> None:
    """In the tokens into which the model's tokenizer cuts the text, to its end."""
    state_of = Grammars(model_folder, vocab_size=49_152, eos_token_ids=frozenset({2}))
    reader = Tokenizer.from_folder(model_folder)
    grammar = grammar_of(asked(FITS[name][0]))
    for text in FITS[name][1][-2:]:
        state, answer = state_of.state(grammar), list[int]()
        for token_id in [*reader.encode(text, add_special_tokens=False), 2]:
            allowed = state.allowed(answer)
            assert allowed is not None, state.error
            assert allowed[token_id], (reader.decode(answer), token_id)
            answer.append(token_id)


@pytest.mark.parametrize(
    "triggers",
    [
        ["<function=", "<tool_call>", "<parameter=", "<thinking>", "<answer>", "<invoke="],
        ["Thought:", "Action:", "Observation:", "Final Answer:"],
        ["a" * 63 + "b"],
    ],
)
def test_as_many_triggers_as_there_may_be_can_be_followed(triggers: list[str], model_folder: Path) -> None:
    tags = [tag(f"{trigger}>", ANY, "\n") for trigger in triggers]
    grammar = grammar_of(asked({"type": "triggered_tags", "triggers": triggers, "tags": tags}))
    reader = Tokenizer.from_folder(model_folder)
    state = Grammars(model_folder, vocab_size=49_152, eos_token_ids=frozenset({2})).state(grammar)
    answer: list[int] = []
    for token_id in [each for trigger in triggers for char in f"<{trigger}>a\n" for each in reader.encode(char)]:
        allowed = state.allowed(answer)
        assert allowed is not None, state.error
        assert allowed[token_id]
        answer.append(token_id)


def test_it_stands_behind_what_is_thought() -> None:
    form = reasoning_of("qwen3", "<think>", has_form=True).grammar(grammar_of(asked(TRIGGERED)))
    assert is_in(form, f"So <f=x</think>\n\nIt is {NOW}.")
    assert not is_in(form, "So</think>\n\nIt is <f=x")


def test_texts_of_tokens_are_as_they_are() -> None:
    assert text_of(tokenizer().encode(NOW).ids) == NOW


ENDLESS = {
    "type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": True, "whitespace_pattern": "(:)*"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("form", "said", "is_thought"),
    [
        (
            asked({"type": "sequence", "elements": [{"type": "regex", "pattern": "(ab)*"}, {**YES, "value": "ab"}]}),
            "abababab",
            True,
        ),
        (
            pb.StructuredOutputs(grammar='start: T "ab"\nT: /(ab)*/\n%llguidance {"no_forcing": false}'),
            "abababab",
            True,
        ),
        (
            pb.StructuredOutputs(grammar='root ::= "ab" root2\nroot2 ::= "ab" root2 | "ab" "ab" root2'),
            "abababab",
            False,
        ),
        (pb.StructuredOutputs(grammar=f"start: %json {json.dumps(ENDLESS)}"), '{"a":::::', False),
    ],
)
def test_a_form_that_never_ends_holds_nobody_up(
    form: pb.StructuredOutputs, said: str, is_thought: bool, tmp_path: Path
) -> None:
    """Runs in a process of its own, which is ended if it takes for ever."""
    grammar = grammar_of(form)
    if is_thought:
        grammar = reasoning_of("qwen3", "<think>", has_form=True).grammar(grammar)
    folder = write_model(tmp_path / "model")
    ids = list(tokenizer().encode(f"</think>{said}" if is_thought else said).ids)
    code = (
        "import sys, json; from engine.scheduling.grammar import Grammars\n"
        "folder, grammar, ids = json.loads(sys.stdin.read())\n"
        "state = Grammars(folder, vocab_size=300, eos_token_ids=frozenset({1})).state(grammar)\n"
        "for length in range(len(ids)):\n"
        "    assert state.allowed(ids[:length])[ids[length]]\n"
        "    state.propose(ids[:length], lambda forced: [], 4)\n"
    )
    given = json.dumps([str(folder), grammar, ids])
    subprocess.run([sys.executable, "-c", code], input=given, text=True, timeout=60, check=True)
