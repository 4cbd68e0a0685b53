"""`tandem bench` against a real cluster, over gRPC and over HTTP: all requests succeed, and both count the same
tokens."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from clusters import RunningCluster


def bench(cluster: RunningCluster, backend: str, seed: int, *flags: str) -> dict[str, Any]:
    where = ("--address", cluster.address) if backend == "grpc" else ("--base-url", f"http://{cluster.http_address}/v1")
    command = [sys.executable, "-m", "tandem", "bench", "--backend", backend, *where, "--seed", str(seed), "--json"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    result = subprocess.run(
        [*command, *flags], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_both_backends_report_the_same_tokens_and_no_errors(cluster: RunningCluster, tmp_path: Path) -> None:
    flags = (
        "--request-rate", "8,inf", "--num-prompts", "6", "--num-warmups", "2", "--random-input-len", "48",
        "--random-output-len", "10", "--random-range-ratio", "0.5", "--goodput", "ttft:30000 tpot:5000",
        "--save-result", "--result-dir", str(tmp_path),
    )  # fmt: skip
    reports = {
        backend: bench(cluster, backend, 5, *flags, "--result-filename", f"{backend}.json")
        for backend in ("grpc", "openai")
    }
    for report in reports.values():
        for result in report["results"]:
            assert (result["completed"], result["refused"], result["failed"], result["errors"]) == (6, 0, 0, {})
            assert result["good_share"] == 1.0
            assert result["p50_ttft_ms"] > 0
        assert report["goodput_rate"] == 8.0
    grpc, http = (
        [(result["total_input_tokens"], result["total_output_tokens"]) for result in reports[backend]["results"]]
        for backend in ("grpc", "openai")
    )
    assert grpc == http
    assert len(set(grpc)) == 2  # each rate has lengths of its own
    # With the same seed, HTTP sends the prompts that gRPC has sent before, so caches have them.
    assert reports["grpc"]["results"][0]["prefix_hit_rate"] == 0.0
    assert reports["openai"]["results"][0]["prefix_hit_rate"] > 0.3
    rows = list(csv.DictReader((tmp_path / "openai-requests.csv").open()))
    assert sum(int(row["output_tokens"]) for row in rows) == sum(output for _, output in http)
    assert (tmp_path / "grpc.html").stat().st_size > 5000
    cluster.wait_until_at_rest()


def test_chats_are_driven_too(cluster: RunningCluster) -> None:
    flags = ("--num-prompts", "3", "--num-warmups", "0", "--random-input-len", "30", "--random-output-len", "8")
    (result,) = bench(cluster, "openai-chat", 6, *flags)["results"]
    assert (result["completed"], result["errors"], result["total_output_tokens"]) == (3, {}, 24)
    # A word is a token, and the template adds some.
    assert 3 * 30 <= result["total_input_tokens"] <= 3 * 80


def test_a_traces_shared_prefixes_are_found_by_the_cache(cluster: RunningCluster, tmp_path: Path) -> None:
    """Two prompts of four trace blocks share three: 3 of 8 blocks are cached, up to the size of the cache's own
    blocks."""
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 8000 * n, "input_length": 2048, "output_length": 40, "hash_ids": [0, 1, 2, 9 + n]}
        for n in range(2)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    flags = ("--dataset-name", "trace", "--dataset-path", str(path), "--trace-length-factor", "0.125",
             "--trace-time-factor", "0.5", "--num-warmups", "0")  # fmt: skip
    (result,) = bench(cluster, "openai", 7, *flags)["results"]
    assert (result["completed"], result["failed"], result["refused"]) == (2, 0, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (2 * 256, 2 * 5)
    assert result["prefix_hit_rate"] == pytest.approx(3 / 8, abs=0.05)


@pytest.mark.slow
def test_refusals_are_counted_apart(cluster: RunningCluster) -> None:
    """More requests at once than memory and queue have room for: the router refuses the rest."""
    flags = ("--num-prompts", "14", "--num-warmups", "0", "--random-input-len", "500", "--random-output-len", "80",
             "--goodput", "e2el:60000")  # fmt: skip
    (result,) = bench(cluster, "openai", 8, *flags)["results"]
    assert result["refused"] > 0
    assert (result["completed"] + result["refused"], result["failed"]) == (14, 0)
    assert result["errors"] == {"429": result["refused"]}
    assert result["good_share"] == pytest.approx(result["completed"] / 14, abs=1e-3)


def test_failures_are_counted_by_status(cluster: RunningCluster) -> None:
    """Prompts beyond the model's context: every request fails with a named error, and the command reports it."""
    command = [
        sys.executable, "-m", "tandem", "bench", "--address", cluster.address, "--num-prompts", "2", "--num-warmups",
        "0", "--random-input-len", "3000", "--json",
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert "no request was answered: INVALID_ARGUMENT" in result.stderr
    (found,) = json.loads(result.stdout)["results"]
    assert (found["errors"], found["failed"], found["refused"]) == ({"INVALID_ARGUMENT": 2}, 2, 0)


def test_prompts_beyond_the_vocabulary_are_refused_by_the_flag(cluster: RunningCluster) -> None:
    command = [sys.executable, "-m", "tandem", "bench", "--address", cluster.address, "--vocab-size", "49153"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert "--vocab-size must be at most 49152, the vocabulary of " in result.stderr
