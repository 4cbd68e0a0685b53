"""A worker's folder of adapters: adapters are added, exchanged and removed while the worker serves."""

from __future__ import annotations

import asyncio
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from lora_folders import products_of, write_adapter
from tiny_cluster import CONFIG, Cluster, wait_for

from engine.async_llm_engine import AsyncLLMEngine
from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.lora.adapters import ReadAdapter
from engine.lora.modules import WEIGHTS_FILE, LoRAModule
from engine.model_loader import create_engine_config
from engine.model_loader.model_config import lora_module_of
from rpc.errors import InvalidRequest, NoWorker
from tandem.requests import generate_request
from worker_service import lora_folder
from worker_service.lora_folder import LoRAFolder

PROMPT = list(range(70, 110))
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
PRODUCTS = products_of(CONFIG | {"head_dim": CONFIG["hidden_size"] // CONFIG["num_attention_heads"]})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Longer than the router takes to learn of a change: an exchanged adapter may be gone two looks later.
    monkeypatch.setattr(lora_folder, "LOOK_S", 0.6)
    (tmp_path / "adapters").mkdir()
    return tmp_path / "adapters"


def write(folder: Path, seed: int, rank: int = 4) -> Path:
    """Write an adapter that appears complete at once, and takes the place of another so quickly that nobody sees the
    name without one: written under a hidden name, then renamed."""
    hidden, before = (folder.with_name(f".{folder.name}{end}") for end in ("", ".before"))
    write_adapter(hidden, seed=seed, rank=rank, products=PRODUCTS)
    if folder.exists():
        folder.rename(before)
    written = hidden.rename(folder)
    shutil.rmtree(before, ignore_errors=True)
    return written


async def known(cluster: Cluster) -> list[str]:
    return list((await cluster.client.model_info()).lora_names)


async def wait_until_known(cluster: Cluster, *names: str) -> None:
    async def are_known() -> bool:
        return await known(cluster) == sorted(names)

    await wait_for(are_known, f"requests may ask for {names} and no others")


async def ask(cluster: Cluster, name: str, max_tokens: int = 8) -> Any:
    return await cluster.client.generate(PROMPT, model=name, max_tokens=max_tokens, **GREEDY)


async def test_what_is_new_is_read_at_the_second_look_and_again_if_it_changes_meanwhile(
    tiny_model: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    args = EngineArgs(model=str(tiny_model), load_format="dummy", device="cpu", num_kv_blocks=256, max_loras=1)
    config = create_engine_config(args)
    is_to_change = True

    class Engine(AsyncLLMEngine):
        async def read_lora(self, module: LoRAModule) -> ReadAdapter:
            nonlocal is_to_change
            read = await super().read_lora(module)
            if is_to_change:
                is_to_change = False
                write(folder / "sql", seed=2)
            return read

    engine = await Engine.start(lambda: LLMEngine(config), on_step=lambda _: None, on_failure=lambda _: None)
    looks = lora_folder.LoRAFolder(folder, engine, names_of_others=(), on_change=lambda: None)
    try:
        await looks.look(waits=False)
        write(folder / "sql", seed=1)
        await looks.look()
        assert is_to_change, "it may be half of it"
        for _ in range(3):
            await looks.look()
        assert [module.name for module in engine.adapters] == ["sql"]
        served = [record for record in caplog.records if record.getMessage() == "adapter is served"]
        assert [record.lora_digest for record in served] == [engine.adapters[0].digest]  # type: ignore[attr-defined]
        assert engine.adapters[0].digest == lora_module_of("sql", folder / "sql").digest
    finally:
        await engine.close()


async def test_no_more_of_those_that_leave_make_room_than_is_needed(tiny_model: Path, folder: Path) -> None:
    """The other leaving adapters stay for half a minute. The one that started leaving first is freed first."""
    args = EngineArgs(model=str(tiny_model), load_format="dummy", device="cpu", num_kv_blocks=256, max_loras=4)
    config = create_engine_config(args)
    engine = await AsyncLLMEngine.start(lambda: LLMEngine(config), on_step=lambda _: None, on_failure=lambda _: None)
    looks = lora_folder.LoRAFolder(folder, engine, names_of_others=(), on_change=lambda: None)
    try:
        for seed, name in enumerate("abc"):
            write(folder / name, seed=seed)
        await looks.look(waits=False)
        for name in "bac":
            shutil.rmtree(folder / name)
            await looks.look()
        for seed, name in enumerate("de"):
            write(folder / name, seed=seed)
        await looks.look(waits=False)
        assert [module.name for module in engine.adapters] == ["d", "e"]
        assert sorted(module.name for module in engine.leaving_adapters) == ["a", "c"]
        write(folder / "d", seed=0)
        write(folder / "e", seed=1, rank=17)
        await looks.look(waits=False)
        assert len(engine.leaving_adapters) == 2, "for the same one written anew, and one too large, they need not go"
        write(folder / "e", seed=2)
        await looks.look(waits=False)
        assert sorted(module.name for module in engine.leaving_adapters) == ["c", "e"], "for another one they do"
    finally:
        await engine.close()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_adapters_come_are_exchanged_and_go(
    tiny_cluster: Cluster, tiny_model: Path, folder: Path, num_ranks: int
) -> None:
    write(folder / "sql", seed=1)
    settings: dict[str, Any] = {"max_loras": 3, "max_num_seqs": 4, "tensor_parallel_size": num_ranks}
    await tiny_cluster.start_decode_worker("w", tiny_model, lora_dir=folder, **settings)
    await tiny_cluster.wait_for_workers("w")
    assert await known(tiny_cluster) == ["sql"], "what is there is served from the first moment on"
    first = await ask(tiny_cluster, "sql", 600)
    write(folder / "poet", seed=2)
    await wait_until_known(tiny_cluster, "poet", "sql")
    poet = await ask(tiny_cluster, "poet")
    assert poet.token_ids != first.token_ids[:8]
    received: list[int] = []
    async for message in tiny_cluster.client.stream(PROMPT, model="sql", max_tokens=600, **GREEDY):
        if not received:
            write(folder / "sql", seed=2)
            shutil.rmtree(folder / "poet")
            await wait_until_known(tiny_cluster, "sql")

            async def is_exchanged() -> bool:
                return bool((await ask(tiny_cluster, "sql")).token_ids == poet.token_ids)

            await wait_for(is_exchanged, "it is another one now")
        received.extend(message.token_ids)
    assert received == first.token_ids, "what has begun goes on with the one that it began with"
    with pytest.raises(InvalidRequest, match=r"model: must be .* is 'poet'"):
        await ask(tiny_cluster, "poet")
    shutil.rmtree(folder / "sql")
    await wait_until_known(tiny_cluster)


async def test_an_answer_whose_worker_died_goes_on_where_its_adapter_is_leaving(
    tiny_cluster: Cluster, tiny_model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def is_another() -> bool:
        return bool((await ask(tiny_cluster, "sql")).token_ids != expected.token_ids[:8])

    async def has_left() -> bool:
        [worker] = (await tiny_cluster.client.status()).workers
        return not worker.record.leaving_loras

    write(folder / "sql", seed=1)
    await tiny_cluster.start_decode_worker("w", tiny_model, lora_dir=folder, max_loras=2)
    await tiny_cluster.wait_for_workers("w")
    expected = await ask(tiny_cluster, "sql", 24)
    asked = {"model": "sql", "max_tokens": 24, **GREEDY}
    [begun, *_] = [message async for message in tiny_cluster.client.stream(PROMPT, **asked)]
    write(folder / "sql", seed=2)
    await wait_for(is_another, "new requests get another of its name")
    rest = generate_request(PROMPT, **asked)
    rest.output_token_ids.extend(expected.token_ids[:8])
    rest.worker_kind = begun.worker_kind
    call = tiny_cluster.client._inference.Generate(rest)
    assert expected.token_ids[8:] == [token_id async for message in call for token_id in message.token_ids]
    second = generate_request(PROMPT, n=2, **asked)
    second.answers_so_far.add(sequence=0, worker_kind=begun.worker_kind, is_complete=True)
    call = tiny_cluster.client._inference.Generate(second)
    said = [(message.sequence, token_id) async for message in call for token_id in message.token_ids]
    assert said == [(1, token_id) for token_id in expected.token_ids], "all answers to a prompt are of one adapter"
    assert not await has_left()
    monkeypatch.setattr(lora_folder, "LEAVING_S", 0.1)
    await wait_for(has_left, "nobody needs it any more")


async def test_what_cannot_be_served_is_told_of_once_and_harms_nobody(
    tiny_cluster: Cluster, tiny_model: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> list[tuple[str, str]]:
        return [
            (record.lora_name, record.why)  # type: ignore[attr-defined]
            for record in caplog.records
            if record.getMessage() == "adapter cannot be served"
        ]

    async def wait_until_told(name: str, what: str) -> None:
        async def is_told() -> bool:
            return any(each == name and what in why for each, why in told())

        await wait_for(is_told, f"of {name} is told that {what}")

    served = tiny_model.name
    (folder / "no adapter").mkdir()
    (folder / ".hidden").mkdir()
    (folder / "a file").write_text("x")
    write(folder / "ok", seed=1)
    await tiny_cluster.start_decode_worker("w", tiny_model, lora_dir=folder, max_loras=2, max_lora_rank=8)
    await tiny_cluster.wait_for_workers("w")
    before = await ask(tiny_cluster, "ok")
    write(folder / "large", seed=2, rank=9)
    write(folder / "two words", seed=2)
    write(folder / served, seed=2)
    await wait_until_told("large", "r must be at most max_lora_rank=8, is 9")
    await wait_until_told("two words", "the name of an adapter's folder must be 1 to 128 letters")
    await wait_until_told(served, "is the model's own name")
    weights = folder / "ok" / WEIGHTS_FILE
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-7])
    await wait_until_told("ok", "not a complete one")
    assert (await ask(tiny_cluster, "ok")).token_ids == before.token_ids, "the one before stays"
    assert await known(tiny_cluster) == ["ok"]
    write_adapter(folder / "ok", seed=3, products=PRODUCTS)

    async def is_mended() -> bool:
        return bool((await ask(tiny_cluster, "ok")).token_ids != before.token_ids)

    await wait_for(is_mended, "it is looked at again")
    assert len(told()) == len(set(told())) == 4


async def test_more_than_there_is_room_for_wait(
    tiny_cluster: Cluster,
    tiny_model: Path,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(folder / "a", seed=1)
    write(folder / "b", seed=2)
    await tiny_cluster.start_decode_worker("w", tiny_model, lora_dir=folder, max_loras=1)
    await tiny_cluster.wait_for_workers("w")
    assert await known(tiny_cluster) == ["a"]
    answers = [await ask(tiny_cluster, "a")]
    shutil.rmtree(folder / "a")
    await wait_until_known(tiny_cluster, "b")
    answers.append(await ask(tiny_cluster, "b"))
    write(folder / "b", seed=1)

    async def is_exchanged() -> bool:
        with suppress(NoWorker):  # it is gone in between
            return bool((await ask(tiny_cluster, "b")).token_ids == answers[0].token_ids)
        return False

    await wait_for(is_exchanged, "the one before has made room")
    assert answers[0].token_ids != answers[1].token_ids
    (folder / "b" / WEIGHTS_FILE).touch()
    looks = []
    monkeypatch.setattr(LoRAFolder, "look", lambda self, look=LoRAFolder.look: looks.append(1) or look(self))

    async def is_looked_at() -> bool:
        assert await known(tiny_cluster) == ["b"], "what is the same needs no room"
        return len(looks) >= 4

    await wait_for(is_looked_at, "it has been looked at")
    waits = [record for record in caplog.records if record.getMessage() == "adapter waits for room"]
    assert [record.lora_name for record in waits] == ["b", "b"]  # type: ignore[attr-defined]
    write(folder / "b", seed=2, rank=17)

    async def is_told() -> bool:
        return "adapter cannot be served" in caplog.text

    await wait_for(is_told, "it is too large")
    assert (await ask(tiny_cluster, "b")).token_ids == answers[0].token_ids, "makes no room for what cannot come"


async def test_requests_for_one_that_is_exchanged_in_a_full_room_may_be_retried(
    tiny_cluster: Cluster, tiny_model: Path, folder: Path
) -> None:
    """The next one of the name cannot be read while a request uses the one before. The adapter has not been removed."""
    write(folder / "a", seed=1)
    await tiny_cluster.start_decode_worker("w", tiny_model, lora_dir=folder, max_loras=1)
    await tiny_cluster.wait_for_workers("w")

    async def is_leaving() -> bool:
        [worker] = (await tiny_cluster.client.status()).workers
        return bool(worker.record.leaving_loras)

    begun = tiny_cluster.client.stream(PROMPT, model="a", max_tokens=1900, **GREEDY)
    await anext(begun)
    write(folder / "a", seed=2)
    await wait_for(is_leaving, "it makes room")
    for _ in range(3):
        with pytest.raises(NoWorker):
            await ask(tiny_cluster, "a")
    assert await known(tiny_cluster) == ["a"]
    shutil.rmtree(folder / "a")
    await wait_until_known(tiny_cluster)
    with pytest.raises(InvalidRequest, match=r"model: must be .* is 'a'"):
        await ask(tiny_cluster, "a")
    await begun.aclose()


async def test_a_change_that_leaves_size_and_time(tiny_cluster: Cluster, tiny_model: Path, folder: Path) -> None:
    """This happens when files are unpacked from an archive that gives them all the same time."""
    write(folder / "sql", seed=1)
    weights = folder / "sql" / WEIGHTS_FILE
    os.utime(weights, ns=(1, 1))
    await tiny_cluster.start_decode_worker("w", tiny_model, lora_dir=folder, max_loras=2)
    await tiny_cluster.wait_for_workers("w")
    before = await ask(tiny_cluster, "sql")
    write(folder.parent / "other", seed=2)
    weights.write_bytes((folder.parent / "other" / WEIGHTS_FILE).read_bytes())
    os.utime(weights, ns=(1, 1))

    async def is_exchanged() -> bool:
        return bool((await ask(tiny_cluster, "sql")).token_ids != before.token_ids)

    await wait_for(is_exchanged, "it is another one")


async def test_one_that_fails_in_no_way_foreseen(
    tiny_cluster: Cluster,
    tiny_model: Path,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An unexpected error in reading one adapter affects neither other adapters nor the worker's start."""

    async def read_lora(self: Any, module: Any, read: Any = AsyncLLMEngine.read_lora) -> Any:
        if module.name == "a":
            raise MemoryError("no memory")
        return await read(self, module)

    monkeypatch.setattr(AsyncLLMEngine, "read_lora", read_lora)
    for name in ("a", "b"):
        write(folder / name, seed=1)
    await tiny_cluster.start_decode_worker("w", tiny_model, lora_dir=folder, max_loras=2)
    await tiny_cluster.wait_for_workers("w")
    assert await known(tiny_cluster) == ["b"]
    assert caplog.text.count("unexpected MemoryError in reading the adapter 'a'") == 1


async def test_a_volume_that_is_away_takes_no_adapter_with_it(
    tiny_cluster: Cluster, tiny_model: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(folder / "sql", seed=1)
    await tiny_cluster.start_decode_worker("w", tiny_model, lora_dir=folder, max_loras=1)
    await tiny_cluster.wait_for_workers("w")
    away = await asyncio.to_thread(folder.rename, folder.with_name("away"))

    async def is_told() -> bool:
        return "the folder of adapters cannot be read" in caplog.text

    await wait_for(is_told, "the log tells of it")
    assert (await ask(tiny_cluster, "sql")).token_ids
    await asyncio.to_thread(away.rename, folder)
    shutil.rmtree(folder / "sql")
    await wait_until_known(tiny_cluster)
    assert caplog.text.count("the folder of adapters cannot be read") == 1


async def test_what_cannot_be_looked_at_is_told_of_once(
    tiny_cluster: Cluster, tiny_model: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "loop").symlink_to("loop")
    write(folder / "ok", seed=1)
    await tiny_cluster.start_decode_worker("w", tiny_model, lora_dir=folder, max_loras=2)
    await tiny_cluster.wait_for_workers("w")
    write(folder / "two words", seed=1)

    async def is_looked_at() -> bool:
        return "the name of an adapter's folder must be 1 to 128 letters" in str(
            [getattr(record, "why", "") for record in caplog.records]
        )

    await wait_for(is_looked_at, "the folder is looked at again, twice")
    told = [record for record in caplog.records if getattr(record, "lora_name", "") == "loop"]
    assert [record.getMessage() for record in told] == ["adapter cannot be served"]
    assert await known(tiny_cluster) == ["ok"]


async def test_one_of_the_name_of_another_that_stays(
    tiny_cluster: Cluster, tiny_model: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    stays = write(folder.parent / "stays", seed=1)
    write(folder / "sql", seed=2)
    write(folder / "poet", seed=2)
    await tiny_cluster.start_decode_worker(
        "w", tiny_model, lora_dir=folder, lora_modules=f"sql={stays}", max_loras=2
    )  # fmt: skip
    await tiny_cluster.wait_for_workers("w")
    shutil.rmtree(folder / "sql")
    shutil.rmtree(folder / "poet")
    await wait_until_known(tiny_cluster, "sql")
    gone = [record for record in caplog.records if record.getMessage() == "adapter is no longer served"]
    assert [record.lora_name for record in gone] == ["poet"]  # type: ignore[attr-defined]


async def test_no_adapter_has_any_of_the_names_of_the_model(
    tiny_cluster: Cluster, tiny_model: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("other", "ok"):
        write(folder / name, seed=1)
    names = f"{tiny_model.name}, other"
    await tiny_cluster.start_decode_worker("w", tiny_model, lora_dir=folder, max_loras=2, served_model_name=names)
    await tiny_cluster.wait_for_workers("w")
    assert await known(tiny_cluster) == ["ok"]
    assert "'other' is the model's own name" in str([getattr(record, "why", "") for record in caplog.records])


async def test_who_is_exchanged_in_a_full_room_comes_before_who_waits(
    tiny_cluster: Cluster, tiny_model: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(folder / "b", seed=1)
    await tiny_cluster.start_decode_worker("w", tiny_model, lora_dir=folder, max_loras=1)
    await tiny_cluster.wait_for_workers("w")
    before = await ask(tiny_cluster, "b")
    write(folder / "a", seed=1)

    async def waits() -> bool:
        return "a" in [getattr(record, "lora_name", "") for record in caplog.records]

    await wait_for(waits, "there is no room for it")
    write(folder / "b", seed=2)

    async def is_exchanged() -> bool:
        with suppress(NoWorker):  # the one before makes room
            return bool((await ask(tiny_cluster, "b")).token_ids != before.token_ids)
        return False

    await wait_for(is_exchanged, "it is served, and not the other one")
    assert await known(tiny_cluster) == ["b"]
