"""Recorded decode steps: which recording serves which step, and that a replay reads only what it is given."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from model_bench import GREEDY, SMALL, engine_config, save_model
from recorder import RelaunchingRecorder

from engine.attention import StepLayout
from engine.llm_engine import LLMEngine
from engine.models.recurrent_states import RecurrentStates, RecurrentStep
from engine.running import model_runner
from engine.running.decode_graphs import DecodeGraphs, batch_ladder, context_ladder
from engine.running.input_batch import InputBatch, build_input_batch
from engine.step_input import StepInput


def step_of(
    context_lens: list[int],
    *,
    num_decodes: int | None = None,
    samples_all: bool = True,
    adapter_ids: list[int] | None = None,
    state_slots: list[int] | None = None,
) -> StepInput:
    """A step in which every sequence computes its last token, whose id is 100 times its position."""
    lens = np.array(context_lens, dtype=np.int64)
    layout = StepLayout(
        query_lens=np.ones_like(lens),
        context_lens=lens,
        block_tables=np.zeros((len(lens), 1), dtype=np.int64),
        slot_mapping=lens,
        num_decodes=len(lens) if num_decodes is None else num_decodes,
    )
    none, tables = np.zeros(0, dtype=np.int64), np.zeros((0, 1), dtype=np.int64)
    return StepInput(
        token_ids=100 * (lens - 1),
        positions=lens - 1,
        layout=layout,
        sample_rows=np.arange(len(lens) if samples_all else 1),
        pending_rows=none,
        rows_before=none,
        prompt_rows=tables,
        begun_blocks=none,
        adapter_ids=np.array(adapter_ids or [], dtype=np.int64),
        state_slots=np.array(state_slots or [], dtype=np.int64),
        loaded_states=tables,
        saved_states=tables,
        restored_states=tables,
        kept_states=none,
        feature_rows=none,
        has_exports=False,
    )


def run(graphs: DecodeGraphs, step: StepInput) -> torch.Tensor:
    return graphs.run(step, build_input_batch(step, "cpu", None))


class Backend:
    """A backend whose plans hold only the context lengths."""

    def __init__(self) -> None:
        self.reserved: list[tuple[int, int]] = []
        self.refilled = (0, 0)
        self.scratch = (0, 0)

    def reserve_decode_plan(self, num_seqs: int, max_context_len: int) -> Any:
        self.reserved.append((num_seqs, max_context_len))
        return SimpleNamespace(context_lens=torch.zeros(num_seqs, dtype=torch.int64), rung=self.reserved[-1])

    def keep_scratch(self, num_seqs: int, max_context_len: int) -> None:
        self.scratch = num_seqs, max_context_len

    def refill(self, plan: Any, layout: StepLayout) -> None:
        self.refilled = plan.rung
        plan.context_lens.zero_()
        plan.context_lens[: len(layout.context_lens)] = torch.from_numpy(layout.context_lens)


def forward(token_ids: torch.Tensor, positions: torch.Tensor, plan: Any) -> torch.Tensor:
    return torch.stack([token_ids, positions, plan.context_lens], dim=1)


@pytest.fixture
def backend() -> Backend:
    return Backend()


@pytest.fixture
def graphs(backend: Backend) -> DecodeGraphs:
    return DecodeGraphs(
        forward=forward,
        backend=backend,
        recorder=RelaunchingRecorder(),
        max_num_seqs=20,
        max_context_len=3000,
        device="cpu",
    )


@pytest.fixture
def recorded(graphs: DecodeGraphs) -> DecodeGraphs:
    graphs.record_all(lambda *_: None)
    return graphs


def test_a_step_is_computed_from_its_own_arrays(recorded: DecodeGraphs) -> None:
    for lens in ([5, 7, 900], [1, 2, 3, 4], [8, 9, 10], [1024], [1025] * 5, [3000, 1]):
        logits = run(recorded, step_of(lens))
        assert logits.tolist() == [[100 * (n - 1), n - 1, n] for n in lens]


def test_a_step_takes_the_smallest_recording(recorded: DecodeGraphs, backend: Backend) -> None:
    for lens, rung in {
        (5,) * 3: (4, 1024), (6,) * 4: (4, 1024), (1024,) * 4: (4, 1024), (1025,): (1, 2048), (2999,) * 20: (20, 3000),
        (3000,) * 17: (20, 3000),
    }.items():  # fmt: skip
        run(recorded, step_of(list(lens)))
        assert backend.refilled == rung


def test_all_are_recorded_at_start_the_largest_first(graphs: DecodeGraphs, backend: Backend) -> None:
    heard: list[tuple[int, int]] = []
    graphs.record_all(lambda *progress: heard.append(progress))
    assert heard == [(number, 18) for number in range(1, 19)]
    assert backend.reserved == [(size, length) for length in (3000, 2048, 1024) for size in (20, 16, 8, 4, 2, 1)]
    for size in range(1, 21):
        run(graphs, step_of([1 + 51 * i for i in range(size)]))
    assert graphs.num_recordings == len(backend.reserved) == 18


def test_each_is_used_once_when_all_are_recorded(backend: Backend) -> None:
    """In steps without a sequence, so that no request waits for what only the first use does."""
    used: list[tuple[tuple[int, int], int]] = []

    class CountingRecorder:
        def record(self, launch: Callable[[], None]) -> Callable[[], None]:
            launch()
            rung = backend.reserved[-1]
            return lambda: used.append((rung, backend.refilled[0]))

    graphs = DecodeGraphs(
        forward=forward,
        backend=backend,
        recorder=CountingRecorder(),
        max_num_seqs=2,
        max_context_len=2048,
        device="cpu",
    )
    graphs.record_all(lambda *_: used.append(((0, 0), 0)))
    assert used == [((0, 0), 0)] * 4 + [((size, length), size) for length in (2048, 1024) for size in (2, 1)]


def test_the_largest_alone_is_recorded_to_see_what_all_take(graphs: DecodeGraphs, backend: Backend) -> None:
    assert graphs.record_largest() == 18
    assert backend.reserved == [(20, 3000)]


def test_steps_that_can_be_replayed(recorded: DecodeGraphs) -> None:
    assert recorded.can_run(step_of([5] * 20))
    assert recorded.can_run(step_of([3000, 5]))
    assert not recorded.can_run(step_of([3001, 5]))
    assert not recorded.can_run(step_of([5] * 21))
    assert not recorded.can_run(step_of([5, 9], num_decodes=1))
    assert not recorded.can_run(step_of([5, 9], samples_all=False))
    assert not recorded.can_run(step_of([5, 9], adapter_ids=[0, 1]))


class Adapters:
    """Adapters that add a row's adapter to its token's id, and count how often they run."""

    def __init__(self) -> None:
        self.current: torch.Tensor | None = None
        self.num_launched = 0

    def assign(self, adapter_ids: Any) -> None:
        assert not len(adapter_ids)
        self.current = None

    def reserve_decodes(self, num_rows: int) -> torch.Tensor:
        self.current = torch.zeros(num_rows, dtype=torch.int64)
        return self.current

    def refill(self, reserved: torch.Tensor, adapter_ids: Any) -> None:
        reserved.zero_()
        reserved[: len(adapter_ids)] = torch.from_numpy(adapter_ids)


def test_steps_with_adapters_have_recordings_of_their_own(backend: Backend) -> None:
    """A replay reads the adapter of each row from the tensor that was recorded. Steps without adapters launch none."""
    adapters = Adapters()

    class KeepingRecorder:
        """A recording uses the tensor of the time when it was made, not the current one."""

        def record(self, launch: Callable[[], None]) -> Callable[[], None]:
            tensor = adapters.current

            def replay() -> None:
                adapters.current = tensor
                launch()

            replay()
            return replay

    def adapted(token_ids: torch.Tensor, positions: torch.Tensor, plan: Any) -> torch.Tensor:
        rows = forward(token_ids, positions, plan)
        if adapters.current is not None:
            adapters.num_launched += 1
            rows[:, 0] += adapters.current
        return rows

    graphs = DecodeGraphs(
        forward=adapted,
        backend=backend,
        recorder=KeepingRecorder(),
        max_num_seqs=4,
        max_context_len=2048,
        device="cpu",
        adapters=adapters,
    )
    assert graphs.record_largest() == 12
    assert backend.reserved == [(4, 2048)]
    assert adapters.num_launched == 1, "the largest is one with adapters"
    graphs.record_all(lambda *_: None)
    assert graphs.num_recordings == 12
    adapters.num_launched = 0
    for ids in ([0, 7, 3], [9, 0, 0], [1, 1, 1]):
        assert graphs.can_run(step_of([5, 9, 2000], adapter_ids=ids))
        logits = run(graphs, step_of([5, 9, 2000], adapter_ids=ids))
        assert logits.tolist() == [[100 * (n - 1) + i, n - 1, n] for n, i in zip([5, 9, 2000], ids, strict=True)]
    assert adapters.num_launched == 3
    assert run(graphs, step_of([5, 9])).tolist() == [[400, 4, 5], [800, 8, 9]]
    assert adapters.num_launched == 3


def test_a_replay_uses_the_states_of_its_own_sequences_alone(backend: Backend) -> None:
    """Rows of no sequence use a row of the states that belongs to nobody, as all do while steps are recorded."""
    states = RecurrentStates([], num_slots=6, row_bytes=8, dtype=torch.float32, device="cpu")
    launched: list[RecurrentStep] = []

    class KeepingRecorder:
        """A recording uses the step of the time when it was made."""

        def record(self, launch: Callable[[], None]) -> Callable[[], None]:
            step = states.step

            def replay() -> None:
                states.step = step
                launch()

            replay()
            return replay

    def forward_with_states(token_ids: torch.Tensor, positions: torch.Tensor, plan: Any) -> torch.Tensor:
        launched.append(states.step)
        return forward(token_ids, positions, plan)

    graphs = DecodeGraphs(
        forward=forward_with_states,
        backend=backend,
        recorder=KeepingRecorder(),
        max_num_seqs=8,
        max_context_len=1024,
        device="cpu",
        states=states,
    )
    graphs.record_all(lambda *_: None)
    assert {slot for step in launched for slot in step.slots.tolist()} == {6}
    for lens, slots in (([5, 1, 900, 7], [4, 0, 2, 5]), ([1, 6, 9], [3, 5, 1])):
        run(graphs, step_of(lens, state_slots=slots))
        assert launched[-1].slots.tolist() == [*slots, 6][:4]
        assert launched[-1].is_new.tolist()[: len(lens)] == [length == 1 for length in lens]


def test_nothing_is_recorded_while_requests_run(graphs: DecodeGraphs) -> None:
    assert not graphs.can_run(step_of([5]))


def runner_of(backend: Backend, *, uses_graphs: bool = True) -> model_runner.ModelRunner:
    """Of a model of at most 8 tokens, and of at most 2 sequences."""
    model: Any = SimpleNamespace(
        adapters=None,
        states=None,
        forward=lambda token_ids, positions, plan, pool, _: forward(token_ids, positions, plan) + pool,
        compute_logits=lambda x: x,
    )
    config: Any = SimpleNamespace(
        model=SimpleNamespace(max_model_len=8, eos_token_ids=frozenset()),
        cache=SimpleNamespace(block_size=4),
        scheduler=SimpleNamespace(max_decode_rows=2, async_scheduling=False),
        device=SimpleNamespace(
            device="cpu", uses_graphs=uses_graphs, uses_triton=False, max_seq_len_to_capture=16,
            attention_backend="torch",
        ),
    )  # fmt: skip
    return model_runner.ModelRunner(config, model, backend, torch.zeros(1), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["let go", "closed"])
def test_recordings_are_let_go_at_once(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the garbage collector, which does not look at objects that existed when the engine was made."""

    class Recorder:
        def record(self, launch: Callable[[], None]) -> Callable[[], None]:
            launch()
            return lambda: None

    monkeypatch.setattr(model_runner, "CudaRecorder", Recorder)
    runner = runner_of(Backend())
    assert runner.record_decode_steps(lambda *_: None) == 2
    left = weakref.ref(runner if how == "let go" else runner._graphs)  # type: ignore[arg-type]
    gc.disable()
    try:
        if how == "closed":
            runner.close()
        else:
            del runner
        assert left() is None
    finally:
        gc.enable()


def test_no_context_is_longer_than_the_model_s(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> None:
    monkeypatch.setattr(model_runner, "CudaRecorder", RelaunchingRecorder)
    runner_of(backend).record_decode_steps(lambda *_: None)
    assert backend.reserved == [(2, 8), (1, 8)]


def test_what_the_largest_decode_step_takes_is_there_to_be_measured(backend: Backend) -> None:
    assert runner_of(backend, uses_graphs=False).record_largest_decode_step() == 0
    assert backend.scratch == (2, 8)


def test_a_step_whose_blocks_are_pushed_is_not_replayed(tmp_path: Path) -> None:
    """A replay would tell nobody of its layers."""

    class AllRecorded:
        def can_run(self, step: StepInput) -> bool:
            return True

        def run(self, step: StepInput, batch: InputBatch) -> torch.Tensor:
            raise NotImplementedError("it is replayed")

    save_model(transformers.LlamaConfig(**SMALL), tmp_path)
    written: list[int] = []
    engine = LLMEngine(engine_config(tmp_path), lambda layer, exports: written.append(layer))
    runner: Any = engine.executor._worker.runner
    runner._graphs = AllRecorded()
    engine.add_prefill("pushed", [5], GREEDY)
    assert len(engine.step()) == 1
    assert written == [0, 1, 2]
    engine.add_request("not pushed", [5], GREEDY)
    with pytest.raises(NotImplementedError, match="it is replayed"):
        engine.step()


def test_ladders() -> None:
    assert batch_ladder(1) == [1]
    assert batch_ladder(3) == [1, 2, 3]
    assert batch_ladder(20) == [1, 2, 4, 8, 16, 20]
    assert batch_ladder(256)[-2:] == [248, 256]
    assert context_ladder(100) == [100]
    assert context_ladder(3000) == [1024, 2048, 3000]
    assert context_ladder(4096) == [1024, 2048, 4096]


def test_recordings_go_before_what_they_have_recorded(backend: Backend) -> None:
    """The model holds the group of ranks, which waits for the recordings of its exchanges."""
    gone: list[str] = []

    class Model:
        def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, plan: Any) -> torch.Tensor:
            return forward(token_ids, positions, plan)

    class Graph:
        def __init__(self) -> None:
            weakref.finalize(self, gone.append, "recording")

        def replay(self) -> None: ...

    class NotingRecorder:
        def record(self, launch: Callable[[], None]) -> Callable[[], None]:
            launch()
            return Graph().replay

    model = Model()
    weakref.finalize(model, gone.append, "model")
    graphs = DecodeGraphs(
        forward=model.forward, backend=backend, recorder=NotingRecorder(), max_num_seqs=2, max_context_len=8,
        device="cpu",
    )  # fmt: skip
    graphs.record_all(lambda *_: None)
    del model, graphs
    assert gone == ["recording"] * 2 + ["model"]
