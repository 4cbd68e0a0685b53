"""A decode worker or a router dies, or leaves, in the middle of an answer: the stream continues elsewhere, with the
tokens that it would have had, over gRPC and over HTTP. The dtype is bfloat16, as in production. Workers send three
tokens at a time, so that a worker that dies may have tokens that it has not sent."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from itertools import chain, count
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import openai
import pytest
from clusters import RunningCluster, wait_until
from openai_cases import ASKING, MESSAGES, TEMPLATE, TOOLS, added_up, client_of

from protos import tandem_inference_pb2 as inference_pb
from protos import tandem_worker_pb2 as worker_pb
from protos.tandem_worker_pb2_grpc import WorkerStub
from tandem.answer import AnswersStream
from tandem.client import Client
from tandem.supervision import RestartPolicy

PROMPT = [(13 * i) % 30_000 + 70 for i in range(75)]
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "seed": 11, "top_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.4},
    "held to a grammar": {
        "temperature": 0.8, "seed": 12, "ignore_eos": False, "structured_outputs": {"regex": "([a-z]{2,8} ){120}"},
    },
}  # fmt: skip


SMALL = (
    "--decode", "2", "--max-model-len", "8192", "--kv-cache-gib", "0.2", "--lease-ms", "2000", "--drain-grace-s", "0.2",
    "--http-port", "0", "--chat-template", str(TEMPLATE), "--stream-interval", "3",
)  # fmt: skip


# Greedy is the simplest: if the draw at each position is right, so is the greedy choice. The test of several answers
# covers seeded sampling, too.
KINDS = [pytest.param(name, marks=() if name == "held to a grammar" else pytest.mark.slow) for name in SAMPLINGS]


@pytest.fixture(scope="module")
def cluster(start_cluster: Callable[..., RunningCluster], few_layers: Path) -> RunningCluster:
    return start_cluster("--model", str(few_layers), *SMALL)


NUM_QUICK_DEATHS = RestartPolicy().max_quick_deaths - 2
"""After one more in a row, with that of the test that drains the router, `tandem up` would give it up."""
_kills = count(1)


def kill_router(cluster: RunningCluster) -> None:
    """Kill the router; one that was killed often in a row, only once it has lived long enough."""
    router = cluster.services()["router"]
    if next(_kills) % NUM_QUICK_DEATHS == 0:
        is_old = router.create_time() + RestartPolicy().quick_death_s + 5  # it also has to start
        wait_until(lambda: time.time() > is_old, 30, "the router has run for a while")
    router.kill()


@pytest.fixture
def openai_client(cluster: RunningCluster) -> Iterator[openai.OpenAI]:
    with client_of(cluster) as client:
        yield client


@pytest.fixture
def model(openai_client: openai.OpenAI) -> str:
    return openai_client.models.list().data[0].id


@pytest.mark.parametrize("name", KINDS)
def test_the_stream_goes_on_at_the_next_position(cluster: RunningCluster, name: str) -> None:
    sampling = {"max_tokens": 800, "ignore_eos": True, "logprobs": 2, **SAMPLINGS[name]}
    with Client(cluster.address) as client:
        expected = client.generate(PROMPT, **sampling)  # type: ignore[arg-type]
        received: list[int] = []
        logprobs: list[inference_pb.TokenLogprobs] = []
        kill = SignalOnce(cluster, signal.SIGKILL)
        for chunk in client.stream(PROMPT, **sampling):  # type: ignore[arg-type]
            received += chunk.token_ids  # the client fails on gaps and repetitions
            logprobs += chunk.logprobs
            if len(received) >= 20:
                kill.send()
            last = chunk
    assert kill.is_sent, f"the answer of {len(received)} tokens had ended when its worker was found"
    assert last.timings.attempts > 1
    assert received == expected.token_ids
    assert "structured_outputs" not in sampling or re.fullmatch("([a-z]{2,8} )*[a-z]{0,8}", expected.text)
    assert logprobs == expected.logprobs, "to the bit: the kernels add in the same order everywhere"
    cluster.wait_until_at_rest(60)


@pytest.mark.slow
def test_several_answers_go_on_each_at_its_next_position(cluster: RunningCluster) -> None:
    """They are so long that they still run when their worker is found, on any machine."""
    sampling = {
        **SAMPLINGS["seeded"],
        "max_tokens": 400,
        "ignore_eos": True,
        "n": 3,
    }
    with Client(cluster.address) as client:
        whole, received = AnswersStream(3), AnswersStream(3)
        for chunk in client.stream(PROMPT, **sampling):  # type: ignore[arg-type]
            whole.accept(chunk)
        kill = SignalOnce(cluster, signal.SIGKILL)
        for chunk in client.stream(PROMPT, **sampling):  # type: ignore[arg-type]
            received.accept(chunk)
            if chunk.sequence == 2 and chunk.offset >= 10:
                kill.send()
    assert kill.is_sent
    assert [answer.token_ids for answer in received.answers()] == [answer.token_ids for answer in whole.answers()]
    assert sum(answer.timings.attempts for answer in received.answers()) > 3
    cluster.wait_until_at_rest(60)


def test_a_router_that_is_held_up_for_longer_than_a_lease_loses_no_stream(cluster: RunningCluster) -> None:
    """All workers take the router for dead and free what it owns. When it resumes, so do its streams, where they
    were."""
    sampling = {"temperature": 0.0, "max_tokens": 120, "ignore_eos": True}
    with Client(cluster.address) as client:
        expected = client.generate(PROMPT, **sampling).token_ids  # type: ignore[arg-type]
        worker_addresses = [worker.record.address for worker in cluster.workers()]
        streams = [client.stream(PROMPT, **sampling) for _ in range(4)]  # type: ignore[arg-type]
        received = [list(next(stream).token_ids) for stream in streams]
        router = cluster.services()["router"]
        router.suspend()
        try:
            wait_until(lambda: not any(map(num_sessions, worker_addresses)), 20, "no worker believes in it any more")
        finally:
            router.resume()
        for begun, stream in zip(received, streams, strict=True):
            begun.extend(token_id for chunk in stream for token_id in chunk.token_ids)
    assert received == [expected] * 4
    cluster.wait_until_at_rest(60)


@pytest.mark.slow  # the next test covers several answers at once
@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_killed_router_is_no_end_of_a_stream(cluster: RunningCluster, name: str) -> None:
    """The next router at its address continues the stream; the reading client notices nothing."""
    sampling = {"max_tokens": 120, "ignore_eos": True, "logprobs": 2, **SAMPLINGS[name]}
    with Client(cluster.address) as client:
        expected = client.generate(PROMPT, **sampling)  # type: ignore[arg-type]
        messages = []
        for message in client.stream(PROMPT, **sampling):  # type: ignore[arg-type]
            messages.append(message)
            if len(messages) == 20:
                kill_router(cluster)
    assert [token_id for message in messages for token_id in message.token_ids] == expected.token_ids
    assert "".join(message.text for message in messages) == expected.text
    assert [each for message in messages for each in message.logprobs] == expected.logprobs
    cluster.wait_until_at_rest(60)


@pytest.mark.slow
def test_a_killed_router_is_no_end_of_several_answers(cluster: RunningCluster) -> None:
    """The answers continue the last message of a chat whose prompt is truncated; the prompt's tokens are sent once."""
    messages = [*MESSAGES, {"role": "assistant", "content": "The capital"}]
    sampling = {**SAMPLINGS["seeded"], "max_tokens": 120, "ignore_eos": True, "logprobs": 1}
    of_prompt = {"continue_final_message": True, "truncate_prompt_tokens": 20, "with_prompt_token_ids": True}
    sampling |= of_prompt
    with Client(cluster.address) as client:
        expected = client.generate_n(messages, 3, **sampling)  # type: ignore[arg-type]
        answers = AnswersStream(3)
        for number, message in enumerate(client.stream(messages, n=3, **sampling)):  # type: ignore[arg-type]
            answers.accept(message)
            if number == 40:
                kill_router(cluster)
        assert [(a.token_ids, a.text, a.logprobs, a.prompt_token_ids) for a in answers.answers()] == [
            (a.token_ids, a.text, a.logprobs, a.prompt_token_ids) for a in expected
        ]
        assert [len(answer.prompt_token_ids) for answer in expected] == [20, 0, 0]
    cluster.wait_until_at_rest(60)


@pytest.mark.slow  # the test below covers a call over HTTP, the one above several answers over gRPC
def test_a_killed_router_is_no_end_of_several_answers_over_http(
    cluster: RunningCluster, openai_client: openai.OpenAI, model: str
) -> None:
    asked: dict[str, Any] = {
        "model": model, "messages": MESSAGES, "max_tokens": 120, "temperature": 0.8, "seed": 9, "n": 3,
        "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    expected = [choice.message.content for choice in openai_client.chat.completions.create(**asked).choices]
    texts = [""] * 3
    for number, event in enumerate(openai_client.chat.completions.create(**asked, stream=True)):
        texts[event.choices[0].index] += event.choices[0].delta.content or ""
        if number == 40:
            kill_router(cluster)
    assert texts == expected
    cluster.wait_until_at_rest(60)


def test_a_killed_router_is_no_end_of_a_call(cluster: RunningCluster, openai_client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {
        "model": model, "messages": ASKING, "tools": TOOLS, "tool_choice": "required", "temperature": 0.8, "seed": 9,
        "max_tokens": 200,
    }  # fmt: skip
    expected = added_up(openai_client.chat.completions.create(**asked, stream=True))
    assert sum(len(call["arguments"]) for call in expected[0]) > 120, "several calls, or one that goes on and on"

    def killing() -> Iterator[Any]:
        for number, event in enumerate(openai_client.chat.completions.create(**asked, stream=True)):
            yield event
            if number == 8:
                kill_router(cluster)

    assert added_up(killing()) == expected
    cluster.wait_until_at_rest(60)


@contextmanager
def process_of_ours(command: list[str], log: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run a process; yield the address where it listens, and the process."""
    with (
        log.open("w") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline().strip()
            assert line.startswith("listening "), log.read_text()
            yield line.partition("=")[2], process
        finally:
            process.kill()


@pytest.mark.slow
def test_streams_are_spread_over_routers_and_outlive_one(cluster: RunningCluster, tmp_path: Path) -> None:
    first = cluster.services()["router"]
    command = [*first.cmdline(), "--redis", first.environ()["REDIS_URL"]]
    command[command.index("--listen") + 1] = "127.0.0.1:0"
    gateway = [sys.executable, "-P", "-m", "gateway", "--listen", "127.0.0.1:0", "--router"]
    asked = {"prompt": PROMPT, "max_tokens": 1600, "temperature": 0.0, "ignore_eos": True}
    with ExitStack() as stack:
        other, process = stack.enter_context(process_of_ours(command, tmp_path / "router.log"))
        targets = [*gateway, f"ipv4:{cluster.address},{other}"]
        address, _ = stack.enter_context(process_of_ours(targets, tmp_path / "gateway.log"))
        http = stack.enter_context(httpx.Client(base_url=f"http://{address}/v1", timeout=60, trust_env=False))
        here, there = (stack.enter_context(Client(router)) for router in (cluster.address, other))
        wait_until(there.is_serving, 20, "the other router knows its workers")

        def reaches_it() -> bool:
            told = http.post("/completions", json={"prompt": "a", "max_tokens": 1})
            return told.headers["x-request-id"] in (tmp_path / "router.log").read_text()

        wait_until(reaches_it, 20, "the gateway has found the other router")

        def opened(_: int) -> Iterator[str]:
            stream = http.stream("POST", "/completions", json={**asked, "stream": True})
            lines: Iterator[str] = stack.enter_context(stream).iter_lines()
            return chain([next(lines)], lines)

        with ThreadPoolExecutor(6) as threads:  # at once: the first must not have ended when the last begins
            streams = list(threads.map(opened, range(6)))
        assert [client.status().num_running_requests for client in (here, there)] == [3, 3]
        process.kill()
        texts = ["".join(map(text_of, lines)) for lines in streams]
    assert len(set(texts)) == 1, "those that moved, and those that did not"
    assert len(texts[0]) > 250
    cluster.wait_until_at_rest(60)


def text_of(line: str) -> str:
    """Return the text of an event of a streamed completion."""
    data = line.removeprefix("data: ")
    return "" if data in ("", "[DONE]") else json.loads(data)["choices"][0]["text"]


def test_the_gateway_comes_back_where_it_was(cluster: RunningCluster, openai_client: openai.OpenAI, model: str) -> None:
    cluster.services()["gateway"].kill()

    def is_back() -> bool:
        with suppress(openai.APIConnectionError):
            return openai_client.models.list().data[0].id == model
        return False

    wait_until(is_back, 20, "another gateway at the same port")


def test_what_a_killed_router_had_not_begun_to_answer_is_asked_of_the_next(cluster: RunningCluster) -> None:
    prompt = [(17 * i) % 30_000 + 90 for i in range(7000)]  # takes some tenths of a second to prefill
    sampling = {**SAMPLINGS["seeded"], "max_tokens": 4, "ignore_eos": True}
    with Client(cluster.address) as client, ThreadPoolExecutor(1) as threads:
        asked = threads.submit(client.generate_n, prompt, 2, **sampling)  # type: ignore[arg-type]
        wait_until(lambda: client.status().num_running_requests > 0, 20, "the router has taken it on")
        kill_router(cluster)
        answers = asked.result(60)
        again = client.generate_n(prompt, 2, **sampling)  # type: ignore[arg-type]
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in again]
    cluster.wait_until_at_rest(60)


def test_a_worker_that_leaves_hands_its_streams_over_when_its_grace_is_over(cluster: RunningCluster) -> None:
    sampling = {**SAMPLINGS["seeded"], "max_tokens": 300, "ignore_eos": True}  # longer than the grace, on any machine
    with Client(cluster.address) as client:
        expected = client.generate(PROMPT, **sampling)  # type: ignore[arg-type]
        received: list[int] = []
        end_worker = SignalOnce(cluster, signal.SIGTERM)
        for chunk in client.stream(PROMPT, **sampling):  # type: ignore[arg-type]
            received += chunk.token_ids
            if len(received) >= 20:
                end_worker.send()
            last = chunk
        assert last.timings.attempts == 2
        assert received == expected.token_ids
        received = []
        end_router = cache(cluster.services()["router"].terminate)
        for chunk in client.stream(PROMPT, **sampling):  # type: ignore[arg-type]
            received += chunk.token_ids
            if len(received) >= 20:
                end_router()
        assert received == expected.token_ids, "a router, too"
    cluster.wait_until_at_rest(60)


def num_sessions(worker_address: str) -> int:
    """How many routers have a session with the worker."""
    with grpc.insecure_channel(worker_address) as channel:
        status: worker_pb.WorkerStatus = WorkerStub(channel).GetStatus(worker_pb.GetWorkerStatusRequest(), timeout=5)
    return status.num_sessions


class SignalOnce:
    """Sends a signal to the decode worker that runs a request, once one is known to: the router hears of a worker's
    batch a few times a lease."""

    def __init__(self, cluster: RunningCluster, number: signal.Signals) -> None:
        self._cluster, self._number = cluster, number
        self.is_sent = False

    def send(self) -> None:
        """Send it if such a worker is known and it was not sent before."""
        if self.is_sent:
            return
        for worker in self._cluster.workers():
            if worker.record.role == worker_pb.ROLE_DECODE and worker.record.load.num_running:
                os.kill(worker.record.pid, self._number)
                self.is_sent = True
                return
