"""Structured outputs in validation, in transit, and as masks, compared with an independent account of which tokens may
come."""

from __future__ import annotations

import json
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grammar_cases import EOS, KINDS, grammar_text, params_of, text_of, tokenizer, write_model
from llguidance import LLParserLimits

from engine.sampling.sampler import Sampler
from engine.sampling_params import SamplingParams
from engine.scheduling import grammar as engine_grammar
from engine.scheduling.grammar import Grammars
from engine.scheduling.sequence import INVALID_TOKEN, Sequence
from protos import tandem_inference_pb2 as pb
from protos import tandem_worker_pb2 as worker_pb
from router.generation_defaults import GenerationDefaults
from router.model_info import ModelInfo
from router.text import structured_outputs
from router.text.structured_outputs import MAX_BYTES, grammar_of
from router.validation.grammar_checker import GrammarChecker
from router.validation.request import compile_grammar, validate
from router.validation.sampling import resolve_sampling
from rpc.errors import InvalidRequest
from tandem import SamplingParams as OfflineParams
from tandem import StructuredOutputsParams
from tandem.requests import generate_request
from worker_service.messages import sampling_params_of

MODEL = ModelInfo(
    served_model_name="smol", max_model_len=100, vocab_size=300, eos_token_ids=frozenset({EOS}),
    has_chat_template=True, defaults=GenerationDefaults(),
)  # fmt: skip
VOCAB = 300
LIMIT_S = 5.0
"""Much more than any of these takes, much less than for ever."""


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker()
    yield checker
    await checker.close()


def asked(**kind: Any) -> pb.StructuredOutputs:
    if "choice" in kind:
        return pb.StructuredOutputs(choice=pb.Choices(texts=kind["choice"]))
    return pb.StructuredOutputs(**kind)


# -- at the door -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "wrong"),
    [
        (
            {"structured_outputs": asked()},
            {"structured_outputs": "must be one of json, json_object, regex, choice, grammar and"},
        ),
        (
            {"structured_outputs": asked(json_object=False)},
            {"structured_outputs": "json_object must be true, is false"},
        ),
        ({"structured_outputs": asked(regex="")}, {"structured_outputs": "regex must not be empty"}),
        ({"structured_outputs": asked(choice=[])}, {"structured_outputs": "choice must have 1 to 1024 texts, has 0"}),
        ({"structured_outputs": asked(choice=["a"] * 1025)}, {"structured_outputs": "1 to 1024 texts, has 1025"}),
        ({"structured_outputs": asked(choice=["a", ""])}, {"structured_outputs": "choice must not have an empty text"}),
        (
            {"structured_outputs": asked(regex="é" * (MAX_BYTES // 2 + 1))},
            {"structured_outputs": f"regex must have at most {MAX_BYTES} bytes, has {MAX_BYTES + 2}"},
        ),
        (
            {"structured_outputs": asked(choice=["a" * MAX_BYTES, "b"])},
            {"structured_outputs": f"choice must have at most {MAX_BYTES} bytes, has {MAX_BYTES + 1}"},
        ),
        (
            {"structured_outputs": asked(regex="a" * 30_000), "n": 10},
            {"structured_outputs": f"regex must have at most {4 * MAX_BYTES // 10} bytes with n=10, has 30000"},
        ),
        (
            {"structured_outputs": asked(regex="a"), "min_tokens": 3},
            {"min_tokens": "cannot be combined with structured_outputs, is 3"},
        ),
        (
            {"structured_outputs": asked(regex="a"), "ignore_eos": True},
            {"ignore_eos": "cannot be combined with structured_outputs, is True"},
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(params: dict[str, Any], wrong: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate(pb.GenerateRequest(text="hi", sampling_params=pb.SamplingParams(**params)), MODEL)
    said = {
        violation.field.removeprefix("sampling_params."): violation.description for violation in caught.value.violations
    }
    assert said.keys() == wrong.keys()
    assert all(wrong[field] in said[field] for field in wrong)


def test_a_model_without_an_end_is_refused() -> None:
    params = pb.SamplingParams(structured_outputs=asked(regex="a"))
    endless = ModelInfo(
        served_model_name="smol", max_model_len=100, vocab_size=300, eos_token_ids=frozenset(),
        has_chat_template=True, defaults=GenerationDefaults(),
    )  # fmt: skip
    with pytest.raises(InvalidRequest, match="'smol' has no end-of-sequence token"):
        validate(pb.GenerateRequest(text="hi", sampling_params=params), endless)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ({"json": "{"}, "json: is not JSON"),
        ({"json": "[1]"}, "json: must be a schema, an object, is a list"),
        ({"json": '{"type": "objekt"}'}, "json: Invalid type: objekt"),
        ({"json": '{"type": "array", "uniqueItems": true}'}, 'json: Unimplemented keys: ["uniqueItems"]'),
        ({"json": '{"$ref": "http://localhost/x"}'}, "json: Resource"),
        ({"json": '{"$ref": "#"}'}, "json: no text fits it"),
        ({"json": "false"}, "json: no text fits it"),
        ({"json": '{"items":' * 5000 + "{}" + "}" * 5000}, "json: "),
        (
            {"json": '{"x-guidance": {"whitespace_pattern": ":*"}}'},
            "json: x-guidance.whitespace_pattern is not",
        ),
        (
            {"json": '{"x-guidance": {"key_separator": "1*"}}'},
            "json: x-guidance.key_separator is not supported; supported",
        ),
        ({"json": '{"x-guidance": {"lenient": "a"}}'}, 'json: x-guidance.lenient must be true or false, is "a"'),
        ({"json": '{"x-guidance": null}'}, "json: x-guidance must be an object, is a NoneType"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-ahead and look-behind"),
        ({"regex": "(" * 30_000 + ")" * 30_000}, "regex: "),
        ({"grammar": 'start: "a" b'}, 'grammar: at 1(8): unknown name: "b"'),
        ({"grammar": "start: T\nT: /a+/ & /b+/"}, "grammar: no text fits it"),
        ({"grammar": "nonsense"}, "grammar: "),
        ({"grammar": 'root ::= "a'}, "grammar: Unexpected end of input at line 1"),
        ({"grammar": 'root ::= "a\\'}, "grammar: ends inside a string"),
        ({"grammar": 'start ::= "a"'}, "grammar: No 'root' rule found"),
        ({"grammar": "root ::= " + "(" * 60_000}, "grammar: "),
        ({"grammar": 'start: "a" <|im_end|>'}, "unknown special token"),
    ],
)
async def test_what_cannot_be_read_is_refused_with_the_reason(
    kind: dict[str, Any], reason: str, checker: GrammarChecker
) -> None:
    start_s = time.monotonic()
    with pytest.raises(InvalidRequest) as caught:
        await compile_grammar(pb.SamplingParams(structured_outputs=asked(**kind)), checker)
    [violation] = caught.value.violations
    assert violation.field == "sampling_params.structured_outputs"
    assert reason in violation.description
    assert len(violation.description) < 500
    assert time.monotonic() - start_s < LIMIT_S


OBJECT = {"type": "object", "additionalProperties": False, "required": ["p399"]}
NASTY = {
    "repetition": {"regex": "a{1,100000}"},
    "of repetitions": {"regex": "([a-z]{1,1000} ){1,1000}"},
    "backtracking": {"regex": "(.*a){200}"},
    "states": {"regex": "(a|b)*a(a|b){200}"},
    "properties": {"json": json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(400)}, **OBJECT})},
    "too many properties": {
        "json": json.dumps({"properties": {f"p{i}": {} for i in range(1000)}, **OBJECT, "required": ["p999"]})
    },
    "enum": {"json": json.dumps({"enum": [f"value {i}" for i in range(4000)]})},
    "ambiguous": {"grammar": 'start: a\na: a a | "x" | '},
    "intersection": {"grammar": "start: T\nT: /(.*a.{14}.*)/ & /(.*b.{17}.*)/ & /(.*c.{18}.*)/"},
    "choices": {"choice": [f"choice number {i}" for i in range(1024)]},
}  # fmt: skip


@pytest.mark.parametrize("name", list(NASTY))
def test_what_is_expensive_is_bounded(name: str, tmp_path: Path) -> None:
    """In validation, and for each token of an answer: the form is refused, or goes on, or ends with an error."""
    start_s = time.monotonic()
    try:
        grammar = grammar_of(asked(**NASTY[name]))
    except ValueError:
        assert name == "intersection"
        return
    state = grammars(tmp_path).state(grammar)
    answer: list[int] = []
    rng = random.Random(5)
    for _ in range(150):
        allowed = state.allowed(answer)
        if allowed is None:
            break
        allowed[EOS] = False
        if not allowed.any():
            break
        answer.append(rng.choice(np.flatnonzero(allowed).tolist()))
    assert bool(state.error) == (name == "too many properties"), state.error
    assert time.monotonic() - start_s < LIMIT_S


def test_the_engine_has_the_limits_of_the_door() -> None:
    names = ("step_max_items", "step_lexer_fuel", "max_items_in_row", "initial_lexer_fuel", "max_grammar_size")
    ours, engines = structured_outputs.LIMITS, LLParserLimits(**engine_grammar.LIMITS)
    assert [getattr(ours, name) for name in names] == [getattr(engines, name) for name in names]


def test_limits_are_kept_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    grammar = grammar_of(asked(regex="ab|ac"))
    monkeypatch.setattr(engine_grammar, "LIMITS", {"initial_lexer_fuel": 2, "verbose_errors": False})
    state = grammars(tmp_path).state(grammar)
    assert state.allowed([]) is None
    assert "limit for this grammar: 2" in state.error
    monkeypatch.setattr(structured_outputs, "LIMITS", LLParserLimits(initial_lexer_fuel=2, verbose_errors=False))
    with pytest.raises(ValueError, match="limit for this grammar: 2"):
        grammar_of(asked(regex="ab|ad"))


# -- on the way -------------------------------------------------------------------------------------------------------


async def test_from_the_client_to_the_engine(checker: GrammarChecker) -> None:
    request = generate_request("hi", structured_outputs={"choice": ["yes", "no"]})
    assert request == generate_request("hi", structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    params = resolve_sampling(validate(request, MODEL).sampling_params, MODEL, 5)
    grammar = await compile_grammar(params, checker)
    engine_request = worker_pb.EngineRequest(sampling_params=params, grammar=grammar)
    assert sampling_params_of(engine_request).grammar == grammar == grammar_of(asked(choice=["yes", "no"]))
    assert "yes" in grammar
    engine_request.ClearField("grammar")
    assert sampling_params_of(engine_request).grammar is None


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({}, "must be exactly one of json, json_object, regex, choice, grammar, structural_tag, is none"),
        ({"regex": "a", "choice": ["a"]}, "is regex and choice"),
        ({"choice": "abc"}, "choice: must be a list of texts, is a text"),
        ({"choice": ["a", 3]}, r"choice: must be a list of texts, is \['a', 3\]"),
        ({"regex": 1}, "regex: must be a text, is 1"),
        ({"json": {"a": {1, 2}}}, "json: "),
        ({"grammar": 5}, "grammar: must be a text, is 5"),
        ({"structural_tag": {"a": {1, 2}}}, "structural_tag: "),
    ],
)
def test_what_a_caller_gets_wrong(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        StructuredOutputsParams(**fields)
    with pytest.raises(ValueError, match=f"structured_outputs: .*{complaint}"):
        generate_request("hi", structured_outputs=fields)  # type: ignore[arg-type]


def test_offline_parameters_are_checked_when_they_are_made() -> None:
    with pytest.raises(ValueError, match=r"(?s)structured_outputs: regex: .*unclosed group"):
        OfflineParams(structured_outputs=StructuredOutputsParams(regex="(a"))
    for name, value in (("min_tokens", 2), ("ignore_eos", True)):
        with pytest.raises(ValueError, match=f"{name} cannot be combined with structured outputs, is {value}"):
            OfflineParams(structured_outputs=StructuredOutputsParams(regex="a"), **{name: value})  # type: ignore[arg-type]
    made = OfflineParams(structured_outputs=StructuredOutputsParams(json={"type": "null"})).for_engine(0)
    assert made.grammar == grammar_of(asked(json='{"type": "null"}'))


# -- as masks ---------------------------------------------------------------------------------------------------------


def grammars(folder: Path) -> Grammars:
    return Grammars(write_model(folder / "model"), vocab_size=VOCAB, eos_token_ids=frozenset({EOS}))


CHOICES = ["red", "green", "reddish", "true", 'q"uo\\te\n', "é", "☃ab"]


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= answer "."\nanswer ::= "yes" | "no"   # as llama.cpp and XGrammar write it\n',
        '# Either/or, 3" wide\nroot ::= ("yes" | "no") "." # no ["/]\n',
        'start: answer "."\nanswer: "yes" | "no"   // as Lark does: "::="\n',
    ],
)
def test_a_grammar_may_be_in_either_of_two_forms(grammar: str, tmp_path: Path) -> None:
    state_of, tokens, said = grammars(tmp_path), bytes_of_tokens(), set[str]()
    for seed in range(8):
        rng, answer = random.Random(seed), list[int]()
        state = state_of.state(grammar_of(asked(grammar=grammar)))
        while (allowed := state.allowed(answer)) is not None and not allowed[EOS]:
            answer.append(rng.choice(np.flatnonzero(allowed).tolist()))
        said.add(b"".join(tokens[token_id] for token_id in answer).decode())
    assert said == {"yes.", "no."}


def test_masks_are_what_may_begin_one_of_the_choices(tmp_path: Path) -> None:
    """Computed by hand: the text so far and the token together begin one of the choices; the end may come if the text
    is a choice. Bytes count, so a character may consist of several tokens. If only one text can follow, the mask may
    leave only one way to cut it."""
    state_of = grammars(tmp_path)
    texts = [choice.encode() for choice in CHOICES]
    tokens = bytes_of_tokens()
    for seed in range(12):
        rng, answer, so_far = random.Random(seed), list[int](), b""
        state = state_of.state(grammar_of(asked(choice=CHOICES)))
        while True:
            expected = {
                token_id for token_id, token in tokens.items() if any(text.startswith(so_far + token) for text in texts)
            } | ({EOS} if so_far in texts else set())
            allowed = state.allowed(answer)
            assert allowed is not None
            left = set(np.flatnonzero(allowed).tolist())
            is_forced = EOS not in expected and len({tokens[token_id][0] for token_id in expected}) == 1
            assert left == expected or (is_forced and left and left < expected)
            token_id = rng.choice(sorted(left))
            if token_id == EOS:
                break
            answer.append(token_id)
            so_far += tokens[token_id]
        assert text_of(answer) in CHOICES


@pytest.mark.parametrize("kind", list(KINDS))
def test_masks_are_a_function_of_the_tokens_alone(kind: str, tmp_path: Path) -> None:
    """However they arrive: one after the other, all at once on another worker, or in two parts."""
    state_of = grammars(tmp_path)
    grammar = grammar_text(kind)
    for seed in range(4):
        rng, answer, state = random.Random(seed), list[int](), state_of.state(grammar)
        for _ in range(40):
            allowed = state.allowed(answer)
            parts = state_of.state(grammar)
            if answer:
                parts.allowed(answer[: rng.randrange(len(answer))])
            assert allowed is not None
            for other in (state, state_of.state(grammar), parts):
                assert np.array_equal(other.allowed(answer), allowed)
            token_id = rng.choice(np.flatnonzero(allowed).tolist())
            if token_id == EOS:
                break
            answer.append(token_id)


def test_what_one_answer_takes_is_not_missing_to_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each answer visits other states of one grammar, which has more states than the limit, but the limit holds for
    each answer."""
    monkeypatch.setattr(engine_grammar, "LIMITS", {"max_lexer_states": 500, "verbose_errors": False})
    state_of = grammars(tmp_path)
    grammar = grammar_of(asked(regex="(a|b)*a(a|b){30}"))
    for seed in range(6):
        rng, answer, state = random.Random(seed), list[int](), state_of.state(grammar)
        for _ in range(100):
            allowed = state.allowed(answer)
            assert allowed is not None, state.error
            allowed[EOS] = False
            answer.append(rng.choice(np.flatnonzero(allowed).tolist()))


def bytes_of_tokens() -> dict[int, bytes]:
    made = tokenizer()
    byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
    return {
        token_id: bytes(byte_of[char] for char in token)
        for token, token_id in made.get_vocab().items()
        if token not in ("<pad>", "<eos>")
    }


def bytes_to_unicode() -> dict[int, str]:
    """GPT-2's table: printable bytes stand for themselves, the others for the characters after 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def sequence(number: int, params: SamplingParams, held_by: Grammars, answer: list[int] | None = None) -> Sequence:
    state = None if params.grammar is None else held_by.state(params.grammar)
    return Sequence(number, str(number), [5, 6, *(answer or [])], 2, params, grammar=state)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_sampler_draws_what_the_mask_leaves_and_leaves_others_alone(tmp_path: Path, temperature: float) -> None:
    held_by = grammars(tmp_path)
    free = SamplingParams(temperature=temperature, seed=3)
    held = SamplingParams(temperature=temperature, seed=3, grammar=grammar_text("choice"), logit_bias={83: 2.0})
    logits = torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(1))
    params = [held if row % 2 else free for row in range(40)]
    seqs = [sequence(row, each, held_by) for row, each in enumerate(params)]
    sampled = Sampler(frozenset({EOS})).sample(logits.clone(), seqs, torch.zeros(40, dtype=torch.int64)).tolist()
    unheld = [sequence(row, free, held_by) for row in range(40)]
    expected = Sampler(frozenset({EOS})).sample(logits.clone(), unheld, torch.zeros(40, dtype=torch.int64)).tolist()
    assert sampled[::2] == expected[::2]
    assert all(
        any(text.startswith(text_of([token_id])) for text in KINDS["choice"]["choice"]) for token_id in sampled[1::2]
    )
    assert len(set(sampled[1::2])) > 1


def test_rows_without_a_next_token(tmp_path: Path) -> None:
    """A mask does not hide NaN logits. An answer that does not fit its grammar has no next token."""
    held_by = grammars(tmp_path)
    params = SamplingParams(temperature=0, grammar=grammar_text("choice"))
    seqs = [sequence(0, params, held_by), sequence(1, params, held_by, [7]), sequence(2, params, held_by)]
    logits = torch.zeros(3, VOCAB)
    logits[0, 299] = float("nan")  # of a token that no choice has
    sampled = Sampler(frozenset({EOS})).sample(logits, seqs, torch.zeros(3, dtype=torch.int64)).tolist()
    assert sampled[:2] == [INVALID_TOKEN, INVALID_TOKEN]
    assert sampled[2] >= 0
    assert seqs[1].grammar is not None
    assert seqs[1].grammar.error


def test_a_tokenizer_that_cannot_be_read_is_the_end_of_the_request_alone(tmp_path: Path) -> None:
    held_by = grammars(tmp_path)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    state = held_by.state(grammar_text("choice"))
    assert state.allowed([]) is None
    assert "tokenizer.json cannot be read" in state.error


def test_params_of_the_cases_differ() -> None:
    assert len({params_of(number).grammar for number in range(5)}) == 5


def test_a_grammar_that_takes_too_long_to_follow_ends_its_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = grammars(tmp_path).state(grammar_of(asked(choice=CHOICES)))
    assert state.allowed([]) is not None
    monkeypatch.setattr(engine_grammar, "MAX_SPENT_S", -1.0)
    assert state.allowed([]) is None
    assert "too ambiguous" in state.error
