"""The stepping thread: it makes the engine that it steps, or reports why it cannot."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decode_service.service import DecodeService
from engine.async_llm_engine import AsyncLLMEngine, EngineDeadError, ProfilingError, StepNews
from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.model_loader import create_engine_config
from engine.running.executor import RankLost
from engine.running.host_copies import _ByHost
from engine.sampling_params import SamplingParams
from protos import tandem_inference_pb2 as inference_pb
from protos import tandem_worker_pb2 as pb
from protos.tandem_worker_pb2_grpc import DecodeStub
from registry.prefix_index import PrefixReporter
from rpc.channel import open_channel
from rpc.session import PROTOCOL_VERSION
from worker_service import process
from worker_service.args import WorkerArgs
from worker_service.watchdog import wait_until_stuck

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "torch_dtype": "float32",
}  # fmt: skip


def args_of(folder: Path) -> EngineArgs:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return EngineArgs(model=str(folder), load_format="dummy", device="cpu", num_kv_blocks=20, block_size=4)


def make_engine(folder: Path) -> LLMEngine:
    return LLMEngine(create_engine_config(args_of(folder)))


def test_an_id_in_use_is_refused_by_every_way_in_until_its_request_ends(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    engine.add_request("r", [1, 2], SamplingParams())
    for way_in in (engine.add_request, engine.add_prefill, engine.reserve):
        with pytest.raises(ValueError, match="request_id 'r' is in use"):
            way_in("r", [1, 2], SamplingParams())
    engine.abort("r")
    assert engine.reserve("r", [1, 2], SamplingParams()) is not None


async def test_an_engine_is_made_where_it_is_stepped(tmp_path: Path) -> None:
    threads: list[int] = []
    is_answered = asyncio.Event()

    def make() -> LLMEngine:
        threads.append(threading.get_ident())
        return make_engine(tmp_path)

    def on_step(news: StepNews) -> None:
        if any(output.is_finished for output in news.outputs):
            is_answered.set()

    engine = await AsyncLLMEngine.start(
        make,
        on_step=on_step,
        on_failure=lambda error: pytest.fail(str(error)),
        before_report=lambda: threads.append(threading.get_ident()),
    )
    assert engine.progress is None, "it waits for something to do"
    assert engine.kv_pool.shape[1] == engine.kv_shape.num_blocks == 20
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    await engine.call(lambda inner: inner.add_request("r", [1, 2, 3], params))
    await asyncio.wait_for(is_answered.wait(), 20)
    assert engine.stats.num_generation_tokens == 3
    await engine.close()
    assert len(threads) > 3
    assert set(threads) == {threads[0]} != {threading.get_ident()}


async def test_why_there_is_no_engine_is_raised() -> None:
    def make() -> LLMEngine:
        raise ValueError("it does not fit")

    news: list[object] = []
    with pytest.raises(ValueError, match="it does not fit"):
        await AsyncLLMEngine.start(make, on_step=news.append, on_failure=news.append)
    assert not [thread for thread in threading.enumerate() if thread.name == "engine"]
    assert not news


async def test_who_gives_up_while_it_is_made_is_not_held_up(tmp_path: Path) -> None:
    may_go_on, began = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def make() -> LLMEngine:
        loop.call_soon_threadsafe(began.set)
        assert may_go_on.wait(20)
        return make_engine(tmp_path)

    starting = asyncio.create_task(
        AsyncLLMEngine.start(make, on_step=lambda _: None, on_failure=lambda error: pytest.fail(str(error)))
    )
    await asyncio.wait_for(began.wait(), 20)
    [thread] = [thread for thread in threading.enumerate() if thread.name == "engine"]
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(starting, 5)
    assert thread.is_alive()
    may_go_on.set()
    await asyncio.to_thread(thread.join, 20)
    assert not thread.is_alive()


async def test_each_step_and_each_command_is_progress(tmp_path: Path) -> None:
    """None of them looks idle, so that the watchdog notices one that never ends."""
    seen: list[int | None] = []
    is_answered = asyncio.Event()

    def on_step(news: StepNews) -> None:
        if any(output.is_finished for output in news.outputs):
            is_answered.set()

    engine = await AsyncLLMEngine.start(
        lambda: make_engine(tmp_path),
        on_step=on_step,
        on_failure=lambda error: pytest.fail(str(error)),
        before_report=lambda: seen.append(engine.progress),
    )
    await engine.call(lambda _: seen.append(engine.progress))
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    await engine.call(lambda inner: inner.add_request("r", [1, 2, 3], params))
    await asyncio.wait_for(is_answered.wait(), 20)
    await engine.call(lambda _: seen.append(engine.progress))
    await engine.close()
    numbers = [number for number in seen if number is not None]
    assert len(numbers) == len(seen) > 6
    assert numbers == sorted(set(numbers))


async def test_a_copy_that_never_ends_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog reports it like a step that never ends, even if nothing is left to compute or `close` waits for the
    copy."""
    may_go_on, copy = threading.Event(), _ByHost.__call__
    monkeypatch.setattr(_ByHost, "__call__", lambda *args: may_go_on.wait(20) and copy(*args))
    settings = replace(args_of(tmp_path), kv_offloading_size=0.01)
    engine = await AsyncLLMEngine.start(
        lambda: LLMEngine(create_engine_config(settings)),
        on_step=lambda _: None,
        on_failure=lambda error: pytest.fail(str(error)),
    )
    params = SamplingParams(temperature=0, max_tokens=1)
    for number in range(3):
        prompt = [number + 1] * 24
        await engine.call(lambda inner, n=number, p=prompt: inner.add_request(str(n), p, params))  # type: ignore[misc]
    try:
        async with asyncio.timeout(5):
            await wait_until_stuck(engine, stall_s=0.1, timeout_s=0.3, on_stall=lambda _: None)
            closing = asyncio.create_task(engine.close())
            await wait_until_stuck(engine, stall_s=0.1, timeout_s=0.3, on_stall=lambda _: None)
    finally:
        may_go_on.set()
    await closing
    assert engine.progress is None


async def test_an_ended_thread_refuses_calls(tmp_path: Path) -> None:
    engine = await AsyncLLMEngine.start(
        lambda: make_engine(tmp_path), on_step=lambda _: None, on_failure=lambda error: pytest.fail(str(error))
    )

    def finds_a_rank_gone(_: LLMEngine) -> None:
        raise RankLost("rank 1 of the engine has ended")

    with pytest.raises(EngineDeadError, match="rank 1"):  # as a call that adds an adapter may
        await asyncio.wait_for(engine.call(finds_a_rank_gone), 5)
    await engine.close()
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(engine.call(LLMEngine.load), 5)


@pytest.mark.parametrize(("role", "is_eager"), [(pb.Role.ROLE_PREFILL, True), (pb.Role.ROLE_DECODE, False)])
async def test_only_who_decodes_records_decoding_steps(
    monkeypatch: pytest.MonkeyPatch, role: pb.Role, is_eager: bool
) -> None:
    asked: list[bool] = []

    def refuse(args: EngineArgs) -> None:
        asked.append(args.enforce_eager)
        raise ValueError("that is all we want to see")

    monkeypatch.setattr(process, "create_engine_config", refuse)
    make_service: Any = None
    code = await process.run_worker(role, WorkerArgs(), EngineArgs(), make_service, asyncio.Event())
    assert (code, asked) == (2, [is_eager])


async def test_a_worker_whose_engine_fails_while_it_drains_waits_for_nobody(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers: asyncio.Queue[process.WorkerProcess] = asyncio.Queue()
    start = process.WorkerProcess.start

    async def start_and_tell(*arguments: Any) -> process.WorkerProcess:
        worker = await start(*arguments)
        workers.put_nowait(worker)
        return worker

    monkeypatch.setattr(process.WorkerProcess, "start", start_and_tell)
    stop = asyncio.Event()
    args = WorkerArgs(redis=redis_url, drain_grace_s=60, lease_ms=60_000)
    running = asyncio.create_task(process.run_worker(pb.Role.ROLE_DECODE, args, args_of(tmp_path), DecodeService, stop))
    worker = await asyncio.wait_for(workers.get(), 20)
    async with asyncio.timeout(20), open_channel(worker._address) as channel:
        session = DecodeStub(channel).Session()
        hello = pb.Hello(protocol_version=PROTOCOL_VERSION, router_id="r", incarnation=worker.identity.incarnation)
        await session.write(pb.DecodeCommand(hello=hello))
        params = inference_pb.SamplingParams(max_tokens=3, temperature=0, top_p=1, repetition_penalty=1, seed=1)
        request = pb.EngineRequest(request_id="a", attempt=1, prompt_token_ids=[1, 2, 3], sampling_params=params)
        await session.write(pb.DecodeCommand(reserve=request))
        while not any(event.HasField("granted") for event in (await session.read()).events):
            pass
        stop.set()
        while not (await session.read()).load.is_draining:
            pass
        worker.engine.post(lambda _: 1 // 0)
        assert await running == 1


async def started(tmp_path: Path) -> AsyncLLMEngine:
    return await AsyncLLMEngine.start(
        lambda: make_engine(tmp_path), on_step=lambda _: None, on_failure=lambda error: pytest.fail(str(error))
    )


async def ask(engine: AsyncLLMEngine, name: str, num_tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    await engine.call(lambda inner: inner.add_request(name, [1, 2, 3], params))


async def begun(engine: AsyncLLMEngine) -> None:
    """Wait until the task created last has sent its command and the engine's thread has run it."""
    await asyncio.sleep(0)
    await engine.call(lambda _: None)


async def test_steps_are_profiled_as_they_come(tmp_path: Path) -> None:
    engine = await started(tmp_path)
    profiling = asyncio.create_task(engine.profile(4, timeout_s=20, with_trace=True))
    await begun(engine)
    with pytest.raises(ProfilingError, match="another profile is being taken"):
        await engine.profile(4, timeout_s=20, with_trace=False)
    await ask(engine, "r", 30)
    profile = await asyncio.wait_for(profiling, 20)
    assert profile.num_steps == 4
    products = [op for op in profile.ops if op.name == "aten::addmm" or op.name == "aten::mm"]
    assert sum(op.num_calls for op in products) >= 4 * 2, "two layers, of which each has some"
    assert 0 < sum(op.host_ms for op in profile.ops) <= profile.step_ms
    assert profile.ops[0].host_ms == max(op.host_ms for op in profile.ops)
    trace = json.loads(gzip.decompress(profile.trace_gz))
    assert any(event.get("name") == products[0].name for event in trace["traceEvents"])
    await engine.close()


async def test_a_profile_of_an_engine_with_nothing_to_do_ends_too(tmp_path: Path) -> None:
    engine = await started(tmp_path)
    profile = await engine.profile(5, timeout_s=0.05, with_trace=True)
    assert (profile.num_steps, profile.ops, profile.trace_gz) == (0, [], b"")
    # A profile with fewer steps than requested ends at its timeout; another one may follow.
    profiling = asyncio.create_task(engine.profile(16, timeout_s=1.0, with_trace=False))
    await begun(engine)
    await ask(engine, "r", 3)
    assert (await profiling).num_steps == 3
    await engine.close()


async def test_who_leaves_stops_being_profiled(tmp_path: Path) -> None:
    engine = await started(tmp_path)
    profiling = asyncio.create_task(engine.profile(5, timeout_s=60, with_trace=False))
    await begun(engine)
    profiling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await profiling
    assert await engine.call(lambda inner: engine._profiler) is None
    await engine.close()


@pytest.mark.parametrize("num_steps", [0, 17])
async def test_a_profile_of_too_few_or_too_many_steps(num_steps: int, tmp_path: Path) -> None:
    engine = await started(tmp_path)
    with pytest.raises(ValueError, match=rf"num_steps must be in \[1, 16\], is {num_steps}"):
        await engine.profile(num_steps, timeout_s=1, with_trace=False)
    await engine.close()


def test_prompts_are_cut_larger_the_more_of_them_wait(tmp_path: Path) -> None:
    """Beside a decoding request, two waiting prompts fit into one step; the chunk for one waiting prompt would be too
    small for both."""
    engine = make_engine(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    engine.add_request("decoding", [1, 2], params)
    engine.step()
    for _ in range(50):  # learns 1 ms per decode, 1 ms per token: 39 tokens beside it, 59 if two wait
        engine._pace.note(num_decoding=1, num_prefill_tokens=0, seconds=0.001)
        engine._pace.note(num_decoding=0, num_prefill_tokens=20, seconds=0.02)
    engine.add_request("first", list(range(25)), params)
    engine.add_request("second", list(range(40, 65)), params)
    answered = {output.request_id for output in engine.step()}
    assert answered == {"decoding", "first", "second"}


async def test_events_are_reported_in_their_order_whatever_snapshots_come_between(tmp_path: Path) -> None:
    """While the event loop is held up, a prefix is stored, a snapshot taken and the prefix evicted: afterwards the
    reporter must not report the prefix as stored."""
    may_go_on, is_done, is_reported = threading.Event(), threading.Event(), threading.Event()
    worker = process.WorkerProcess(pb.Role.ROLE_DECODE, WorkerArgs(), create_engine_config(args_of(tmp_path)))
    worker._reporter = PrefixReporter(
        WorkerArgs().redis, namespace="test", worker_id="w", incarnation="i", snapshot=worker._prefix_snapshot
    )

    def before_report() -> None:
        if not is_done.is_set():
            is_done.set()
            engine.post(lambda _: is_reported.set())

    engine = worker.engine = await AsyncLLMEngine.start(
        lambda: make_engine(tmp_path),
        on_step=worker._on_step,
        on_failure=lambda error: pytest.fail(str(error)),
        before_report=before_report,
    )
    params = SamplingParams(temperature=0, max_tokens=2)

    def store(inner: LLMEngine) -> None:
        inner.reserve("stored", list(range(8)), params)
        inner.commit("stored", 1, 8)
        inner.abort("stored")

    def evict(inner: LLMEngine) -> None:
        for first in (20, 60):
            assert inner.reserve(f"from {first}", list(range(first, first + 37)), params) is not None

    engine.post(lambda _: may_go_on.wait(20))
    engine.post(store)
    snapshot = asyncio.create_task(worker._prefix_snapshot())
    await asyncio.sleep(0)  # it has asked
    engine.post(evict)
    may_go_on.set()
    assert is_reported.wait(20)
    assert len(list(await snapshot)) == 2
    await engine.call(lambda _: None)
    await asyncio.sleep(0)
    assert list(worker._reporter._pending.values()) == [False, False]
    await engine.close()
    await worker._reporter.close()


def test_blocks_that_a_device_spoilt_are_found_by_nobody_again(tmp_path: Path) -> None:
    """A request that uses the corrupt blocks fails; the next request with that prefix computes it anew."""
    engine = make_engine(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)

    def ask(name: str) -> tuple[list[int], int]:
        engine.add_request(name, list(range(17)), params)
        outputs = [output for _ in range(2) for output in engine.step()]
        return [token_id for output in outputs for token_id in output.token_ids], outputs[0].num_cached_tokens

    answer, _ = ask("first")
    assert ask("again") == (answer, 16)
    engine.executor.kv_pool.fill_(float("nan"))
    assert ask("spoilt") == ([], 16)
    assert ask("healed") == (answer, 0)
    assert ask("cached") == (answer, 16)
    told: dict[bytes, bool] = {event.block_hash: event.is_stored for event in engine.take_cache_events()}
    assert {block_hash for block_hash, is_stored in told.items() if is_stored} == set(engine.cached_hashes())
    assert engine.audit()[1] == []
