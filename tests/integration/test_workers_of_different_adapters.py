"""Workers of one model that do not all have the same adapters, as during a rollout of adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
from lora_folders import products_of, write_adapter
from tiny_cluster import CONFIG, Cluster

from rpc.errors import InvalidRequest, NoWorker

PROMPT = list(range(70, 110))
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture
def adapters(tmp_path: Path) -> dict[str, str]:
    """Values for `lora_modules`: `old` and `new` are two different adapters with the name "sql"."""
    products = products_of(CONFIG | {"head_dim": CONFIG["hidden_size"] // CONFIG["num_attention_heads"]})
    for seed, name in enumerate(("old", "new"), start=1):
        write_adapter(tmp_path / name, seed=seed, products=products)
    return {name: f"sql={tmp_path / name}" for name in ("old", "new")}


@pytest.mark.slow
async def test_an_adapter_is_there_as_soon_as_one_worker_has_it(
    impatient_cluster: Cluster, tiny_model: Path, adapters: dict[str, str]
) -> None:
    client = impatient_cluster.client
    plain = await impatient_cluster.start_decode_worker("plain", tiny_model)
    await impatient_cluster.wait_for_workers("plain")
    with pytest.raises(InvalidRequest, match=r"model: must be .* is 'sql'"):
        await client.generate(PROMPT, model="sql", max_tokens=1)
    expected = await client.generate(PROMPT, max_tokens=600, **GREEDY)
    with_it = await impatient_cluster.start_decode_worker("with-it", tiny_model, lora_modules=adapters["old"])
    assert with_it.identity.compat_digest == plain.identity.compat_digest
    await impatient_cluster.wait_for_workers("plain", "with-it")
    assert (await client.status()).of_another_kind == []
    for _ in range(3):
        answer = await client.generate(PROMPT, model="sql", max_tokens=8, **GREEDY)
        assert answer.timings.decode_worker == "with-it"
        assert answer.token_ids != expected.token_ids[:8]
    received: list[int] = []
    async for message in client.stream(PROMPT, max_tokens=600, **GREEDY):
        if not received:
            began = message
            await plain.drain(0)
            await plain.close()
        received.extend(message.token_ids)
    assert received == expected.token_ids
    assert began.worker_kind, "whoever goes on with it has to be of this kind"
    assert message.timings.decode_worker == "with-it"


async def test_no_answer_goes_on_with_another_adapter_of_its_name(
    impatient_cluster: Cluster, tiny_model: Path, adapters: dict[str, str]
) -> None:
    client = impatient_cluster.client
    old = await impatient_cluster.start_decode_worker("old", tiny_model, lora_modules=adapters["old"])
    await impatient_cluster.wait_for_workers("old")
    first = await client.generate(PROMPT, model="sql", max_tokens=8, **GREEDY)
    await impatient_cluster.start_decode_worker("new", tiny_model, lora_modules=adapters["new"])
    await impatient_cluster.wait_for_workers("old", "new")
    received: list[int] = []

    async def read() -> None:
        async for message in client.stream(PROMPT, model="sql", max_tokens=4000, **GREEDY):
            if not received:
                await old.drain(0)
                await old.close()
            received.extend(message.token_ids)

    with pytest.raises(NoWorker, match="of the kind that began this answer with the adapter 'sql' is available"):
        await read()
    assert received[:8] == first.token_ids[: len(received)], "of as many, it is the one before"
    anew = await client.generate(PROMPT, model="sql", max_tokens=8, **GREEDY)
    assert (anew.timings.decode_worker, anew.usage.cached_tokens) == ("new", 0)
    assert anew.token_ids != first.token_ids
    assert (await client.generate(PROMPT, model="sql", max_tokens=8, **GREEDY)).usage.cached_tokens == 32
