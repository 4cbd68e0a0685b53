"""Host memory beside a pool that is too small: the same answers, and known prompts are not computed again."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from many_endings import CONFIG, answers_alone, answers_of, prompt_of
from pretend_gpu import pretend_gpu
from pretend_gpu.engines import make_engine

from engine.config import GIB
from engine.llm_engine import LLMEngine
from engine.sampling_params import SamplingParams
from engine.scheduling.offloading import BlockCopy

NUMBERS = range(2, 14)
BLOCK_BYTES = 2 * 2 * 2 * 4 * 8 * 4
"""layers, parts, heads, slots, dim, bytes"""
PLENTY = {"kv_offloading_size": 400 * BLOCK_BYTES / GIB}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_same_answers_and_less_to_compute(num_ranks: int, tmp_path: Path) -> None:
    expected = answers_alone(make_engine(tmp_path, CONFIG, device="cpu"), NUMBERS)
    settings = {"num_kv_blocks": 24, "max_model_len": 96, "device": "cpu", "tensor_parallel_size": num_ranks}
    engine = make_engine(tmp_path, CONFIG, **settings, **PLENTY)
    assert engine.block_manager.prefixes.offloading.num_host_blocks == 400
    num_prompt_tokens = sum(len(prompt_of(number)) for number in NUMBERS)
    for num_rounds in (0, 1):
        for number in NUMBERS:
            assert answers_of(engine, range(number, number + 1)) == {str(number): expected[str(number)]}
            end_copies(engine)
        assert (engine.stats.num_prompt_tokens == num_prompt_tokens) == (num_rounds == 0)
    # While a prompt or an answer fills half of the pool, some blocks are evicted before they are copied.
    assert engine.stats.num_prompt_tokens < 1.75 * num_prompt_tokens
    assert engine.stats.num_loaded_tokens == engine.stats.num_prefix_hits_tokens > num_prompt_tokens / 4
    assert answers_of(engine, NUMBERS) == expected  # all at once: some are preempted, or wait for blocks
    engine.close()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("copies_are_late", [False, True])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_copies_beside_a_gpus_steps(copies_are_late: bool, tmp_path: Path) -> None:
    """No copy waits for a step, no step waits for a copy, and no block is used before its copy is done."""
    expected = [answers(make_engine(tmp_path, CONFIG, device="cpu"), number) for number in range(6)]
    with pretend_gpu():
        engine = make_engine(tmp_path, CONFIG, num_kv_blocks=16, max_model_len=60, **PLENTY)
        if copies_are_late:
            copy_when_waited_for(engine)
        for _ in range(2):
            for number in range(6):
                assert answers(engine, number) == expected[number]
                end_copies(engine)
        assert engine.stats.num_prefix_hits_tokens == 6 * 12
        assert engine.stats.num_loaded_tokens > 4 * 12
        engine.close()


def end_copies(engine: LLMEngine) -> None:
    """Wait for all copies. The next request would evict blocks without a copy rather than wait, so how much is found
    again would be a race."""
    while engine.executor.wait_for_copies():
        engine.step()


def copy_when_waited_for(engine: LLMEngine) -> None:
    """Make copies as late as possible: only when the engine waits for them."""
    copies = engine.executor._host_copies
    assert copies is not None
    copy, wait, is_waited_for = copies._copy, copies.wait, threading.Event()

    def copy_late(blocks: list[BlockCopy]) -> None:
        is_waited_for.wait()
        copy(blocks)

    def wait_for_copies() -> bool:
        is_waited_for.set()
        try:
            return wait()
        finally:
            is_waited_for.clear()

    copies._copy, copies.wait = copy_late, wait_for_copies  # type: ignore[method-assign]


def answers(engine: LLMEngine, number: int) -> list[int]:
    """Return two tokens after a prompt of four blocks, of which the last is not full."""
    prompt = [5 + (number + 7 * i) % 50 for i in range(14)]
    engine.add_request("r", prompt, SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
    token_ids: list[int] = []
    while engine.has_unfinished_requests():
        token_ids += [token_id for output in engine.step() for token_id in output.token_ids]
    return token_ids


def test_what_is_too_large_or_too_small_is_said(tmp_path: Path) -> None:
    for size, why in (
        (1e6, "kv_offloading_size must be at most .* all the memory of this process, is 1e"),
        (1e-9, "kv_offloading_size must be at least .* one block of all layers"),
        (-1.0, "kv_offloading_size must be at least 0 and finite, is -1"),
    ):
        settings: dict[str, Any] = {"kv_offloading_size": size, "device": "cpu"}
        with pytest.raises(ValueError, match=why):
            make_engine(tmp_path, CONFIG, **settings)
    with pytest.raises(ValueError, match="kv_offloading_size must be 0 without enable_prefix_caching"):
        make_engine(tmp_path, CONFIG, device="cpu", enable_prefix_caching=False, **PLENTY)


def test_what_waits_for_the_host_is_counted_among_those_that_wait(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, CONFIG, num_kv_blocks=16, max_model_len=60, device="cpu", **PLENTY)
    for number in range(6):
        answers(engine, number)
        end_copies(engine)
    engine.wake_by(lambda: None)  # from now on a step does not wait for copies
    prompt = [5 + 7 * i % 50 for i in range(14)]
    engine.add_request("again", prompt, SamplingParams(max_tokens=2, temperature=0))
    assert engine.step() == []
    load = engine.load()
    assert (load.num_running, load.num_waiting, load.num_waiting_tokens) == (0, 1, 2)
    engine.close()


def test_who_lets_go_of_an_engine_has_its_memory_back(tmp_path: Path) -> None:
    """The copying thread must end with the engine, since it keeps the pool alive."""
    before = threading.enumerate()
    engine = make_engine(tmp_path, CONFIG, num_kv_blocks=16, max_model_len=60, device="cpu", **PLENTY)
    answers(engine, 1)
    [thread] = [each for each in threading.enumerate() if each.name == "host-copies" and each not in before]
    del engine
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()
