"""`tandem bench`: when it sends requests, what it computes from their times, and what it saves."""

from __future__ import annotations

import asyncio
import base64
import csv
import io
import json
import re
import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import httpx2
import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import serve
from tandem.answer import StreamBroken
from tandem.bench.args import BenchArgs
from tandem.bench.backends import HttpServer, ServerGone, _first_model
from tandem.bench.curve import _name_of
from tandem.bench.outcome import BROKEN_STREAM, Outcome, Progress, Usage
from tandem.bench.page import page
from tandem.bench.plots import draw
from tandem.bench.report import NO_PLOTS, Report, Run, requests_csv, summary_csv, table, to_dict
from tandem.bench.run import NotAnswered, Piece, run_load
from tandem.bench.save import save
from tandem.bench.summary import (
    Summary,
    gaps_over_time,
    is_good,
    max_good_rate,
    parse_goodput,
    percentile,
    summarise,
)
from tandem.bench.workload import RandomShape, Request, TokenSource, Workload, random_workload
from tandem.cli import main
from tandem.cli.bench import progress_line

OBJECTIVES = {"ttft": 1000.0, "tpot": 50.0}


def answered(due_s: float, *arrived_s: float, cached: int | None = 4, prompt: int = 16) -> Outcome:
    num_tokens = len(arrived_s)
    return Outcome(
        due_s=due_s, sent_s=due_s + 0.001, ended_s=arrived_s[-1] + 0.01, arrived_s=list(arrived_s),
        num_tokens=num_tokens, usage=Usage(prompt, num_tokens, cached),
    )  # fmt: skip


GOOD = answered(1.0, 1.5, 1.52, 1.56)
LATE = answered(1.0, 2.1, 2.11, 2.12)
SLOW = answered(1.0, 1.1, 1.2, 1.3)
REFUSED = Outcome(due_s=1.0, sent_s=1.0, ended_s=1.1, code="429", message="full <now>", is_refused=True)
FAILED = Outcome(due_s=1.0, sent_s=1.25, ended_s=4.0, code="500", message="gone")
ALL = [GOOD, LATE, SLOW, REFUSED, FAILED]


def summary_of(outcomes: list[Outcome], rate: float = 2.0, **changed: object) -> Summary:
    return summarise(rate, outcomes, **{"objectives": OBJECTIVES, **changed})  # type: ignore[arg-type]


# -- numbers ----------------------------------------------------------------------------------------------------


def test_percentiles_are_numpys() -> None:
    for count in (1, 2, 57, 100):
        values = [float(v) for v in np.random.default_rng(1).normal(size=count)]
        for percent in (0, 1, 50, 90, 99, 99.9, 100):
            assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_times_count_from_when_a_request_was_due() -> None:
    sent_late = replace_outcome(GOOD, sent_s=1.49)
    assert (sent_late.ttft_ms, sent_late.tpot_ms, sent_late.e2el_ms) == pytest.approx((500, 30, 560))
    assert sent_late.itl_ms == pytest.approx([20, 40])
    assert summary_of([sent_late]).max_send_lag_ms == pytest.approx(490)


def replace_outcome(outcome: Outcome, **changed: object) -> Outcome:
    return replace(outcome, **changed)  # type: ignore[arg-type]


def test_a_summary_adds_up() -> None:
    summary = summary_of(ALL)
    assert (summary.num_prompts, summary.completed, summary.refused, summary.failed) == (5, 3, 1, 1)
    assert summary.errors == {"429": 1, "500": 1}
    assert summary.duration == 4.0  # until the last request ended, in whatever way
    assert summary.request_throughput == pytest.approx(3 / 4)
    assert (summary.total_input_tokens, summary.total_output_tokens) == (48, 9)
    assert summary.output_throughput == pytest.approx(9 / 4)
    assert summary.total_token_throughput == pytest.approx(57 / 4)
    assert summary.prefix_hit_rate == pytest.approx(12 / 48)
    assert summary.good_share == pytest.approx(1 / 5)  # refused and failed requests are not good
    assert summary.request_goodput == pytest.approx(1 / 4)
    assert summary.max_send_lag_ms == pytest.approx(250)


def test_latencies_are_those_of_numpy_over_answered_requests() -> None:
    flat = summary_of(ALL).to_dict()
    ttft = [500.0, 1100.0, 100.0]
    gaps = [20.0, 40.0, 10.0, 10.0, 100.0, 100.0]
    for metric, values in (("ttft", ttft), ("itl", gaps), ("tpot", [30.0, 10.0, 100.0]), ("e2el", [560, 1120, 300])):
        for percent in (50, 90, 99):
            assert flat[f"p{percent}_{metric}_ms"] == pytest.approx(np.percentile(values, percent), abs=1e-3)
        assert flat[f"mean_{metric}_ms"] == pytest.approx(np.mean(values), abs=1e-3)
        assert flat[f"median_{metric}_ms"] == pytest.approx(np.median(values), abs=1e-3)
        assert flat[f"std_{metric}_ms"] == pytest.approx(np.std(values), abs=1e-3)


def test_only_what_was_asked_for_is_reported() -> None:
    flat = summary_of(ALL, metrics=["ttft"], percentiles=[99.9]).to_dict()
    assert {name for name in flat if name.endswith("_ms")} == {
        "mean_ttft_ms", "median_ttft_ms", "std_ttft_ms", "p99.9_ttft_ms", "max_send_lag_ms",
    }  # fmt: skip


def test_what_nobody_knows_is_none() -> None:
    summary = summary_of([answered(0.0, 0.1, cached=None)], objectives={})
    assert (summary.prefix_hit_rate, summary.request_goodput, summary.good_share) == (None, None, None)
    assert set(summary.spreads) == {"ttft", "e2el"}  # one token: no gap, no time per further token
    assert summary_of([REFUSED]).spreads == {}
    assert summary_of([REFUSED], rate=float("inf")).to_dict()["request_rate"] == "inf"


def test_objectives_are_vllms() -> None:
    assert parse_goodput("ttft:1000  tpot:50.5 e2el:3000") == {"ttft": 1000, "tpot": 50.5, "e2el": 3000}
    assert parse_goodput("") == {}
    assert [is_good(outcome, OBJECTIVES) for outcome in ALL] == [True, False, False, False, False]
    assert is_good(answered(0.0, 0.1), {"tpot": 0.0})


def test_the_goodput_of_a_curve_is_its_highest_good_rate() -> None:
    all_good, most = [GOOD] * 100, [GOOD] * 98 + [SLOW] * 2
    curve = [summary_of(all_good, 1), summary_of(all_good, 3), summary_of(most, 4), summary_of(all_good, float("inf"))]
    assert max_good_rate(curve) == 3
    assert max_good_rate([summary_of(most, 4)]) == 0
    assert max_good_rate([summary_of(all_good, objectives={})]) is None
    assert max_good_rate([summary_of(all_good, float("inf"))]) is None  # no rate was tried


def test_runs_at_one_rate_count_together() -> None:
    """Otherwise the best of several rounds would be the goodput, by luck."""
    all_good, most = [GOOD] * 100, [GOOD] * 98 + [SLOW] * 2
    curve = [summary_of(all_good, 1), *(summary_of(of, 4) for of in (most, all_good))]
    assert max_good_rate(curve) == 4, "198 of 200"
    assert max_good_rate([*curve, summary_of(most, 4)]) == 1, "296 of 300"


def test_gaps_over_time_are_where_they_ended() -> None:
    steady = answered(0.0, *(0.1 * n for n in range(1, 51)))
    stall = answered(0.0, 1.0, 4.0, 10.0)
    points = gaps_over_time([steady, stall], num_buckets=10)
    assert [at_s for at_s, _, _ in points] == pytest.approx([0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 9.5], abs=0.01)
    assert [round(p50) for _, p50, _ in points] == [100] * 6 + [6000]
    assert points[4][2] > 2500  # the gap that ended at 4 s
    assert gaps_over_time([REFUSED]) == []


# -- sending ----------------------------------------------------------------------------------------------------


class Scripted:
    """A server that answers the second request only when the others are done, and refuses the third."""

    ignores_eos = True

    def __init__(self) -> None:
        self.num_asked = 0
        self.others_are_done = asyncio.Event()

    async def send(self, request: Request) -> AsyncGenerator[Piece, None]:
        self.num_asked += 1
        number = self.num_asked
        if number == 2:
            await self.others_are_done.wait()
        if number == 3:
            raise NotAnswered("429", "full", is_refused=True)
        if number == 4:
            raise StreamBroken("a gap")
        if number == 5:
            raise OSError("broke")
        for _ in range(request.output_tokens):
            await asyncio.sleep(0)
            yield Piece(1)
        if number == 20:
            self.others_are_done.set()
        if number != 6:
            yield Piece(0, Usage(len(request.prompt), request.output_tokens, 0))


async def test_load_is_an_open_loop_and_counts_what_fails() -> None:
    """The server answers one request last, and refuses or breaks off others. The client still sends all, and all
    end."""
    workload = random_workload(RandomShape(input_len=8, output_len=3), TokenSource(seed=1), rate=1000.0, count=20)
    progress = Progress(20)
    outcomes = await run_load(workload, Scripted(), progress)
    assert [outcome.code for outcome in outcomes[1:6]] == ["", "429", BROKEN_STREAM, "OSError", BROKEN_STREAM]
    assert sum(outcome.is_answered for outcome in outcomes) == 16
    assert (progress.num_sent, progress.num_answered, progress.num_refused, progress.num_failed) == (20, 16, 1, 3)
    assert progress.num_running == 0
    assert all(outcome.num_tokens == len(outcome.arrived_s) == 3 for outcome in outcomes if outcome.is_answered)
    waited = outcomes[1]
    assert waited.ended_s > max(outcome.sent_s for outcome in outcomes[2:])


async def test_a_late_client_makes_no_server_look_faster() -> None:
    """The client itself is held up for 100 ms. The request that was due meanwhile has waited, and its time includes the
    wait."""

    class HoldsUp:
        ignores_eos = True

        async def send(self, request: Request) -> AsyncGenerator[Piece, None]:
            if not request.at_s:
                time.sleep(0.1)  # noqa: ASYNC251 - what is tested
            yield Piece(1)
            yield Piece(0, Usage(1, 1, 0))

    requests = [Request(at_s=at_s, prompt=np.zeros(1, dtype=np.int32), output_tokens=1) for at_s in (0.0, 0.02)]
    _, second = await run_load(Workload(requests=requests, request_rate=1.0), HoldsUp())
    assert second.due_s == 0.02
    assert second.sent_s > 0.09
    assert second.ttft_ms > 70


def test_progress_is_one_line() -> None:
    progress = Progress(20, num_sent=9, num_tokens=30)
    for outcome in ALL:
        progress.count(outcome)
    line = progress_line("4/s", progress, 2.0)
    assert line == "4/s  2 s  9/20 sent, 4 running, 3 answered, 1 refused, 1 failed (500: gone), 15 tokens/s"
    progress.last_error = "400: token_ids: must be at most 8191 tokens\n(a context of 8192, 1 for the answer), has 9000"
    line = progress_line("4/s", progress, 2.0)
    assert "1 failed (400: token_ids: must be at most 8191 tokens (a context of…), 15" in line


# -- what is kept -----------------------------------------------------------------------------------------------


@pytest.fixture
def report(tmp_path: Path) -> Report:
    args = BenchArgs(
        request_rate="2,inf", goodput="ttft:1000 tpot:50", result_dir=str(tmp_path / "deep" / "er"), api_key="hush",
        result_filename="r.json", label="a <b> & c", save_result=True,
    )  # fmt: skip
    return Report(args=args, model="m", runs=[run_of(ALL, 2.0), run_of([GOOD, REFUSED], float("inf"))], at_s=0.0)


def run_of(outcomes: list[Outcome], rate: float) -> Run:
    return Run(summary=summary_of(outcomes, rate), outcomes=outcomes, about={"dataset": "random", "input_len": 16})


def test_json_has_flags_and_numbers_and_no_secrets(report: Report) -> None:
    text = json.dumps(to_dict(report), allow_nan=False)
    found = json.loads(text)
    assert "hush" not in text
    assert [result["request_rate"] for result in found["results"]] == [2.0, "inf"]
    assert found["results"][0]["completed"] == 3
    assert found["results"][0]["workload"] == {"dataset": "random", "input_len": 16}
    assert found["goodput_objectives_ms"] == OBJECTIVES
    assert found["goodput_rate"] == 0.0
    assert found["args"]["request_rate"] == "2,inf"


def test_csv_has_a_line_for_each_rate_and_for_each_request(report: Report) -> None:
    rates = list(csv.DictReader(io.StringIO(summary_csv(report))))
    assert [row["completed"] for row in rates] == ["3", "1"]
    assert json.loads(rates[0]["errors"]) == {"429": 1, "500": 1}
    rows = list(csv.DictReader(io.StringIO(requests_csv(report))))
    assert [row["status"] for row in rows] == [
        "answered", "answered", "answered", "refused", "failed", "answered", "refused",
    ]  # fmt: skip
    assert (rows[0]["ttft_ms"], rows[0]["max_itl_ms"], rows[0]["is_good"]) == ("500.0", "40.0", "1")
    assert (rows[3]["ttft_ms"], rows[3]["code"], rows[3]["message"]) == ("", "429", "full <now>")


def test_a_request_has_only_the_times_that_its_answer_has(report: Report) -> None:
    one_token = Report(args=report.args, model="m", runs=[run_of([answered(0.0, 0.1)], 1.0)])
    (row,) = csv.DictReader(io.StringIO(requests_csv(one_token)))
    assert (row["ttft_ms"], row["tpot_ms"], row["max_itl_ms"], row["e2el_ms"]) == ("100.0", "", "", "100.0")


def test_the_page_says_what_was_sent_and_no_rate_that_was_not_tried(report: Report) -> None:
    html = page(report, [])
    assert "<td>requests per rate</td><td>5, 2</td>" in html  # not --num-prompts
    assert "Goodput: 0 requests/s" in html
    at_once = Report(args=report.args, model="m", runs=[run_of([GOOD], float("inf"))])
    assert "Goodput" not in page(at_once, [])
    assert to_dict(at_once)["goodput_rate"] is None


def test_a_rate_without_answers_keeps_its_column(report: Report) -> None:
    runs = [run_of([REFUSED], 9.0), *report.runs]
    shown = {row[0]: row[1:] for row in table(runs).rows}
    assert shown["answered"] == ("0", "3", "1")
    assert shown["  429"] == ("1", "1", "1")
    assert shown["p99 TTFT, ms"] == ("-", "1088.0", "500.0")
    assert shown["good, of all"] == ("0.0 %", "20.0 %", "50.0 %")
    assert table(runs).headers == ("requests/s", ">9", ">2", ">all at once")
    rows = list(csv.DictReader(io.StringIO(summary_csv(Report(args=report.args, model="m", runs=runs)))))
    assert (rows[0]["p99_ttft_ms"], rows[1]["p99_ttft_ms"]) == ("", "1088.0")


def test_plots_and_the_page_need_nothing_else(report: Report) -> None:
    pytest.importorskip("matplotlib")
    plots = draw(report)
    assert [plot.name for plot in plots] == ["latency", "goodput", "itl"]
    assert all(plot.svg.startswith("<svg") for plot in plots)
    html = page(report, plots)
    embedded = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', html)
    assert [base64.b64decode(data).decode() for data in embedded] == [plot.svg for plot in plots]
    assert not re.findall(r"<script|<link|@import|url\(|(?:src|href)=[\"'](?!data:)", html)
    assert "a &lt;b&gt; &amp; c" in html
    assert "full &lt;now&gt;" in html
    assert "hush" not in html
    assert "1088.0" in html


def test_everything_is_kept_under_one_name(report: Report) -> None:
    pytest.importorskip("matplotlib")
    paths = save(report)
    assert [path.name for path in paths] == [
        "r.json", "r.csv", "r-requests.csv", "r-latency.svg", "r-goodput.svg", "r-itl.svg", "r.html",
    ]  # fmt: skip
    assert all(path.stat().st_size > 100 for path in paths)


def test_without_matplotlib_only_plots_are_missing(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    paths = save(report)
    assert [path.suffix for path in paths] == [".json", ".csv", ".csv", ".html"]
    html = paths[-1].read_text()
    assert "pip install matplotlib" in html
    assert "1088.0" in html
    assert "\n" not in NO_PLOTS


def test_numbers_of_a_server_that_sends_broken_streams_come_with_a_warning(report: Report) -> None:
    broken = Outcome(due_s=0.0, code=BROKEN_STREAM, message="a gap")
    assert report.problem == ""
    assert Report(args=report.args, model="m", runs=[run_of([GOOD, broken, broken], 1)]).problem == (
        "2 answers were not exact: broken stream: a gap"
    )
    nothing = Report(args=report.args, model="m", runs=[run_of([REFUSED], 1)])
    assert nothing.problem == "no request was answered: 429: full <now>"
    assert "no request was answered" in page(nothing, draw(nothing))


# -- the command ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--address", "127.0.0.1:1"], "no router answers at 127.0.0.1:1"),
        (["--router", "127.0.0.1:1"], "no router answers at 127.0.0.1:1"),
        (["--backend", "openai", "--base-url", "http://127.0.0.1:1"], "does not list its models"),
        (["--dataset-name", "trace", "--dataset-path", "no/such.csv"], "Error: --dataset-path: [Errno 2] No such"),
        (["--dataset-name", "trace", "--dataset-path", "/"], "Error: --dataset-path: [Errno 21] Is a directory"),
        (
            ["--dataset-name", "trace", "--dataset-path", __file__],
            "Error: --dataset-path: test_bench_report.py, line 1",
        ),
    ],
)
def test_a_server_that_is_not_there_is_one_line(flags: list[str], said: str) -> None:
    result = CliRunner().invoke(main, ["bench", *flags])
    assert result.exit_code == 1
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


async def test_a_server_that_asks_for_a_key_is_one_line() -> None:
    said = {"error": {"message": "the API key is missing", "code": "invalid_api_key"}}
    keyed = httpx2.MockTransport(lambda _: httpx2.Response(401, json=said))
    async with httpx2.AsyncClient(transport=keyed, base_url="http://server") as client:
        with pytest.raises(ServerGone) as gone:
            await _first_model(client, HttpServer(base_url="http://server"))
    assert "does not list its models (401: the API key is missing)." in str(gone.value)
    assert "with --api-key or OPENAI_API_KEY" in str(gone.value)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("flags", "router", "http", "key"),
    [
        ([], "older newer", "sk-1", "older"),
        ([], "", "sk-1", ""),
        (["--backend", "openai"], "older newer", "sk-1", "sk-1"),
        (["--backend", "openai"], "older", "", ""),
        (["--api-key", "given"], "older", "sk-1", "given"),
    ],
)
def test_the_environments_key_is_of_the_kind_of_server(
    flags: list[str], router: str, http: str, key: str, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither key is shown to a server of the other kind."""
    shown: list[str] = []

    async def run_bench(args: BenchArgs, **_: object) -> Report:
        shown.append(args.api_key)
        return report

    monkeypatch.setattr("tandem.bench.curve.run_bench", run_bench)
    CliRunner().invoke(main, ["bench", *flags], env={"TANDEM_API_KEY": router, "OPENAI_API_KEY": http})
    assert shown == [key]


@pytest.mark.parametrize(("rate", "name"), [(2.5, "2.5/s"), (float("inf"), "all at once")])
def test_a_run_has_a_name(rate: float, name: str) -> None:
    assert _name_of(Workload(requests=[], request_rate=rate)) == name


def test_one_answer_that_is_not_exact_is_exit_code_1(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Outcome(due_s=0.0, code=BROKEN_STREAM, message="a gap")

    async def run_bench(*_: object, **__: object) -> Report:
        return Report(args=report.args, model="m", runs=[run_of([GOOD, broken], 1.0)])

    monkeypatch.setattr("tandem.bench.curve.run_bench", run_bench)
    result = CliRunner().invoke(main, ["bench"])
    assert result.exit_code == 1
    assert "1 answers were not exact: broken stream: a gap" in result.stderr


@pytest.mark.parametrize(("rates", "said"), [("inf", ""), ("2,inf", 'goodput: {"1p1d": 2.0}\n')])
def test_servers_side_by_side_have_a_goodput_where_a_rate_was_tried(
    rates: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[dict[str, object]] = []

    async def measure(name: str, workloads: list[Workload], *_: object) -> list[Summary]:
        return [summary_of([GOOD], workload.request_rate) for workload in workloads]

    monkeypatch.setattr(serve, "measure", measure)
    monkeypatch.setattr(serve, "save", lambda name, summary, draw: kept.append(summary))
    result = CliRunner().invoke(serve.main, ["--rates", rates, "--requests", "2"])
    assert result.exit_code == 0, result.output
    assert "".join(result.stdout.partition("goodput: ")[1:]) == said
    assert kept[0]["goodput"] == {"1p1d": 2.0 if said else None}


def test_servers_side_by_side_play_no_trace_of_one_moment_at_a_rate(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"timestamp": 5, "input_length": 9, "output_length": 3}\n' * 4)
    result = CliRunner().invoke(serve.main, ["--trace", str(path), "--rates", "1,inf"])
    assert result.exit_code == 2
    assert "Error: --trace: all records chosen (4) come at the same time" in result.stderr


def test_a_key_of_the_environment_that_is_none_is_said() -> None:
    result = CliRunner().invoke(main, ["bench"], env={"TANDEM_API_KEY": "  "})
    assert result.exit_code == 2
    assert "TANDEM_API_KEY must not be empty" in result.stderr


def test_wrong_flags_are_named() -> None:
    result = CliRunner().invoke(main, ["bench", "--goodput", "speed:9"])
    assert result.exit_code == 2
    assert "--goodput: 'speed:9' is not an objective" in result.stderr
