"""benchmarks/gpu.py: what it counts, and how it runs its parts. The parts: test_gpu_parts.py, test_gpu_push.py,
test_gpu_servers.py, test_gpu_answers.py. What is carried to a bare machine for them: test_bare_machine.py."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import parts_for_gpu as parts
import pytest
import torch
from click.testing import CliRunner

from benchmarks import gpu
from benchmarks.gpu_parts import kernels, profiling, runner, steps, timing
from benchmarks.gpu_parts.rows import Row, table
from benchmarks.gpu_parts.runner import OUT_OF_TIME, NotRun, OutOfTime, Part, Setting, run_parts, side_by_side
from benchmarks.gpu_parts.shapes import FULL, ModelShape, attention_bytes, attention_flop
from benchmarks.machine import compilers

LIMIT_S = 20.0


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(device="cpu", is_tiny=True, results=tmp_path)


# -- what is counted ------------------------------------------------------------------------------------------------


def test_bytes_of_llama_8b() -> None:
    shape = FULL.model
    # A layer: q and o 4096 x 4096, k and v 4096 x 1024, three of 4096 x 14336. Plus the product of the logits.
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert layer == 218_103_808
    assert shape.num_weight_bytes == 2 * (32 * layer + 128_256 * 4096) == 15_009_316_864
    assert shape.kv_bytes(1) == 131_072  # keys and values, 32 layers, 8 heads of 128, 2 bytes
    assert shape.decode_bytes(64, 2048) == 15_009_316_864 + 64 * 2048 * 131_072
    assert steps.decode_limit_ms(FULL, 64, 2048, 4300.0) == pytest.approx(7.4859, rel=1e-4)
    assert steps.decode_limit_ms(FULL, 64, 2048, None) is None
    eight = replace(shape, layer_item_bytes=1, kv_item_bytes=1)  # the product of the logits keeps its size
    assert eight.decode_bytes(64, 2048) == 32 * layer + 2 * 128_256 * 4096 + 64 * 2048 * 65_536
    assert eight.prefill_flop(100) == shape.prefill_flop(100)


def test_operations_of_a_prompt() -> None:
    config = {
        "hidden_size": 8, "intermediate_size": 10, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 100,
    }  # fmt: skip
    # For each token and layer: q, o 8 x 8, k, v 8 x 4, three of 8 x 10. Attention: 1 + 2 + 3 pairs, 2 heads of 4.
    products = 2 * 3 * 2 * (2 * 64 + 2 * 32 + 3 * 80)
    logits = 2 * 100 * 8
    pairs = 2 * (1 + 2 + 3) * 2 * 2 * 2 * 4
    assert ModelShape(config).prefill_flop(3) == products + logits + pairs == 5184 + 1600 + 384
    assert attention_flop(2, 4, 3) == 192
    # 8B: 16 billion operations a token, about 49 thousand tokens a second at 790 TFLOP/s, less what attention takes.
    assert FULL.model.prefill_flop(2048) / 2048 == pytest.approx(14.5e9, rel=0.01)
    assert steps.prefill_limit_ms(FULL, 8, 8192, 790.0) == pytest.approx(8 * 8192 * 16.1e9 / 790e12 * 1e3, rel=0.01)


def test_bytes_of_attention() -> None:
    assert attention_bytes(8, 128, 64 * 4096) == 1 << 30
    assert attention_bytes(2, 16, 5, item_bytes=4) == 1280


@pytest.mark.parametrize(
    ("bytes_each", "cache", "expected"),
    [(1 << 30, 60 << 20, 1), (120 << 20, 60 << 20, 3), (50, 60, 6), (7, 0, 1), (1, 60, 64)],
)
def test_inputs_that_rotate_do_not_fit_the_cache(bytes_each: int, cache: int, expected: int) -> None:
    assert timing.num_sets(bytes_each, cache) == expected


def test_time_covered_by_kernels_that_overlap() -> None:
    assert profiling.covered([(10.0, 12.0), (0.0, 4.0), (3.0, 5.0), (3.5, 4.5), (12.0, 13.0)]) == 8.0
    assert profiling.covered([]) == 0.0
    assert steps.idle_share(10.0, 8.0) == pytest.approx(0.2)
    event = SimpleNamespace(time_range=SimpleNamespace(start=3.0, end=4.5))
    assert profiling.span_of(event) == (3.0, 4.5)


def test_kernels_of_a_step_by_what_they_take(tmp_path: Path) -> None:
    def event(name: str, start: float, end: float) -> SimpleNamespace:
        return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end))

    spans = [("norm", 0, 1000), ("product", 1000, 4000), ("norm", 4000, 7000), ("norm", 7000, 7500)]
    times = profiling.by_kernel([event(*span) for span in spans], num_calls=2)
    assert times == [profiling.KernelTime("norm", 1.5, 2.25), profiling.KernelTime("product", 0.5, 1.5)]
    profiling.write_table(tmp_path / "log", "1 x 8", profiling.DeviceWork(3.75, times))
    title, head, first, _ = (tmp_path / "log").read_text().splitlines()
    assert title == "1 x 8: busy for 3.750 ms"
    assert head.split() == ["ms", "share", "launches", "us", "each", "kernel"]
    assert first.split() == ["2.250", "60.0%", "1.5", "1500.00", "norm"]


@pytest.mark.parametrize(
    ("summary", "expected"),
    [
        ("100 passed, 4 skipped in 33.21s", 0),
        ("3 failed, 97 passed in 61.00s (0:01:01)", 3),
        ("2 failed, 1 passed, 1 error in 2s", 3),
        ("12 errors in 2s", 12),
        ("4 skipped in 0.2s", 0),
    ],
)
def test_failures_of_a_test_run(summary: str, expected: int) -> None:
    assert kernels.num_failed(summary) == expected


def test_what_is_no_test_run_has_no_failures_to_count() -> None:
    with pytest.raises(ValueError, match="no summary"):
        kernels.num_failed("no tests ran in 0.01s")


def test_carried_packages_stay_on_the_path_of_the_kernels_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/carried")
    assert kernels.environment()["PYTHONPATH"].split(os.pathsep)[-1] == "/carried"
    assert sum("test_triton_" in part for part in kernels.command()) >= 4


KERNEL_TESTS = """
import threading, pytest
def test_well(): pass
@pytest.mark.skip(reason="for (this) reason")
def test_left_out(): pass
def test_lost(): raise RuntimeError("CUDA error: an illegal memory access was encountered")
def test_long(): assert not {hangs} or threading.Event().wait(60)
"""


@pytest.fixture
def kernels_rows(setting: Setting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[Row]]:
    """The rows of a run of the test's own kernel tests, one of which may hang, with `limit_s` seconds."""

    def rows_of(*, hangs: bool, limit_s: float) -> list[Row]:
        tests = tmp_path / "test_of_kernels.py"
        tests.write_text(KERNEL_TESTS.format(hangs=hangs))
        _, *options = [one for one in kernels.command() if not one.endswith(".py")]
        monkeypatch.setattr(kernels, "command", lambda: [sys.executable, *options, "-n", "0", str(tests)])
        rows: list[Row] = []
        limit_s += kernels.SUMMARY_S
        try:
            for row in kernels.measure(replace(setting, device="cuda", limit_s=limit_s)):
                rows.append(row)
        except OutOfTime:
            assert hangs
        return rows

    return rows_of


LOST = "test_lost: RuntimeError: CUDA error: an illegal memory access was encountered"


def test_kernels_tests_that_fail_are_counted_and_the_first_illegal_access_is_named(kernels_rows: Any) -> None:
    (row,) = kernels_rows(hangs=False, limit_s=LIMIT_S)
    assert (row.value, row.is_wrong) == (1, True)
    assert re.fullmatch(f"1 failed, 2 passed, 1 skipped in .*; {re.escape(LOST)}", row.note)


@pytest.mark.slow
def test_kernels_tests_that_hang_are_ended_and_what_failed_before_is_told(kernels_rows: Any) -> None:
    (row,) = kernels_rows(hangs=True, limit_s=12.0)  # pytest alone takes seconds to start on a busy machine
    assert (row.value, row.is_wrong) == (1, True)
    assert row.note == f"out of time after 75% of the tests; {LOST}"


def test_lines_of_tests_by_xdist() -> None:
    lines = [
        "tests/unit/test_a.py::test_b ",
        "[gw0] [  1%] ERROR tests/unit/test_a.py::test_b ",
        "[gw11] [ 50%] PASSED tests/unit/test_a.py::test_c[1-FAILED] ",
        "[gw0] [ 75%] FAILED tests/unit/test_a.py::test_d ",
    ]
    assert kernels.so_far(lines) == (2, "75%")
    assert kernels.so_far(["pytest said nothing"]) == (0, "0%")
    assert kernels.first_illegal_access(["12 passed"]) == ""


def test_without_pytest_the_kernels_tests_are_not_run(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "find_spec", lambda name: None if name == "pytest" else importlib.util.find_spec(name))
    monkeypatch.setattr(kernels, "run_tests", lambda *_: pytest.fail("they are run"))
    with pytest.raises(NotRun, match="not installed: pytest"):
        next(kernels.measure(replace(setting, device="cuda")))


# -- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "share", "is_met"),
    [
        (Row(what="", value=3200.0, unit="GB/s", limit=4000.0, target=0.8), 0.8, True),
        (Row(what="", value=3199.0, unit="GB/s", limit=4000.0, target=0.8), 0.79975, False),
        (Row(what="", value=5.0, unit="ms", limit=4.0, target=0.8), 0.8, True),
        (Row(what="", value=5.1, unit="ms", limit=4.0, target=0.8), 4 / 5.1, False),
        (Row(what="", value=5.1, unit="ms", target=0.8), None, None),
        (Row(what="", value=1.15, unit="x", at_most=1.15), None, True),
        (Row(what="", value=2.9, unit="x", at_least=3.0), None, False),
        (Row(what="", value=math.nan, unit="error", at_most=1.0), None, False),
        (Row(what="", value=None, unit="error", at_most=1.0), None, False),
        (Row(what="", value=0.0, unit="tests", at_most=0), None, True),
    ],
)
def test_a_row_beside_its_bounds(row: Row, share: float | None, is_met: bool | None) -> None:
    assert row.share == (None if share is None else pytest.approx(share))
    assert row.is_met is is_met
    assert not row.is_wrong


def test_the_table_marks_the_best_of_a_group_and_says_what_is_wrong() -> None:
    rows = [
        Row(what="ours", value=10.0, unit="GB/s", group="a", limit=20.0, target=0.4),
        Row(what="other", value=12.0, unit="GB/s", group="a", limit=20.0),
        Row(what="third", value=None, unit="GB/s", group="a", note="does not run"),
        Row(what="slow", value=12.0, unit="ms", group="b"),
        Row(what="fast", value=11.0, unit="ms", group="b"),
        Row(what="error", value=2e-5, unit="error", at_most=1e-5, is_check=True),
        Row(what="aim", value=2.0, unit="x", at_least=3),
    ]
    lines = table(rows)
    assert [line.split()[0] for line in lines if "<- best" in line] == ["other", "fast"]
    assert "50% of it  aim 40%: met" in lines[0]
    assert lines[2].endswith("- GB/s      does not run")
    assert "must be <= 1e-05: WRONG" in lines[5]
    assert "aim >= 3: missed" in lines[6]
    unit_at = len("other") + 14
    assert all(line[unit_at:].startswith(row.unit) for line, row in zip(lines, rows, strict=True))
    assert Row(what="", value=0.0, unit="tests", at_most=0).to_dict()["at_most"] == 0


# -- parts, one after the other -------------------------------------------------------------------------------------


def part(name: str, measure: Callable[[Setting], Iterator[Row]], limit_s: float = LIMIT_S) -> Part:
    return Part(name=name, about="for a test", measure=measure, limit_s=limit_s)


def in_process(part: Part, setting: Setting, limit_s: float, on_row: Callable[[Row], None]) -> str:
    """Run one part in a process. Returns its problem."""
    problems: list[str] = []
    side_by_side([part], setting, [limit_s], lambda _, row: on_row(row), lambda _, problem: problems.append(problem))
    (problem,) = problems
    return problem


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_no_part_begins_after_the_budget_or_runs_beyond_it(setting: Setting) -> None:
    clock, allowed = Clock(), []

    def run_group(group: Any, setting: Setting, limits_s: Any, on_row: Any, on_end: Any) -> None:
        for part, limit_s in zip(group, limits_s, strict=True):
            allowed.append((part.name, limit_s, dict(setting.known)))
            on_row(part, parts.row(limit_s))
            clock.now_s += 40
            on_end(part, "")

    # "d" has 10 of its 60 seconds left: too few to begin.

    said: list[str] = []
    results = run_parts(
        [part(name, parts.well, 60) for name in "abcd"], setting, budget_s=130, say=said.append,
        on_result=lambda _: None, run_group=run_group, clock=clock,
        known_of=lambda rows: {f"seen {len(allowed)}": row.value or 0.0 for row in rows},
    )  # fmt: skip
    assert allowed == [
        ("a", 60, {}), ("b", 60, {"seen 1": 60}), ("c", 50, {"seen 1": 60, "seen 2": 60}),
    ]  # fmt: skip
    assert [result.problem for result in results] == ["", "", "", OUT_OF_TIME]
    assert [result.is_bad for result in results] == [False, False, False, True]
    assert said[-1].startswith(f"d: {OUT_OF_TIME}")


def test_neighbours_that_time_nothing_run_side_by_side(setting: Setting, tmp_path: Path) -> None:
    """The first waits for a file that the second writes; the process of another dies; a timed part runs alone."""
    waiting, telling = (
        replace(part(measure.__name__, measure), is_timed=False) for measure in (parts.waiting, parts.telling)
    )
    alone = part("alone", parts.well)
    assert [[one.name for one in group] for group in runner.groups_of([waiting, telling, alone, alone, waiting])] == [
        ["waiting", "telling"], ["alone"], ["alone"], ["waiting"],
    ]  # fmt: skip
    dying = replace(part("dying", parts.dying), is_timed=False)
    results = run_parts(
        [waiting, dying, telling, alone], setting, budget_s=LIMIT_S, say=lambda _: None, on_result=lambda _: None
    )
    found = {result.name: (result.problem, len(result.rows)) for result in results}
    assert found == {
        "waiting": ("", 1), "dying": ("failed: its process ended with -9", 1), "telling": ("", 1), "alone": ("", 2),
    }  # fmt: skip
    assert [result.name for result in results][-1] == "alone"


@pytest.mark.parametrize(
    ("measure", "num_rows", "problem"),
    [
        (parts.well, 2, ""),
        (parts.raising, 1, "failed: RuntimeError: an illegal access"),
        (parts.missing, 0, "not run: nothing is installed"),
        (parts.dying, 1, "failed: its process ended with -9"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_part_in_a_process_of_its_own(setting: Setting, measure: Any, num_rows: int, problem: str) -> None:
    rows: list[Row] = []
    assert in_process(part("p", measure), setting, LIMIT_S, rows.append) == problem
    assert len(rows) == num_rows


def test_a_part_that_hangs_is_ended_with_its_children_and_its_rows_are_kept(setting: Setting) -> None:
    rows: list[Row] = []
    assert in_process(part("p", parts.hanging, 3.0), setting, 3.0, rows.append) == "failed: took more than 3 s"
    (row,) = rows
    assert row.value is not None
    deadline_s = time.monotonic() + 5
    while is_running(int(row.value)):
        assert time.monotonic() < deadline_s, "the child of a part that was ended goes on"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("limit_s", "problem"),
    [(1.0, "failed: took more than 1 s"), (LIMIT_S, "failed: the budget ended 1 s after its beginning")],
)
@pytest.mark.parametrize("measure", [parts.hanging, parts.stopping])
def test_who_ended_a_part_is_said(setting: Setting, measure: Any, limit_s: float, problem: str) -> None:
    assert in_process(part("p", measure, limit_s), setting, 1.0, lambda _: None) == problem


def is_running(pid: int) -> bool:
    """Whether the process runs. A zombie, which its new parent has not reaped yet, does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_one_part_fails_and_the_others_are_measured_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chosen = [part("raising", parts.raising), part("looking", parts.looking), part("missing", parts.missing)]
    monkeypatch.setattr(gpu, "PARTS", chosen)
    result = CliRunner().invoke(gpu.main, ["--tiny", "--results-dir", str(tmp_path)])
    assert result.exit_code == 1, result.output
    (kept,) = tmp_path.glob("gpu-*.json")
    summary = json.loads(kept.read_text())
    assert [(p["part"], p["problem"], len(p["rows"])) for p in summary["parts"]] == [
        ("raising", "failed: RuntimeError: an illegal access", 1),
        ("looking", "", 1),
        ("missing", "not run: nothing is installed", 0),
    ]
    shown = result.stdout.strip().splitlines()
    assert shown[-1] == f"kept in {kept}"
    assert len(shown[-2]) < 200, "the table is not what stands at the end"
    assert "raising  failed: RuntimeError: an illegal access" in shown
    assert any(line.startswith("looking  first") for line in shown)
    assert summary["parts"][1]["rows"][0]["value"] == 1, "nothing is kept before the end"


@pytest.mark.parametrize(
    ("chosen", "exit_code"), [([("m", parts.missing), ("w", parts.well)], 0), ([("wrong", parts.wrong)], 1)]
)
def test_the_exit_code_is_of_what_was_found(
    monkeypatch: pytest.MonkeyPatch, chosen: list[tuple[str, Any]], exit_code: int
) -> None:
    monkeypatch.setattr(gpu, "PARTS", [part(*each) for each in chosen])
    result = CliRunner().invoke(gpu.main, ["--tiny"])
    assert result.exit_code == exit_code
    # Results that are not saved are printed.
    assert [found["part"] for found in json.loads(result.stdout.splitlines()[-1])["parts"]] == [c[0] for c in chosen]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_results_say_what_made_the_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import triton

    assembler = tmp_path / "ptxas"
    assembler.write_text("#!/bin/sh\necho Cuda compilation tools, release 77.5, V77.5.1\n")
    assembler.chmod(0o755)
    own = compilers()
    assert own["triton"] == triton.__version__
    assert re.fullmatch(r"\d+\.\d+", own["ptxas"])
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(assembler))
    assert compilers() == own | {"ptxas": f"77.5 of {assembler}"}
    monkeypatch.setattr(gpu, "PARTS", [part("w", parts.well)])
    shown = CliRunner().invoke(gpu.main, ["--tiny"]).stdout.splitlines()
    assert f"triton {triton.__version__}, ptxas 77.5 of {assembler}" in shown[0]
    assert json.loads(shown[-1])["ptxas"] == f"77.5 of {assembler}"


def test_parts_are_chosen_by_name_in_their_order_and_floors_go_along() -> None:
    assert [part.name for part in gpu.chosen_parts("steps, kernels")] == ["floors", "kernels", "steps"]
    default = [part.name for part in gpu.chosen_parts("")]
    assert [part.name for part in gpu.PARTS if part.name not in default] == [
        "steps-cublaslt", "vllm", "attention-variants", "products-variants", "invariant-variants",
    ]  # fmt: skip
    assert [part.name for part in gpu.chosen_parts("products-variants")] == ["floors", "products-variants"]
    result = CliRunner().invoke(gpu.main, ["--tiny", "--only", "steps,speed"])
    assert result.exit_code == 2
    assert "no part is called speed; there are floors, kernels, model" in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_only_the_toy_runs() -> None:
    result = CliRunner().invoke(gpu.main, [])
    assert result.exit_code == 1
    assert "--tiny" in result.output
