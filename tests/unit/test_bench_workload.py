"""What `tandem bench` sends, and when: random workloads, and traces with shared prefixes."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from gateway.requests import CompletionRequest
from tandem.bench.args import BenchArgs
from tandem.bench.curve import workloads_of
from tandem.bench.traces import Record, TraceError, block_prompt, mean_rate, parse_trace, read_trace, trace_workload
from tandem.bench.workload import (
    FIRST_TOKEN_ID,
    RandomShape,
    Tokens,
    TokenSource,
    Workload,
    arrivals_s,
    random_workload,
    warm_up_workload,
)

SHAPE = RandomShape(input_len=8, output_len=3)
MOONCAKE = [
    {"timestamp": 0, "input_length": 1300, "output_length": 20, "hash_ids": [7, 8, 9]},
    {"timestamp": 3000, "input_length": 1100, "output_length": 30, "hash_ids": [7, 8, 10]},
    {"timestamp": 9000, "input_length": 600, "output_length": 10, "hash_ids": [11, 12]},
]
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.6805900,396,109\r\n"
    "2023-11-16 18:15:48.6805900,879,0\r\n"
)


def source(seed: int = 1, run: int = 0) -> TokenSource:
    return TokenSource(seed=seed, run=run)


def shared(a: Tokens, b: Tokens) -> int:
    """The number of tokens that both begin with."""
    same = a[: len(b)] == b[: len(a)]
    return int(np.argmin(same)) if not same.all() else len(same)


# -- random -----------------------------------------------------------------------------------------------------


def test_arrivals_are_poisson_and_of_the_seed() -> None:
    gaps = np.diff([0.0, *arrivals_s(4.0, 4000, seed=1)])
    assert gaps.mean() == pytest.approx(0.25, rel=0.1)
    assert gaps.std() == pytest.approx(0.25, rel=0.1)
    # In a Poisson process, 1 / e of the gaps are longer than the mean.
    assert (gaps > 0.25).mean() == pytest.approx(np.exp(-1), abs=0.03)
    assert arrivals_s(4.0, 9, seed=2) != arrivals_s(4.0, 9, seed=1) == arrivals_s(4.0, 9, seed=1)
    assert arrivals_s(float("inf"), 3, seed=1) == [0.0] * 3


def test_burstiness_moves_the_spread_of_gaps_and_not_their_mean() -> None:
    gaps = np.diff([0.0, *arrivals_s(4.0, 8000, seed=1, burstiness=0.25)])
    assert gaps.mean() == pytest.approx(0.25, rel=0.1)
    assert gaps.std() == pytest.approx(0.5, rel=0.1)


def test_no_two_runs_share_a_prompt_and_the_same_run_is_the_same() -> None:
    runs = [(1, 0), (1, 1), (2, 0)]
    workloads = [random_workload(SHAPE, source(*run), rate=9.0, count=20) for run in runs]
    prompts = [tuple(request.prompt.tolist()) for workload in workloads for request in workload.requests]
    assert len(set(prompts)) == 60
    assert {len(prompt) for prompt in prompts} == {8}
    assert min(map(min, prompts)) >= FIRST_TOKEN_ID
    assert max(map(max, prompts)) < 32_000
    again = random_workload(SHAPE, source(1, 1), rate=9.0, count=20)
    assert [request.prompt.tolist() for request in again.requests] == [list(prompt) for prompt in prompts[20:40]]
    assert [request.at_s for request in again.requests] == [request.at_s for request in workloads[1].requests]
    assert [request.at_s for request in workloads[0].requests] != [request.at_s for request in again.requests]


def test_random_prompts_may_share_a_prefix_and_differ_in_length() -> None:
    shape = RandomShape(input_len=100, output_len=10, prefix_len=40, range_ratio=0.5)
    requests = random_workload(shape, source(), rate=1.0, count=200).requests
    assert all(shared(requests[0].prompt, request.prompt) == 40 for request in requests[1:])
    lengths = [len(request.prompt) - 40 for request in requests]
    assert min(lengths) >= 50
    assert max(lengths) <= 150
    assert np.mean(lengths) == pytest.approx(100, rel=0.1)
    assert {request.output_tokens for request in requests} == set(range(5, 16))


@pytest.mark.parametrize("prefix_len", [0, 20])
def test_warm_up_shares_nothing_with_what_it_warms_up_for(prefix_len: int) -> None:
    shape = RandomShape(input_len=70 - prefix_len, output_len=30, prefix_len=prefix_len)
    workload = random_workload(shape, source(), rate=1.0, count=9)
    warm_up = warm_up_workload(workload, source(), 4)
    assert [(len(r.prompt), r.output_tokens, r.at_s) for r in warm_up.requests] == [(70, 8, 0.0)] * 4
    assert all(shared(a.prompt, b.prompt) < 3 for a in warm_up.requests for b in workload.requests)


# -- traces -----------------------------------------------------------------------------------------------------


def test_both_forms_are_read(tmp_path: Path) -> None:
    mooncake, azure = tmp_path / "m.jsonl", tmp_path / "a.csv"
    mooncake.write_text("\n".join(map(json.dumps, MOONCAKE)) + "\n\n")
    azure.write_text(AZURE, newline="")
    assert read_trace(mooncake)[1] == Record(3.0, 1100, 30, (7, 8, 10))
    assert read_trace(mooncake, skip=1) == [Record(0.0, 1100, 30, (7, 8, 10)), Record(6.0, 600, 10, (11, 12))]
    assert read_trace(mooncake, limit=1) == [Record(0.0, 1300, 20, (7, 8, 9))]
    found = read_trace(azure)
    assert [(round(r.at_s, 3), r.input_tokens, r.output_tokens) for r in found] == [
        (0.0, 374, 44), (2.0, 879, 0), (4.0, 396, 109),
    ]  # fmt: skip
    assert mean_rate(found) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\n", "line 1: neither Mooncake's form"),
        (json.dumps(MOONCAKE[0]) + '\n{"timestamp": 1}\n', "line 2: KeyError"),
        (AZURE + "yesterday,3,4\n", "line 5: ValueError"),
        (AZURE + "2023-11-16 18:15:50,3\n", "line 5: IndexError"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1}', "line 1: a prompt of 0"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [-1]}', "line 1: ValueError"),
        (json.dumps(MOONCAKE[0]) + "\n[1]\n", "line 2: ValueError: is not a JSON object"),
        ('{"timestamp": 0, "input_length": 1e999, "output_length": 1}', "line 1: OverflowError"),
        ('{"timestamp": NaN, "input_length": 5, "output_length": 1}', "line 1: its time is nan"),
        (f'{{"timestamp": {"[" * 100_000}', "line 1: RecursionError"),
        (AZURE + f'"{"2" * 200_000}",3,4\n', "line 5: Error: field larger"),
    ],
)
def test_what_is_no_trace_is_named_by_its_line(text: str, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        list(parse_trace(text.splitlines(keepends=True)))


def test_an_empty_trace_says_so(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(MOONCAKE[0]))
    with pytest.raises(TraceError, match="no records after the first 1"):
        read_trace(path, skip=1)


@pytest.mark.parametrize("factor", [1.0, 0.1, 0.013])
def test_equal_hash_ids_are_equal_tokens(factor: float) -> None:
    """Prompts share exactly the tokens of the ids that they share, at any scale, and none beyond."""
    records = [
        Record(0, row["input_length"], row["output_length"], tuple(row["hash_ids"]))  # type: ignore[arg-type]
        for row in MOONCAKE
    ]
    first, second, other = (block_prompt(record, factor, source(), number) for number, record in enumerate(records))
    assert [len(first), len(second), len(other)] == [round(n * factor) for n in (1300, 1100, 600)]
    assert shared(first, second) == round(1024 * factor)
    assert shared(first, other) == 0
    longer = block_prompt(Record(0, 1500, 1, (7, 8, 9)), factor, source(), 5)
    assert shared(first, longer) == len(first)
    assert shared(first, block_prompt(records[0], factor, source(seed=2), 0)) == 0


def test_prompts_without_ids_share_nothing_and_fill_up() -> None:
    records = [Record(0, 700, 1), Record(0, 700, 1), Record(0, 700, 1, (3,)), Record(0, 700, 1, (3,))]
    prompts = [block_prompt(record, 1.0, source(), number) for number, record in enumerate(records)]
    assert [len(prompt) for prompt in prompts] == [700] * 4
    assert shared(prompts[0], prompts[1]) < 3
    assert shared(prompts[2], prompts[3]) == 512  # the rest has no id, so each prompt has its own


def test_a_trace_is_scaled_by_stated_factors() -> None:
    records = [Record(0.0, 100, 10), Record(2.0, 300, 20), Record(4.0, 100, 1)]
    workload = trace_workload(records, source(), length_factor=0.1, time_factor=0.5)
    assert [(r.at_s, len(r.prompt), r.output_tokens) for r in workload.requests] == [(0, 10, 1), (1, 30, 2), (2, 10, 1)]
    assert workload.request_rate == pytest.approx(1.0)
    assert workload.about["time_factor"] == 0.5
    faster = trace_workload(records, source(), rate=4.0)
    assert [r.at_s for r in faster.requests] == pytest.approx([0, 0.25, 0.5])
    assert faster.about["time_factor"] == pytest.approx(0.125)
    assert faster.request_rate == pytest.approx(4.0)
    at_once = trace_workload(records, source(), rate=float("inf"))
    assert [r.at_s for r in at_once.requests] == [0, 0, 0]
    assert at_once.request_rate == float("inf")


def test_what_is_too_long_is_left_out_and_counted() -> None:
    records = [Record(0.0, 5000, 10), Record(1.0, 100, 20), Record(3.0, 95, 5)]
    workload = trace_workload(records, source(), max_total_len=120)
    assert [(r.at_s, len(r.prompt)) for r in workload.requests] == [(0, 100), (2, 95)]
    assert workload.about["left_out"] == 1
    with pytest.raises(TraceError, match="none of 3 records"):
        trace_workload(records, source(), max_total_len=50)


def test_what_is_too_long_does_not_count_as_one_of_those_asked_for(tmp_path: Path) -> None:
    """Two that fit are asked for: the long ones before them are skipped, and nothing after them is read."""
    path = tmp_path / "m.jsonl"
    lengths = [500, 100, 500, 110, 500, 120]
    rows = [{"timestamp": 1000 * n, "input_length": length, "output_length": 10} for n, length in enumerate(lengths)]
    path.write_text("\n".join(map(json.dumps, rows)))

    def chosen(num_prompts: int, skip: int = 0) -> Workload:
        args = BenchArgs(
            dataset_name="trace", dataset_path=str(path), num_prompts=num_prompts, trace_skip=skip,
            trace_length_factor=0.5, trace_max_total_len=65,
        )  # fmt: skip
        (workload,) = workloads_of(args)
        return workload

    two = chosen(2)
    assert [(r.at_s, len(r.prompt)) for r in two.requests] == [(0, 50), (2, 55)]
    assert two.about["left_out"] == 2
    fewer = chosen(9, skip=2)
    assert ([len(r.prompt) for r in fewer.requests], fewer.about["left_out"]) == ([55, 60], 2)


@pytest.mark.parametrize("records", [[Record(3.0, 5, 5)] * 4, [Record(0.0, 5, 5)]])
def test_what_comes_at_one_moment_is_stretched_to_no_rate(records: list[Record]) -> None:
    with pytest.raises(
        TraceError, match=rf"\({len(records)}\) come at the same time.*--num-prompts.*--request-rate inf"
    ):
        trace_workload(records, source(), rate=3.0)
    for rate in (None, float("inf")):
        workload = trace_workload(records, source(), rate=rate)
        assert [r.at_s for r in workload.requests] == [0.0] * len(records)
        assert workload.request_rate == float("inf")


def test_every_rate_of_a_curve_has_prompts_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("\n".join(map(json.dumps, MOONCAKE)))
    traces = workloads_of(BenchArgs(dataset_name="trace", dataset_path=str(path), request_rate="1,2,inf"))
    assert [workload.request_rate for workload in traces] == pytest.approx([1, 2, float("inf")])
    assert traces[0].about["file"] == "m.jsonl"
    randoms = workloads_of(BenchArgs(request_rate="1,2", num_prompts=5))
    for workloads in (traces, randoms):
        assert shared(workloads[0].requests[0].prompt, workloads[1].requests[0].prompt) < 3
    (own,) = workloads_of(BenchArgs(dataset_name="trace", dataset_path=str(path), trace_time_factor=0.5))
    assert [request.at_s for request in own.requests] == [0, 1.5, 4.5]


# -- flags ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"backend": "vllm"}, "backend must be one of grpc, openai, openai-chat"),
        ({"dataset_name": "trace"}, "dataset_path"),
        ({"dataset_path": "x"}, "dataset_path"),
        ({"request_rate": "1,fast"}, "request_rate must be numbers"),
        ({"request_rate": "nan"}, "request_rate must be more than 0"),
        ({"request_rate": "0"}, "request_rate must be more than 0"),
        ({"goodput": "ttft"}, "goodput: 'ttft' is not an objective"),
        ({"goodput": "itl:3"}, "goodput: 'itl:3' is not an objective"),
        ({"percentile_metrics": "ttft,p"}, "percentile_metrics: 'p'"),
        ({"metric_percentiles": "101"}, "metric_percentiles must be in"),
        ({"random_range_ratio": 1.0}, "random_range_ratio"),
        ({"trace_length_factor": 0.0}, "trace_length_factor must be more than 0"),
        ({"num_prompts": 0}, "num_prompts must be at least 1"),
        ({"vocab_size": 10}, "vocab_size"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"backend": "openai", "extra_body": "[1]"}, "extra_body must be a JSON object"),
        ({"backend": "openai", "extra_body": "{"}, "extra_body is not JSON"),
        ({"base_url": "localhost:8000"}, "base_url must begin with"),
        ({"result_filename": "../x.json"}, "result_filename"),
        ({"result_filename": "x.json"}, "result_filename needs --save-result"),
        ({"extra_body": "{}"}, "extra_body needs --backend openai or openai-chat"),
        ({"model": "m"}, "model needs --backend openai or openai-chat"),
        ({"trace_skip": 5}, "trace_skip needs --dataset-name trace"),
        (
            {"dataset_name": "trace", "dataset_path": "x", "random_input_len": 5},
            "random_input_len needs --dataset-name",
        ),
        ({"dataset_name": "trace", "dataset_path": "x", "burstiness": 2.0}, "burstiness needs --dataset-name random"),
    ],
)
def test_wrong_flags_are_named(flags: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        BenchArgs(**flags)  # type: ignore[arg-type]


def test_the_examples_of_further_fields_are_some_that_our_gateway_takes() -> None:
    (extra_body,) = (field for field in dataclasses.fields(BenchArgs) if field.name == "extra_body")
    examples = re.findall(r"{.*?}", extra_body.metadata["help"])
    assert len(examples) == 2
    for example in examples:
        CompletionRequest(prompt="a", **json.loads(example))
