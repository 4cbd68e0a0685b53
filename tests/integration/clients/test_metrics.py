"""What Prometheus sees of a running cluster: numbers that agree with what clients got, and every metric that dashboards
and alerts query."""

from __future__ import annotations

import gzip
import json
import math
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from clusters import RunningCluster, wait_until
from prometheus_client.parser import text_string_to_metric_families

from rpc.errors import InvalidRequest, NotFound
from tandem.client import Client

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
ACCEPT = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
"""The Accept header of Prometheus 2."""
NUM_REQUESTS, NUM_TOKENS, PROMPT_TOKENS = 5, 12, 100

Samples = dict[str, list[tuple[dict[str, str], float]]]
"""By metric name: (labels, value)."""


def scrape(url: str) -> Samples:
    samples: Samples = {}
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": ACCEPT}), timeout=10) as response:
        for family in text_string_to_metric_families(response.read().decode()):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return samples


def urls_of(cluster: RunningCluster) -> dict[str, str]:
    """Where metrics are, by process: "router", "prefill-1", "decode-1"."""
    return dict(re.findall(r"^(\S+) +\| .* metrics url=(\S+)$", cluster.log.read_text(), re.MULTILINE))


def scrape_all(cluster: RunningCluster) -> dict[str, Samples]:
    """By process, among them "gateway"."""
    urls = urls_of(cluster) | {"gateway": f"http://{cluster.http_address}/metrics"}
    return {name: scrape(url) for name, url in urls.items()}


def test_probes_without_grpc(cluster: RunningCluster) -> None:
    urls = urls_of(cluster)
    assert urls.keys() == {"router", "prefill-1", "decode-1"}
    for url in urls.values():
        for path in ("health", "ready"):
            with urllib.request.urlopen(url.removesuffix("metrics") + path, timeout=10) as response:
                assert response.status == 200


def total(samples: Samples, name: str, **labels: str) -> float:
    return sum(value for given, value in samples[name] if labels.items() <= given.items())


def counted_since(before: dict[str, Samples], after: dict[str, Samples]) -> dict[str, Samples]:
    """Return the difference of all counters between the two scrapes, and the later value of gauges."""

    def since(samples: Samples, name: str, labels: dict[str, str], value: float) -> float:
        is_counter = name.endswith(("_total", "_count", "_sum", "_bucket"))
        return value - sum(was for given, was in samples.get(name, ()) if given == labels) if is_counter else value

    return {
        process: {
            name: [(labels, since(before[process], name, labels, value)) for labels, value in rows]
            for name, rows in samples.items()
        }
        for process, samples in after.items()
    }


@pytest.fixture(scope="module")
def scraped(cluster: RunningCluster) -> dict[str, Samples]:
    """The metrics of some requests, one of which was refused, without what other tests have added before."""
    cluster.wait_until_at_rest()
    before = scrape_all(cluster)
    with Client(cluster.address) as client:
        for number in range(NUM_REQUESTS):
            prompt = list(range(1000 + 200 * number, 1000 + 200 * number + PROMPT_TOKENS))
            client.generate(prompt, max_tokens=NUM_TOKENS, ignore_eos=True)
        with pytest.raises(InvalidRequest):
            client.generate("a", top_p=3)
    scrape(f"http://{cluster.http_address}/metrics")
    with urllib.request.urlopen(f"http://{cluster.http_address}/v1/models", timeout=10):
        pass
    wait_until(
        lambda: total(scrape_all(cluster)["decode-1"], "tandem:num_requests_running") == 0, 10, "a load that is news"
    )
    return counted_since(before, scrape_all(cluster))


def test_the_router_counts_what_clients_got(scraped: dict[str, Samples]) -> None:
    router = scraped["router"]
    assert total(router, "tandem:request_success_total", finished_reason="length") == NUM_REQUESTS
    assert total(router, "tandem:request_failures_total", reason="invalid_argument") == 1
    assert total(router, "tandem:prompt_tokens_total") == NUM_REQUESTS * PROMPT_TOKENS
    assert total(router, "tandem:generation_tokens_total") == NUM_REQUESTS * NUM_TOKENS
    assert total(router, "tandem:requests_by_mode_total", mode="disaggregated") == NUM_REQUESTS
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_transfer_time"):
        assert total(router, f"tandem:{name}_seconds_count") == NUM_REQUESTS, name
    # Several tokens may come at a time, after a transfer or where other processes have the cores: then there is one gap
    # for all of them.
    num_gaps = total(router, "tandem:inter_token_latency_seconds_count")
    assert NUM_REQUESTS * NUM_TOKENS / 2 <= num_gaps <= NUM_REQUESTS * (NUM_TOKENS - 1)
    assert (
        0
        < total(router, "tandem:time_to_first_token_seconds_sum")
        < total(router, "tandem:e2e_request_latency_seconds_sum")
    )
    assert [total(router, "tandem:workers", role=role) for role in ("prefill", "decode")] == [1, 1]
    assert total(router, "tandem:queue_tokens") == 0
    assert total(router, "tandem:registry_reachable") == 1
    assert 0 < total(router, "tandem:expected_prompt_seconds", worker="prefill-1") < 60
    assert 0 < total(router, "tandem:expected_handover_seconds") < 10


def test_workers_count_what_they_computed(scraped: dict[str, Samples]) -> None:
    prefill, decode = scraped["prefill-1"], scraped["decode-1"]
    assert total(prefill, "tandem:computed_prompt_tokens_total") == NUM_REQUESTS * PROMPT_TOKENS
    assert total(prefill, "tandem:computed_generation_tokens_total") == NUM_REQUESTS
    assert total(decode, "tandem:computed_generation_tokens_total") == NUM_REQUESTS * (NUM_TOKENS - 1)
    for name in ("transfer_seconds", "transfer_bytes", "commit_seconds"):
        assert total(prefill, f"tandem:kv_{name}_count") == NUM_REQUESTS
        assert total(decode, f"tandem:kv_{name}_count") == 0, "it receives"
    assert total(prefill, "tandem:kv_transfer_bytes_sum") > NUM_REQUESTS * 3e5
    assert 0 < total(prefill, "tandem:kv_commit_seconds_sum") < total(prefill, "tandem:kv_transfer_seconds_sum")
    assert total(decode, "tandem:grants_total") == NUM_REQUESTS
    assert total(decode, "tandem:num_grants") == 0
    for worker in (prefill, decode):
        owned = {labels["owner"]: value for labels, value in worker["tandem:kv_blocks"]}
        assert owned["sequence"] == owned["grant"] == owned["held"] == 0
        assert total(worker, "tandem:kv_cache_usage_perc") == 0
        num_iterations = total(worker, "tandem:iteration_tokens_total_count")
        assert 0 < num_iterations <= total(worker, "tandem:engine_steps_total")
        assert total(worker, "tandem:engine_seconds_total") > 0


@pytest.mark.slow
def test_a_workers_steps_are_profiled_through_the_router(cluster: RunningCluster, tmp_path: Path) -> None:
    """`tandem profile` profiles while a request runs."""
    trace = tmp_path / "trace.json.gz"
    command = [sys.executable, "-m", "tandem", "profile", "--router", cluster.address]
    with Client(cluster.address) as client:
        stream = client.stream("once", max_tokens=1500, temperature=0, ignore_eos=True)
        next(stream)
        result = subprocess.run(
            [*command, "decode-1", "--steps", "5", "--trace", str(trace)], capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
        stream.close()
        assert result.returncode == 0, result.stderr
        first, header, _, *rows = result.stdout.splitlines()
        described = re.fullmatch(r"decode-1: 5 steps of [\d.]+ ms, of which the operations below take (\d+)%", first)
        assert described is not None
        assert header.split() == ["operation", "calls", "host", "ms", "of", "a", "step"]
        assert any("tandem_cpu::" in row or "aten::" in row for row in rows)
        if any("tandem_cpu::" in row for row in rows):  # all layers are one call, whose parts have names
            assert int(described[1]) > 30  # 20 without the parts, 87 with them; less beside other processes
            assert {"attention", "qkv", "down"} <= {word for row in rows for word in row.split()}
        assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        nowhere = [*command, "decode-1", "--trace", str(tmp_path / "nowhere" / "t.gz")]
        refused = subprocess.run(nowhere, capture_output=True, text=True, timeout=60, check=False)
        assert (refused.returncode, "there is no folder" in refused.stderr) == (2, True)
        with pytest.raises(NotFound, match=r"no worker 'decode-7'; there are: decode-1, prefill-1"):
            client.profile("decode-7")
        with pytest.raises(InvalidRequest, match=r"num_steps.*must be in \[1, 16\], is 17"):
            client.profile("decode-1", num_steps=17)
        for settings in ({"timeout_s": 0}, {"timeout_s": math.nan}, {"timeout_s": 601}, {"num_steps": -1}):
            with pytest.raises(ValueError, match=f"{next(iter(settings))}: must be"):
                client.profile("decode-1", **settings)
        idle = client.profile("prefill-1", timeout_s=0.2)
        assert (idle.worker_id, idle.num_steps, len(idle.ops)) == ("prefill-1", 0, 0)
    assert "USDT" not in cluster.log.read_text()


def test_the_gateway_counts_requests(scraped: dict[str, Samples]) -> None:
    assert total(scraped["gateway"], "tandem:gateway_requests_total", route="models", status="200") == 1


def queries() -> Iterator[tuple[str, str]]:
    """Yield (where, PromQL) for every query in deploy/."""
    for panel in json.loads((DEPLOY / "grafana" / "tandem.json").read_text())["panels"]:
        for target in panel.get("targets", []):
            yield f"panel {panel['title']}", target["expr"]
    for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield f"alert {rule['alert']}", rule["expr"]


def test_every_process_tells_of_itself(scraped: dict[str, Samples]) -> None:
    for name, samples in scraped.items():
        assert "process_cpu_seconds_total" in samples, name
        assert total(samples, "process_resident_memory_bytes") > 10e6, name
        assert total(samples, "process_open_fds") > 3, name


def test_dashboards_and_alerts_ask_for_what_is_exported(scraped: dict[str, Samples]) -> None:
    exported = {name for samples in scraped.values() for name in samples}
    asked = list(queries())
    assert len(asked) > 40
    for where, expression in asked:
        names = re.findall(r"tandem:\w+", expression)
        assert names, f"{where}: {expression}"
        for name in names:
            assert name in exported, f"{where} asks for {name}"


def test_pages_name_what_is_exported(scraped: dict[str, Samples]) -> None:
    exported = {name for samples in scraped.values() for name in samples}
    exported |= {re.sub(r"_(sum|count|bucket)$", "", name) for name in exported}
    exported.add("tandem:lora_requests_info")  # only where there are adapters
    for page in sorted((ROOT / "docs").glob("*.md")):
        for name in re.findall(r"`(tandem:\w+)", page.read_text()):
            assert name in exported, f"{page.name}: {name}"


def test_labels_that_are_asked_for_exist(scraped: dict[str, Samples]) -> None:
    """Labels in selectors (`{role="decode"}`) and groupings (`by (worker_id)`) exist on the metrics that a query
    names."""
    labels_of: dict[str, set[str]] = {}
    for samples in scraped.values():
        for name, rows in samples.items():
            labels_of.setdefault(name, set()).update(*(labels for labels, _ in rows))
    for where, expression in queries():
        for name, selector in re.findall(r"(tandem:\w+)(\{[^}]*\})?", expression):
            for label in re.findall(r"(\w+)=~?\"", selector):
                assert label in labels_of[name], f"{where}: {name} has no label {label}"
        grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
        known = {"instance"}.union(*(labels_of[name] for name in re.findall(r"tandem:\w+", expression)))
        assert grouped <= known, f"{where}: {grouped - known}"
