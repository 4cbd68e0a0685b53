"""Tokens that are sent several at a time: none is lost, they stay in order, and the first and the last are sent at
once."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from model_bench import SMALL, engine_config, save_model

from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.outputs import FinishReason, Logprob, RequestOutput, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.scheduling.stream_interval import StreamInterval


def output(
    offset: int, *token_ids: int, name: str = "a", reason: FinishReason | None = None, is_held: bool = False
) -> RequestOutput:
    logprobs = [TokenLogprobs(Logprob(token_id, -1.0, 1), []) for token_id in token_ids]
    held = (1, 2) if is_held else ()
    return RequestOutput(name, offset, list(token_ids), reason, 0, 0.5, logprobs, held_block_ids=held)


def told(outputs: list[RequestOutput]) -> list[tuple[str, int, list[int]]]:
    assert all([each.sampled.token_id for each in o.logprobs or ()] == o.token_ids for o in outputs)
    return [(o.request_id, o.offset, o.token_ids) for o in outputs]


def test_the_first_and_the_last_come_at_once_and_others_together() -> None:
    interval = StreamInterval(3)
    assert told(interval.take_in([output(0, 5)])) == [("a", 0, [5])]
    assert interval.take_in([output(1, 6)]) == []
    assert told(interval.take_in([output(2, 7), output(40, 1, name="b")])) == [("b", 40, [1])]
    assert told(interval.take_in([output(3, 8, 9)])) == [("a", 1, [6, 7, 8, 9])]
    assert interval.take_in([output(5, 10)]) == []
    (last,) = interval.take_in([output(6, 11, reason=FinishReason.LENGTH)])
    assert (told([last]), last.finish_reason) == ([("a", 5, [10, 11])], FinishReason.LENGTH)
    assert told(interval.take_in([output(0, 5)])) == [("a", 0, [5])], "a later request of that name"


def test_what_was_kept_of_a_request_that_fails_is_told_before() -> None:
    interval = StreamInterval(3)
    interval.take_in([output(0, 5)])
    interval.take_in([output(1, 6)])
    tokens, failure = interval.take_in([output(2, reason=FinishReason.ERROR)])
    assert told([tokens]) == [("a", 1, [6])]
    assert (tokens.finish_reason, failure.finish_reason) == (None, FinishReason.ERROR)


def test_nothing_is_kept_of_a_request_that_is_aborted() -> None:
    interval = StreamInterval(3)
    interval.take_in([output(0, 5)])
    interval.take_in([output(1, 6)])
    interval.forget("a")
    assert told(interval.take_in([output(7, 9)])) == [("a", 7, [9])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(transformers.LlamaConfig(**SMALL), folder)
    return folder


def steps_of(folder: Path, stream_interval: int) -> list[list[RequestOutput]]:
    engine = LLMEngine(engine_config(folder, stream_interval=stream_interval))
    engine.add_request("a", [3, 4, 5], SamplingParams(max_tokens=9, temperature=0, ignore_eos=True, logprobs=1))
    engine.add_request("b", [6, 7], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    steps = []
    while engine.has_unfinished_requests():
        steps.append(engine.step())
    assert engine.stats.num_generation_tokens == 13
    assert not engine._interval._kept
    return steps


def test_an_engine_tells_the_same_in_fewer_pieces(folder: Path) -> None:
    each, several = steps_of(folder, 1), steps_of(folder, 4)
    lengths = [len(o.token_ids) for step in several for o in step if o.request_id == "a"]
    assert lengths == [1, 4, 4]
    for name in ("a", "b"):
        for field in ("token_ids", "logprobs"):
            whole, pieces = (
                [item for step in steps for o in step if o.request_id == name for item in getattr(o, field) or ()]
                for steps in (each, several)
            )
            assert whole == pieces


def test_an_engine_keeps_nothing_of_a_request_that_is_aborted(folder: Path) -> None:
    engine = LLMEngine(engine_config(folder, stream_interval=4))
    engine.add_request("a", [3, 4, 5], SamplingParams(max_tokens=9, temperature=0, ignore_eos=True))
    for _ in range(3):
        engine.step()
    assert engine.abort("a")
    engine.add_request("a", [6, 7], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
    outputs = [output for _ in range(2) for output in engine.step()]
    assert [(output.offset, len(output.token_ids)) for output in outputs] == [(0, 1), (1, 1)]


def test_the_bound_is_named() -> None:
    with pytest.raises(ValueError, match=r"stream_interval must be in \[1, 1024\], is 0"):
        EngineArgs(stream_interval=0)
