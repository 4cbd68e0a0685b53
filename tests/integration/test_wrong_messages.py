"""Wrong messages on every RPC between processes: an error that says what is wrong, and all goes on as before.

One real cluster; everything is sent straight to its workers. After each test the same processes run, every block is at
rest, and no log holds a traceback. After all of them a request gets the same answer as before.
"""

from __future__ import annotations

import itertools
import math
import queue
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
import xxhash
from clusters import RunningCluster, wait_until
from google.protobuf.message import DecodeError, Message

from engine.kv_cache import KV_ORDER
from kv_transfer.base import PROTOCOL_VERSION as KV_PROTOCOL_VERSION
from protos import tandem_inference_pb2 as inference_pb
from protos import tandem_kv_transfer_pb2 as kv_pb
from protos import tandem_worker_pb2 as pb
from rpc.channel import DEFAULT_MAX_MESSAGE_BYTES
from rpc.errors import InternalError, InvalidRequest, RequestExists, code_of
from rpc.session import PROTOCOL_VERSION
from tandem.client import Client

TIMEOUT_S = 15.0
MAX_MODEL_LEN = 256
NUM_BLOCKS = 40
BLOCK_SIZE = 16
PROMPT = [(13 * i) % 40_000 + 100 for i in range(40)]
FUZZ_S = 1.2
"""How long each kind of RPC is sent mutated messages."""

StatusCode = grpc.StatusCode
BAD, FAILED, GONE = StatusCode.INVALID_ARGUMENT, StatusCode.FAILED_PRECONDITION, StatusCode.ABORTED
GARBAGE = b"\xff\xff\xff\xff junk"
HUGE = 2**32 - 1


@dataclass
class Peers:
    """The cluster's two workers, and raw calls to them."""

    cluster: RunningCluster
    prefill: pb.WorkerRecord
    decode: pb.WorkerRecord
    client: Client
    router: grpc.Channel
    channels: dict[str, grpc.Channel] = field(default_factory=dict)

    def record_of(self, service: str) -> pb.WorkerRecord:
        return self.prefill if service == "Prefill" else self.decode

    def call(self, method: str, *messages: bytes | Message, worker: pb.WorkerRecord | None = None) -> bytes:
        """`messages` to a method that answers once, as they are. Raises `grpc.RpcError`."""
        service = method.partition("/")[0]
        channel = self.router if service == "Cluster" else self.channels[(worker or self.decode).worker_id]
        path, data = f"/tandem.v1.{method}", [as_bytes(message) for message in messages]
        if method == "KVTransfer/Push":
            return bytes(channel.stream_unary(path)(iter(data), timeout=TIMEOUT_S))
        return bytes(channel.unary_unary(path)(data[0], timeout=TIMEOUT_S))


class Session:
    """A raw Session stream that says only what it is told to."""

    def __init__(self, peers: Peers, service: str) -> None:
        self.record = peers.record_of(service)
        self.command_type = pb.PrefillCommand if service == "Prefill" else pb.DecodeCommand
        self._commands: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        method = peers.channels[self.record.worker_id].stream_stream(f"/tandem.v1.{service}/Session")
        self._call = method(iter(self._commands.get, None), timeout=TIMEOUT_S)
        self._events: list[pb.WorkerEvent] = []

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._commands.put(None)
        self._call.cancel()

    def send(self, *commands: bytes | Message) -> Session:
        for command in commands:
            self._commands.put(as_bytes(command))
        return self

    def say(self, **command: Any) -> Session:
        return self.send(self.command_type(**command))

    def hello(self, **changes: Any) -> Session:
        known = {"protocol_version": PROTOCOL_VERSION, "router_id": "r", "incarnation": self.record.incarnation}
        return self.say(hello=pb.Hello(**{**known, **changes}))

    def event(self) -> pb.WorkerEvent:
        """The next one. Raises `grpc.RpcError` where the session ends with an error."""
        while not self._events:
            self._events += pb.WorkerEvents.FromString(next(self._call)).events
        return self._events.pop(0)

    def events_until(self, request_id: str) -> list[pb.WorkerEvent]:
        events = [self.event()]
        while events[-1].request_id != request_id:
            events.append(self.event())
        return events

    def error(self) -> tuple[StatusCode, str]:
        """What the session ends with, whatever comes before."""
        return refusal(lambda: list(self._call))


def as_bytes(message: bytes | Message) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


@pytest.fixture(scope="module")
def peers(start_cluster: Callable[..., RunningCluster]) -> Iterator[Peers]:
    sizes = ("--max-model-len", str(MAX_MODEL_LEN), "--num-kv-blocks", str(NUM_BLOCKS))
    cluster = start_cluster(*sizes, "--block-size", str(BLOCK_SIZE), "--attention-backend", "torch")
    prefill, decode = sorted((w.record for w in cluster.workers()), key=lambda record: int(record.role))
    unbounded = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    with Client(cluster.address) as client, grpc.insecure_channel(cluster.address, options=unbounded) as router:
        peers = Peers(cluster, prefill, decode, client, router)
        answer = ask(client)
        for record in (prefill, decode):
            peers.channels[record.worker_id] = grpc.insecure_channel(record.address, options=unbounded)
        yield peers
        assert ask(client) == answer
        cluster.wait_until_at_rest()
        for channel in peers.channels.values():
            channel.close()


def ask(client: Client) -> list[int]:
    answer = client.generate(PROMPT, max_tokens=4, temperature=0, ignore_eos=True, timeout_s=TIMEOUT_S)
    return list(answer.token_ids)


@pytest.fixture(autouse=True)
def all_is_as_before(peers: Peers) -> Iterator[None]:
    yield
    assert {worker.record.pid for worker in peers.client.status().workers} == {peers.prefill.pid, peers.decode.pid}
    wait_until(lambda: is_at_rest(peers), TIMEOUT_S, "every block free or cached", peers.client.audit)
    log = peers.cluster.log.read_text()
    assert not {word for word in ("Traceback", "bug_id") if word in log}, log[-5000:]


def is_at_rest(peers: Peers) -> bool:
    audit = peers.client.audit()
    assert not audit.unreachable
    assert not any(worker.problems for worker in audit.workers)
    return all(w.blocks.num_free + w.blocks.num_cached == w.blocks.num_blocks for w in audit.workers)


# -- what is right, and how it is made wrong --------------------------------------------------------------------------


def sampling(**changes: Any) -> inference_pb.SamplingParams:
    right = {"max_tokens": 4, "temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0, "seed": 1}
    changed = {name: value for name, value in {**right, **changes}.items() if value is not None}
    return inference_pb.SamplingParams(**changed)


def engine_request(**changes: Any) -> pb.EngineRequest:
    right: dict[str, Any] = {"request_id": "a", "attempt": 1, "prompt_token_ids": PROMPT, "sampling_params": sampling()}
    return pb.EngineRequest(**{**right, **changes})


def grant_of(peers: Peers, **changes: Any) -> kv_pb.Grant:
    """A grant that the decode worker could have made for PROMPT, but has not."""
    right = {
        "worker_id": peers.decode.worker_id,
        "incarnation": peers.decode.incarnation,
        "kv_address": peers.decode.address,
        "grant_id": 10**9,
        "epoch": 10**9,
        "block_ids": [1, 2, 3],
        "lease_ms": 10_000,
    }
    return kv_pb.Grant(**{**right, **changes})


def connect_request(peers: Peers, **changes: Any) -> kv_pb.ConnectRequest:
    if different := changes.pop("part", ""):
        digest = peers.decode.compat_digest
        changes["compat_digest"] = re.sub(rf"(?<={different}=)[^;]*", "other", digest)
    layout = {
        "num_layers": 30,
        "num_blocks": NUM_BLOCKS,
        "block_size": BLOCK_SIZE,
        "num_kv_heads": 3,
        "head_dim": 64,
        "dtype": "bfloat16",
        "order": KV_ORDER,
        "digest": "xxh3_64",
    }
    right = {
        "protocol_version": KV_PROTOCOL_VERSION,
        "worker_id": "p",
        "incarnation": "i",
        "compat_digest": peers.decode.compat_digest,
        "transport": "grpc",
    }
    changed_layout = kv_pb.KVLayout(**{**layout, **changes.pop("layout", {})})
    return kv_pb.ConnectRequest(**{**right, **changes}, layout=changed_layout)


def outcome(call: Callable[[], object]) -> tuple[StatusCode, str]:
    try:
        call()
    except grpc.RpcError as error:
        return error.code(), error.details()  # type: ignore[attr-defined]
    return StatusCode.OK, ""


def refusal(call: Callable[[], object]) -> tuple[StatusCode, str]:
    code, details = outcome(call)
    assert code != StatusCode.OK
    return code, details


# -- sessions: what comes first ---------------------------------------------------------------------------------------

SESSIONS = pytest.mark.parametrize("service", ["Prefill", "Decode"])

Send = Callable[[Session], object]
FIRST: dict[str, tuple[Send, StatusCode, str]] = {
    "nothing": (lambda s: s.send(b""), FAILED, "must be hello"),
    "beat": (lambda s: s.say(beat=pb.Beat()), FAILED, "must be hello"),
    "cancel": (lambda s: s.say(cancel=pb.Cancel(request_id="a")), FAILED, "must be hello"),
    "work": (lambda s: s.send(work(s)), FAILED, "must be hello"),
    "unknown command": (lambda s: s.send(b"\xfa\x01\x00"), FAILED, "must be hello"),
    "garbage": (lambda s: s.send(GARBAGE), BAD, "cannot be read"),
    "truncated": (lambda s: s.send(hello_bytes(s)[:-3]), BAD, "cannot be read"),
    "no utf-8": (lambda s: s.send(hello_bytes(s, "\x01").replace(b"\x01", b"\xff")), BAD, "cannot be read"),
    "empty hello": (lambda s: s.say(hello=pb.Hello()), FAILED, "protocol_version 0"),
    "version of tomorrow": (lambda s: s.hello(protocol_version=PROTOCOL_VERSION + 1), FAILED, "protocol_version 2"),
    "version beyond": (lambda s: s.hello(protocol_version=HUGE), FAILED, f"protocol_version {HUGE}"),
    "no incarnation": (lambda s: s.hello(incarnation=""), FAILED, "incarnation ''"),
    "other incarnation": (lambda s: s.hello(incarnation="of old"), FAILED, "incarnation 'of old'"),
    "endless incarnation": (lambda s: s.hello(incarnation="x" * 1_000_000), FAILED, "incarnation 'xxx"),
    "endless name": (lambda s: s.hello(router_id="x" * 1_000_000), BAD, "router_id"),
    "beyond all bounds": (lambda s: s.hello(router_id="x" * (17 << 20)), StatusCode.RESOURCE_EXHAUSTED, "larger than"),
}


def hello_bytes(session: Session, router_id: str = "r") -> bytes:
    hello = pb.Hello(protocol_version=PROTOCOL_VERSION, incarnation=session.record.incarnation, router_id=router_id)
    return as_bytes(session.command_type(hello=hello))


def work(session: Session, **changes: Any) -> Message:
    if session.command_type is pb.PrefillCommand:
        return pb.PrefillCommand(prefill=pb.PrefillRequest(request=engine_request(**changes)))
    return pb.DecodeCommand(reserve=engine_request(**changes))


@SESSIONS
@pytest.mark.parametrize("name", FIRST)
def test_a_wrong_first_command(peers: Peers, service: str, name: str) -> None:
    send, code, says = FIRST[name]
    with Session(peers, service) as session:
        send(session)
        found, details = session.error()
    assert found == code, details
    assert says in details
    assert len(details) <= 600


LATER: dict[str, tuple[Send, StatusCode, str]] = {
    "nothing": (lambda s: s.send(b""), BAD, "command: must be one of"),
    "unknown command": (lambda s: s.send(b"\xfa\x01\x00"), BAD, "command: must be one of"),
    "second hello": (lambda s: s.hello(), BAD, "hello"),
    "garbage": (lambda s: s.send(GARBAGE), BAD, "cannot be read"),
    "truncated": (lambda s: s.send(as_bytes(work(s))[:-3]), BAD, "cannot be read"),
    "nameless work": (lambda s: s.send(work(s, request_id="")), BAD, "request_id"),
    "endless name": (lambda s: s.send(work(s, request_id="x" * 100_000)), BAD, "request_id"),
    "beyond all bounds": (
        lambda s: s.send(work(s, prompt_token_ids=[HUGE] * (4 << 20))),
        StatusCode.RESOURCE_EXHAUSTED,
        "larger than",
    ),
}


@SESSIONS
@pytest.mark.parametrize("name", LATER)
def test_a_wrong_later_command(peers: Peers, service: str, name: str) -> None:
    send, code, says = LATER[name]
    with Session(peers, service) as session:
        session.hello()
        send(session)
        found, details = session.error()
    assert found == code, details
    assert says in details


@SESSIONS
def test_commands_of_the_other_role_are_none(peers: Peers, service: str) -> None:
    other = "Decode" if service == "Prefill" else "Prefill"
    assert refusal(lambda: peers.call(f"{other}/Session", b"", worker=peers.record_of(service))) == (
        StatusCode.UNIMPLEMENTED,
        "Method not found!",
    )


@SESSIONS
def test_cancels_of_what_is_not_there_and_cancels_again_change_nothing(peers: Peers, service: str) -> None:
    with Session(peers, service) as session:
        session.hello()
        for request_id, attempt in (("nobody", 1), ("a", HUGE), ("", 0), ("x" * 1_000_000, 1), ("a", 1), ("a", 1)):
            session.say(cancel=pb.Cancel(request_id=request_id, attempt=attempt)).say(beat=pb.Beat())
        session.send(work(session, prompt_token_ids=[]))
        assert session.event().failed.code == code_of(InvalidRequest())


@SESSIONS
def test_an_attempt_that_is_open_is_not_opened_again(peers: Peers, service: str) -> None:
    """The first may have ended, by its grant that is none, when the second comes: then it is tried again."""
    with Session(peers, service) as session:
        session.hello()
        for number in range(1, 51):
            request = engine_request(attempt=number)
            if service == "Prefill":
                prefill = pb.PrefillRequest(request=request, grant=grant_of(peers))
                session.say(prefill=prefill).say(prefill=prefill)
            else:
                session.say(generate=request).say(reserve=request)
            refused = [failed for failed in failures_of(session, number, service) if "is open" in failed.message]
            if refused:
                break
    assert [(failed.code, failed.can_retry) for failed in refused] == [(code_of(RequestExists()), False)]
    assert f"'a', attempt {number}" in refused[0].message


def failures_of(session: Session, attempt: int, service: str) -> list[pb.Failed]:
    """What is said to have failed of two commands: both of a prefill worker, the second alone of a decode worker."""
    failures: list[pb.Failed] = []
    while len(failures) < (2 if service == "Prefill" else 1):
        event = session.event()
        failures += [event.failed] if event.HasField("failed") and event.attempt == attempt else []
    return failures


# -- sessions: work that cannot be done -------------------------------------------------------------------------------

NAN, INF = math.nan, math.inf
WORK: dict[str, dict[str, Any]] = {
    "prompt_token_ids: none": {"prompt_token_ids": []},
    "prompt_token_ids: none, but an answer": {"prompt_token_ids": [], "output_token_ids": [5]},
    "prompt_token_ids: as long as the context": {"prompt_token_ids": [5] * MAX_MODEL_LEN},
    "prompt_token_ids: longer than the pool": {"prompt_token_ids": [5] * (BLOCK_SIZE * NUM_BLOCKS + 1)},
    "prompt_token_ids: a million": {"prompt_token_ids": [5] * 1_000_000},
    "prompt_token_ids: with the answer too long": {
        "prompt_token_ids": [5] * (MAX_MODEL_LEN - 2),
        "output_token_ids": [5, 5],
        "sampling_params": sampling(max_tokens=9),
    },
    "prompt_token_ids: one beyond the vocabulary": {"prompt_token_ids": [*PROMPT, 49_152]},
    "prompt_token_ids: the largest number": {"prompt_token_ids": [HUGE, *PROMPT]},
    "output_token_ids: one beyond the vocabulary": {
        "output_token_ids": [49_152],
        "sampling_params": sampling(max_tokens=9),
    },
    "output_token_ids: as many as there may be": {"output_token_ids": [5] * 4},
    "max_tokens: no parameters": {"sampling_params": None},
    **{
        f"{name}: {value}": {"sampling_params": sampling(**{name: value})}
        for name, values in {
            "max_tokens": (None, 0),
            "min_tokens": (5, HUGE),
            "temperature": (None, -1, NAN, INF),
            "top_p": (None, 0, -0.5, 1.5, NAN),
            "top_k": (-2, -(2**31)),
            "min_p": (-0.5, 1.5, NAN),
            "presence_penalty": (2.5, -INF, NAN),
            "frequency_penalty": (-2.5, INF, NAN),
            "repetition_penalty": (None, 0, -1, 2.5, NAN),
            "seed": (None,),
            "stop_token_ids": (range(65), [49_152], [HUGE]),
            "logit_bias": ({5: NAN}, {5: 101}, {49_152: 1}, {HUGE: 1}, dict.fromkeys(range(1025), 1)),
        }.items()
        for value in values
    },
}
COMMANDS = pytest.mark.parametrize("command", ["prefill", "reserve", "generate"])


def say_work(session: Session, peers: Peers, command: str, request: pb.EngineRequest) -> None:
    if command != "prefill":
        session.say(**{command: request})
        return
    num_blocks = -(-(len(request.prompt_token_ids) + len(request.output_token_ids)) // BLOCK_SIZE)
    session.say(prefill=pb.PrefillRequest(request=request, grant=grant_of(peers, block_ids=range(num_blocks))))


@COMMANDS
def test_work_that_cannot_be_done_names_its_field(peers: Peers, command: str) -> None:
    """All in one session, which goes on."""
    with Session(peers, "Prefill" if command == "prefill" else "Decode") as session:
        session.hello()
        for attempt, (name, changes) in enumerate(WORK.items()):
            request = engine_request(attempt=attempt, **changes)
            if command == "prefill" and len(request.prompt_token_ids) > NUM_BLOCKS * BLOCK_SIZE:
                continue  # no grant can have so many blocks: see there
            say_work(session, peers, command, request)
            event = session.event()
            assert event.attempt == attempt
            assert event.failed.code == code_of(InvalidRequest()), (name, event)
            assert name.partition(":")[0] in event.failed.message, (name, event)
            assert not event.failed.can_retry


ODD_BUT_RIGHT: dict[str, dict[str, Any]] = {
    "endless": {"max_tokens": HUGE, "stop_token_ids": range(64)},
    "almost cold": {"temperature": 1e-45},
    "hot": {"temperature": 3e38},
    "hardly a nucleus": {"temperature": 1, "top_p": 1e-45, "min_p": 1},
    "tiny penalty": {"repetition_penalty": 1e-45},
    "banned": {"logit_bias": dict.fromkeys(range(1024), -100)},
    "lowest seed": {"temperature": 1, "seed": -(2**63), "top_k": 2**31 - 1},
}


@pytest.mark.parametrize("name", ODD_BUT_RIGHT)
def test_numbers_at_their_bounds_are_served(peers: Peers, name: str) -> None:
    with Session(peers, "Decode") as session:
        session.hello().say(generate=engine_request(sampling_params=sampling(**ODD_BUT_RIGHT[name])))
        for _ in range(4):
            event = session.event()
            assert event.HasField("tokens"), event


GRANTS: dict[str, tuple[dict[str, Any] | None, StatusCode, str]] = {
    "none": (None, BAD, "grant must have 3 blocks"),
    "too few blocks": ({"block_ids": [1, 2]}, BAD, "grant must have 3 blocks for 40 tokens, has 2"),
    "too many blocks": ({"block_ids": range(1000)}, BAD, "grant must have 3 blocks for 40 tokens, has 1000"),
    "a block twice": ({"block_ids": [1, 2, 1]}, BAD, "each block once"),
    "a block beyond the pool": ({"block_ids": [1, 2, NUM_BLOCKS]}, BAD, "blocks beyond the 40"),
    "a block beyond everything": ({"block_ids": [1, 2, HUGE]}, BAD, "blocks beyond the 40"),
    "more cached than there are": ({"num_cached_blocks": 4}, BAD, "num_cached_blocks"),
    "far more cached": ({"num_cached_blocks": HUGE}, BAD, "num_cached_blocks"),
    "no lease": ({"lease_ms": 0}, BAD, "lease_ms"),
    "endless lease": ({"lease_ms": HUGE}, BAD, "lease_ms"),
    "no worker": ({"worker_id": ""}, BAD, "a worker"),
    "endless worker": ({"worker_id": "x" * 1_000_000}, BAD, "a worker"),
    "other worker": ({"worker_id": "d-9"}, GONE, "not 'd-9'"),
    "no incarnation": ({"incarnation": ""}, BAD, "an incarnation"),
    "other incarnation": ({"incarnation": "of old"}, GONE, "'of old'"),
    "no address": ({"kv_address": ""}, BAD, "address"),
    "endless address": ({"kv_address": "x" * 1_000_000}, BAD, "address"),
    "address that is none": ({"kv_address": "nonsense"}, BAD, "kv_address"),
    "address with a zero": ({"kv_address": "127.0.0.1\0:1"}, BAD, "kv_address"),
    "port beyond": ({"kv_address": "127.0.0.1:99999"}, BAD, "kv_address"),
    "address of another scheme": ({"kv_address": "unix:///tmp/nobody"}, BAD, "kv_address"),
    "address of nobody": ({"kv_address": "127.0.0.1:1"}, StatusCode.UNAVAILABLE, ""),
    "grant that was never made": ({}, GONE, "is gone"),
    "grant of the last number": ({"grant_id": 2**64 - 1, "epoch": 2**64 - 1}, GONE, "is gone"),
}


@pytest.mark.parametrize("name", GRANTS)
def test_prefill_under_a_wrong_grant(peers: Peers, name: str) -> None:
    changes, code, says = GRANTS[name]
    grant = None if changes is None else grant_of(peers, **changes)
    with Session(peers, "Prefill") as session:
        session.hello().say(prefill=pb.PrefillRequest(request=engine_request(), grant=grant))
        event = session.event()
        while not event.HasField("failed"):
            event = session.event()
    assert event.failed.code == code.value[0], event
    assert says in event.failed.message


def test_prefill_for_a_worker_that_takes_no_kv(peers: Peers) -> None:
    with Session(peers, "Prefill") as session:
        grant = grant_of(peers, kv_address=peers.prefill.address)
        session.hello().say(prefill=pb.PrefillRequest(request=engine_request(), grant=grant))
        failed = session.event().failed
    assert (failed.code, failed.can_retry) == (StatusCode.UNAVAILABLE.value[0], True)
    assert "UNIMPLEMENTED" in failed.message


# -- KV transfers -----------------------------------------------------------------------------------------------------


@pytest.fixture
def granted(peers: Peers) -> Iterator[tuple[Session, kv_pb.Grant]]:
    """A session in which the decode worker has made a grant for a prompt of 40 tokens, of which it has none."""
    with Session(peers, "Decode") as session:
        session.hello().say(reserve=engine_request(prompt_token_ids=[next(_fresh_ids), *PROMPT[1:]]))
        yield session, session.event().granted


_fresh_ids = itertools.count(45_000)
BLOCK_BYTES = 2 * 3 * BLOCK_SIZE * 64 * 2


def chunk_of(grant: kv_pb.Grant, **changes: Any) -> kv_pb.PushChunk:
    right = {
        "grant_id": grant.grant_id,
        "epoch": grant.epoch,
        "incarnation": grant.incarnation,
        "layer": 1,
        "block_ids": [grant.block_ids[-1]],
        "data": b"\xff" * BLOCK_BYTES,
    }
    return kv_pb.PushChunk(**{**right, **changes})


def commit_of(peers: Peers, grant: kv_pb.Grant, **changes: Any) -> kv_pb.CommitRequest:
    """Of what the blocks hold, whatever it is: the decode worker itself is asked which digests are right."""
    right = {
        "grant_id": grant.grant_id,
        "epoch": grant.epoch,
        "incarnation": grant.incarnation,
        "num_prompt_tokens": len(PROMPT),
        "digests": zero_digests(30 * (len(grant.block_ids) - grant.num_cached_blocks)),
        "first_token_id": 5,
    }
    return kv_pb.CommitRequest(**{**right, **changes})


def zero_digests(num_blocks: int) -> bytes:
    return xxhash.xxh3_64_intdigest(bytes(BLOCK_BYTES)).to_bytes(8, "little") * num_blocks


def push_zeros(peers: Peers, grant: kv_pb.Grant) -> None:
    for layer in range(30):
        data = bytes(BLOCK_BYTES * len(grant.block_ids))
        peers.call("KVTransfer/Push", chunk_of(grant, layer=layer, block_ids=grant.block_ids, data=data))


CHUNKS: dict[str, tuple[dict[str, Any], str]] = {
    "layer beyond": ({"layer": 30}, "layer 30"),
    "layer far beyond": ({"layer": HUGE}, f"layer {HUGE}"),
    "block beyond the pool": ({"block_ids": [NUM_BLOCKS]}, f"block {NUM_BLOCKS}"),
    "block far beyond": ({"block_ids": [HUGE]}, f"block {HUGE}"),
    "no data": ({"data": b""}, "not 0"),
    "a byte less": ({"data": bytes(BLOCK_BYTES - 1)}, f"not {BLOCK_BYTES - 1}"),
    "a byte more": ({"data": bytes(BLOCK_BYTES + 1)}, f"not {BLOCK_BYTES + 1}"),
    "a million blocks": ({"block_ids": [1] * 1_000_000}, "1000000 blocks are"),
    "data for no block": ({"block_ids": []}, "must be the first"),
    "nothing": ({"block_ids": [], "data": b""}, "must be the first"),
}


@pytest.mark.parametrize("name", CHUNKS)
def test_wrong_chunks(peers: Peers, granted: tuple[Session, kv_pb.Grant], name: str) -> None:
    changes, says = CHUNKS[name]
    grant = granted[1]
    code, details = refusal(lambda: peers.call("KVTransfer/Push", chunk_of(grant), chunk_of(grant, **changes)))
    assert code == BAD
    assert says in details
    # The grant lives on, and what a block is repeated or overwritten with counts until it is committed.
    push_zeros(peers, grant)
    push_zeros(peers, grant)
    answer = kv_pb.CommitResponse.FromString(peers.call("KVTransfer/Commit", commit_of(peers, grant)))
    assert answer.outcome == kv_pb.CommitResponse.COMMITTED


STRAYS: dict[str, dict[str, Any]] = {
    "grant never made": {"grant_id": 10**9},
    "grant zero": {"grant_id": 0},
    "grant of the last number": {"grant_id": 2**64 - 1},
    "epoch zero": {"epoch": 0},
    "epoch of the last number": {"epoch": 2**64 - 1},
    "no incarnation": {"incarnation": ""},
    "other incarnation": {"incarnation": "of old"},
    "endless incarnation": {"incarnation": "x" * 1_000_000},
}


@pytest.mark.parametrize("name", STRAYS)
def test_what_belongs_to_no_grant(peers: Peers, granted: tuple[Session, kv_pb.Grant], name: str) -> None:
    grant = granted[1]
    push = peers.call("KVTransfer/Push", *[chunk_of(grant, **STRAYS[name])] * 3)
    assert kv_pb.PushSummary.FromString(push).num_late == 3
    commit = peers.call("KVTransfer/Commit", commit_of(peers, grant, **STRAYS[name]))
    assert kv_pb.CommitResponse.FromString(commit).outcome == kv_pb.CommitResponse.GRANT_GONE
    named = {"grant_id": grant.grant_id, "epoch": grant.epoch, "incarnation": grant.incarnation}
    peers.call("KVTransfer/Abandon", kv_pb.AbandonRequest(**{**named, **STRAYS[name]}))
    push = peers.call("KVTransfer/Push", chunk_of(grant))
    assert kv_pb.PushSummary.FromString(push).num_written == 1


COMMITS: dict[str, tuple[dict[str, Any], str]] = {
    "no digests": ({"digests": b""}, "not 0"),
    "a byte less": ({"digests": bytes(8 * 30 * 3 - 1)}, "not 719"),
    "a block more": ({"digests": bytes(8 * 30 * 4)}, "not 960"),
    "a million digests": ({"digests": bytes(8_000_000)}, "not 8000000"),
    "no prompt": ({"num_prompt_tokens": 0}, "0 prompt tokens"),
    "prompt beyond the blocks": ({"num_prompt_tokens": 49}, "49 prompt tokens"),
    "endless prompt": ({"num_prompt_tokens": HUGE}, f"{HUGE} prompt tokens"),
}


@pytest.mark.parametrize("name", COMMITS)
def test_wrong_commits(peers: Peers, granted: tuple[Session, kv_pb.Grant], name: str) -> None:
    changes, says = COMMITS[name]
    grant = granted[1]
    push_zeros(peers, grant)
    code, details = refusal(lambda: peers.call("KVTransfer/Commit", commit_of(peers, grant, **changes)))
    assert code == BAD
    assert says in details
    answer = kv_pb.CommitResponse.FromString(peers.call("KVTransfer/Commit", commit_of(peers, grant)))
    assert answer.outcome == kv_pb.CommitResponse.COMMITTED


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"first_token_id": 49_152}, "token_id"),
        ({"first_token_id": HUGE}, "token_id"),
        ({"num_prompt_tokens": 39}, "num_tokens must be 40, is 39"),
        ({"num_prompt_tokens": 48}, "num_tokens must be 40, is 48"),
    ],
    ids=str,
)
def test_a_commit_of_something_else_ends_the_attempt(
    peers: Peers, granted: tuple[Session, kv_pb.Grant], changes: dict[str, Any], says: str
) -> None:
    """Nothing runs on it: both sides are told what is wrong, and the blocks are free at once."""
    session, grant = granted
    push_zeros(peers, grant)
    code, details = refusal(lambda: peers.call("KVTransfer/Commit", commit_of(peers, grant, **changes)))
    assert (code, says in details) == (BAD, True), details
    failed = session.event().failed
    assert (failed.code, failed.can_retry) == (code_of(InvalidRequest()), True)
    assert says in failed.message
    peers.cluster.wait_until_at_rest()
    again = peers.call("KVTransfer/Commit", commit_of(peers, grant))
    assert kv_pb.CommitResponse.FromString(again).outcome == kv_pb.CommitResponse.GRANT_GONE


def test_a_commit_before_its_writes_and_a_commit_again(peers: Peers, granted: tuple[Session, kv_pb.Grant]) -> None:
    session, grant = granted
    peers.call("KVTransfer/Push", chunk_of(grant))
    early = kv_pb.CommitResponse.FromString(peers.call("KVTransfer/Commit", commit_of(peers, grant)))
    assert early.outcome == kv_pb.CommitResponse.MISMATCH
    assert grant.block_ids[-1] in early.mismatched_blocks
    push_zeros(peers, grant)
    for _ in range(2):
        answer = kv_pb.CommitResponse.FromString(peers.call("KVTransfer/Commit", commit_of(peers, grant)))
        assert answer.outcome == kv_pb.CommitResponse.COMMITTED
    late = kv_pb.PushSummary.FromString(peers.call("KVTransfer/Push", chunk_of(grant)))
    assert (late.num_written, late.num_late) == (0, 1)
    assert [session.event().tokens.index for _ in range(3)] == [1, 2, 3]


def test_after_a_cancel_nothing_of_the_grant_counts(peers: Peers, granted: tuple[Session, kv_pb.Grant]) -> None:
    session, grant = granted
    session.say(cancel=pb.Cancel(request_id="a", attempt=1)).send(work(session, attempt=2, prompt_token_ids=[]))
    assert session.event().failed.code == code_of(InvalidRequest())
    late = kv_pb.PushSummary.FromString(peers.call("KVTransfer/Push", chunk_of(grant)))
    assert (late.num_written, late.num_late) == (0, 1)
    answer = kv_pb.CommitResponse.FromString(peers.call("KVTransfer/Commit", commit_of(peers, grant)))
    assert answer.outcome == kv_pb.CommitResponse.GRANT_GONE


CONNECTS: dict[str, tuple[dict[str, Any], str]] = {
    "version": ({"protocol_version": KV_PROTOCOL_VERSION + 1}, "protocol_version: 1 != 2"),
    "no version": ({"protocol_version": 0}, "protocol_version: 1 != 0"),
    "no digest": ({"compat_digest": ""}, "compat_digest: 'kv_format_version=1"),
    "digest of other parts": ({"compat_digest": "weights=1"}, "!= 'weights=1'"),
    **{
        f"other {part}": ({"part": part}, f"compat_digest: {part} '")
        for part in ("model", "weights", "dtype", "block_size", "kv_order", "eos_token_ids", "kv_format_version")
    },
    "endless digest": ({"compat_digest": "x" * 1_000_000}, "compat_digest"),
    "transport": ({"transport": "pigeon"}, "transport: grpc is served, not 'pigeon'"),
    "endless transport": ({"transport": "x" * 1_000_000}, "transport: grpc is served"),
    "layers": ({"layout": {"num_layers": 29}}, "num_layers: 30 != 29"),
    "no layers": ({"layout": {"num_layers": 0}}, "layout: num_layers"),
    "layers beyond": ({"layout": {"num_layers": HUGE}}, "layout: num_layers"),
    "block size": ({"layout": {"block_size": 8}}, "block_size: 16 != 8"),
    "heads": ({"layout": {"num_kv_heads": 9}}, "num_kv_heads: 3 != 9"),
    "head_dim": ({"layout": {"head_dim": 128}}, "head_dim: 64 != 128"),
    "dtype": ({"layout": {"dtype": "float16"}}, "dtype: 'bfloat16' != 'float16'"),
    "dtype that is none": ({"layout": {"dtype": "x" * 1_000_000}}, "layout: dtype"),
    "order": ({"layout": {"order": "layer block slot kv head dim"}}, "order: "),
    "digest of blocks": ({"layout": {"digest": "md5"}}, "layout: digest"),
    "pool beyond": ({"layout": {"num_blocks": HUGE}}, "layout: num_blocks"),
}


@pytest.mark.parametrize("name", CONNECTS)
def test_peers_that_differ_are_told_in_what(peers: Peers, name: str) -> None:
    changes, says = CONNECTS[name]
    code, details = refusal(lambda: peers.call("KVTransfer/Connect", connect_request(peers, **changes)))
    assert code == FAILED
    assert says in details
    assert len(details) < 600
    assert kv_pb.ConnectResponse.FromString(peers.call("KVTransfer/Connect", connect_request(peers))).HasField("grpc")


# -- all methods ------------------------------------------------------------------------------------------------------

ASKED_ONCE = [
    *(f"KVTransfer/{name}" for name in ("Connect", "Push", "Commit", "Abandon")),
    *(f"Worker/{name}" for name in ("GetStatus", "Drain", "Audit")),
    *(f"Cluster/{name}" for name in ("GetStatus", "Audit")),
]


@pytest.mark.parametrize("method", ASKED_ONCE)
def test_bytes_that_are_no_message(peers: Peers, method: str) -> None:
    for data in (GARBAGE, b"\x0a\xff\xff\xff\xff\x0f", b"\x0c", bytes(range(256))):
        code, details = refusal(lambda data=data: peers.call(method, data))  # type: ignore[misc]
        assert code == BAD
        assert "cannot be read" in details


def test_chunks_that_stop_in_the_middle(peers: Peers, granted: tuple[Session, kv_pb.Grant]) -> None:
    grant = granted[1]
    data = as_bytes(chunk_of(grant))
    assert refusal(lambda: peers.call("KVTransfer/Push", data, data[:-7]))[0] == BAD
    assert kv_pb.PushSummary.FromString(peers.call("KVTransfer/Push")) == kv_pb.PushSummary()


@pytest.mark.parametrize("method", ["KVTransfer/Push", "KVTransfer/Commit", "Worker/Audit", "Cluster/Audit"])
def test_messages_beyond_all_bounds(peers: Peers, method: str) -> None:
    """Cut off by gRPC, which is one for all methods of a process, before anything reads them."""
    size = (4 if method.startswith("Cluster") else 1) * DEFAULT_MAX_MESSAGE_BYTES + (1 << 20)
    code, details = refusal(lambda: peers.call(method, b"\xfa\x01" + varint(size) + bytes(size)))
    assert (code, "larger than max" in details) == (StatusCode.RESOURCE_EXHAUSTED, True), details


def varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


# -- mutations --------------------------------------------------------------------------------------------------------


def mutated(dice: random.Random, data: bytes) -> bytes:
    """`data` with one to four bits flipped, pieces cut, repeated, or replaced."""
    changed = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        start, end = sorted(dice.choices(range(len(changed) + 1), k=2))
        match dice.randrange(6):
            case 0 | 1 | 2 if changed:
                changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
            case 3:
                del changed[start : min(end, start + 8)]
            case 4:
                changed[start:start] = changed[start : min(end, start + 64)]
            case _:
                changed[start : start + 4] = dice.randbytes(4)
    return bytes(changed)


@pytest.mark.parametrize("method", ASKED_ONCE)
def test_mutated_messages(peers: Peers, granted: tuple[Session, kv_pb.Grant], method: str) -> None:
    dice, grant = random.Random(method), granted[1]
    named = {"grant_id": grant.grant_id, "epoch": grant.epoch, "incarnation": grant.incarnation}
    right = {
        "KVTransfer/Connect": connect_request(peers),
        "KVTransfer/Push": chunk_of(grant),
        "KVTransfer/Commit": commit_of(peers, grant, first_token_id=HUGE),
        "KVTransfer/Abandon": kv_pb.AbandonRequest(**named),
    }
    seed = as_bytes(right.get(method, b"\x0a\x03abc"))
    head = min(len(seed), 100)  # where the fields are: most of a chunk is data
    may = {StatusCode.OK, BAD, FAILED, GONE}
    num_sent, until_s = 0, time.monotonic() + FUZZ_S / 2
    while time.monotonic() < until_s:
        data = mutated(dice, seed[:head]) + seed[head:]
        if method == "Worker/Drain" and parses(pb.DrainRequest(), data):
            continue  # that would be right
        num_sent += 1
        code, details = outcome(lambda data=data: peers.call(method, data))  # type: ignore[misc]
        assert code in may, (code, details, data)
    assert num_sent >= 20


def parses(message: Message, data: bytes) -> bool:
    try:
        message.ParseFromString(data)
    except DecodeError:
        return False
    return True


@COMMANDS
def test_mutated_sessions(peers: Peers, command: str) -> None:
    service = "Prefill" if command == "prefill" else "Decode"
    dice = random.Random(command)
    num_sessions, until_s = 0, time.monotonic() + FUZZ_S
    while time.monotonic() < until_s:
        num_sessions += 1
        with Session(peers, service) as session:
            if num_sessions % 8:
                session.hello()
            else:
                session.send(mutated(dice, hello_bytes(session)))
            for attempt in range(4):
                request = engine_request(attempt=attempt, prompt_token_ids=PROMPT[:20], output_token_ids=[7, 8])
                if command == "prefill":
                    prefill = pb.PrefillRequest(request=request, grant=grant_of(peers, block_ids=[1, 2]))
                    right = as_bytes(pb.PrefillCommand(prefill=prefill))
                else:
                    right = as_bytes(pb.DecodeCommand(**{command: request}))
                session.send(mutated(dice, right))
            session.send(work(session, request_id="last", prompt_token_ids=[]))
            events: list[pb.WorkerEvent] = []
            code, details = outcome(lambda e=events, s=session: e.extend(s.events_until("last")))  # type: ignore[misc]
        assert code in {StatusCode.OK, BAD, FAILED}, (code, details)
        assert not any(event.failed.code == code_of(InternalError()) for event in events), events
    assert num_sessions >= 10
