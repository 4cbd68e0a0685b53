"""Worker processes with one or two pretended GPUs each: KV goes from device memory to device memory."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from clusters import run_cluster, wait_until
from many_endings import CONFIG
from nixl_marks import needs_nixl
from pretend_gpu.__main__ import write_python
from pretend_gpu.races import Race

from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.model_loader import create_engine_config
from engine.sampling_params import SamplingParams
from protos import tandem_inference_pb2 as pb
from protos import tandem_worker_pb2 as worker_pb
from tandem.answer import Answer
from tandem.client import AsyncClient, Client

NUM_TOKENS = 12
LENGTHS = (1, 15, 16, 33, 340, 401)


@pytest.fixture
def tiny_model(model_folder: Path, tmp_path: Path) -> Path:
    """A tiny model with the default model's tokenizer."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    shutil.copy(model_folder / "tokenizer.json", folder)
    vocab_size = json.loads((model_folder / "config.json").read_text())["vocab_size"]
    (folder / "config.json").write_text(
        json.dumps(CONFIG | {"vocab_size": vocab_size, "max_position_embeddings": 1024})
    )
    return folder


def prompt_of(length: int) -> list[int]:
    return [(length * 131 + i * 17) % 40_000 + 50 for i in range(length)]


def sampling_of(length: int) -> dict[str, Any]:
    drawn = {"temperature": 0.9, "top_p": 0.9, "seed": length, "repetition_penalty": 1.2}
    return {"max_tokens": NUM_TOKENS, "ignore_eos": True} | (drawn if length % 2 else {"temperature": 0.0})


def answers_of_a_cpu(folder: Path) -> dict[int, list[int]]:
    args = EngineArgs(
        model=str(folder), load_format="dummy", dtype="float32", device="cpu", attention_backend="torch",
        num_kv_blocks=128, num_threads=1,
    )  # fmt: skip
    engine = LLMEngine(create_engine_config(args))
    for length in LENGTHS:
        engine.add_request(str(length), prompt_of(length), SamplingParams(**sampling_of(length)))
    answers: dict[int, list[int]] = {length: [] for length in LENGTHS}
    while engine.has_unfinished_requests():
        for output in engine.step():
            answers[int(output.request_id)] += output.token_ids
    return answers


@pytest.mark.slow  # test_pretended_gpu.py tests engines alone
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("num_ranks", "transport"),
    [(1, "grpc"), (2, "grpc"), (2, "ipc"), pytest.param(2, "nixl", marks=needs_nixl)],
)
def test_the_answers_of_a_cpu(tiny_model: Path, tmp_path: Path, num_ranks: int, transport: str) -> None:
    flags = (
        "--model", str(tiny_model), "--load-format", "dummy", "--dtype", "float32", "--device", "cuda",
        "--attention-backend", "torch", "--num-kv-blocks", "128", "--prefill-chunk-tokens", "128",
        "--tensor-parallel-size", str(num_ranks), "--transport", transport,
    )  # fmt: skip
    with run_cluster(tmp_path / "log", *flags, python=write_python(tmp_path / "python", num_ranks)) as cluster:
        with Client(cluster.address) as client, ThreadPoolExecutor(len(LENGTHS)) as threads:

            def ask(length: int) -> Answer:
                return client.generate(prompt_of(length), **sampling_of(length))

            # The longest runs alone: beside others the decode worker might prefill it itself.
            answers = {LENGTHS[-1]: ask(LENGTHS[-1])}
            answers |= dict(zip(LENGTHS[:-1], threads.map(ask, LENGTHS[:-1]), strict=True))
        assert not any(worker.num_repairs for worker in cluster.workers()), "pushed once they were written"
        cluster.wait_until_at_rest()
    log = (tmp_path / "log").read_text()
    assert log.count("warmed up in") == 2 * num_ranks, "each has a GPU"
    assert f"{Race.__name__}:" not in log
    assert answers[LENGTHS[-1]].timings.mode == pb.MODE_DISAGGREGATED
    assert answers[LENGTHS[-1]].timings.kv_transfer.num_bytes == 26 * 2 * (2 * 16 * 2 * 8 * 4), "of all ranks"
    assert {length: answer.token_ids for length, answer in answers.items()} == answers_of_a_cpu(tiny_model)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("transport", ["grpc", "ipc", pytest.param("nixl", marks=needs_nixl)])
def test_who_leaves_leaves_no_copy_under_way(tiny_model: Path, tmp_path: Path, transport: str) -> None:
    """Clients leave at various moments. Their blocks soon go to other requests, whose answers must not change."""
    flags = (
        "--model", str(tiny_model), "--load-format", "dummy", "--dtype", "float32", "--device", "cuda",
        "--attention-backend", "torch", "--num-kv-blocks", "96", "--prefill-chunk-tokens", "64",
        "--tensor-parallel-size", "2", "--transport", transport, "--no-enable-prefix-caching",
    )  # fmt: skip
    num_kept = 0

    async def ask(client: AsyncClient, number: int) -> None:
        nonlocal num_kept
        request = asyncio.create_task(client.generate(prompt_of(401), **sampling_of(401)))
        # Every second client stays. The others leave while the prompt is computed, while KV is transferred, or later.
        if number % 2:
            await asyncio.wait([request], timeout=0.05 * number)
            request.cancel()
            await asyncio.wait([request])
            return
        assert (await request).token_ids == expected
        num_kept += 1

    async def ask_all(address: str) -> None:
        async with AsyncClient(address) as client, asyncio.timeout(120.0):
            for first in range(0, 24, 4):
                await asyncio.gather(*(ask(client, number) for number in range(first, first + 4)))

    expected = answers_of_a_cpu(tiny_model)[401]
    with run_cluster(tmp_path / "log", *flags, python=write_python(tmp_path / "python", 2)) as cluster:
        asyncio.run(ask_all(cluster.address))
        assert num_kept == 12
        assert not any(worker.num_repairs for worker in cluster.workers())
        cluster.wait_until_at_rest()
    assert f"{Race.__name__}:" not in (tmp_path / "log").read_text()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_worker_ends_with_its_rank_also_within_a_step(tiny_model: Path, tmp_path: Path) -> None:
    """The device waits for the dead rank, as with NCCL, until the ranks' joint operation is aborted."""
    flags = (
        "--model", str(tiny_model), "--load-format", "dummy", "--dtype", "float32", "--device", "cuda",
        "--attention-backend", "torch", "--num-kv-blocks", "128", "--tensor-parallel-size", "2", "--transport", "grpc",
    )  # fmt: skip
    with run_cluster(tmp_path / "log", *flags, python=write_python(tmp_path / "python", 2)) as cluster:
        [prefill] = [each.record.pid for each in cluster.workers() if each.record.role == worker_pb.ROLE_PREFILL]
        tasks = Path(f"/proc/{prefill}/task").iterdir()
        [rank] = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
        os.kill(rank, signal.SIGSTOP)
        with Client(cluster.address) as client, ThreadPoolExecutor(1) as threads:
            answer = threads.submit(client.generate, prompt_of(401), max_tokens=5, ignore_eos=True, temperature=0.0)
            wait_until(lambda: "the engine is stuck in a step" in cluster.log.read_text(), 30.0, "a step waits")
            os.kill(rank, signal.SIGKILL)
            wait_until(lambda: not Path(f"/proc/{prefill}").exists(), 30.0, "its worker ends")
            assert len(answer.result().token_ids) == 5, "it goes on elsewhere"
    assert "rank 1 of the engine has ended with SIGKILL" in (tmp_path / "log").read_text()
