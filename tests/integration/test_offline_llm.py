"""`tandem.LLM`: prompts in, answers out, in this process."""

from __future__ import annotations

import dataclasses
import re
import shutil
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from offline_books import at_rest
from safetensors.torch import load_file, save_file

from engine import sampling_params as engine_params
from engine.outputs import FinishReason, TokenLogprobs
from engine.outputs import Logprob as StepLogprob
from engine.outputs import RequestOutput as StepOutput
from router.text.tokenizer import Tokenizer
from tandem import LLM, AsyncLLM, BeamSearchParams, SamplingParams, StructuredOutputsParams, TextPrompt, TokensPrompt
from tandem.metrics import Counter
from tandem.offline_answer import OfflineRequest
from tandem.prompts import ReadPrompt
from tandem.vllm_settings import METHODS

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm(model_folder: Path) -> LLM:
    return LLM(model=str(model_folder), max_model_len=1024, kv_cache_gib=0.1, num_threads=1)


def test_text_token_ids_and_lists_of_either(llm: LLM) -> None:
    (from_text,) = llm.generate("The capital of France is", GREEDY)
    assert from_text.prompt == "The capital of France is"
    assert from_text.outputs[0].text.startswith(" Paris")
    (from_ids,) = llm.generate(from_text.prompt_token_ids, GREEDY)
    assert from_ids.prompt is None
    several = llm.generate([from_text.prompt, "Once upon a time"], GREEDY)
    assert from_text.outputs[0] == from_ids.outputs[0] == several[0].outputs[0] != several[1].outputs[0]


def test_what_the_engine_has_counted(llm: LLM) -> None:
    def counted() -> dict[str, float]:
        return {each.name: each.value for each in llm.get_metrics() if isinstance(each, Counter)}

    before = counted()
    llm.generate("The capital of France is", GREEDY)
    assert counted()["tandem:computed_generation_tokens"] - before["tandem:computed_generation_tokens"] == 12
    assert {each.labels["model_name"] for each in llm.get_metrics()} == {llm.config.model.served_model_name}


def test_prompts_in_vllms_dicts_and_in_arrays(llm: LLM) -> None:
    text, greedy = "The capital of France is", SamplingParams(temperature=0, max_tokens=3)
    (expected,) = llm.generate(text, greedy)
    ids = expected.prompt_token_ids
    one_prompt: list[Any] = [
        {"prompt": text}, {"prompt_token_ids": ids}, {"prompt_token_ids": ids, "prompt": "As it was written"},
        {"prompt": text, "prompt_token_ids": None, "multi_modal_data": None}, TextPrompt(prompt=text),
        TokensPrompt(prompt_token_ids=tuple(ids)), np.array(ids), torch.tensor(ids), list(torch.tensor(ids)),
        {"prompt_token_ids": np.array(ids, dtype=np.uint16)}, text, ids, array("i", ids),
    ]  # fmt: skip
    alone = [output for prompt in one_prompt for output in llm.generate(prompt, greedy)]
    together = llm.generate(one_prompt, greedy)
    for output, other in zip(alone, together, strict=True):
        assert output.outputs == other.outputs == expected.outputs
        assert output.prompt_token_ids == other.prompt_token_ids == ids
        assert {type(token_id) for token_id in output.prompt_token_ids} == {int}
        assert output.prompt == other.prompt
    assert [output.prompt for output in alone[:5]] == [text, None, "As it was written", text, text]
    assert [output.prompt_token_ids for output in llm.generate(np.array([ids, ids]), greedy)] == [ids, ids]  # type: ignore[arg-type]


SHAPES = "must be a text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}"


@pytest.mark.parametrize(
    ("prompts", "complaint"),
    [
        ([-1], "prompt: prompt_token_ids must be in [0, 49152), is -1 at 0"),
        ([5, 10**20], "prompt: prompt_token_ids must be in [0, 49152), is 100000000000000000000 at 1"),
        (["a", [1, 49152]], "prompts[1]: prompt_token_ids must be in [0, 49152), is 49152 at 1"),
        ([1.0], "prompt: prompt_token_ids must be whole numbers, is 1.0 at 0"),
        ([True, False], "prompt: prompt_token_ids must be whole numbers, is True at 0"),
        ([1, "a"], "prompt: prompt_token_ids must be whole numbers, is 'a' at 1"),
        ([[[1]]], "prompts[0]: prompt_token_ids must be whole numbers, is [1] at 0"),
        (np.array([0.5]), "prompt: prompt_token_ids must be whole numbers, is 0.5 at 0"),
        ({"prompt_token_ids": 3}, "prompt: prompt_token_ids must be a list of whole numbers, is 3"),
        ({"prompt_token_ids": b"ab"}, "prompt: prompt_token_ids must be a list of whole numbers, is b'ab'"),
        ("a\ud800b", "prompt: has an invalid character at 1"),
        (["a", {"prompt": "\ud800"}], "prompts[1]: has an invalid character at 0"),
        ({"prompt": 3}, "prompt: must be a text, is 3"),
        (
            {"prompt": "a", "multi_modal_data": {}},
            "prompt has 'multi_modal_data', which is not served; a prompt may have",
        ),
        ([{"role": "user", "content": "a"}], "prompts[0] has 'role', which is not served"),
        ({}, f"prompt {SHAPES}, is {{}}"),
        (["a", None], f"prompts[1] {SHAPES}, is None"),
        (["a", 3], f"prompts[1] {SHAPES}, is 3"),
        ([b"ab"], f"prompts[0] {SHAPES}, is b'ab'"),
        (None, f"prompts {SHAPES}, or a list of these, is None"),
        (3, f"prompts {SHAPES}, or a list of these, is 3"),
        (b"ab", f"prompts {SHAPES}, or a list of these, is b'ab'"),
        (memoryview(b"ab"), f"prompts {SHAPES}, or a list of these, is <memory"),
        (np.ndarray, f"prompts {SHAPES}, or a list of these, is <class"),
        ((each for each in "ab"), f"prompts {SHAPES}, or a list of these, is <generator"),
    ],
)
def test_what_is_no_prompt_is_told_what_one_is(llm: LLM, prompts: Any, complaint: str) -> None:
    with pytest.raises(ValueError) as raised:
        llm.generate(prompts, GREEDY)
    assert str(raised.value).startswith(complaint)
    assert at_rest(llm)


@pytest.mark.parametrize(
    ("params", "complaint"),
    [
        ({"max_tokens": 3}, r"sampling_params must be SamplingParams, .* is \{'max_tokens': 3\}"),
        ([{"max_tokens": 3}], "sampling_params must be SamplingParams, .* one for all prompts or one for each, is "),
        (engine_params.SamplingParams(), "sampling_params must be SamplingParams"),
        (3, "sampling_params must be SamplingParams, .* is 3"),
    ],
)
def test_what_are_no_sampling_params_is_told_so(llm: LLM, params: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        llm.generate("a", params)


@pytest.mark.slow
def test_without_max_tokens_the_context_ends_an_answer(llm: LLM) -> None:
    prompt = list(range(3000, 4019))
    (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (5, "length")


def test_a_second_thread_is_refused_and_corrupts_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    (expected,) = llm.generate("Once upon a time", GREEDY)
    refusals = []
    step = llm.llm_engine.step

    def step_while_another_thread_calls() -> Any:
        monkeypatch.undo()
        with ThreadPoolExecutor(1) as other:
            refusals.append(other.submit(llm.generate, "The capital of France is", GREEDY).exception(timeout=60))
        return step()

    monkeypatch.setattr(llm.llm_engine, "step", step_while_another_thread_calls)
    (output,) = llm.generate("Once upon a time", GREEDY)
    assert output.outputs == expected.outputs
    [refusal] = refusals
    assert isinstance(refusal, RuntimeError)
    assert "this LLM is generating in another thread" in str(refusal)
    with ThreadPoolExecutor(1) as other:  # one after another, threads may share it
        (later,) = other.submit(llm.generate, "Once upon a time", GREEDY).result(60)
    assert later.outputs == expected.outputs
    assert at_rest(llm)


def test_what_goes_wrong_behind_a_stop_string_is_no_part_of_the_answer(llm: LLM) -> None:
    """With `stream_interval`, one step may report a stop string and a later error: the answer ends at the stop."""
    tokenizer = Tokenizer.from_folder(llm.config.model.path)
    prompt, ids = ReadPrompt(name="prompt", text="x", token_ids=[1]), tokenizer.encode("One. Two.")
    request = OfflineRequest("r", prompt, SamplingParams(stop=["."]), "", tokenizer)
    kept = StepOutput("r", 0, ids, None, num_cached_tokens=0, waited_s=0)
    failed = StepOutput("r", len(ids), [], FinishReason.ERROR, num_cached_tokens=0, waited_s=0)
    llm._take([kept, failed], {"r": request.answers[0]})
    [answer] = request.output().outputs
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("One", "stop", ".")


def test_a_stop_string_ends_text_and_work(llm: LLM) -> None:
    prompt = "Count: one, two, three,"
    (free,) = llm.generate(prompt, GREEDY)
    assert "six" in free.outputs[0].text
    (stopped,) = llm.generate(prompt, dataclasses.replace(GREEDY, max_tokens=500, stop=["never", "six"]))
    answer = stopped.outputs[0]
    assert answer.text == free.outputs[0].text.split("six")[0]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "six")
    assert at_rest(llm)


def test_a_stop_string_ends_logprobs_with_the_tokens(llm: LLM) -> None:
    (output,) = llm.generate("Count: one, two, three,", dataclasses.replace(GREEDY, stop="six", logprobs=0))
    answer = output.outputs[0]
    assert answer.stop_reason == "six"
    assert answer.logprobs is not None
    assert [list(told) for told in answer.logprobs] == [[token_id] for token_id in answer.token_ids]


def test_how_likely_an_answer_is_hangs_on_its_tokens_and_not_on_how_they_came(llm: LLM) -> None:
    """The sums are bitwise equal, although accepted drafts and `stream_interval` bring several tokens at once."""
    tokenizer = Tokenizer.from_folder(llm.config.model.path)
    prompt, ids = ReadPrompt(name="prompt", text="x", token_ids=[1]), [500, 501, 502]
    # One very improbable token, and two almost certain ones: in float32, with logits 16 apart.
    sure = torch.tensor([0.0, -16.0]).log_softmax(0)[0].item()
    logprobs = [-100.0, sure, sure]
    told = [TokenLogprobs(StepLogprob(*each, 1), []) for each in zip(ids, logprobs, strict=True)]

    def likelihood(*ends: int) -> float | None:
        request = OfflineRequest("r", prompt, SamplingParams(logprobs=0), "", tokenizer)
        for start, end in zip((0, *ends), ends, strict=False):
            output = StepOutput("r", start, ids[start:end], None, 0, 0.0, logprobs=told[start:end])
            llm._take([output], {"r": request.answers[0]})
        return request.output().outputs[0].cumulative_logprob

    assert likelihood(1, 2, 3) == likelihood(3) == likelihood(1, 3) == -100.0 + sure + sure


def test_what_is_sampled_by_if_nobody_says_may_be_given(model_folder: Path) -> None:
    settings: dict[str, Any] = {
        "model": str(model_folder),
        "load_format": "dummy",
        "max_model_len": 64,
        "num_kv_blocks": 8,
    }
    llm = LLM(**settings, override_generation_config={"temperature": 0.25, "max_new_tokens": 3})
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.max_tokens) == (0.25, 3)
    assert len(llm.generate([[1, 2]])[0].outputs[0].token_ids) <= 3
    with pytest.raises(ValueError, match="override_generation_config must be a JSON object of temperature"):
        LLM(**settings, override_generation_config={"colour": 1})
    with pytest.raises(ValueError, match="generation_config must be auto, vllm or a folder"):
        LLM(**settings, generation_config="/nowhere")


def test_a_stop_token_is_told_as_the_reason(llm: LLM) -> None:
    (plain,) = llm.generate("One two three", SamplingParams(temperature=0, max_tokens=4))
    stop = plain.outputs[0].token_ids[2]
    (ended,) = llm.generate("One two three", SamplingParams(temperature=0, max_tokens=4, stop_token_ids=[stop]))
    (answer,) = ended.outputs
    assert (answer.finish_reason, answer.stop_reason, answer.finished()) == ("stop", stop, True)
    assert plain.outputs[0].stop_reason is None


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_the_models_own_end_is_no_reason_unless_it_was_not_to_count(llm: LLM, ignore_eos: bool) -> None:
    """`stop_reason` does not name the model's end token, even if the request lists it as a stop token, unless
    `ignore_eos` is set."""
    end = llm.get_tokenizer().eos_token_id
    wanted = SamplingParams(max_tokens=4, stop_token_ids=[end], logit_bias={end: 100}, ignore_eos=ignore_eos)
    [answer] = llm.generate("One two three", wanted)[0].outputs
    assert (answer.finish_reason, answer.stop_reason) == ("stop", end if ignore_eos else None)


def test_params_that_were_assigned_are_checked_before_anything_is_generated(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    params.max_tokens = 2
    assert len(llm.generate("One", params)[0].outputs[0].token_ids) <= 2
    params.top_p = 2.0
    for asked in (params, [params]):
        with pytest.raises(ValueError, match=r"top_p must be in \(0, 1\], is 2.0"):
            llm.generate(["One"], asked)


def test_seeds(llm: LLM) -> None:
    drawn = SamplingParams(max_tokens=16)
    unseeded = llm.generate(["Once upon a time"] * 2, drawn)
    assert unseeded[0].outputs[0].text != unseeded[1].outputs[0].text, "each request draws a seed of its own"
    seeded = llm.generate(["Once upon a time"] * 2, dataclasses.replace(drawn, seed=7))
    assert seeded[0].outputs[0] == seeded[1].outputs[0]


def test_several_answers_to_a_prompt(llm: LLM) -> None:
    """Answer i equals the single answer with seed + i; the prompt is computed only for the first answer."""
    params = SamplingParams(max_tokens=12, seed=7, n=3)
    prompts = ["Once upon a time there was", "The capital of"]
    outputs = llm.generate(prompts, params)
    alone = [dataclasses.replace(params, seed=7 + i, n=1) for i in range(3)]
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = llm.generate([prompt] * 3, alone)
        assert [answer.text for answer in output.outputs] == [one.outputs[0].text for one in expected]
        assert [answer.index for answer in output.outputs] == [0, 1, 2]
    (unseeded,) = llm.generate("Once upon a time", SamplingParams(max_tokens=16, n=4))
    assert len({answer.text for answer in unseeded.outputs}) == 4, "two in 10^5 would begin with the same 8 tokens"
    (stopped,) = llm.generate("Once upon a time", SamplingParams(max_tokens=60, n=4, stop=["e"], seed=7))
    assert {answer.finish_reason for answer in stopped.outputs} == {"stop"}
    assert all("e" not in answer.text for answer in stopped.outputs)
    with pytest.raises(ValueError, match=r"n must be an integer in \[1, 128\], is 0"):
        SamplingParams(n=0)
    assert at_rest(llm)


def test_cached_prompts_are_counted(llm: LLM) -> None:
    prompt = list(range(1000, 1064))
    assert llm.generate([prompt], GREEDY)[0].num_cached_tokens == 0
    assert llm.generate([prompt], GREEDY)[0].num_cached_tokens == 48, "all full blocks but the last, which is computed"


def test_what_is_cached_of_prompts_may_be_forgotten(llm: LLM) -> None:
    prompt = "Forget me, forget me not. " * 8
    llm.generate(prompt, GREEDY)
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens > 0
    assert llm.reset_prefix_cache()
    assert at_rest(llm)
    assert llm.llm_engine.audit()[0].num_cached == 0
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 0


def test_an_answer_ends_with_the_context(llm: LLM) -> None:
    (output,) = llm.generate([list(range(1000, 2020))], SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (4, "length")


def test_outputs_say_when_their_tokens_came_and_may_be_changed(llm: LLM) -> None:
    before_s, before = time.time(), time.monotonic()
    first, second = llm.generate(["Once upon a time", "A"], [SamplingParams(max_tokens=6, n=2, seed=1), GREEDY])
    after = time.monotonic()
    assert first.metrics is not None
    assert first.metrics.num_generation_tokens == sum(len(each.token_ids) for each in first.outputs) == 12
    assert before_s - 1 < first.metrics.arrival_time < before_s + (after - before) + 1
    stamps = [before, first.metrics.queued_ts, first.metrics.first_token_ts, first.metrics.last_token_ts, after]
    assert stamps == sorted(stamps)
    assert len(set(stamps)) == 5
    assert first.metrics.first_token_latency == first.metrics.first_token_ts - first.metrics.queued_ts
    assert second.metrics is not None
    assert second.metrics.num_generation_tokens == len(second.outputs[0].token_ids)
    second.outputs[0].text = second.outputs[0].text.strip()  # vLLM's users do this


def test_vllms_methods_that_are_not_here_say_what_is(llm: LLM) -> None:
    for name, hint in (("embed", "generate text"), ("sleep", "delete the LLM"), ("collective_rpc", "not for code")):
        with pytest.raises(AttributeError, match=f"^'LLM' object has no attribute '{name}': .*{hint}"):
            getattr(llm, name)
    with pytest.raises(AttributeError, match=r"^'LLM' object has no attribute 'generat'$"):
        llm.generat  # type: ignore[attr-defined]  # noqa: B018
    assert not {name for name in METHODS if hasattr(LLM, name) or hasattr(AsyncLLM, name)}


def test_an_answer_without_a_next_token_says_why(llm: LLM, model_folder: Path, tmp_path: Path) -> None:
    """Causes: a grammar that takes too much work, and NaN weights. Requests in the same batch go on."""
    schema = {"type": "object", "properties": {f"p{i}": {} for i in range(1000)}, "required": ["p999"]}
    large = SamplingParams(temperature=0, max_tokens=12, structured_outputs=StructuredOutputsParams(json=schema))
    failed, other = llm.generate(["Once upon a time"] * 2, [large, GREEDY])
    assert failed.outputs[0].finish_reason == "error"
    assert "max is 2000" in failed.outputs[0].error
    assert (other.outputs[0].finish_reason, other.outputs[0].error) == ("length", "")

    folder = Path(shutil.copytree(model_folder, tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    broken = LLM(model=folder, max_model_len=64, kv_cache_gib=0.1, num_threads=1)
    (output,) = broken.generate(["Once upon a time"], GREEDY)
    assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("error", [])
    assert output.outputs[0].error == "the model's numbers for the next token are not numbers"
    with pytest.raises(RuntimeError, match=r"^prompts\[0\]: the model's numbers for the next token are not numbers"):
        broken.beam_search(["Once upon a time"], BeamSearchParams(beam_width=2, max_tokens=4))
    assert at_rest(llm)
    assert at_rest(broken)


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (["fine", ""], GREEDY, r"prompts\[1\]: prompt_token_ids must not be empty"),
        (["fine", "x " * 2000], GREEDY, "max_model_len=1024"),
        ([[1], [10**6]], GREEDY, "prompt_token_ids must be in"),
        (["fine", "fine"], [GREEDY], "1 entries for 2 prompts"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_and_leaves_nothing(
    llm: LLM, prompts: list[str], params: SamplingParams, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, params)
    assert at_rest(llm)
    assert not llm.llm_engine.has_unfinished_requests()


def test_an_absent_seed_is_drawn() -> None:
    assert SamplingParams().for_engine(5).seed == 5
    assert SamplingParams(seed=0).for_engine(5).seed == 0
    assert SamplingParams(seed=-1).for_engine(5).seed == 5, "as in vLLM, -1 asks for a random one"
    assert SamplingParams(seed=-2).for_engine(5, 1).seed == -1


def test_no_prompts_give_no_answers(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_defaults_and_bounds_are_the_engines() -> None:
    ours = {field.name: field for field in dataclasses.fields(SamplingParams)}
    theirs = dataclasses.fields(engine_params.SamplingParams)
    # made from structured_outputs, bad_words and thinking_token_budget
    made_of_others = {"grammar", "bad_words_token_ids", "thinking_budget"}
    assert {field.name for field in theirs} - made_of_others <= set(ours)
    assert SamplingParams().for_engine(0) == engine_params.SamplingParams()
    with pytest.raises(ValueError, match="top_p must be in"):
        SamplingParams(top_p=0)
    with pytest.raises(ValueError, match="stop must not hold empty strings"):
        SamplingParams(stop=["a", ""])


def test_settings_are_those_of_engine_args() -> None:
    with pytest.raises(ValueError, match="block_size must be a power of two"):
        LLM(block_size=17)
    with pytest.raises(TypeError, match="blok_size"):
        LLM(blok_size=16)


def test_each_of_several_answers_has_the_form_and_the_tokens_of_its_seed(llm: LLM) -> None:
    form = StructuredOutputsParams(regex="[A-Z][a-z]{2,9}, [0-9]{2}")
    params = SamplingParams(n=3, seed=5, max_tokens=30, structured_outputs=form)
    (several,) = llm.generate("The winner is", params)
    texts = [output.text for output in several.outputs]
    assert len(set(texts)) > 1
    for index, text in enumerate(texts):
        assert re.fullmatch("[A-Z][a-z]{2,9}, [0-9]{2}", text)
        (alone,) = llm.generate("The winner is", dataclasses.replace(params, n=1, seed=5 + index))
        assert alone.outputs[0].text == text
    assert at_rest(llm)


def test_a_tag_in_a_text(llm: LLM) -> None:
    """The trigger is a part of ordinary text, or a token by itself."""
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    for word, begin in (("<", "<function=f>"), ("<file_sep>", "<file_sep>f>")):
        content = {"type": "json_schema", "json_schema": schema}
        tag = {"begin": begin, "content": content, "end": "</function>"}
        asked = {"type": "triggered_tags", "triggers": [word], "tags": [tag], "stop_after_first": True}
        form = StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": asked})
        bias = {llm.get_tokenizer().encode(word, add_special_tokens=False)[0]: 100.0}
        params = SamplingParams(temperature=0, max_tokens=60, structured_outputs=form, logit_bias=bias)
        [output] = llm.generate(["Call it:"], params)
        assert re.fullmatch(rf'{begin}\{{"n": [12]\}}</function>', output.outputs[0].text), output.outputs[0].text
        assert output.outputs[0].finish_reason == "stop"
    with pytest.raises(ValueError, match="structured_outputs: structural_tag: type must be structural_tag"):
        SamplingParams(structured_outputs=StructuredOutputsParams(structural_tag='{"type": "json"}'))
    assert at_rest(llm)


def test_nothing_is_kept_of_what_was_cached_and_evicted(llm: LLM) -> None:
    """A worker sends cache events to routers; an offline engine must not collect them for as long as it lives."""
    llm.generate([list(range(100, 140))], SamplingParams(max_tokens=2, temperature=0), use_tqdm=False)
    assert llm.llm_engine.cached_hashes()
    assert llm.llm_engine.take_cache_events() == []


def test_no_bad_word(llm: LLM) -> None:
    prompt = "The capital of France is"
    [[said]] = [each.outputs for each in llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8))]
    assert "Paris" in said.text
    params = SamplingParams(temperature=0, max_tokens=8, bad_words=["Paris"])
    [[other]] = [each.outputs for each in llm.generate([prompt], params)]
    assert "Paris" not in other.text
    assert len(other.token_ids) == 8
