"""What a router knows about its model: read from the folder, completed by workers. Errors name the bad file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from protos import tandem_inference_pb2 as pb
from router.args import RouterArgs
from router.generation_defaults import GenerationDefaults
from router.model_info import ModelInfo


def write_model(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_model_info_is_read_from_the_folder_and_completed_by_a_worker(tmp_path: Path) -> None:
    config = {"max_position_embeddings": 8192, "vocab_size": 1000, "eos_token_id": 2}
    write_model(tmp_path, config, {"eos_token_id": [2, 7], "temperature": 0.6, "top_k": 50, "max_new_tokens": 64})
    info = ModelInfo.from_folder(tmp_path, served_model_name="smol")
    assert info == ModelInfo(
        served_model_name="smol",
        max_model_len=8192,
        vocab_size=1000,
        eos_token_ids=frozenset({2, 7}),
        defaults=GenerationDefaults(temperature=0.6, top_k=50, max_new_tokens=64),
    )
    assert ModelInfo.from_folder(tmp_path).served_model_name == tmp_path.name
    worker = pb.GetModelInfoResponse(
        model="smol", max_model_len=512, vocab_size=1000, block_size=16, dtype="bfloat16", eos_token_ids=[2, 7]
    )
    served = info.with_worker(worker)
    assert (served.max_model_len, served.block_size, served.dtype) == (512, 16, "bfloat16")
    worker.default_sampling_params.CopyFrom(pb.SamplingParams(temperature=0.6, top_k=50, max_tokens=64))
    assert served.to_proto() == worker
    worker.lora_names.extend(["poet", "smol", "sql"])
    served = info.with_worker(worker, ["sql", "smol", "poet", "sql"])
    assert served.lora_names == ("poet", "sql"), "nobody takes the model's own name from it"
    assert list(served.to_proto().lora_names) == ["poet", "sql"]
    named = ModelInfo.from_folder(tmp_path, served_model_name="smol, sql,gpt ,sql,smol")
    assert (named.served_model_name, named.aliases) == ("smol", ("sql", "gpt"))
    assert list(named.to_proto().aliases) == ["sql", "gpt"]
    assert named.with_worker(worker, ["sql", "poet"]).lora_names == ("poet",), "nor any other of its names"
    leaving = named.with_worker(worker, ["poet"], ["sql", "old", "poet"])
    names = ("gpt", "poet", "old", "sql", "other")
    assert [name for name in names if leaving.has_name(name, has_begun=True)] == ["gpt", "poet", "old", "sql"]
    assert [name for name in names if leaving.is_lora(name, has_begun=True)] == ["poet", "old"]
    assert not leaving.has_name("old")
    assert list(leaving.to_proto().lora_names) == ["poet"]
    worker.vocab_size = 999
    with pytest.raises(ValueError, match="vocabulary of 999 tokens"):
        info.with_worker(worker)


def test_the_text_part_of_a_model_that_sees_counts(tmp_path: Path) -> None:
    write_model(tmp_path, {"text_config": {"max_position_embeddings": 64, "vocab_size": 50}})
    info = ModelInfo.from_folder(tmp_path)
    assert (info.max_model_len, info.vocab_size, info.has_chat_template) == (64, 50, False)


@pytest.mark.parametrize("config", [{}, {"vocab_size": "many"}, {"vocab_size": 0}])
def test_a_folder_without_a_vocabulary_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        ModelInfo.from_folder(write_model(tmp_path, config))


def test_greedy_models_give_no_sampling_defaults() -> None:
    config = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1, "max_new_tokens": 5.0}
    defaults = GenerationDefaults.from_generation_config(config)
    assert defaults == GenerationDefaults(repetition_penalty=1.1, max_new_tokens=5)
    assert (
        GenerationDefaults.from_generation_config({"do_sample": True, "top_p": 0.9, "temperature": None}).top_p == 0.9
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"temperature": -1}, "temperature must be at least 0 and finite, is -1"),
        ({"temperature": float("nan")}, "temperature must be at least 0 and finite, is nan"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\], is 0"),
        ({"top_k": -2}, "top_k must be -1 or more, and below 2147483648, is -2"),
        ({"top_k": 1e30}, "top_k must be -1 or more, and below 2147483648, is 1e"),
        ({"max_new_tokens": 1 << 31}, "max_new_tokens must be 1 or more, and below 2147483648, is 2147483648"),
        ({"temperature": 1e308}, "temperature must be at least 0 and finite, is 1e"),
        ({"temperature": 10**400}, "temperature must be at least 0 and finite, is 1000"),
        ({"repetition_penalty": 1e-300}, r"repetition_penalty must be in \(0, 2\], is 1e-300"),
        ({"top_k": 1.5}, "top_k must be a whole number, is 1.5"),
        ({"top_k": float("inf")}, "top_k must be a whole number, is inf"),
        ({"min_p": 1.5}, r"min_p must be in \[0, 1\], is 1.5"),
        ({"repetition_penalty": 0}, r"repetition_penalty must be in \(0, 2\], is 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be 1 or more, and below 2147483648, is 0"),
        ({"top_p": "0.9"}, "top_p must be a number, is '0.9'"),
    ],
)
def test_generation_defaults_out_of_bounds_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GenerationDefaults.from_generation_config(config)


def test_defaults_come_from_where_they_are_to(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    for folder, temperature in ((own, 0.6), (other, 0.2)):
        folder.mkdir()
        write_model(folder, {}, {"temperature": temperature, "top_k": 50, "max_new_tokens": 64})
    of = GenerationDefaults.of
    assert of(own) == GenerationDefaults(temperature=0.6, top_k=50, max_new_tokens=64)
    assert of(own, "vllm") == GenerationDefaults()
    assert of(own, str(other)).temperature == 0.2
    override = '{"temperature": 1, "max_new_tokens": 8, "top_k": null}'
    assert of(own, override=override) == GenerationDefaults(temperature=1, top_k=50, max_new_tokens=8)
    assert of(own, "vllm", override) == GenerationDefaults(temperature=1, max_new_tokens=8)
    with pytest.raises(
        ValueError,
        match=r"generation_config must be auto, vllm or a folder .*: .*/x/generation_config.json does not exist",
    ):
        of(own, str(tmp_path / "x"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("{", "override_generation_config must be a JSON object, is '{'"),
        ("[]", r"must be a JSON object of temperature, .*, is '\[\]'"),
        ('{"top": 1}', "must be a JSON object of temperature, "),
        ('{"top_p": 2}', r"override_generation_config: top_p must be in \(0, 1\], is 2"),
        ('{"top_k": true}', "override_generation_config: top_k must be a number, is True"),
        ("[" * 100_000, "must be a JSON object"),
    ],
)
def test_an_override_that_is_none(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RouterArgs(model="m", override_generation_config=override)


@pytest.mark.parametrize("names", [",", "a,", ",a", "a,,b", "a, "])
def test_names_that_are_none(names: str) -> None:
    with pytest.raises(ValueError, match="served_model_name must be NAME or NAME,NAME, is"):
        RouterArgs(model="m", served_model_name=names)
