"""Models on several pretended GPUs, one for each rank, with a process per rank: the KV of all ranks is transferred.

The ranks sum over gloo, and pools lie in memory that other processes really open; everything else is as on one
pretended GPU (test_pretended_gpu.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from deepseek_cases import GREEDY, V3
from handover import alone, handed_over
from lora_folders import CONFIG as LORA_CONFIG
from lora_folders import write_adapter
from many_endings import CONFIG, prompt_of
from nixl_marks import NIXL
from pretend_gpu import pretend_gpu
from pretend_gpu.__main__ import write_python
from pretend_gpu.engines import make_engine
from quantized_checkpoints import FORMS, llama_tensors, quantized, save_checkpoint
from standstill import hold_up
from transformers_cases import GEMMA2

from engine.config import GIB
from engine.llm_engine import LLMEngine
from engine.running.executor import RankLost
from kv_transfer import KVPool
from worker_service.pool_memory import PoolMemory

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


class OnTwoGpus(NamedTuple):
    engine: LLMEngine
    pool: KVPool
    """The pool of both ranks."""


class Pair(NamedTuple):
    config: dict[str, Any]
    prefill: OnTwoGpus
    decode: OnTwoGpus


CONFIGS = {
    "heads": CONFIG,
    "latents and experts": V3 | {"vocab_size": CONFIG["vocab_size"]},
    "transformers' code": GEMMA2 | {"vocab_size": CONFIG["vocab_size"], "eos_token_id": 59},
}


def on_two_gpus(folder: Path, config: dict[str, Any], *, is_received: bool) -> OnTwoGpus:
    memory = PoolMemory("ipc", is_received=is_received)
    engine = make_engine(
        folder, config, memory, tensor_parallel_size=2, max_num_batched_tokens=16, max_num_seqs=2, max_model_len=96
    )
    executor = engine.executor
    return OnTwoGpus(engine, memory.as_pool(executor.kv_pool, executor.kv_shape, engine.config.cache.kv_order))


@contextmanager
def two_gpus(folder: Path) -> Iterator[None]:
    """Pretend two GPUs. This process, rank 0, uses the first. `folder`: holds the program that starts the other
    rank."""
    with pretend_gpu(num_devices=2), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", write_python(folder / "python", num_devices=2))
        yield


@pytest.fixture(
    scope="module",
    # The others on one GPU: test_pretended_gpu.py.
    params=["heads", *(pytest.param(name, marks=pytest.mark.slow) for name in list(CONFIGS)[1:])],
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder, config = tmp_path_factory.mktemp("model"), CONFIGS[request.param]
    with two_gpus(folder):
        prefill = on_two_gpus(folder, config, is_received=False)
        with closing(prefill.engine):
            decode = on_two_gpus(folder, config, is_received=True)
            with closing(decode.engine):
                yield Pair(config, prefill, decode)


PROMPTS = {"grpc": prompt_of(16), "ipc": prompt_of(16)[::-1], "nixl": prompt_of(16)[1::2] + prompt_of(16)[::2]}
"""A prompt for each transport, so that none is cached."""


@pytest.mark.parametrize("transport", ["grpc", "ipc", NIXL])
def test_two_prefill_and_two_others_decode(pair: Pair, tmp_path: Path, transport: str) -> None:
    config, prefill, decode = pair
    assert decode.pool.layout.num_layers == 2 * config["num_hidden_layers"]
    assert decode.pool.memory == "VRAM"
    prompt = PROMPTS[transport]
    tokens = handed_over(
        prefill.engine, decode.engine, prompt, GREEDY, pools=(prefill.pool, decode.pool), transport=transport
    )
    assert tokens == alone(make_engine(tmp_path, config, device="cpu"), prompt, GREEDY)
    for each in (prefill, decode):
        assert each.engine.audit()[1] == []


@pytest.mark.slow
def test_blocks_go_to_host_memory_and_back_on_each_rank(tmp_path: Path) -> None:
    """The answers are the same as without host memory. If a rank dies, nothing waits for its copies any more."""
    params = replace(GREEDY, max_tokens=2)
    prompts = [[5 + (number + 7 * i) % 50 for i in range(14)] for number in (*range(5), 0, 1)]
    one = make_engine(tmp_path, CONFIG, device="cpu")
    settings: dict[str, Any] = {"num_kv_blocks": 12, "max_model_len": 40, "max_num_seqs": 1}
    settings |= {"max_num_batched_tokens": 16, "tensor_parallel_size": 2, "kv_offloading_size": 2**18 / GIB}
    with two_gpus(tmp_path), closing(make_engine(tmp_path, CONFIG, **settings)) as engine:
        assert engine.executor.num_host_blocks == 2**18 / (2 * engine.executor.kv_shape.all_layers_bytes)
        for prompt in prompts:
            assert alone(engine, prompt, params) == alone(one, prompt, params)
            while engine.executor.wait_for_copies():
                engine.step()
        assert engine.stats.num_loaded_tokens == engine.stats.num_prefix_hits_tokens == 2 * 12

        woken = threading.Event()
        engine.wake_by(woken.set)
        [pid] = engine.executor.rank_pids
        hold_up(pid)
        engine.add_request("r", prompts[2], params)
        engine.step()
        assert engine.is_idle
        os.kill(pid, signal.SIGKILL)
        assert woken.wait(60.0)
        for wait in (engine.executor.wait_for_copies, engine.step):
            with pytest.raises(RankLost, match=r"^rank 1 of the engine has ended with SIGKILL"):
                wait()


@pytest.mark.slow
@pytest.mark.parametrize("model_impl", ["tandem", "transformers"])
@pytest.mark.parametrize("form", ["plain", "float channel", "fp8 blocks, powers of two"])
def test_each_rank_reads_weights_and_adapters_to_its_own_gpu(tmp_path: Path, form: str, model_impl: str) -> None:
    """Reading to another GPU would be an error here. 8-bit weights are kept as stored, or widened."""
    config = LORA_CONFIG | {"attention_bias": False, "eos_token_id": 1}
    tensors = llama_tensors(config, torch.bfloat16)
    if form != "plain":
        tensors, _ = quantized(tensors, FORMS[form])
        config |= {"quantization_config": FORMS[form].quantization_config}
    save_checkpoint(tmp_path, config, tensors)
    write_adapter(tmp_path / "adapter")
    settings: dict[str, Any] = {"load_format": "auto", "lora_modules": f"a={tmp_path / 'adapter'}", "max_num_seqs": 2}
    settings |= {"dtype": "float32" if form == "plain" else "bfloat16", "model_impl": model_impl}
    prompt = prompt_of(16)
    with two_gpus(tmp_path), closing(make_engine(tmp_path, config, tensor_parallel_size=2, **settings)) as engine:
        assert engine.config.model.quantization == ("stored" if form == "float channel" else "none")
        told = alone(engine, prompt, GREEDY, lora_name="a")
    if form == "plain":
        assert told == alone(make_engine(tmp_path, config, device="cpu", **settings), prompt, GREEDY, lora_name="a")
    assert len(told) == GREEDY.max_tokens


@pytest.mark.slow
def test_adapters_that_come_go_to_each_rank_s_own_gpu(tmp_path: Path) -> None:
    """The threads that read adapters have selected their rank's GPU."""
    config = LORA_CONFIG | {"eos_token_id": 1}
    for seed, name in enumerate(("a", "b"), start=1):
        write_adapter(tmp_path / name, seed=seed)

    def answers(engine: LLMEngine) -> list[list[int]]:
        told = []
        for name in ("a", "b"):
            module = engine.find_lora("x", tmp_path / name)
            engine.add_lora(module, engine.read_lora(module))
            engine.free_loras(engine.loras.leaving)
            told += [alone(engine, prompt_of(16), GREEDY, lora_name=asked) for asked in ("", "x")]
        return told

    settings: dict[str, Any] = {"max_loras": 2, "max_num_seqs": 2}
    with two_gpus(tmp_path), closing(make_engine(tmp_path, config, tensor_parallel_size=2, **settings)) as engine:
        told = answers(engine)
    assert told == answers(make_engine(tmp_path, config, device="cpu", **settings))
    assert len({tuple(each) for each in told}) == 3


@pytest.mark.slow
def test_a_rank_that_ends_while_all_load_takes_its_engine_along(tmp_path: Path) -> None:
    """The engine waits for its device, and the device for the dead rank, as with NCCL."""
    script = textwrap.dedent(
        f"""
        import json, os, signal, sys
        from pathlib import Path

        from pretend_gpu import pretend_gpu
        from pretend_gpu.__main__ import write_python
        from pretend_gpu.engines import make_engine

        from engine.tensor_parallel import executor, rank_processes

        folder, ranks, make_worker = Path(sys.argv[1]), [], executor.Worker

        class Ranks(rank_processes.RankProcesses):
            def __init__(self, *arguments):
                super().__init__(*arguments)
                ranks.extend(self.pids)

        def make_worker_alone(*arguments):
            os.kill(ranks[0], signal.SIGKILL)
            return make_worker(*arguments)

        executor.RankProcesses, executor.Worker, rank_processes.NOTICE_S = Ranks, make_worker_alone, 5.0
        sys.executable = write_python(folder / "python", num_devices=2)
        with pretend_gpu(num_devices=2):
            make_engine(folder, json.loads({json.dumps(CONFIG)!r}), tensor_parallel_size=2, max_num_seqs=2)
        """
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert done.returncode == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("tandem: rank 1 of the engine has ended with SIGKILL"), done.stderr
