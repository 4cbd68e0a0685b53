"""A gateway's span of a request that fails before or after its status has been sent."""

from __future__ import annotations

import pytest
from collector import running_collector
from gateway_harness import Script, failing, gateway

from rpc.errors import InternalError, InvalidRequest, NoWorker

TRACE = "0af7651916cd43dd8448eb211c80319c"
PATH = "/v1/completions"


@pytest.mark.parametrize(
    ("script", "status", "failed", "error"),
    [
        (None, 200, None, ""),
        (failing(InternalError("a bug")), 500, None, "status 500"),
        (failing(InternalError("a bug"), after=1), 200, 500, "status 500"),
        (failing(NoWorker("gone"), after=1), 200, 503, "status 503"),
        (failing(InvalidRequest([("text", "is wrong")]), after=1), 200, 400, ""),
    ],
    ids=["answered", "refused", "failed in its stream", "left alone in its stream", "the client's fault"],
)
async def test_a_stream_that_fails_is_a_span_that_failed(
    script: Script | None, status: int, failed: int | None, error: str
) -> None:
    with running_collector() as collector:
        async with gateway(otlp_traces_endpoint=collector.endpoint, resume_s=0.0) as (router, http):
            router.script = script or router.script
            headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
            answer = await http.post(PATH, json={"prompt": "a", "stream": True}, headers=headers)
            assert answer.status_code == status
        (span,) = collector.trace(TRACE, f"POST {PATH}")
    told = span.attributes
    assert (told["http.response.status_code"], told.get("tandem.stream.failed_status_code")) == (status, failed)
    assert span.error == error
