"""Adapters that are added and removed on several ranks: one rank cannot read an adapter, or dies while the others wait.

Everything else about adapters on ranks: kind "ranks" in test_loras_that_come_and_go.py."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from handover import alone
from lora_folders import CONFIG, PRODUCTS, write_adapter, write_model

from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.lora.adapters import MAX_HEADER_BYTES, MAX_NUMBER_BYTES, ReadAdapter
from engine.lora.modules import WEIGHTS_FILE, LoRAModule
from engine.model_loader import create_engine_config
from engine.running.executor import Executor, RankLost
from engine.sampling_params import SamplingParams
from engine.tensor_parallel.rank_adapters import FollowedAdapters, RankAdapters

PROMPT = [(11 * i) % 290 + 5 for i in range(40)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
Q = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loras")
    write_model(folder / "model")
    for seed, name in enumerate(("a", "b"), start=1):
        write_adapter(folder / name, seed=seed)
    up = torch.zeros(PRODUCTS["self_attn.q_proj"][0], 4)
    up[-1] = float("nan")
    write_adapter(folder / "of the last rank", seed=3, tensors={Q: up})
    return folder


def make_engine(folder: Path, num_ranks: int = 2) -> LLMEngine:
    args = EngineArgs(
        model=str(folder / "model"), load_format="dummy", device="cpu", num_threads=1, num_kv_blocks=60,
        dtype="float32", attention_backend="torch", tensor_parallel_size=num_ranks, max_loras=2,
    )  # fmt: skip
    return LLMEngine(create_engine_config(args))


@pytest.fixture(scope="module")
def shared_engine(folder: Path) -> Iterator[LLMEngine]:
    with closing(make_engine(folder)) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: LLMEngine) -> LLMEngine:
    """The shared engine, without adapters."""
    for module in shared_engine.loras.served:
        shared_engine.remove_lora(module.name)
    assert shared_engine.free_loras(shared_engine.loras.leaving) == []
    return shared_engine


def test_they_answer_as_with_one_rank(engine: LLMEngine, folder: Path) -> None:
    """This holds even if an adapter is exchanged while a request still uses the previous one."""

    def answers(engine: LLMEngine) -> list[list[int]]:
        told = {"before": list[int](), "after": list[int]()}
        for name in ("a", "b"):
            module = engine.find_lora("x", folder / name)
            engine.add_lora(module, engine.read_lora(module))
            engine.add_request("before" if name == "a" else "after", PROMPT, GREEDY, lora_name="x")
            for output in engine.step():
                told[output.request_id] += output.token_ids
        while engine.has_unfinished_requests():
            for output in engine.step():
                told[output.request_id] += output.token_ids
        assert engine.free_loras(engine.loras.leaving) == []
        return [*told.values(), alone(engine, PROMPT, GREEDY)]

    told = answers(engine)
    with closing(make_engine(folder, num_ranks=1)) as one:
        assert told == answers(one)
    assert len({tuple(tokens) for tokens in told}) == 3


def test_what_another_rank_cannot_read_changes_nothing(engine: LLMEngine, folder: Path) -> None:
    before = alone(engine, PROMPT, GREEDY)
    wrong = engine.find_lora("x", folder / "of the last rank")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"rank 1: adapter 'x': its weights for .*q_proj are not finite"):
            engine.read_lora(wrong)
    right = engine.find_lora("x", folder / "a")
    engine.add_lora(right, engine.read_lora(right))
    assert alone(engine, PROMPT, GREEDY) == before != alone(engine, PROMPT, GREEDY, lora_name="x")


def test_a_file_may_have_the_bytes_of_all_ranks(engine: LLMEngine) -> None:
    num_layers, numbers = CONFIG["num_hidden_layers"], sum(map(sum, PRODUCTS.values()))
    most = engine.executor.max_adapter_bytes("a", 4)
    assert most == MAX_HEADER_BYTES + MAX_NUMBER_BYTES * 4 * num_layers * numbers


def test_they_are_put_one_by_one(engine: LLMEngine, folder: Path) -> None:
    """A rank keeps only the adapter that it has read last."""
    modules = [engine.find_lora(name, folder / name) for name in ("a", "b")]
    first, second = [engine.read_lora(module) for module in modules]
    with pytest.raises(ValueError, match="another adapter has been read since: on several ranks they are put one by"):
        engine.add_lora(modules[0], first)
    assert engine.loras.served == ()
    engine.add_lora(modules[1], second)
    engine.add_lora(modules[0], engine.read_lora(modules[0]))
    answers = [alone(engine, PROMPT, GREEDY, lora_name=name) for name in ("", "a", "b")]
    assert len({tuple(tokens) for tokens in answers}) == 3


def test_what_ranks_have_read_is_one_adapter(
    engine: LLMEngine, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the file changes between the reads of two ranks, they must not serve parts of two adapters."""
    shutil.copytree(folder / "a", tmp_path / "x")

    def read_and_exchange(self: Executor, module: LoRAModule, read: Any = Executor.read_adapter) -> ReadAdapter:
        adapter: ReadAdapter = read(self, module)
        shutil.copyfile(folder / "b" / WEIGHTS_FILE, tmp_path / "x" / WEIGHTS_FILE)
        return adapter

    monkeypatch.setattr(Executor, "read_adapter", read_and_exchange)
    module = engine.find_lora("x", tmp_path / "x")
    with pytest.raises(ValueError, match=r"^rank 1: adapter 'x': .* has changed since it was read$"):
        engine.read_lora(module)


def test_a_rank_that_ends_while_it_reads(folder: Path) -> None:
    """The caller that waits for the rank gets `RankLost`."""
    with closing(make_engine(folder)) as engine, ThreadPoolExecutor(1) as threads:
        module = engine.find_lora("a", folder / "a")
        [pid] = engine.executor.rank_pids
        os.kill(pid, signal.SIGSTOP)
        reading = threads.submit(engine.read_lora, module)
        with pytest.raises(TimeoutError):
            reading.result(0.2)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankLost, match="rank 1 of the engine has ended with SIGKILL"):
            reading.result(30)


class Read:
    """A stand-in for the `Adapters` of another rank."""

    def __init__(self) -> None:
        self.may_read = threading.Event()
        self.is_reading = threading.Event()
        self.put_by_number: dict[int, str] = {}
        self.cannot_read = ""

    def read(self, module: LoRAModule) -> Any:
        self.is_reading.set()
        self.may_read.wait(30)
        if module.name == self.cannot_read:
            raise ValueError("no number")
        return module.name

    def put(self, adapter_id: int, adapter: Any) -> None:
        self.put_by_number[adapter_id] = adapter

    def remove(self, adapter_id: int) -> None:
        del self.put_by_number[adapter_id]


def test_a_rank_that_reads_does_what_it_is_told_meanwhile(tmp_path: Path) -> None:
    """While a rank reads an adapter, it puts or removes others that it has read; it keeps none that cannot be put any
    more."""
    ours, theirs = Pipe()
    there = Read()
    followed = FollowedAdapters(there, theirs, None)  # type: ignore[arg-type]
    told: list[bytes] = []
    adapters = RankAdapters([ours], told.append)

    def read(name: str) -> Any:
        return adapters.read(LoRAModule(name=name, path=tmp_path, rank=4, scale=1.0, digest=name), lambda _: [name])

    there.may_read.set()
    for name in ("never put", "never put, too"):
        read(name)
    adapters.put(3, first := read("first"), lambda number, adapter: None)
    unput = read("never put, either")
    there.may_read.clear()
    there.is_reading.clear()
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(read, "second")
        assert there.is_reading.wait(30)
        followed.change(told.pop())
        assert there.put_by_number == {3: "first"}
        adapters.remove(3)
        followed.change(told.pop())
        assert there.put_by_number == {}
        for gone in (first, unput):
            with pytest.raises(ValueError, match="another adapter has been read since"):
                adapters.put(3, gone, lambda number, adapter: None)
        there.may_read.set()
        second = reading.result(30)
    assert list(followed._read.values()) == ["second"]
    adapters.put(3, second, lambda number, adapter: None)
    followed.change(told.pop())
    assert there.put_by_number == {3: "second"}
    assert not followed._read
    ours.close()


def test_whose_answer_it_is_where_a_reading_was_broken_off(tmp_path: Path) -> None:
    """After Ctrl-C interrupts one read, the next read must not take the answer to the interrupted one."""
    ours, theirs = Pipe()
    there = Read()
    FollowedAdapters(there, theirs, None)  # type: ignore[arg-type]

    class BrokenOff:
        """A connection whose first receive raises `KeyboardInterrupt`."""

        send_bytes = staticmethod(ours.send_bytes)

        def recv_bytes(self) -> bytes:
            self.recv_bytes = ours.recv_bytes  # type: ignore[method-assign]
            raise KeyboardInterrupt

    adapters = RankAdapters([BrokenOff()], lambda change: None)  # type: ignore[list-item]

    def read(name: str) -> Any:
        return adapters.read(LoRAModule(name=name, path=tmp_path, rank=4, scale=1.0, digest=name), lambda _: [name])

    with pytest.raises(KeyboardInterrupt):
        read("broken off")
    there.cannot_read = "wrong"
    there.may_read.set()
    with pytest.raises(ValueError, match="rank 1: no number"):
        read("wrong")
    assert read("right") == ["right"]
    ours.close()


def test_an_error_that_nobody_has_foreseen_is_told_of_with_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = Pipe()

    class Broken(Read):
        def read(self, module: LoRAModule) -> Any:
            raise RuntimeError("no memory")

    FollowedAdapters(Broken(), theirs, None)  # type: ignore[arg-type]
    module = LoRAModule(name="a", path=tmp_path, rank=4, scale=1.0, digest="a")
    with pytest.raises(ValueError, match=r"^rank 1: RuntimeError: no memory$"):
        RankAdapters([ours], lambda change: None).read(module, lambda _: [])
    assert "in read\n" in capsys.readouterr().err
    ours.close()
