"""`tandem.SamplingParams`: it accepts what vLLM's callers write, and its errors name what is wrong."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.engine_args import EngineArgs
from engine.model_loader import create_engine_config
from tandem import LLM, SamplingParams, StructuredOutputsParams
from tandem.cli import command
from tandem.vllm_settings import FLAGS, SETTINGS, instead_of_flag, with_room_for_loras, without_neutral


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"top_k": 1.0}, "top_k must be a whole number, is 1.0"),
        ({"n": True}, "n must be a whole number, is True"),
        ({"seed": 1.0}, "seed must be a whole number or None, is 1.0"),
        ({"seed": "a"}, "seed must be a whole number or None, is 'a'"),
        ({"seed": 2**63}, "seed must fit 64 bits, is 9223372036854775808"),
        ({"max_tokens": 1.5}, "max_tokens must be a whole number or None, is 1.5"),
        ({"max_tokens": True}, "max_tokens must be a whole number or None, is True"),
        ({"max_tokens": "3"}, "max_tokens must be a whole number or None, is '3'"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, is 0"),
        ({"min_tokens": None}, "min_tokens must be a whole number, is None"),
        ({"logprobs": True}, "logprobs must be a whole number or None, is True"),
        ({"temperature": "3"}, "temperature must be a number, is '3'"),
        ({"temperature": 10**400}, "temperature must be a number, is 1000"),
        ({"temperature": None}, "temperature must be a number, is None"),
        ({"ignore_eos": "yes"}, "ignore_eos must be True or False, is 'yes'"),
        ({"skip_special_tokens": 1}, "skip_special_tokens must be True or False, is 1"),
        ({"stop_token_ids": [1.0]}, "stop_token_ids must be a list of whole numbers or None, is [1.0]"),
        ({"stop_token_ids": "12"}, "stop_token_ids must be a list of whole numbers or None, is '12'"),
        ({"stop_token_ids": iter([1])}, "stop_token_ids must be a list of whole numbers or None, is <list_it"),
        ({"stop": 3}, "stop must be a text, a list of texts or None, is 3"),
        ({"stop": ["a", b"b"]}, "stop must be a text, a list of texts or None, is ['a', b'b']"),
        ({"stop": "\ud800"}, "stop: has an invalid character at 0"),
        ({"stop": ["a", ""]}, "stop must not hold empty strings"),
        ({"logit_bias": {"1": 5}}, "logit_bias must be a dict of token ids (whole numbers) and numbers, or None"),
        ({"logit_bias": [1]}, "logit_bias must be a dict of token ids (whole numbers) and numbers, or None, is [1]"),
        ({"logit_bias": {1: "5"}}, "logit_bias must be a dict"),
        ({"logit_bias": {1: 101}}, "logit_bias must be in [-100, 100], is 101"),
        ({"detokenize": False}, "detokenize must be True, nothing else is served; is False"),
        ({"detokenize": 1}, "detokenize must be True, nothing else is served; is 1"),
        ({"spaces_between_special_tokens": 0}, "spaces_between_special_tokens must be True or False, nothing else"),
        ({"bad_words": "a"}, "bad_words must be a list of texts or None, is 'a'"),
        ({"bad_words": [5]}, "bad_words must be a list of texts or None, is [5]"),
        ({"bad_words": ["a"] * 257}, "bad_words must have at most 256 words, has 257"),
        ({"bad_words": ["a", " "]}, "bad_words must be 1 to 256 characters long, not all of them spaces, has ' '"),
        ({"bad_words": ["a" * 257]}, "bad_words must be 1 to 256 characters long"),
        (
            {"bad_words": ["a"], "allowed_token_ids": [5]},
            "bad_words cannot be combined with structured outputs or allowed",
        ),
        ({"allowed_token_ids": []}, "allowed_token_ids must not be empty: for any token, leave it out"),
        ({"allowed_token_ids": 5}, "allowed_token_ids must be a list of whole numbers or None, is 5"),
        ({"allowed_token_ids": range(4097)}, "allowed_token_ids must have at most 4096 ids, has 4097"),
        (
            {"allowed_token_ids": [5], "structured_outputs": StructuredOutputsParams(regex="a")},
            "allowed_token_ids cannot be combined with structured outputs",
        ),
        ({"logits_processors": [print]}, "logits_processors must be None or [], nothing else is served; is [<built"),
        ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens must be None, nothing else is served; is -1"),
        (
            {"structured_outputs": {"regex": "a"}},
            "structured_outputs must be StructuredOutputsParams or None, is {'regex': 'a'}",
        ),
        ({"output_kind": 1}, "output_kind must be a RequestOutputKind, is 1"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError) as raised:
        SamplingParams(**given)
    assert str(raised.value).startswith(complaint)


def test_none_is_what_it_is_for_vllm() -> None:
    may_be_none = [entry.name for entry in dataclasses.fields(SamplingParams) if "None" in str(entry.type)]
    assert may_be_none == [
        "max_tokens", "stop", "stop_token_ids", "seed", "allowed_token_ids", "bad_words", "logit_bias", "logprobs",
        "prompt_logprobs", "structured_outputs", "thinking_token_budget",
    ]  # fmt: skip
    params = SamplingParams(**dict.fromkeys(may_be_none))
    assert params.stop_strings == ()
    asked = params.for_engine(5)
    assert asked == dataclasses.replace(SamplingParams().for_engine(5), max_tokens=asked.max_tokens)
    assert asked.max_tokens > 10**6, "the context ends the answer"


def test_numbers_may_be_numpys() -> None:
    params = SamplingParams(
        seed=np.int64(2**63 - 1), temperature=np.float32(0.5), n=np.int32(2), stop_token_ids=np.array([3]),  # type: ignore[arg-type]
        logit_bias={np.int64(3): np.float32(1)},  # type: ignore[dict-item]
    )  # fmt: skip
    asked = params.for_engine(0, 1)
    assert (asked.seed, asked.temperature, asked.stop_token_ids, asked.logit_bias) == (-(2**63), 0.5, {3}, {3: 1.0})
    assert {type(each) for each in (asked.seed, *asked.stop_token_ids, *asked.logit_bias)} == {int}


def test_a_name_that_is_no_field_is_told_with_those_that_are() -> None:
    there = ", ".join(entry.name for entry in dataclasses.fields(SamplingParams))
    with pytest.raises(TypeError, match=f"SamplingParams has no best_of; known are {there}$"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="SamplingParams has no temprature; did you mean temperature"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]


def test_copies_are_equal() -> None:
    params = SamplingParams(seed=3, stop=["a"], max_tokens=None)
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == dataclasses.replace(params) == params  # noqa: S301


def test_fields_may_be_assigned_and_are_checked_together() -> None:
    """vLLM's users do this with a model's own parameters: they set one after another, and the parameters need not fit
    in between."""
    params = SamplingParams()
    params.min_tokens = 20
    params.max_tokens = 30
    params.detokenize = True
    params.check()
    assert params == SamplingParams(min_tokens=20, max_tokens=30)
    assert params.for_engine(1).max_tokens == 30
    with pytest.raises(AttributeError, match="SamplingParams has no max_token; did you mean max_tokens"):
        params.max_token = 3  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="detokenize must be True"):
        params.detokenize = False
    params.temperature = -1
    with pytest.raises(ValueError, match="temperature must be at least 0 and finite, is -1"):
        params.check()


def test_forms_may_say_that_they_want_nothing_else() -> None:
    plain = StructuredOutputsParams(regex="a")
    assert StructuredOutputsParams(regex="a", whitespace_pattern=None, disable_any_whitespace=False) == plain
    assert StructuredOutputsParams.of({"regex": "a", "whitespace_pattern": None}) == plain
    assert StructuredOutputsParams(regex="a", disable_any_whitespace=True) == plain, "JSON is on one line anyway"
    with pytest.raises(ValueError, match="disable_additional_properties is not supported"):
        StructuredOutputsParams(regex="a", disable_additional_properties=True)
    with pytest.raises(ValueError, match="whitespace_pattern is not supported"):
        StructuredOutputsParams(regex="a", whitespace_pattern=" ?")


def test_a_clone_shares_nothing() -> None:
    stop, bias = ["a"], {1: 2.0}
    params = SamplingParams(stop=stop, logit_bias=bias, structured_outputs=StructuredOutputsParams(choice=["a", "b"]))
    clone = params.clone()
    assert clone == params
    stop.append("b")
    bias[2] = 3.0
    assert (clone.stop, clone.logit_bias) == (["a"], {1: 2.0})


def test_what_asks_for_what_is_done_anyway_is_taken_and_is_no_field() -> None:
    params = SamplingParams(
        detokenize=True, skip_special_tokens=True, spaces_between_special_tokens=True,
        include_stop_str_in_output=False, logits_processors=[], truncate_prompt_tokens=None,
    )  # fmt: skip
    plain = SamplingParams()
    assert (params, repr(params)) == (plain, repr(plain))
    assert params.for_engine(1) == plain.for_engine(1)
    assert SamplingParams(logits_processors=None) == plain
    assert SamplingParams(spaces_between_special_tokens=False) == plain
    assert SamplingParams(extra_args={}, flat_logprobs=False, stream_interval=1) == plain
    names = {entry.name for entry in dataclasses.fields(params)}
    assert not names & {"detokenize", "logits_processors"}
    assert dataclasses.replace(params, n=2) == SamplingParams(n=2)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"lora_modules": 3}, "lora_modules must be a dict or a text, is 3"),
        ({"lora_modules": {("a",): "b"}}, "lora_modules must be a JSON object: "),
        ({"speculative_config": ["ngram"]}, r"speculative_config must be a dict or a text, is \['ngram'\]"),
        ({"dtype": 3}, "dtype must be a text, is 3"),
        ({"model": None}, "model must be a text, is None"),
        ({"max_model_len": "10"}, "max_model_len must be a whole number, is '10'"),
    ],
)
def test_settings_of_a_wrong_type_are_named(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        LLM(**settings)


def test_a_name_that_is_no_setting_is_told_with_those_that_are() -> None:
    there = ", ".join(entry.name for entry in dataclasses.fields(EngineArgs))
    with pytest.raises(TypeError, match=f"LLM has no zzz; known are {there}$"):
        LLM(zzz=True)
    with pytest.raises(TypeError, match="num_gpu_blocks_override: use num_kv_blocks instead"):
        LLM(num_gpu_blocks_override=100)
    with pytest.raises(TypeError, match="LLM has no zzz"):
        LLM(zzz=None)


@pytest.mark.parametrize(
    ("settings", "num"),
    [
        ({"enable_lora": True}, 1), ({"enable_lora": True, "max_loras": None}, 1),
        ({"enable_lora": True, "max_loras": 4}, 4), ({"enable_lora": False}, None), ({}, None),
        ({"enable_lora": True, "lora_modules": {"a": "x"}}, None),
    ],
)  # fmt: skip
def test_enable_lora_leaves_room_for_one(settings: dict[str, Any], num: int | None) -> None:
    """As in vLLM, whose examples bring the adapter along with a request."""
    asked = without_neutral(with_room_for_loras(settings))
    assert asked.get("max_loras") == num
    assert "enable_lora" not in asked


def test_vllms_settings_may_ask_for_what_is_done_anyway() -> None:
    asked = {"trust_remote_code": True, "enable_chunked_prefill": True, "swap_space": 4, "tokenizer_mode": "auto"}
    nothing = {"tokenizer": None, "hf_overrides": {}}
    assert without_neutral({**asked, **nothing, "dtype": "half", "zzz": 1}) == {"dtype": "half", "zzz": 1}
    for name, value in (("enable_chunked_prefill", False), ("pipeline_parallel_size", True), ("task", "embed")):
        with pytest.raises(TypeError, match=f"LLM has no {name}: "):
            without_neutral({name: value})
    ours = {entry.name for entry in dataclasses.fields(EngineArgs)}
    assert not ours & SETTINGS.keys(), "what is a setting here needs nothing instead"


def test_all_that_is_to_be_said_instead_is_there() -> None:
    known = {entry.name for entry in dataclasses.fields(EngineArgs)} | {"max_itl_ms", "chat_template"}
    flags = {f"--{name.replace('_', '-')}" for name in known} | {
        option for parameter in command("up").params for option in parameter.opts
    }
    for name in (*SETTINGS, *FLAGS):
        told = instead_of_flag(f"--{name}")
        assert told
        assert set(re.findall(r"--[a-z-]+", told)) <= flags, (name, told)


def test_types_of_numbers_may_have_vllms_names_and_torchs(model_folder: Path) -> None:
    for dtype, resolved in (("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16")):
        config = create_engine_config(EngineArgs(model=str(model_folder), dtype=dtype))
        assert config.model.dtype == resolved
    with pytest.raises(ValueError, match="load_format gguf needs"):
        LLM(model="x", dtype=torch.bfloat16, load_format="gguf")
