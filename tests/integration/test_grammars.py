"""Answers that a grammar constrains: they match it, and have the same tokens however an engine computes them."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from grammar_cases import (
    EOS,
    KINDS,
    SCHEMA,
    Answers,
    answers_of,
    grammar_text,
    params_of,
    text_of,
    unconstrained,
    write_model,
)
from handover import handed_over
from many_endings import prompt_of
from pretend_gpu import pretend_gpu
from pretend_gpu.streams import without_waiting

from engine.async_llm_engine import AsyncLLMEngine, StepNews
from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.model_loader import create_engine_config
from engine.outputs import FinishReason, RequestOutput
from engine.sampling_params import SamplingParams
from router.text.structured_outputs import grammar_of
from tandem.structured_outputs import StructuredOutputsParams

NUMBERS = range(30)
EITHER = pytest.mark.parametrize("runs_ahead", [False, True], ids=["in-turn", "ahead"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def make(folder: Path, runs_ahead: bool = False, **settings: object) -> LLMEngine:
    defaults = {"num_kv_blocks": 256, "device": "cpu"}
    args = EngineArgs(
        model=str(folder), load_format="dummy", dtype="float32", block_size=4, num_threads=1,
        attention_backend="torch", **{**defaults, **settings},
    )  # fmt: skip
    config = create_engine_config(args)
    return LLMEngine(replace(config, scheduler=replace(config.scheduler, async_scheduling=runs_ahead)))


@pytest.fixture(scope="module")
def expected(folder: Path) -> Answers:
    """The answer to each request alone."""
    engine = make(folder)
    return {name: answer for n in NUMBERS for name, answer in answers_of(engine, range(n, n + 1)).items()}


def test_answers_have_the_form_that_was_asked_for(folder: Path, expected: Answers) -> None:
    reasons = [reason for _, reason in expected.values()]
    assert reasons.count(FinishReason.STOP) > 15
    assert FinishReason.LENGTH in reasons
    for number in NUMBERS:
        tokens, reason = expected[str(number)]
        if reason is FinishReason.STOP:
            assert tokens[-1] == EOS
            assert has_form(list(KINDS)[number % len(KINDS)], text_of(tokens))
    free = answers_of(make(folder), NUMBERS, unconstrained)
    assert not any(has_form(list(KINDS)[n % len(KINDS)], text_of(free[str(n)][0])) for n in NUMBERS)


def has_form(kind: str, text: str) -> bool:
    """Check the form with independent parsers."""
    if kind == "regex":
        return re.fullmatch(KINDS[kind]["regex"], text) is not None
    if kind == "choice":
        return text in KINDS[kind]["choice"]
    if kind == "grammar":
        before = ""
        while before != text:
            before, text = text, re.sub(r"\((ab|#){1,3}\)", "#", text)
        return text == "#"
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and (
        kind == "json_object"
        or (
            list(value) == list(SCHEMA["properties"])
            and value["size"] in ("red", "green", 12)
            and len(value["name"]) <= 6
        )
    )


GUESSING = {"speculative_config": '{"num_speculative_tokens": 4, "prompt_lookup_min": 1}'}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "settings",
    [{}, {"prefill_chunk_tokens": 8}, {"num_kv_blocks": 80, "max_num_seqs": 9, "enable_prefix_caching": False}],
    ids=["batched", "chunked", "preempted"],
)
def test_same_tokens_guessed_ahead(folder: Path, expected: Answers, settings: dict[str, object]) -> None:
    """Drafts are tokens that the grammar forces, and repetitions of earlier text: many are right, and some are not."""
    engine = make(folder, **settings, **GUESSING)
    assert answers_of(engine, NUMBERS) == expected
    assert (engine.stats.num_preemptions > 0) == ("num_kv_blocks" in settings)
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens


def test_same_tokens_guessed_ahead_after_those_of_another_worker(folder: Path, expected: Answers) -> None:
    assert answers_of(make(folder, **GUESSING), NUMBERS, num_given=4, given=expected) == expected


def test_same_tokens_guessed_ahead_and_handed_over(folder: Path, expected: Answers) -> None:
    prefill, decode = make(folder), make(folder, **GUESSING)
    for number in NUMBERS[:10]:
        assert handed_over(prefill, decode, prompt_of(number), params_of(number)) == expected[str(number)][0]
    assert decode.stats.num_accepted_tokens > 0


def test_what_alone_may_come_takes_no_steps_of_its_own(folder: Path) -> None:
    """An object's names and punctuation are forced: all forced tokens between two choices take one step."""
    names = ["abcabc", "greenred", "trueabc"]
    schema = {
        "properties": {name: {"enum": [1, 2]} for name in names},
        "required": names,
        "additionalProperties": False,
    }
    grammar = grammar_of(StructuredOutputsParams(json={"type": "object", **schema}).to_proto())
    params = SamplingParams(temperature=0, max_tokens=60, grammar=grammar)

    def run(**settings: object) -> tuple[list[int], int]:
        engine = make(folder, **settings)
        engine.add_request("r", [5, 6, 7], params)
        engine._scheduler.sequences.waiting[0].grammar.wait_until_compiled()
        steps = []
        while engine.has_unfinished_requests():
            steps.append([token_id for output in engine.step() for token_id in output.token_ids])
        return [token_id for step in steps for token_id in step], len(steps)

    plain, num_steps = run()
    assert json.loads(text_of(plain)).keys() == set(names)
    guessed, num_fewer = run(speculative_config='{"num_speculative_tokens": 16, "prompt_lookup_min": 5}')
    assert guessed == plain
    assert num_steps == len(plain) > 25
    assert num_fewer <= 10


@pytest.mark.one_in(3)
@EITHER
@pytest.mark.parametrize(
    "settings",
    [{}, {"prefill_chunk_tokens": 8}, {"num_kv_blocks": 80, "max_num_seqs": 9, "enable_prefix_caching": False}],
    ids=["batched", "chunked", "preempted"],
)
def test_same_tokens(folder: Path, expected: Answers, runs_ahead: bool, settings: dict[str, object]) -> None:
    engine = make(folder, runs_ahead, **settings)
    assert answers_of(engine, NUMBERS) == expected
    assert (engine.stats.num_preemptions > 0) == ("num_kv_blocks" in settings)


@pytest.mark.parametrize("num_given", [1, 4])
def test_same_tokens_after_those_of_another_worker(folder: Path, expected: Answers, num_given: int) -> None:
    assert answers_of(make(folder), NUMBERS, num_given=num_given, given=expected) == expected


@EITHER
def test_same_tokens_handed_over(folder: Path, expected: Answers, runs_ahead: bool) -> None:
    prefill, decode = make(folder, runs_ahead), make(folder, runs_ahead)
    for number in NUMBERS[:10]:
        assert handed_over(prefill, decode, prompt_of(number), params_of(number)) == expected[str(number)][0]


def test_neighbours_without_a_grammar_get_what_they_would_get_without(folder: Path) -> None:
    def params(number: int):  # type: ignore[no-untyped-def]
        return params_of(number) if number % 2 else unconstrained(number)

    mixed, free = (answers_of(make(folder, True), NUMBERS, choose) for choose in (params, unconstrained))
    assert [mixed[str(n)] for n in NUMBERS if n % 2 == 0] == [free[str(n)] for n in NUMBERS if n % 2 == 0]
    assert any(mixed[str(n)] != free[str(n)] for n in NUMBERS if n % 2)


def test_a_step_ahead_leaves_out_whose_token_is_not_known_and_nobody_else(folder: Path) -> None:
    engine = make(folder, True)
    engine.add_request("held", prompt_of(2), replace(params_of(2), temperature=0.0, max_tokens=4))
    engine._scheduler.sequences.waiting[0].grammar.wait_until_compiled()
    engine.add_request("free", prompt_of(3), replace(unconstrained(3), ignore_eos=True, max_tokens=4))
    steps = []
    while engine.has_unfinished_requests():
        steps.append(sorted(output.request_id for output in engine.step()))
    assert steps == [[], ["free", "held"], ["free"], ["free", "held"], ["free"], ["held"], [], ["held"]]


@contextmanager
def held_up(engine: LLMEngine) -> Iterator[tuple[list[str], threading.Event]]:
    """Let no grammar compile before the yielded event is set (set on exit at the latest). Also yields the list of the
    grammars compiled since, in order."""
    compiled: list[str] = []
    may_go_on = threading.Event()
    compile_it = engine._grammars._compile

    def wait_and_compile(grammar: str) -> object:
        assert may_go_on.wait(20)
        compiled.append(grammar)
        return compile_it(grammar)

    engine._grammars._compile = wait_and_compile  # type: ignore[assignment, method-assign]
    try:
        yield compiled, may_go_on
    finally:
        may_go_on.set()


@EITHER
@pytest.mark.parametrize("num_prompt_tokens", [1, 30])
def test_others_go_on_while_a_grammar_is_compiled(folder: Path, runs_ahead: bool, num_prompt_tokens: int) -> None:
    def ask(engine: LLMEngine) -> None:
        engine.add_request("held", (prompt_of(2) * 30)[:num_prompt_tokens], replace(params_of(2), logprobs=None))

    alone, engine = make(folder), make(folder, runs_ahead)
    ask(alone)
    answer = [token_id for output in steps_of(alone) for token_id in output.token_ids]
    with held_up(engine) as (_, may_go_on):
        engine.add_request("free", prompt_of(3), replace(unconstrained(3), ignore_eos=True, max_tokens=40))
        ask(engine)
        of_free = [output for _ in range(20) for output in engine.step()]
        assert {output.request_id for output in of_free} == {"free"}
        assert len(of_free) > 10
        may_go_on.set()
        assert [t for o in steps_of(engine) if o.request_id == "held" for t in o.token_ids] == answer
    assert engine.audit()[1] == []


async def test_who_comes_while_a_grammar_is_compiled_is_served(folder: Path) -> None:
    """While a grammar compiles, the idle stepping thread waits only for commands, so it serves new requests."""
    told: list[RequestOutput] = []
    is_over = {name: asyncio.Event() for name in ("held", "free")}

    def on_step(news: StepNews) -> None:
        told.extend(news.outputs)
        for output in news.outputs:
            if output.is_finished:
                is_over[output.request_id].set()

    held = replace(params_of(2), logprobs=None)
    alone = make(folder)
    alone.add_request("held", prompt_of(2), held)
    answer = [token_id for output in steps_of(alone) for token_id in output.token_ids]
    engine = await AsyncLLMEngine.start(
        lambda: make(folder), on_step=on_step, on_failure=lambda error: pytest.fail(str(error))
    )
    with held_up(engine._engine) as (_, may_go_on):
        await engine.call(lambda inner: inner.add_request("held", prompt_of(2), held))
        for _ in range(4):  # between two of these calls the engine is idle
            await asyncio.wait_for(engine.call(lambda inner: None), 10)
        await engine.call(lambda inner: inner.add_request("free", prompt_of(3), unconstrained(3)))
        await asyncio.wait_for(is_over["free"].wait(), 10)
        assert {output.request_id for output in told} == {"free"}
        may_go_on.set()
        await asyncio.wait_for(is_over["held"].wait(), 10)
    assert [t for o in told if o.request_id == "held" for t in o.token_ids] == answer
    await engine.close()


def steps_of(engine: LLMEngine) -> list[RequestOutput]:
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def test_what_nobody_waits_for_any_more_is_not_compiled(folder: Path) -> None:
    engine = make(folder, num_kv_blocks=64)
    params = [replace(params_of(0), grammar=grammar_text(kind), max_tokens=40) for kind in KINDS]
    with held_up(engine) as (compiled, may_go_on):
        for name, each in zip(("first", "aborted", "last"), params, strict=False):
            assert engine.add_request(name, [5] * 20, each)
        assert not engine.add_request("refused", [6] * 210, params[3], may_wait=False)
        assert engine.reserve("refused", [6] * 210, params[4]) is None
        engine.abort("aborted")
        may_go_on.set()
        steps_of(engine)
    assert compiled == [params[0].grammar, params[2].grammar]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.slow
def test_on_a_pretended_gpu(folder: Path, expected: Answers) -> None:
    """The engine sends masks to the device without waiting for the device."""
    with pretend_gpu(total_bytes=64 << 20):
        engine = make(folder, True, device="cuda")
        launch = engine.executor.launch

        def launch_without_waiting(output):  # type: ignore[no-untyped-def]
            with without_waiting():
                return launch(output)

        engine.executor.launch = launch_without_waiting  # type: ignore[method-assign]
        assert answers_of(engine, NUMBERS[:3]) == {str(n): expected[str(n)] for n in NUMBERS[:3]}


def test_a_model_that_cannot_be_held_to_a_grammar_says_so(tmp_path: Path) -> None:
    nameless = write_model(tmp_path / "nameless")
    (nameless / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"grammar: .*nameless has no tokenizer\.json"):
        make(nameless).add_request("r", [5], params_of(0))
    endless = write_model(tmp_path / "endless")
    config = json.loads((endless / "config.json").read_text())
    (endless / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    with pytest.raises(ValueError, match="grammar: the model has no end-of-sequence token"):
        make(endless).add_request("r", [5], params_of(0))


@pytest.mark.parametrize("settings", [{}, GUESSING], ids=["token by token", "guessing"])
def test_a_grammar_that_takes_too_much_ends_its_request_and_no_other(
    folder: Path, expected: Answers, settings: dict[str, object]
) -> None:
    """After the opening brace any of a thousand names may come, each with any value."""
    schema = {"type": "object", "properties": {f"p{i}": {} for i in range(1000)}, "required": ["p999"]}
    grammar = grammar_of(StructuredOutputsParams(json=schema).to_proto())
    engine = make(folder, **settings)
    engine.add_request("large", prompt_of(2), replace(params_of(2), grammar=grammar))
    engine.add_request("5", prompt_of(5), params_of(5))
    answers: dict[str, list[int]] = {}
    ends = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            answers.setdefault(output.request_id, []).extend(output.token_ids)
            ends[output.request_id] = output
    assert ends["large"].finish_reason is FinishReason.ERROR
    assert "max is 2000" in ends["large"].grammar_error
    assert 0 < len(answers["large"]) < 5
    assert answers["5"] == expected["5"][0]
    assert engine.audit()[1] == []
    assert {event.is_stored for event in engine.take_cache_events()} == {True}, "its blocks are as good as others'"
