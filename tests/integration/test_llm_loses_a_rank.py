"""One of an `LLM`'s rank processes is killed: `generate` fails at once, and every later call fails in the same way.

On CPUs exchanges with the dead rank fail; on pretended GPUs the device waits for it, as with NCCL.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from clusters import wait_until
from many_endings import CONFIG
from pretend_gpu import pretend_gpu
from pretend_gpu.__main__ import write_python

from engine.running.executor import RankLost
from engine.running.model_runner import ModelRunner
from engine.step_input import StepInput
from engine.tensor_parallel.rank_processes import FOLDER_PREFIX, RankProcesses
from tandem import LLM, SamplingParams

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
PROMPT = list(range(5, 23))
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAID = "rank 2 of the engine has ended with SIGKILL; see its output above; this LLM cannot generate any more: "
SOON_S = 10.0
"""Well below every timeout that could end a wait here."""


@contextmanager
def gpus(folder: Path) -> Iterator[None]:
    """Pretend four GPUs, one for each rank."""
    with pretend_gpu(num_devices=4), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", write_python(folder / "python", num_devices=4))
        yield


ON_A_GPU = pytest.mark.parametrize("llm", ["cuda", pytest.param("cpu", marks=pytest.mark.slow)], indirect=True)
ON_A_CPU = pytest.mark.parametrize("llm", ["cpu", pytest.param("cuda", marks=pytest.mark.slow)], indirect=True)
"""Each fault is tested on one kind of device; with `-m slow` on the other, too."""


@pytest.fixture
def llm(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LLM]:
    """An `LLM` of three ranks, so that two are left. Its pool holds one prompt, so that blocks which a lost step failed
    to release would be missed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shutil.copy(model_folder / "tokenizer.json", tmp_path)
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48, "intermediate_size": 48}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | heads | {"vocab_size": 49152}))
    with gpus(tmp_path) if request.param == "cuda" else nullcontext():
        llm = LLM(
            tmp_path, load_format="dummy", device=request.param, attention_backend="torch", tensor_parallel_size=3,
            dtype="float32", num_threads=1, num_kv_blocks=2, block_size=16, max_num_seqs=1, max_model_len=32,
        )  # fmt: skip
        try:
            yield llm
        finally:
            llm.llm_engine.close()


def kill(pid: int) -> None:
    """Kill the process and return once it has ended. It is not reaped here: the engine must notice by itself."""
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not os.path.exists(f"/proc/{pid}/exe"), SOON_S, "the rank ends")


@pytest.mark.slow
@ON_A_GPU
@pytest.mark.parametrize(
    "num_steps_before",
    [
        pytest.param(0, id="the prompt's", marks=pytest.mark.slow),
        pytest.param(1, id="the first token's", marks=pytest.mark.slow),
        pytest.param(5, id="a later one's"),
    ],
)
def test_in_the_middle_of_a_step(
    llm: LLM, num_steps_before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = llm.llm_engine.executor.rank_pids
    told: list[float] = []
    tell = RankProcesses.tell

    def tell_and_kill(self: RankProcesses, step: StepInput) -> None:
        tell(self, step)
        told.append(time.monotonic())
        if len(told) == num_steps_before + 1:
            kill(pids[1])

    monkeypatch.setattr(RankProcesses, "tell", tell_and_kill)
    # A rank may finish the step that it has been sent before it is killed, but not the next one.
    with pytest.raises(RankLost, match=SAID):
        llm.generate([PROMPT], PARAMS, use_tqdm=False)
    assert time.monotonic() - told[num_steps_before] < SOON_S
    assert len(told) <= num_steps_before + 2
    check_that_nothing_is_left(llm, pids, tmp_path)


@ON_A_CPU
def test_between_two_calls(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded steps are released, too: NCCL's abort waits for them, and torch would report the wait as a hang."""
    closed: list[ModelRunner] = []

    def close(self: ModelRunner) -> None:
        closed.append(self)

    monkeypatch.setattr(ModelRunner, "close", close)
    [output] = llm.generate([PROMPT], PARAMS, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 12
    pids = llm.llm_engine.executor.rank_pids
    kill(pids[1])
    begin_s = time.monotonic()
    with pytest.raises(RankLost, match=SAID):
        llm.generate([PROMPT], PARAMS, use_tqdm=False)
    assert time.monotonic() - begin_s < SOON_S
    assert len(closed) == 1
    check_that_nothing_is_left(llm, pids, tmp_path)


def check_that_nothing_is_left(llm: LLM, pids: list[int], tmp_path: Path) -> None:
    """Check that no rank and no shared folder is left, and that every later call raises the same error."""
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists(), "it is gone, and was waited for"
    assert list(tmp_path.glob(f"{FOLDER_PREFIX}*")) == []
    for _ in range(5):
        with pytest.raises(RankLost, match=SAID):
            llm.generate([PROMPT], PARAMS, use_tqdm=False)
