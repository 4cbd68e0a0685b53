"""What an OTLP collector receives: one trace per request, from the client's own span down to each worker's work."""

from __future__ import annotations

import json
import secrets
import urllib.error
import urllib.request

import pytest
from clusters import RunningCluster
from collector import Collector, ToldSpan

from rpc.errors import InvalidRequest
from tandem.client import Client

ATTEMPT = ("attempt", ["reserve", "prefill", "kv_transfer", "decode"])


def new_parent(*, is_sampled: bool = True) -> tuple[str, str, dict[str, str]]:
    """Return new IDs of a trace and of a span in it, and the headers that name them."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return trace_id, span_id, {"traceparent": f"00-{trace_id}-{span_id}-{int(is_sampled):02x}"}


def post(cluster: RunningCluster, path: str, body: object, headers: dict[str, str]) -> bytes:
    request = urllib.request.Request(
        f"http://{cluster.http_address}{path}",
        json.dumps(body).encode(),
        {"content-type": "application/json", "x-request-id": "asked", **headers},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: bytes = response.read()
    return answer


def flat(spans: list[ToldSpan]) -> dict[str, ToldSpan]:
    found: dict[str, ToldSpan] = {}
    for span in spans:
        found |= {span.name: span, **flat(span.children)}
    return found


def test_a_streamed_chat_is_one_trace(cluster: RunningCluster, collector: Collector) -> None:
    trace_id, span_id, headers = new_parent()
    prompt = "How many pieces has this? " * 8 + secrets.token_hex(4)
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 6, "stream": True, "temperature": 0.5}
    events = post(cluster, "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}}, headers)
    told = [json.loads(line[6:]) for line in events.decode().splitlines() if line.startswith("data: {")]
    usage, timings = told[-1]["usage"], next(each["timings"] for each in told if "timings" in each)
    (top,) = collector.trace(trace_id, "POST /v1/chat/completions", "llm_request")
    assert top.proto.parent_span_id.hex() == span_id
    assert top.tree() == ("POST /v1/chat/completions", [("llm_request", ["prepare", "queue", ATTEMPT])])
    spans = flat([top])
    assert (top.service, spans["llm_request"].service) == ("tandem-gateway", "tandem-router")
    assert top.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.request.id": "asked",
    }
    request = spans["llm_request"].attributes
    assert request["gen_ai.request.id"] == "asked"
    assert request["gen_ai.request.temperature"] == 0.5
    assert request["gen_ai.request.max_tokens"] == 6
    assert request["gen_ai.usage.prompt_tokens"] == usage["prompt_tokens"]
    assert request["gen_ai.usage.completion_tokens"] == usage["completion_tokens"]
    assert request["gen_ai.latency.e2e"] == pytest.approx(timings["total_ms"] / 1e3)
    assert request["tandem.outcome"] == "done"
    assert spans["attempt"].attributes == {
        "tandem.attempt": 1,
        "tandem.mode": "MODE_DISAGGREGATED",
        "tandem.prefill_worker": "prefill-1",
        "tandem.decode_worker": "decode-1",
        "tandem.is_busy": False,
    }
    workers = {name: spans[name].attributes.get("tandem.worker") for name in ATTEMPT[1]}
    assert workers == {"reserve": "decode-1", "prefill": "prefill-1", "kv_transfer": None, "decode": "decode-1"}
    assert spans["kv_transfer"].attributes["tandem.num_bytes"] == timings["kv_transfer"]["num_bytes"] > 0
    # The spans are nested, and as long as the answer's own timings.
    for span in spans.values():
        for child in span.children:
            assert span.start_ns - 1e6 <= child.start_ns <= child.end_ns <= span.end_ns + 1e6, (span.name, child.name)
    until_placed = spans["prepare"].seconds + spans["queue"].seconds + spans["reserve"].seconds
    assert until_placed <= timings["queue_ms"] / 1e3 + 1e-3
    assert spans["decode"].seconds == pytest.approx(timings["decode_ms"] / 1e3, abs=5e-3)


def test_who_does_not_want_to_be_traced_is_not(cluster: RunningCluster, collector: Collector) -> None:
    trace_id, _, headers = new_parent(is_sampled=False)
    post(cluster, "/v1/completions", {"prompt": "not this one", "max_tokens": 2}, headers)
    other_id, _, headers = new_parent()
    post(cluster, "/v1/completions", {"prompt": "but this one", "max_tokens": 2}, headers)
    assert collector.trace(other_id, "POST /v1/completions", "llm_request")
    assert not collector.trace(trace_id)


def test_several_answers_and_a_refusal_over_grpc(cluster: RunningCluster, collector: Collector) -> None:
    trace_id, span_id, headers = new_parent()
    with Client(cluster.address) as client:
        prompt = "Two answers " + secrets.token_hex(8)
        assert list(client.stream(prompt, n=2, max_tokens=3, ignore_eos=True, trace_headers=headers))
        (top,) = collector.trace(trace_id, "llm_request")
        assert top.proto.parent_span_id.hex() == span_id
        attempts = [span.attributes for span in top.children if span.name == "attempt"]
        assert sorted(attempt["tandem.sequence"] for attempt in attempts) == [0, 1]
        assert top.attributes["gen_ai.usage.completion_tokens"] == 6
        trace_id, _, headers = new_parent()
        with pytest.raises(InvalidRequest):
            list(client.stream("x", request_id="named", temperature=-1, trace_headers=headers))
        (refused,) = collector.trace(trace_id, "llm_request")
        assert "temperature" in refused.error
        assert refused.attributes == {
            "error.type": "invalid_argument", "tandem.outcome": "failed", "gen_ai.request.id": "named",
        }  # fmt: skip
        with pytest.raises(ValueError, match="trace_headers: must be traceparent and tracestate"):
            client.stream("x", trace_headers={"Traceparent": "x"})


def test_a_refusal_over_http_is_no_fault_of_the_server(cluster: RunningCluster, collector: Collector) -> None:
    trace_id, _, headers = new_parent()
    with pytest.raises(urllib.error.HTTPError):
        post(cluster, "/v1/completions", {"prompt": "x", "temperature": -1}, headers)
    (top,) = collector.trace(trace_id, "POST /v1/completions", "llm_request")
    assert (top.attributes["http.response.status_code"], top.error) == (400, "")
    assert top.children[0].error
