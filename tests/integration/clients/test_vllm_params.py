"""What vLLM's clients may ask beside OpenAI's words: the same over gRPC, over HTTP, and as its parts are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from clusters import RunningCluster
from openai_cases import MESSAGES

from tandem.client import Client

GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0}


@pytest.fixture
def http(cluster: RunningCluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{cluster.http_address}", trust_env=False, timeout=20) as http:
        yield http


def test_an_answer_goes_on_with_the_last_message(cluster: RunningCluster, http: httpx.Client) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "The capital"}]
    asked = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    with Client(cluster.address) as client:
        prompt = client.tokenize(messages, continue_final_message=True).token_ids
        expected = client.generate(prompt, **GREEDY)
        assert client.generate(messages, **GREEDY, continue_final_message=True).token_ids == expected.token_ids
        assert client.generate(messages, **GREEDY).token_ids != expected.token_ids
    answer = http.post("/v1/chat/completions", json={**asked, **GREEDY}).json()
    assert answer["choices"][0]["message"]["content"] == expected.text
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    both = http.post("/v1/chat/completions", json={**asked, "add_generation_prompt": True})
    assert (both.status_code, both.json()["error"]["param"]) == (400, "continue_final_message")
    as_it_is = http.post(
        "/v1/chat/completions", json={**asked, **GREEDY, "continue_final_message": False, "messages": MESSAGES}
    )
    assert as_it_is.json()["choices"][0]["message"]["role"] == "user", "whose message was the last"
