"""The parts of benchmarks/gpu.py that check correctness, with toys on a CPU: models against transformers, and the
answers of one engine against another's."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_parts import answers, model
from benchmarks.gpu_parts.runner import Setting
from engine.running import host_copies
from engine.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("is_damaged", [False, True])
def test_the_model_against_transformers(setting: Setting, monkeypatch: pytest.MonkeyPatch, is_damaged: bool) -> None:
    monkeypatch.setattr(model, "MODELS", ("qwen3",))
    if is_damaged:  # a wrong norm of heads, which only the numbers reveal
        damage_norms(monkeypatch)
    rows = list(model.measure(setting))
    assert [row.what for row in rows] == [
        *(f"qwen3, {dtype}, {how}" for dtype in ("float32", "bfloat16")
          for how in ("prompts whole", "prompts in chunks", "decoding", "decoding alone")),
        "qwen3, float32, greedy answers unlike",
    ]  # fmt: skip
    numbers = [(row.what, row.value, row.at_most, row.note) for row in rows]
    assert [row.is_wrong for row in rows[:8]] == [is_damaged] * 8, numbers
    assert is_damaged or not rows[8].is_wrong


def damage_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.model_loader.weights import SafetensorsWeights

    read = SafetensorsWeights._read

    def damaged(self: SafetensorsWeights, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = read(self, name, shape)
        return tensor.flip(0) if name.endswith("q_norm.weight") else tensor

    monkeypatch.setattr(SafetensorsWeights, "_read", damaged)


def test_answers_as_on_the_cpu(setting: Setting) -> None:
    rows = list(answers.measure(setting))
    assert [row.is_wrong for row in rows] == [False] * len(answers.CASES)
    assert [row.value for row in rows] == [0] * len(rows)


@pytest.mark.parametrize("what", ["another token", "nobody was preempted"])
def test_other_answers_are_wrong_and_so_is_a_case_that_shows_nothing(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    asked = answers.answers
    devices = iter(("cpu", "the device"))

    def answers_of(*args: Any) -> Any:
        tokens, stats = asked(*args)
        if next(devices) == "the device":
            tokens["1"][-1] += what == "another token"
            stats.num_preemptions *= what == "another token"
        return tokens, stats

    monkeypatch.setattr(answers, "CASES", [case for case in answers.CASES if case.what == "too small a pool"])
    monkeypatch.setattr(answers, "answers", answers_of)
    (row,) = answers.measure(setting)
    assert row.is_wrong
    assert row.value == (1 if what == "another token" else None)


def test_blocks_come_from_the_host_however_slowly_they_went_there(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = host_copies._ByHost.__call__
    monkeypatch.setattr(host_copies._ByHost, "__call__", lambda *args: time.sleep(0.05) or copy(*args))
    monkeypatch.setattr(answers, "CASES", [case for case in answers.CASES if case.what == "blocks from the host"])
    (row,) = answers.measure(setting)
    assert not row.is_wrong, row.note


def test_whatever_is_asked_changes_its_answer(tmp_path: Path) -> None:
    """Otherwise a device could ignore a parameter unnoticed."""
    plan, plain = answers.FULL, SamplingParams()
    model.save_model("llama", plan, tmp_path)
    settings = {"model": str(tmp_path), "device": "cpu", "num_threads": 1, "num_kv_blocks": 1000}
    modules = json.dumps(answers.save_adapters(tmp_path))
    asked = answers.sampled(plan)
    changes = [
        (number, name, replace(request, params=replace(request.params, **{name: getattr(plain, name)})))
        for number, request in enumerate(asked)
        for name in request.params.__slots__
        if name not in ("temperature", "seed", "max_tokens", "logprobs")
        and getattr(request.params, name) != getattr(plain, name)
    ]
    expected, _ = answers.answers(asked, settings)
    found, _ = answers.answers([request for *_, request in changes], settings)
    assert [change[:2] for i, change in enumerate(changes) if found[str(i)] == expected[str(change[0])]] == []
    requests = answers.adapted(plan)
    without, _ = answers.answers([replace(request, lora_name="") for request in requests], settings)
    adapted, _ = answers.answers(requests, settings | {"lora_modules": modules})
    assert [adapted[i] != without[i] for i in adapted] == [bool(request.lora_name) for request in requests]
