"""What Prometheus reads from a router and a worker before anything has happened there."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import httpx2 as httpx
import pytest
from lifecycle_bench import Asked, Bench, load, settle
from prometheus_client import CollectorRegistry

from engine.scheduling.stats import COUNTERS, SchedulerStats
from gateway.metrics import Metrics as GatewayMetrics
from protos import tandem_inference_pb2 as inference_pb
from protos import tandem_worker_pb2 as pb
from router.gauges import COST_TOKENS, RouterGauges
from router.lifecycle import Lifecycle
from router.metrics import RouterMetrics
from router.open_requests import OpenRequests
from router.sequences import Sequences
from rpc.http import HttpServer, metrics_app
from rpc.server import CannotListen
from tandem.metrics import Counter, Vector, metrics_of
from worker_service.metrics import WorkerMetrics
from worker_service.role import TransferCounters

ALERTS = Path(__file__).parents[2] / "deploy" / "prometheus" / "alerts.yml"
ACCEPTED = {
    "nothing": "",
    "text": "text/plain",
    "prometheus-2": "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "prometheus-3": "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
}


def router_registry() -> CollectorRegistry:
    return RouterMetrics("m", 2048, good_ttft_ms=1000, good_tpot_ms=50).registry


def worker_registry(load: pb.WorkerLoad | None = None, stats: SchedulerStats | None = None) -> CollectorRegistry:
    return WorkerMetrics(
        labels=("m", "decode-1", "decode"),
        load=lambda: load or pb.WorkerLoad(),
        stats=stats or SchedulerStats(),
        block_bytes=1000,
        counters=TransferCounters,
        num_sessions=lambda: 0,
        cache_config={"block_size": "16", "num_gpu_blocks": "300"},
    ).registry


def test_guesses_by_their_place_in_a_step() -> None:
    stats = SchedulerStats()
    name = "tandem:spec_decode_num_accepted_tokens_per_pos_total"

    def shown() -> list[float | None]:
        labels = {"model_name": "m", "worker_id": "decode-1", "role": "decode"}
        registry = worker_registry(stats=stats)
        return [registry.get_sample_value(name, labels | {"position": place}) for place in "0123"]

    assert shown() == [0, None, None, None]
    for num_right in (3, 0, 1, 2):
        stats.count_drafts(4, num_right)
    assert shown() == [3, 2, 1, None]
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (4, 16, 6)


def test_an_llm_tells_what_a_worker_shows() -> None:
    """Every counter of the engine, with equal values."""
    stats = SchedulerStats(**{each.field: place + 3 for place, each in enumerate(COUNTERS)})
    stats.count_drafts(4, 2)
    registry, labels = worker_registry(stats=stats), {"model_name": "m", "worker_id": "decode-1", "role": "decode"}
    *counters, per_pos = metrics_of(stats, "m")
    assert len(counters) == len(COUNTERS)
    for counter in counters:
        assert isinstance(counter, Counter)
        assert counter.value == registry.get_sample_value(f"{counter.name}_total", labels) > 0
        assert counter.labels == {"model_name": "m"}
    assert per_pos == Vector(
        name="tandem:spec_decode_num_accepted_tokens_per_pos", labels={"model_name": "m"}, values=[1, 1]
    )


@pytest.mark.parametrize("accept", ACCEPTED.values(), ids=ACCEPTED.keys())
@pytest.mark.parametrize(
    ("registry", "name"),
    [(router_registry(), "tandem:retries_total"), (worker_registry(), "tandem:grants_total")],
    ids=["router", "worker"],
)
async def test_names_keep_their_colons_whatever_is_accepted(
    registry: CollectorRegistry, name: str, accept: str
) -> None:
    transport = httpx.ASGITransport(app=metrics_app(registry, lambda: True))
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
        response = await http.get("/metrics", headers={"Accept": accept})
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert f"\n{name}{{" in response.text
    assert "tandem_" not in response.text
    assert "_created" not in response.text, "when a count began, for each: twice as much to keep, and vLLM shows none"


async def test_whether_a_process_lives_and_is_ready() -> None:
    is_ready = False
    app = metrics_app(router_registry(), lambda: is_ready)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://w") as http:
        for is_ready, status in ((False, 503), (True, 200), (False, 503)):  # noqa: B007 - the lambda reads it
            assert (await http.get("/ready")).status_code == status
            assert (await http.get("/health")).status_code == 200
        assert "tandem:" in (await http.get("/metrics")).text


def test_what_is_offloaded_is_shown_where_something_is() -> None:
    labels = {"model_name": "m", "worker_id": "decode-1", "role": "decode"}
    name = "tandem:kv_offload_cpu_cache_usage_perc"
    assert worker_registry().get_sample_value(name, labels) is None
    load = pb.WorkerLoad(host_blocks=pb.HostLedger(num_blocks=8, num_free=6, num_kept=2))
    registry = worker_registry(load, SchedulerStats(
        num_prefix_queries_tokens=100, num_prefix_hits_tokens=48, num_saved_blocks=3, num_loaded_blocks=2,
        num_loaded_tokens=32,
    ))  # fmt: skip
    assert registry.get_sample_value(name, labels) == 0.25
    assert registry.get_sample_value("tandem:external_prefix_cache_hits_total", labels) == 32
    assert registry.get_sample_value("tandem:external_prefix_cache_queries_total", labels) == 84, "16 were in the pool"
    moved = {
        transfer_type: registry.get_sample_value(
            "tandem:kv_offload_total_bytes_total", labels | {"transfer_type": transfer_type}
        )
        for transfer_type in ("GPU_to_CPU", "CPU_to_GPU")
    }
    assert moved == {"GPU_to_CPU": 3000, "CPU_to_GPU": 2000}


def test_a_request_that_is_aborted_while_it_waits_is_counted() -> None:
    metrics = RouterMetrics("m", 2048, good_ttft_ms=1000, good_tpot_ms=50)
    timings = inference_pb.Timings(queue_ms=5, total_ms=5)  # no worker has served it
    for reason in (inference_pb.FINISH_REASON_ABORT, inference_pb.FINISH_REASON_STOP):
        metrics.all_answered([inference_pb.GenerateResponse(finish_reason=reason, timings=timings)])
    shown = {
        sample.labels["finished_reason"]: sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "tandem:request_success_total"
    }
    assert shown == {"abort": 1, "stop": 0, "length": 0}, "one that was complete is counted where it was computed"
    assert metrics.registry.get_sample_value("tandem:e2e_request_latency_seconds_count", {"model_name": "m"}) == 0


def test_what_was_asked_for_and_the_longest_answer_to_it() -> None:
    metrics = RouterMetrics("m", 2048, good_ttft_ms=1000, good_tpot_ms=50)
    stop, timings = inference_pb.FINISH_REASON_STOP, inference_pb.Timings(
        mode=inference_pb.MODE_LOCAL, prefill_ms=100, transfer_ms=50, decode_ms=850
    )  # fmt: skip
    lasts = [
        inference_pb.GenerateResponse(
            finish_reason=stop, timings=timings, usage=inference_pb.Usage(completion_tokens=n)
        )
        for n in (7, 30)
    ]
    metrics.asked(inference_pb.SamplingParams(n=2, max_tokens=100))
    metrics.all_answered(lasts)
    metrics.asked(inference_pb.SamplingParams())

    def shown(name: str) -> tuple[float | None, float | None]:
        labels = {"model_name": "m"}
        return tuple(metrics.registry.get_sample_value(f"tandem:{name}_{kind}", labels) for kind in ("count", "sum"))  # type: ignore[return-value]

    assert shown("request_params_n") == (2, 3)
    assert shown("request_params_max_tokens") == (1, 100), "of requests that say it"
    assert shown("request_generation_tokens") == (2, 37)
    assert shown("request_max_num_generation_tokens") == (1, 30)
    assert shown("request_inference_time_seconds") == (2, pytest.approx(2.0))


def test_a_worker_shows_the_settings_of_its_pool() -> None:
    labels = {"model_name": "m", "worker_id": "decode-1", "role": "decode", "block_size": "16", "num_gpu_blocks": "300"}
    assert worker_registry().get_sample_value("tandem:cache_config_info", labels) == 1


def gauges_of(bench: Bench, *running: Lifecycle) -> RouterGauges:
    open_requests = OpenRequests()
    for each in running:
        open_requests.enter(each.name, [each.name])
        open_requests.begin(each.name, Sequences([each], is_streaming=True))
    return RouterGauges("m", parts=bench.cluster, open_requests=open_requests)


async def test_adapters_that_are_asked_for_run_or_wait() -> None:
    """As in vLLM, an adapter is shown in one list, or in both."""
    bench = Bench()
    assert "tandem:lora_requests_info" not in {family.name for family in gauges_of(bench).collect()}
    bench.tell_adapters(bench.decode, poet="1", sql="2", other="3")
    lifecycles = [bench.lifecycle("a", lora_name="sql"), bench.lifecycle("b")]
    asked = [Asked(each.run()) for each in lifecycles]
    await settle()
    bench.decode.set_load(load(0))
    for number, name in enumerate(("sql", "poet")):
        lifecycles.append(bench.lifecycle(f"c{number}", lora_name=name))
        asked.append(Asked(lifecycles[-1].run()))
    await settle()
    gauges = gauges_of(bench, *lifecycles)
    (info,) = (family for family in gauges.collect() if family.name == "tandem:lora_requests_info")
    (shown,) = info.samples
    assert shown.labels == {
        "model_name": "m", "max_lora": "3", "running_lora_adapters": "sql", "waiting_lora_adapters": "poet,sql",
    }  # fmt: skip
    assert abs(shown.value - time.time()) < 60
    for each in asked:
        await each.leave()


async def test_a_worker_that_is_started_again_is_shown_once_while_the_first_process_finishes() -> None:
    bench = Bench()
    old, new = bench.decode, bench.add("d", pb.Role.ROLE_DECODE, 2048, incarnation="2")
    bench.take_away(old)
    for handle, seconds in ((old, 10.0), (new, 1.0)):
        bench.pool.costs.computed(handle.key, 1000, seconds, time.monotonic())
    (prompts,) = (family for family in gauges_of(bench).collect() if family.name == "tandem:expected_prompt_seconds")
    (shown,) = prompts.samples
    assert shown.labels["worker"] == "d"
    assert shown.value < bench.pool.costs.prompt_s(old.key, COST_TOKENS, time.monotonic())


async def test_a_busy_port_is_said_with_the_flag_that_asked_for_it() -> None:
    first, second = (HttpServer(metrics_app(router_registry(), lambda: True)) for _ in range(2))
    address = first.start("127.0.0.1:0", flag="--this")
    with pytest.raises(CannotListen, match=f"cannot listen on {address}: .* in use; take another port with --that"):
        second.start(address, flag="--that")
    await first.close()


async def test_a_server_ends_when_it_is_told_and_not_at_the_next_look_at_its_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rpc.http.CLOCK_S", 3600.0)
    server = HttpServer(metrics_app(router_registry(), lambda: True))
    address = server.start("127.0.0.1:0", flag="--this")
    async with httpx.AsyncClient(base_url=f"http://{address}", trust_env=False, verify=False) as http:
        assert (await http.get("/metrics")).headers["date"]
    async with asyncio.timeout(20):
        await server.close()


def test_counters_that_alerts_compare_are_zero_from_the_start() -> None:
    registry = router_registry()
    shown = {sample.name for family in registry.collect() for sample in family.samples}
    of_gateway = set(re.findall(r"^(tandem:\w+_total)\{", GatewayMetrics().text().decode(), re.MULTILINE))
    asked = set(re.findall(r"rate\((tandem:\w+_total)", ALERTS.read_text()))
    assert {"tandem:request_success_total", "tandem:gateway_stream_errors_total"} <= asked
    assert asked <= shown | of_gateway
    reasons = re.findall(r'request_failures_total\{reason=~?"([^"]+)"', ALERTS.read_text())
    for reason in "|".join(reasons).split("|"):
        labels = {"model_name": "m", "reason": reason}
        assert registry.get_sample_value("tandem:request_failures_total", labels) == 0, reason
    for reason in ("stop", "length", "abort"):
        labels = {"model_name": "m", "finished_reason": reason}
        assert registry.get_sample_value("tandem:request_success_total", labels) == 0, reason
