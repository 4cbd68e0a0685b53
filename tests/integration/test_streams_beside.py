"""Transfers that run beside an engine's steps on a GPU, on streams of their own: outgoing and incoming KV.

They run on a pretended GPU (`tests/pretend_gpu`), where it is an error to read what another stream may still write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_cases import GREEDY
from handover import bytes_of
from many_endings import CONFIG, prompt_of
from pretend_gpu import pretend_gpu
from pretend_gpu.engines import make_engine
from pretend_gpu.races import Race

from engine.llm_engine import LLMEngine
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import BlockExport, Sequence, SequenceStatus
from engine.scheduling.sequences_by_state import SequencesByState
from kv_transfer import KVPool
from worker_service.device_pool import DeviceWatch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
Settings = dict[str, Any]
"""Settings of an engine."""


@pytest.fixture(params=["torch", pytest.param("triton", marks=pytest.mark.slow)])
def settings(request: pytest.FixtureRequest) -> Iterator[Settings]:
    """Settings for a pretended GPU, with plain torch, and with kernels that report their loads and stores."""
    backend = {"attention_backend": request.param, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    if request.param == "torch":
        with pretend_gpu(total_bytes=64 << 20):
            yield backend
        return
    pytest.importorskip("triton_device")
    from pretend_gpu.triton import triton_interprets

    with pretend_gpu(total_bytes=64 << 20, has_triton=True) as gpu, triton_interprets(gpu):
        yield backend


class Reader:
    """Reads the blocks of each layer when they are announced, as a transport does."""

    def __init__(
        self, folder: Path, settings: Settings, when_written: Callable[[Callable[[], object]], object]
    ) -> None:
        self._when_written = when_written
        chunks = {"prefill_chunk_tokens": 8}
        self.engine = make_engine(folder, CONFIG, on_layer_written=self._on_layer, **settings | chunks)
        self.pool = bytes_of(self.engine)
        self.has_read: dict[tuple[int, int], bytes] = {}
        """The bytes read, by layer and block."""

    def _on_layer(self, layer: int, exports: list[BlockExport]) -> None:
        self._when_written(partial(self._read, layer, [block for each in exports for block in each.block_ids]))

    def _read(self, layer: int, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self.has_read[layer, block_id] = self.pool.read(layer, [block_id])

    def prefill(self, *names: str) -> None:
        for number, name in enumerate(names):
            self.engine.add_prefill(name, prompt_of(16)[number:], GREEDY)
        self.engine.add_request("decodes beside", prompt_of(2), GREEDY)
        while self.engine.has_unfinished_requests():
            self.engine.step()


def test_layers_leave_as_they_are_written_while_others_are_computed(tmp_path: Path, settings: Settings) -> None:
    with closing(DeviceWatch()) as watch:
        reader = Reader(tmp_path, settings, watch.when_done)
        reader.prefill("a", "b")
        watch.catch_up()
    num_blocks = sum(-(-(len(prompt_of(16)) - number) // 4) for number in range(2))
    assert len(reader.has_read) == num_blocks * CONFIG["num_hidden_layers"]
    for (layer, block_id), data in reader.has_read.items():
        assert data == reader.pool.read(layer, [block_id])
        assert any(data)


def test_a_layer_that_is_read_when_it_is_only_launched_is_a_race(tmp_path: Path, settings: Settings) -> None:
    with (
        ThreadPoolExecutor(1) as thread,
        pytest.raises(Race, match=r"reads .* what the default stream may still be using"),
    ):
        Reader(tmp_path, settings, lambda read: thread.submit(read).result()).prefill("a")
    torch.cuda.synchronize()


def receive_what_another_left(engine: LLMEngine, pool: KVPool) -> list[int]:
    """Let a request end at a stop token while the next step already runs; as soon as its blocks can be granted to
    another request, write to them. Return the blocks that both requests had."""
    engine.add_request("first", prompt_of(12), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    tokens: list[int] = []
    while engine.has_unfinished_requests():
        tokens += [token_id for output in engine.step() for token_id in output.token_ids]
    stop_at = next(token for place, token in enumerate(tokens) if place > 4 and token not in tokens[:place])
    ends = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=frozenset({stop_at}), ignore_eos=True)
    engine.add_request("second", prompt_of(12), ends)
    reservation, owned = None, set[int]()
    while reservation is None:
        engine.step()
        reservation = engine.reserve("third", [5] * 70, GREEDY)
        owned |= {block for seq in engine._scheduler.sequences.running for block in seq.block_table}
    for layer in range(CONFIG["num_hidden_layers"]):
        pool.write(layer, reservation.block_ids, bytes(len(reservation.block_ids) * pool.layout.block_bytes))
    engine.abort("third")
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.audit()[1] == []
    return sorted(owned & set(reservation.block_ids))


SMALL = {"num_kv_blocks": 24, "max_model_len": 90, "enable_prefix_caching": False}
"""So few blocks that the next request needs those of the previous one."""


def test_kv_comes_into_blocks_that_no_step_writes_to_any_more(tmp_path: Path, settings: Settings) -> None:
    engine = make_engine(tmp_path, CONFIG, **settings | SMALL)
    assert receive_what_another_left(engine, bytes_of(engine))


def test_kv_that_comes_into_blocks_of_a_step_under_way_is_a_race(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would happen if blocks were freed as soon as their sequence is known to have ended."""

    def free_at_once(self: SequencesByState, seq: Sequence) -> None:
        if seq.status is SequenceStatus.FINISHED and seq.block_table:
            self._block_manager.free(seq)

    monkeypatch.setattr(SequencesByState, "free_ended", free_at_once)
    engine = make_engine(tmp_path, CONFIG, **settings | SMALL)
    with pytest.raises(Race, match=r"writes .* what the default stream may still be using"):
        receive_what_another_left(engine, bytes_of(engine))
    torch.cuda.synchronize()
