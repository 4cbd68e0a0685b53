"""However a request ends, it ends once, with a status that says why, and all its blocks are released."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from clusters import RunningCluster, wait_until
from standstill import hold_up

from protos import tandem_inference_pb2 as pb
from protos import tandem_worker_pb2 as worker_pb
from protos.tandem_inference_pb2_grpc import InferenceStub
from protos.tandem_worker_pb2_grpc import DecodeStub
from rpc.errors import InvalidRequest, NoWorker
from tandem.answer import AnswersStream
from tandem.client import Client

LONG = [(7 * i) % 40_000 + 100 for i in range(900)]
SHORT = [(11 * i) % 40_000 + 100 for i in range(50)]
_fresh_ids = itertools.count(10_000)
"""First tokens of prompts that no cache has seen."""


@pytest.fixture(scope="module")
def cluster(start_cluster: Callable[..., RunningCluster], few_layers: Path) -> RunningCluster:
    sizes = ("--max-model-len", "2048", "--num-kv-blocks", "200", "--prefill-chunk-tokens", "128")
    return start_cluster("--model", str(few_layers), *sizes)


@pytest.fixture
def stub(cluster: RunningCluster) -> Iterator[InferenceStub]:
    with grpc.insecure_channel(cluster.address) as channel:
        yield InferenceStub(channel)


def request_of(token_ids: list[int], max_tokens: int, request_id: str = "") -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=request_id,
        token_ids=pb.TokenIds(ids=token_ids),
        sampling_params=pb.SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True),
    )


def code_of_call(call: grpc.Call) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError):
        for _ in call:
            pass
    return call.code()


def test_a_client_that_goes_away_while_decoding(cluster: RunningCluster, stub: InferenceStub) -> None:
    call = stub.Generate(request_of(SHORT, 1500))
    for _ in range(5):
        next(call)
    call.cancel()
    cluster.wait_until_at_rest()


@dataclass(frozen=True)
class Asked:
    """A running request, which a thread of its own reads."""

    prompt: list[int]
    call: grpc.Call
    answer: Future[list[pb.GenerateResponse]]


def ask(stub: InferenceStub, prompt: list[int], max_tokens: int) -> Asked:
    call = stub.Generate(request_of(prompt, max_tokens))
    answer: Future[list[pb.GenerateResponse]] = Future()

    def read() -> None:
        try:
            answer.set_result(list(call))
        except grpc.RpcError as error:
            answer.set_exception(error)

    threading.Thread(target=read).start()
    return Asked(prompt, call, answer)


def begin_prefill(cluster: RunningCluster, stub: InferenceStub, max_tokens: int) -> Asked:
    """Return a request whose prompt the prefill worker is computing.

    If a request ends without being seen there, send a new one: after the machine stood still for a lease, the router
    has lost its session with the prefill worker for a moment, and the decode worker computes the prompt.
    """
    asked = ask(stub, [next(_fresh_ids), *LONG[1:]], max_tokens)
    unseen: list[pb.GenerateResponse] = []

    def is_prefilling() -> bool:
        nonlocal asked
        if any(w.record.role == worker_pb.ROLE_PREFILL and w.record.load.num_running for w in cluster.workers()):
            return True
        if asked.answer.done():
            unseen.append(asked.answer.result()[-1])
            asked = ask(stub, [next(_fresh_ids), *LONG[1:]], max_tokens)
        return False

    wait_until(is_prefilling, 30, "a prompt is seen being prefilled", lambda: (unseen, cluster.log.read_text()[-3000:]))
    return asked


def test_a_client_that_goes_away_while_prefilling(cluster: RunningCluster, stub: InferenceStub) -> None:
    asked = begin_prefill(cluster, stub, 1000)
    asked.call.cancel()
    assert isinstance(asked.answer.exception(10), grpc.RpcError)
    cluster.wait_until_at_rest()


def test_abort_ends_the_stream_well(cluster: RunningCluster, stub: InferenceStub) -> None:
    call = stub.Generate(request_of(SHORT, 1500, "to-abort"))
    received = [next(call) for _ in range(3)]
    assert stub.Abort(pb.AbortRequest(request_id="to-abort")).was_running
    received += list(call)
    assert received[-1].finish_reason == pb.FINISH_REASON_ABORT
    assert received[-1].usage.completion_tokens == sum(len(r.token_ids) for r in received)
    assert call.code() == grpc.StatusCode.OK
    assert not stub.Abort(pb.AbortRequest(request_id="to-abort")).was_running
    cluster.wait_until_at_rest()


SEVERAL = {"max_tokens": 24, "temperature": 0.9, "seed": 5, "ignore_eos": True, "logprobs": 1}


@pytest.mark.parametrize("is_stream", [pytest.param(True, id="streamed"), pytest.param(False, id="whole")])
def test_each_of_several_answers_ends_once(cluster: RunningCluster, is_stream: bool) -> None:
    """Answer i equals the single answer with seed + i, and the prompt is prefilled only for the first answer."""
    prompt = [next(_fresh_ids), *LONG[1:]]
    with Client(cluster.address) as client:
        if is_stream:
            stream = AnswersStream(4)
            messages = [stream.accept(message) for message in client.stream(prompt, n=4, **SEVERAL)]  # type: ignore[arg-type]
            lasts = [message for message in messages if message.HasField("usage")]
            assert sorted(last.sequence for last in lasts) == [0, 1, 2, 3]
            answers = stream.answers()
            changes = sum(a.sequence != b.sequence for a, b in itertools.pairwise(messages))
            assert changes > 24, "they are answered together, not one after the other"
        else:
            answers = client.generate_n(prompt, 4, **SEVERAL)  # type: ignore[arg-type]
        alone = [client.generate(prompt, **{**SEVERAL, "seed": 5 + i}) for i in range(4)]  # type: ignore[arg-type]
    assert [answer.token_ids for answer in answers] == [one.token_ids for one in alone]
    assert [answer.text for answer in answers] == [one.text for one in alone]
    assert [answer.logprobs for answer in answers] == [one.logprobs for one in alone]
    assert len({answer.text for answer in answers}) == 4
    assert [answer.usage.cached_tokens for answer in answers] == [0, 896, 896, 896]
    modes = [answer.timings.mode for answer in answers]
    assert modes == [pb.MODE_DISAGGREGATED, pb.MODE_LOCAL, pb.MODE_LOCAL, pb.MODE_LOCAL]
    for answer in answers:
        spans = answer.timings
        assert spans.total_ms == pytest.approx(spans.queue_ms + spans.prefill_ms + spans.transfer_ms + spans.decode_ms)
    cluster.wait_until_at_rest()


def test_answers_to_a_prompt_that_fills_most_of_the_pool_are_decoded_together(cluster: RunningCluster) -> None:
    """The pool has 200 blocks and the prompt fills 115: the answers share the prompt's blocks."""
    prompt = [next(_fresh_ids), *LONG[1:], *SHORT, *LONG[: 1840 - len(LONG) - len(SHORT)]]
    stream = AnswersStream(4)
    with Client(cluster.address) as client:
        for message in client.stream(prompt, n=4, **{**SEVERAL, "max_tokens": 60}):  # type: ignore[arg-type]
            stream.accept(message)
    starts = [answer.timings.time_to_first_token_ms for answer in stream.answers()]
    ends = [answer.timings.total_ms for answer in stream.answers()]
    assert max(starts) < min(ends), "none waits for the end of another"
    cluster.wait_until_at_rest()


def test_greedy_answers_are_the_same_and_may_end_at_their_first_token(cluster: RunningCluster) -> None:
    with Client(cluster.address) as client:
        first, *others = client.generate_n(SHORT, 3, max_tokens=1, temperature=0, ignore_eos=True)
    assert [other.token_ids for other in others] == [first.token_ids] * 2
    cluster.wait_until_at_rest()


def test_abort_ends_all_of_several_answers_well(cluster: RunningCluster, stub: InferenceStub) -> None:
    request = request_of(SHORT, 1500, "several")
    request.sampling_params.n = 3
    call = stub.Generate(request)
    received: list[pb.GenerateResponse] = []
    while {response.sequence for response in received} != {0, 1, 2}:
        received.append(next(call))
    taken = request_of(SHORT, 5, "1_several")  # the id under which workers know the second answer
    assert code_of_call(stub.Generate(taken)) == grpc.StatusCode.ALREADY_EXISTS
    assert stub.Abort(pb.AbortRequest(request_id="several")).was_running
    received += list(call)
    lasts = [response for response in received if response.finish_reason]
    assert [response.finish_reason for response in lasts] == [pb.FINISH_REASON_ABORT] * 3
    assert {response.sequence for response in lasts} == {0, 1, 2}
    assert len(list(stub.Generate(taken))) > 1
    cluster.wait_until_at_rest()


def test_a_client_that_goes_away_from_several_answers(cluster: RunningCluster, stub: InferenceStub) -> None:
    """The first client leaves before the second answer has begun, the second while all are being decoded."""
    for num_messages in (1, 30):
        request = request_of([next(_fresh_ids), *LONG[1:]], 700)
        request.sampling_params.n = 3
        call = stub.Generate(request)
        for _ in range(num_messages):
            next(call)
        call.cancel()
        cluster.wait_until_at_rest()


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param({"temperature": 0.0}, marks=pytest.mark.slow),
        {"temperature": 0.9, "seed": 4, "repetition_penalty": 1.2, "presence_penalty": 0.5, "min_tokens": 12},
    ],
    ids=["greedy", "seeded"],
)
def test_an_answer_goes_on_from_any_of_its_tokens(
    cluster: RunningCluster, stub: InferenceStub, sampling: dict[str, float]
) -> None:
    """Another router that resumes the answer gives the same tokens, with bitwise equal logprobs."""
    request = pb.GenerateRequest(
        text="The three largest cities of Japan are", sampling_params=pb.SamplingParams(max_tokens=16, logprobs=2)
    )
    request.sampling_params.MergeFrom(pb.SamplingParams(**sampling))  # type: ignore[arg-type]
    messages = list(stub.Generate(request))
    token_ids = [token_id for message in messages for token_id in message.token_ids]
    logprobs = [each for message in messages for each in message.logprobs]
    assert len(token_ids) > 11
    request.worker_kind = messages[0].worker_kind
    assert request.worker_kind
    for cut in range(1, len(token_ids) + 1):
        del request.output_token_ids[:]
        request.output_token_ids.extend(token_ids[:cut])
        later = list(stub.Generate(request))
        assert [token_id for message in later for token_id in message.token_ids] == token_ids[cut:]
        assert later[0].offset == cut
        assert later[0].worker_kind == (request.worker_kind if cut < len(token_ids) else "")
        # A message may hold the tokens of several steps: then its text cannot be split by token.
        if not any(message.offset < cut < message.offset + len(message.token_ids) for message in messages):
            expected = "".join(message.text for message in messages if message.offset >= cut)
            assert "".join(message.text for message in later) == expected
        assert [each for message in later for each in message.logprobs] == logprobs[cut:]
        assert later[-1].usage.completion_tokens == len(token_ids)
        assert later[-1].finish_reason == messages[-1].finish_reason
    request.worker_kind = "another"
    call = stub.Generate(request)
    assert code_of_call(call) == grpc.StatusCode.UNAVAILABLE
    assert "of the kind that began this answer" in call.details()
    cluster.wait_until_at_rest()


SHARES = (
    (0.1, 0, 0), (0.5, 0.5, 0), (0.1, 0.1, 0.1), (0.5, 0.5, 0.9), (0, 0.5, 1), (1, 0, 0), (1, 0.1, 0), (1, 1, 0.5),
    (1, 0.5, 1), (0.9, 1, 1),
)  # fmt: skip
"""For each of three answers: the share of its messages that the client has."""


def test_several_answers_go_on_each_from_its_own_token(cluster: RunningCluster, stub: InferenceStub) -> None:
    """Some answers are complete, some begun, some not begun, in whatever order their messages came."""
    request = pb.GenerateRequest(
        text="Once upon a time there was a",
        sampling_params=pb.SamplingParams(n=3, max_tokens=20, temperature=0.9, seed=7, logprobs=1, stop=["-"]),
    )
    messages = list(stub.Generate(request))
    expected = [whole(messages, sequence) for sequence in range(3)]
    assert len({len(token_ids) for token_ids, *_ in expected}) > 1, "some end before others"
    own = [[message for message in messages if message.sequence == sequence] for sequence in range(3)]
    states = set()
    for shares in SHARES:
        del request.answers_so_far[:]
        kept = [share_of(said, share) for said, share in zip(own, shares, strict=True)]
        for sequence, said in enumerate(kept):
            if not said:
                continue
            kind = next(message.worker_kind for message in own[sequence] if message.worker_kind)
            so_far = request.answers_so_far.add(sequence=sequence, worker_kind=kind)
            so_far.is_complete = bool(said[-1].finish_reason)
            if not so_far.is_complete:
                so_far.token_ids.extend(token_id for message in said for token_id in message.token_ids)
        complete = sum(so_far.is_complete for so_far in request.answers_so_far)
        states.add((len(request.answers_so_far) - complete, complete))
        later = list(stub.Generate(request))
        whole_messages = [message for said in (*kept, later) for message in said]
        assert [whole(whole_messages, sequence) for sequence in range(3)] == expected
    assert {began for began, _ in states} >= {1, 2, 3}
    assert {ended for _, ended in states} >= {0, 1, 2}
    request.answers_so_far[0].worker_kind = "another"
    del request.answers_so_far[1:]
    request.answers_so_far[0].is_complete = False
    request.answers_so_far[0].token_ids[:] = [5]  # the whole answer but one token may have been there
    assert code_of_call(stub.Generate(request)) == grpc.StatusCode.UNAVAILABLE
    cluster.wait_until_at_rest()


def share_of(said: list[pb.GenerateResponse], share: float) -> list[pb.GenerateResponse]:
    """Return none or all of the messages; otherwise, of several, at least one and never the last."""
    if share in (0, 1) or len(said) == 1:
        return said if share else []
    return said[: min(max(int(share * len(said)), 1), len(said) - 1)]


def whole(
    messages: list[pb.GenerateResponse], sequence: int
) -> tuple[list[int], str, list[pb.TokenLogprobs], int, list[int]]:
    """Return an answer's tokens, text, logprobs, finish reason and lengths at its ends (one, if it ended once). Check
    that its messages are contiguous."""
    own = [message for message in messages if message.sequence == sequence]
    assert [message.offset for message in own] == [
        sum(len(each.token_ids) for each in own[:index]) for index in range(len(own))
    ]
    ends = [message.usage.completion_tokens for message in own if message.HasField("usage")]
    return (
        [token_id for message in own for token_id in message.token_ids],
        "".join(message.text for message in own),
        [each for message in own for each in message.logprobs],
        own[-1].finish_reason,
        ends,
    )


def test_a_deadline_that_passes(cluster: RunningCluster, stub: InferenceStub) -> None:
    assert code_of_call(stub.Generate(request_of(LONG, 800), timeout=1.5)) == grpc.StatusCode.DEADLINE_EXCEEDED
    cluster.wait_until_at_rest()


def test_more_than_the_pool_holds_waits_and_is_served(cluster: RunningCluster) -> None:
    """Four requests of 57 to 82 blocks on a pool of 200: some wait in the router, for seconds. A waiting request can be
    cancelled."""
    answers: list[int] = []

    def ask(start: int) -> None:
        with Client(cluster.address) as client:
            answer = client.generate([start, *LONG[1:]], max_tokens=400, temperature=0, ignore_eos=True)
        answers.append(len(answer.token_ids))

    threads = [threading.Thread(target=ask, args=(start,)) for start in range(200, 204)]
    for thread in threads:
        thread.start()
    with grpc.insecure_channel(cluster.address) as channel:
        waiting = InferenceStub(channel).Generate(request_of([999, *LONG[1:]], 4))
        with Client(cluster.address) as client:
            wait_until(lambda: client.status().num_queued_requests > 0, 20, "a request waits in the router")
        waiting.cancel()
    for thread in threads:
        thread.join()
    assert answers == [400] * 4
    cluster.wait_until_at_rest()


def test_what_is_freed_is_told_to_every_router(cluster: RunningCluster, stub: InferenceStub) -> None:
    """Otherwise a request that waits for memory in one router would not learn that another router's request has
    ended."""
    record = next(w.record for w in cluster.workers() if w.record.role == worker_pb.ROLE_DECODE)
    loads: list[worker_pb.WorkerLoad] = []
    has_heard_enough = threading.Event()

    def commands() -> Iterator[worker_pb.DecodeCommand]:
        hello = worker_pb.Hello(protocol_version=1, router_id="idle", incarnation=record.incarnation)
        yield worker_pb.DecodeCommand(hello=hello)
        has_heard_enough.wait(30)

    def listen(messages: Iterator[worker_pb.WorkerEvents]) -> None:
        loads.extend(message.load for message in messages)

    with grpc.insecure_channel(record.address) as channel:
        listener = threading.Thread(target=listen, args=(DecodeStub(channel).Session(commands()),))
        listener.start()
        wait_until(lambda: bool(loads), 10, "the session is open")
        assert list(stub.Generate(request_of(SHORT, 3)))
        try:
            wait_until(lambda: any(load.num_running for load in loads), 10, "the other router heard of the request")
            wait_until(lambda: not loads[-1].num_running, 10, "the other router heard of its end", lambda: loads[-1])
        finally:
            has_heard_enough.set()
            listener.join()


def test_a_request_id_in_use_is_refused(cluster: RunningCluster, stub: InferenceStub) -> None:
    call = stub.Generate(request_of(SHORT, 1500, "twice"))
    next(call)
    assert code_of_call(stub.Generate(request_of(SHORT, 5, "twice"))) == grpc.StatusCode.ALREADY_EXISTS
    call.cancel()
    cluster.wait_until_at_rest()


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("text", {"prompt": ""}),
        ("token_ids", {"prompt": [5] * 2048}),
        ("token_ids", {"prompt": [49152]}),
        ("sampling_params.temperature", {"prompt": "x", "temperature": -1}),
        ("sampling_params.top_p", {"prompt": "x", "top_p": 0}),
        ("sampling_params.top_p", {"prompt": "x", "top_p": 1.5}),
        ("sampling_params.max_tokens", {"prompt": "x", "max_tokens": 0}),
        ("sampling_params.n", {"prompt": "x", "n": 0}),
        ("sampling_params.n", {"prompt": "x", "n": 129}),
        ("sampling_params.stop", {"prompt": "x", "stop": ["a"] * 17}),
        ("sampling_params.stop[0]", {"prompt": "x", "stop": ["a" * 257]}),
        ("model", {"prompt": "x", "model": "another"}),
    ],
)
def test_bad_input_is_named_at_the_door(cluster: RunningCluster, field: str, arguments: dict[str, object]) -> None:
    with Client(cluster.address) as client, pytest.raises(InvalidRequest) as caught:
        client.generate_n(**{"n": 1, **arguments})  # type: ignore[arg-type]
    assert field in [violation.field for violation in caught.value.violations]


@pytest.mark.parametrize("num_mib", [5, 17])
def test_an_oversized_message_is_refused(cluster: RunningCluster, stub: InferenceStub, num_mib: int) -> None:
    """gRPC itself refuses the larger message."""
    text = "x" * (num_mib * 1024 * 1024)
    is_at_door = num_mib < 16
    code = grpc.StatusCode.INVALID_ARGUMENT if is_at_door else grpc.StatusCode.RESOURCE_EXHAUSTED
    assert code_of_call(stub.Generate(pb.GenerateRequest(text=text))) == code
    with Client(cluster.address) as client, pytest.raises(InvalidRequest) as caught:
        client.generate(text)
    assert [violation.field for violation in caught.value.violations] == (["text"] if is_at_door else [])


@pytest.mark.parametrize("temperature", [None, 0, 1e-45])
def test_no_parameter_takes_a_worker_down(cluster: RunningCluster, temperature: float | None) -> None:
    """A penalty that makes logits infinite once crashed the engine of every worker that tried the request."""
    pids = [worker.record.pid for worker in cluster.workers()]
    with Client(cluster.address) as client:
        for prompt in (SHORT, LONG):
            sampling = {"repetition_penalty": 1e-45, "temperature": temperature, "max_tokens": 3, "ignore_eos": True}
            assert len(client.generate(prompt, **sampling).token_ids) == 3  # type: ignore[arg-type]
    assert [worker.record.pid for worker in cluster.workers()] == pids


def pid_of(cluster: RunningCluster, role: worker_pb.Role) -> int:
    return next(worker.record.pid for worker in cluster.workers() if worker.record.role == role)


def wait_for_new_worker(cluster: RunningCluster, role: worker_pb.Role, old_pid: int) -> None:
    def is_back() -> bool:
        return any(w.record.role == role and w.record.pid != old_pid for w in cluster.workers())

    wait_until(is_back, 60, "the worker was started again")


def test_a_killed_prefill_worker_costs_the_client_nothing(cluster: RunningCluster, stub: InferenceStub) -> None:
    pid = pid_of(cluster, worker_pb.ROLE_PREFILL)
    asked = begin_prefill(cluster, stub, 6)
    os.kill(pid, signal.SIGKILL)
    received = [token for response in asked.answer.result(60) for token in response.token_ids]
    wait_for_new_worker(cluster, worker_pb.ROLE_PREFILL, pid)
    with Client(cluster.address) as client:
        assert received == client.generate(asked.prompt, max_tokens=6, temperature=0, ignore_eos=True).token_ids
    cluster.wait_until_at_rest()


def test_streams_of_the_only_decode_worker_wait_for_it_to_be_there_again_and_others_do_not(
    cluster: RunningCluster, stub: InferenceStub
) -> None:
    call = stub.Generate(request_of(SHORT, 500))
    received = [token for _ in range(5) for token in next(call).token_ids]
    pid = pid_of(cluster, worker_pb.ROLE_DECODE)
    hold_up(cluster.pid)  # else it starts another worker, perhaps before the router refuses a request
    try:
        os.kill(pid, signal.SIGKILL)
        with Client(cluster.address) as client:
            wait_until(lambda: not client.is_serving(), 20, "the router has noticed")
            with pytest.raises(NoWorker) as caught:
                client.generate(SHORT, max_tokens=5)
            assert caught.value.retry_after_s is not None
            with pytest.raises(InvalidRequest):  # checked against the context length that the worker had
                client.generate([5] * 2048, max_tokens=1)
    finally:
        os.kill(cluster.pid, signal.SIGCONT)
    received += [token for message in call for token in message.token_ids]
    wait_for_new_worker(cluster, worker_pb.ROLE_DECODE, pid)
    with Client(cluster.address) as client:
        whole = client.generate(SHORT, max_tokens=500, temperature=0, ignore_eos=True)
    assert received == whole.token_ids
    cluster.wait_until_at_rest()
