"""Workers of other models under one router: workers of a different model get no requests, and no answer continues with
other weights."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tiny_cluster import Cluster, make_model, wait_for

from rpc.errors import NoWorker
from tandem.cli import main
from tandem.cli.status import status

PROMPT = [70, 71, 72]


async def test_workers_of_another_model_get_nothing_and_the_status_says_why(
    tiny_cluster: Cluster, tiny_model: Path, tmp_path: Path
) -> None:
    tokenizer = json.loads((tiny_model / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {token: (1 + 7 * number) % len(vocab) for token, number in vocab.items()}
    other = tmp_path / "other.json"
    other.write_text(json.dumps(tokenizer))
    ours = tiny_model / "tokenizer.json"
    await tiny_cluster.start_decode_worker("wide", make_model(tmp_path / "wide", ours, hidden_size=32))
    await tiny_cluster.start_decode_worker("words", make_model(tmp_path / "words", other))

    async def are_known() -> bool:
        return len((await tiny_cluster.client.status()).unused) == 2

    await wait_for(are_known, "both are known to be strangers")
    with pytest.raises(NoWorker):
        await tiny_cluster.client.generate(PROMPT, max_tokens=1)
    copied = make_model(tmp_path / "copied", ours, dtype="bfloat16", quantization_config={"quant_method": "fp8"})
    await tiny_cluster.start_decode_worker("own", copied)
    await tiny_cluster.wait_for_workers("own")
    answer = await tiny_cluster.client.generate(PROMPT, max_tokens=1)
    assert answer.timings.decode_worker == "own"
    said = await asyncio.to_thread(CliRunner().invoke, status, ["--router", tiny_cluster.address])
    assert "\nnot used: wide: its model has 2 layers of 32, ours 2 of 16\n" in said.output
    assert "\nnot used: words: its tokens are others: 1536 is '" in said.output
    told = await asyncio.to_thread(CliRunner().invoke, main, ["drain", "wide", "--router", tiny_cluster.address])
    why = "the router does not use wide: its model has 2 layers of 32, ours 2 of 16. Send its process SIGTERM instead."
    assert (told.exit_code, told.output) == (1, f"Error: {why}\n")


async def test_no_answer_goes_on_with_other_weights(impatient_cluster: Cluster, tiny_model: Path) -> None:
    """A fine-tuned model has the base model's vocabulary and shape. Its worker serves only new requests."""
    ours = await impatient_cluster.start_decode_worker("ours", tiny_model)
    await impatient_cluster.wait_for_workers("ours")
    await impatient_cluster.start_decode_worker("tuned", tiny_model, seed=1)
    await impatient_cluster.wait_for_workers("ours", "tuned")
    assert (await impatient_cluster.client.status()).of_another_kind == ["tuned"]
    received: list[int] = []

    async def read() -> None:
        async for message in impatient_cluster.client.stream(PROMPT, max_tokens=4000, temperature=0.0, ignore_eos=True):
            if not received:
                await ours.drain(0)
                await ours.close()
            received.extend(message.token_ids)

    with pytest.raises(NoWorker, match="no decode worker of the kind that began this answer is available"):
        await read()
    assert 0 < len(received) < 4000
    anew = await impatient_cluster.client.generate(PROMPT, max_tokens=4, temperature=0.0, ignore_eos=True)
    assert anew.timings.decode_worker == "tuned"
    assert anew.token_ids != received[:4]
