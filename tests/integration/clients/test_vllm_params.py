"""Parameters that vLLM has beyond OpenAI's: the same result over gRPC and over HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from clusters import RunningCluster
from openai_cases import MESSAGES

from protos import tandem_inference_pb2 as inference_pb
from rpc.errors import InvalidRequest
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


def test_an_answer_may_have_more_than_there_is_room_for(cluster: RunningCluster, http: httpx.Client) -> None:
    body = {"prompt": "The capital of France is", "temperature": 0, "stop": "."}
    [few] = http.post("/v1/completions", json=body).json()["choices"]
    [many] = http.post("/v1/completions", json=body | {"max_tokens": 1_000_000}).json()["choices"]
    assert (many["text"], many["finish_reason"]) == (few["text"], "stop")
    with Client(cluster.address) as client, pytest.raises(InvalidRequest, match="max_tokens: must be at most"):
        client.generate("The capital of France is", max_tokens=1_000_000)


def test_no_token_but_those_allowed(cluster: RunningCluster, http: httpx.Client) -> None:
    """Classification uses such a list of classes. On one worker and on two, over gRPC and over HTTP."""
    allowed = [504, 3575, 282]
    sampling: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 4, "allowed_token_ids": allowed}
    with Client(cluster.address) as client:
        answer = client.generate("Once upon a time " * 40, **sampling)
        short = client.generate("Once", **sampling)
    assert answer.timings.mode == inference_pb.MODE_DISAGGREGATED
    assert len(answer.token_ids) == 12, "what ends an answer is not among them"
    assert {*answer.token_ids, *short.token_ids} <= {*allowed}
    body = {"prompt": "Once", "return_token_ids": True, **sampling}
    [choice] = http.post("/v1/completions", json=body).json()["choices"]
    assert choice["token_ids"] == short.token_ids
    for wrong, said in (([49_152], "below the vocabulary's size"), ([], "must not be empty")):
        refused = http.post("/v1/completions", json={"prompt": "Once", "allowed_token_ids": wrong}).json()["error"]
        assert refused["param"] == "allowed_token_ids"
        assert said in refused["message"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("beginning", ["Once", "Once upon a time " * 40], ids=["one worker", "two"])
def test_no_bad_word(cluster: RunningCluster, http: httpx.Client, beginning: str) -> None:
    """Each round bans the longest word of the previous answer, and the new answer has none of the banned words."""
    sampling: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
    bad_words: list[str] = []
    with Client(cluster.address) as client:
        text = client.generate(beginning, **sampling).text
        for number in range(3):
            bad_words += [max(text.split(), key=len)]
            # Each with a salt of its own: else the worker that has the prefix would compute the whole request.
            answer = client.generate(beginning, bad_words=bad_words, cache_salt=f"bad {number}", **sampling)
            assert not any(word in answer.text for word in bad_words), (bad_words, answer.text)
            text = answer.text
    assert (answer.timings.mode == inference_pb.MODE_DISAGGREGATED) == (len(beginning) > 100)
    body = {"prompt": beginning, "bad_words": bad_words, **sampling}
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == text
    refused = http.post("/v1/completions", json={**body, "bad_words": [" "]}).json()["error"]
    assert refused["param"] == "bad_words[0]"


PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TAG = {"begin": "<function=weather>", "content": {"type": "json_schema", "json_schema": PLACE}, "end": "</function>"}
TAGGED: dict[str, Any] = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<function="],
        "tags": [TAG],
        "at_least_one": True,
        "stop_after_first": True,
    },
}
CALL = re.compile(r"<function=weather>(\{.*\})</function>")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("beginning", ["Oslo", "Once upon a time " * 40], ids=["one worker", "two"])
def test_a_tag_in_a_text(cluster: RunningCluster, http: httpx.Client, beginning: str) -> None:
    """In vLLM's and in OpenAI's parameter, for a completion and for a chat: the same answer."""
    sampling: dict[str, Any] = {"max_tokens": 60, "temperature": 1.0, "seed": 3}
    with Client(cluster.address) as client:
        # With a salt of its own: else the worker that has the prefix would compute the whole request.
        expected = client.generate(
            beginning, cache_salt="tag", structured_outputs={"structural_tag": TAGGED}, **sampling
        )
        of_chat = client.generate(MESSAGES, structured_outputs={"structural_tag": TAGGED}, **sampling)
        in_text = {}
        for word in ("<", "<gh_stars>"):  # "<gh_stars>" is a special token, normally left out of texts
            old = {"structures": [{"begin": word, "schema": PLACE, "end": ">"}], "triggers": [word]}
            # The bias makes the free text begin the tag; else it would go on.
            bias = {client.tokenize(word).token_ids[0]: 100.0}
            in_text[word] = client.generate(
                "It is", structured_outputs={"structural_tag": old}, logit_bias=bias, stop=["}>"], max_tokens=60
            )
            assert in_text[word].token_ids[0] in bias
    assert (expected.timings.mode == inference_pb.MODE_DISAGGREGATED) == (len(beginning) > 100)
    for answer in (expected, of_chat):
        found = CALL.fullmatch(answer.text)
        assert found is not None, answer.text
        assert answer.finish_reason == "stop"
        value = json.loads(found[1])
        assert value["city"] in ("Oslo", "Rome")
        assert value["days"] in range(1, 10)
    for word, answer in in_text.items():
        assert json.loads(answer.text.removeprefix(word) + "}").keys() == {"city", "days"}
    for form in ({"structured_outputs": {"structural_tag": json.dumps(TAGGED)}}, {"response_format": TAGGED}):
        body = {"prompt": beginning, **sampling, **form}
        assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == expected.text
        chat = http.post("/v1/chat/completions", json={"messages": MESSAGES, **sampling, **form}).json()
        assert chat["choices"][0]["message"]["content"] == of_chat.text


def test_a_tag_that_is_wrong(http: httpx.Client) -> None:
    wrong = {"type": "structural_tag", "format": {**TAGGED["format"], "triggers": ["<tool="]}}
    said = 'structural_tag: format.tags[0].begin must begin with one of format.triggers, is "<function=weather>"'
    for field, form in (("structured_outputs", {"structural_tag": wrong}), ("response_format", wrong)):
        refused = http.post("/v1/completions", json={"prompt": "a", field: form})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, field)
        assert error["message"] == f"{field}: {said}"


def test_a_prompt_and_its_tokens(cluster: RunningCluster, http: httpx.Client) -> None:
    """A truncated prompt: the response reports the kept tokens, and the answer is the one to these tokens."""
    text = "Once upon a time there was a fox, who " * 9
    asked = {"prompt": text, "return_token_ids": True, **GREEDY}
    with Client(cluster.address) as client:
        token_ids = list(client.tokenize(text).token_ids)
        expected = client.generate(token_ids[-20:], **GREEDY)
        answer = client.generate(text, **GREEDY, truncate_prompt_tokens=20, with_prompt_token_ids=True)
        several = client.generate_n(text, 2, **GREEDY, with_prompt_token_ids=True)
    assert (answer.token_ids, answer.prompt_token_ids) == (expected.token_ids, token_ids[-20:])
    assert answer.usage.prompt_tokens == 20
    assert [each.prompt_token_ids for each in several] == [token_ids, []]
    [choice] = http.post("/v1/completions", json={**asked, "truncate_prompt_tokens": 20}).json()["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (expected.token_ids, token_ids[-20:])
    too_long = {**asked, "prompt": token_ids * 30, "max_tokens": 40, "max_completion_tokens": None}
    assert http.post("/v1/completions", json=too_long).status_code == 400
    [cut] = http.post("/v1/completions", json={**too_long, "truncate_prompt_tokens": -1}).json()["choices"]
    assert cut["prompt_token_ids"] == (token_ids * 30)[-(2048 - 40) :]
    chat = {"messages": [{"role": "user", "content": text}], "truncate_prompt_tokens": 20, "return_token_ids": True}
    of_chat = http.post("/v1/chat/completions", json={**chat, **GREEDY}).json()
    assert len(of_chat["prompt_token_ids"]) == of_chat["usage"]["prompt_tokens"] == 20
    refused = http.post("/v1/completions", json={**asked, "truncate_prompt_tokens": 2049})
    assert refused.json()["error"]["message"].startswith("truncate_prompt_tokens: must be in [1, 2048] (the context)")
