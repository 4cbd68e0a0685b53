"""Workers of other models under one router: those that are none of its own get nothing, and no answer goes on with
other weights. Router and workers are the real ones, with gRPC and Redis between them, all in this process; the models
are tiny, their weights made from seeds."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from click.testing import CliRunner

import router.process
import worker_service.process
from decode_service.service import DecodeService
from engine.config import EngineArgs
from engine.model_loader import create_engine_config
from protos import tandem_worker_pb2 as pb
from router.args import RouterArgs
from router.policy import PolicyConfig
from router.process import Router, load_texts
from rpc.errors import NoWorker
from rpc.tracing import Untraced
from tandem.cli.status import status
from tandem.client import AsyncClient
from worker_service.args import WorkerArgs
from worker_service.process import WorkerProcess

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 49_152, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "eos_token_id": 2, "dtype": "float32",
}  # fmt: skip
PROMPT = [70, 71, 72]


def make_model(folder: Path, tokenizer: Path, **changes: Any) -> Path:
    folder.mkdir()
    shutil.copy(tokenizer, folder / "tokenizer.json")
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


@dataclass
class Cluster:
    """A router, and workers as they are started."""

    redis: str
    address: str
    """Of the router."""
    stack: AsyncExitStack
    client: AsyncClient

    async def start_decode_worker(self, name: str, model: Path, seed: int = 0) -> WorkerProcess:
        engine_args = EngineArgs(
            model=str(model), load_format="dummy", seed=seed, num_threads=1, num_kv_blocks=300, max_num_seqs=4,
            attention_backend="torch",
        )  # fmt: skip
        args = WorkerArgs(redis=self.redis, listen="127.0.0.1:0", worker_id=name)
        config = await asyncio.to_thread(create_engine_config, engine_args)
        worker = await WorkerProcess.start(pb.Role.ROLE_DECODE, args, config, DecodeService)
        self.stack.push_async_callback(worker.close)
        return worker

    async def wait_for(self, condition: Callable[[pb.ClusterStatus], bool], what: str) -> None:
        async def holds() -> bool:
            return condition(await self.client.status())

        await wait_for(holds, what)


async def wait_for(condition: Callable[[], Awaitable[bool]], what: str, timeout_s: float = 20.0) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            while not await condition():  # noqa: ASYNC110 - asked over gRPC
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"not within {timeout_s} s: {what}") from None


@pytest.fixture
def model(tmp_path: Path, model_folder: Path) -> Path:
    return make_model(tmp_path / "model", model_folder / "tokenizer.json")


@pytest_asyncio.fixture
async def cluster(redis_url: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    addresses: list[str] = []
    for module in (worker_service.process, router.process):
        monkeypatch.setattr(module, "announce", addresses.append)
    async with AsyncExitStack() as stack:
        args = RouterArgs(redis=redis_url, listen="127.0.0.1:0", model=str(model))
        front = Router(args, PolicyConfig(), load_texts(args), Untraced())
        await front.start()
        stack.push_async_callback(front.close)
        client = await stack.enter_async_context(AsyncClient(addresses[-1]))
        yield Cluster(redis_url, addresses[-1], stack, client)


def connected(status: pb.ClusterStatus) -> set[str]:
    return {worker.record.worker_id for worker in status.workers} - set(status.not_connected)


async def test_workers_of_another_model_get_nothing_and_the_status_says_why(
    cluster: Cluster, model: Path, tmp_path: Path
) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {token: (1 + 7 * number) % len(vocab) for token, number in vocab.items()}
    other = tmp_path / "other.json"
    other.write_text(json.dumps(tokenizer))
    ours = model / "tokenizer.json"
    await cluster.start_decode_worker("wide", make_model(tmp_path / "wide", ours, hidden_size=32))
    await cluster.start_decode_worker("words", make_model(tmp_path / "words", other))
    await cluster.wait_for(lambda status: len(status.unused) == 2, "both are known to be strangers")
    with pytest.raises(NoWorker):
        await cluster.client.generate(PROMPT, max_tokens=1)
    copied = make_model(tmp_path / "copied", ours, dtype="bfloat16", quantization_config={"quant_method": "fp8"})
    await cluster.start_decode_worker("own", copied)
    await cluster.wait_for(lambda status: connected(status) == {"own"}, "ours has joined")
    answer = await cluster.client.generate(PROMPT, max_tokens=1)
    assert answer.timings.decode_worker == "own"
    said = await asyncio.to_thread(CliRunner().invoke, status, ["--router", cluster.address])
    assert "\nnot used: wide: its model has 2 layers of 32, ours 2 of 16\n" in said.output
    assert "\nnot used: words: its tokens are others: 1536 is '" in said.output


async def test_no_answer_goes_on_with_other_weights(cluster: Cluster, model: Path) -> None:
    """A fine-tuned model has another's vocabulary and shape. Its worker is left to those that ask anew."""
    ours = await cluster.start_decode_worker("ours", model)
    await cluster.wait_for(lambda status: connected(status) == {"ours"}, "ours has joined")
    await cluster.start_decode_worker("tuned", model, seed=1)
    await cluster.wait_for(lambda status: connected(status) == {"ours", "tuned"}, "the other one, too")
    assert (await cluster.client.status()).of_another_kind == ["tuned"]
    received: list[int] = []

    async def read() -> None:
        async for message in cluster.client.stream(PROMPT, max_tokens=4000, temperature=0.0, ignore_eos=True):
            if not received:
                await ours.drain(0)
                await ours.close()
            received.extend(message.token_ids)

    with pytest.raises(NoWorker, match="no decode worker of the kind that began this answer is available"):
        await read()
    assert 0 < len(received) < 4000
    anew = await cluster.client.generate(PROMPT, max_tokens=4, temperature=0.0, ignore_eos=True)
    assert anew.timings.decode_worker == "tuned"
    assert anew.token_ids != received[:4]
