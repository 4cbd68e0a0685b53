"""The part of benchmarks/gpu.py that starts whole servers: what it sends, and what it computes from the results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu_parts import push, servers
from benchmarks.gpu_parts.runner import NotRun, Setting
from benchmarks.gpu_parts.shapes import write_model
from tandem.bench.outcome import Outcome
from tandem.bench.workload import TokenSource

pytestmark = pytest.mark.usefixtures("one_thread")


def test_streams_and_long_prompts() -> None:
    load = servers.TINY
    requests = servers.busy_load(load, TokenSource(seed=1, vocab_size=500)).requests
    assert [(r.at_s, len(r.prompt), r.output_tokens) for r in requests] == [
        *[(0.0, 128, 40)] * 2, (0.125, 256, 1), (0.25, 256, 1), (0.375, 256, 1),
    ]  # fmt: skip
    assert len({tuple(request.prompt[:20]) for request in requests}) == 5
    quiet = servers.quiet_load(load, TokenSource(seed=1, vocab_size=500))
    assert {len(request.prompt) for request in quiet.requests} == {64}
    # The long prompts affect enough gaps, more than one in a hundred, for the 99th percentile to show them.
    assert servers.FULL.num_long / servers.FULL.stream_tokens > 0.01


def test_one_arrangement_beside_the_other() -> None:
    apart = servers.Found(ttft_p50=110.0, gap_p99=20.0, gap_p50=9.0, prefilled_share=0.9)
    together = servers.Found(ttft_p50=100.0, gap_p99=50.0, gap_p50=8.0, prefilled_share=0.0)
    ttft, gap = servers.compared(apart, together, "ipc", is_tiny=False)
    assert (ttft.value, ttft.is_met) == (pytest.approx(1.1), True)
    assert (gap.value, gap.is_met) == (2.5, False)
    assert [row.is_met for row in servers.compared(apart, together, "ipc", is_tiny=True)] == [None, None]
    assert servers.prefilled_share({"prefill-1": 900, "decode-1": 60, "decode-2": 40}) == 0.9
    assert servers.prefilled_share({"decode-1": 0}) == 0.0


@pytest.mark.parametrize(
    ("measured", "parts_before", "expected"),
    [
        ({"copy": 4300.0}, ("floors", "push-ipc", "push-nixl"), "grpc"),
        ({"copy": 4300.0}, ("floors", "push-grpc"), "ipc"),
        ({push.NIXL_PUSH: 20.0}, ("push-ipc", "push-nixl"), "nixl"),
        ({push.NIXL_PUSH: 20.0, push.IPC_PUSH: 700.0}, ("push-ipc", "push-nixl"), "ipc"),
        ({push.NIXL_PUSH: 800.0, push.IPC_PUSH: 700.0, "copy": 4300.0}, ("push-ipc", "push-nixl"), "nixl"),
    ],
)
def test_servers_send_kv_by_what_was_fastest(
    setting: Setting, measured: dict[str, float], parts_before: tuple[str, ...], expected: str
) -> None:
    assert servers.best_transport(replace(setting, known=measured, parts_before=parts_before)) == expected


@pytest.mark.parametrize(
    ("why_no_kernels", "has_bindings", "expected"),
    [("", True, "ipc"), ("", False, "grpc"), ("no compiler", True, "grpc")],
)
def test_servers_alone_send_kv_by_ipc_where_a_gpu_has_what_it_needs(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, why_no_kernels: str, has_bindings: bool, expected: str
) -> None:
    monkeypatch.setattr(servers, "why_no_triton", lambda _: why_no_kernels)
    monkeypatch.setattr(servers, "is_installed", lambda name: has_bindings and name == "cuda.bindings")
    assert servers.best_transport(replace(setting, device="cuda")) == expected


def test_each_row_of_servers_names_how_kv_travels() -> None:
    found = servers.Found(ttft_p50=110.0, gap_p99=20.0, gap_p50=9.0, prefilled_share=0.9)
    rows = [*servers.rows_of("1p1d", found, "ipc", servers.TINY), *servers.compared(found, found, "ipc", is_tiny=True)]
    assert ["KV by ipc" in row.note for row in rows] == [True] * 4


def test_requests_that_were_not_answered_are_no_measurement() -> None:
    fine, failed = Outcome(due_s=0), Outcome(due_s=0, code="UNAVAILABLE", message="nobody")
    assert servers.answered([fine]) == [fine]
    with pytest.raises(RuntimeError, match="1 of 2 requests were not answered: UNAVAILABLE: nobody"):
        servers.answered([fine, failed])


def test_servers_say_what_they_miss(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "NEEDED", ("grpc", "google.protobuf", "no_such_package", "no_other.part"))
    with pytest.raises(NotRun, match=r"not installed: no_such_package, no_other\.part \(docs/gpu\.md"):
        next(servers.measure(setting))


def test_a_router_reads_the_tokenizer_of_a_model_that_is_made_up(tmp_path: Path) -> None:
    from router.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(write_model(tmp_path / "m", {"vocab_size": 12}, with_tokenizer=True))
    assert tokenizer.vocab_size == 12
    assert tokenizer.encode("t3 t11") == [3, 11]
    assert np.array_equal(tokenizer.encode(tokenizer.decode(list(range(12)))), np.arange(12))
