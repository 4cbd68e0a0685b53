"""Peers that can send anything: raw calls and sessions, and correct messages that tests make wrong."""

from __future__ import annotations

import queue
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
import xxhash
from clusters import RunningCluster
from google.protobuf.message import Message

from engine.kv_cache import KV_ORDER
from kv_transfer.base import PROTOCOL_VERSION as KV_PROTOCOL_VERSION
from protos import tandem_inference_pb2 as inference_pb
from protos import tandem_kv_transfer_pb2 as kv_pb
from protos import tandem_worker_pb2 as pb
from rpc.session import PROTOCOL_VERSION
from tandem.client import Client

TIMEOUT_S = 15.0
MAX_MODEL_LEN = 256
NUM_BLOCKS = 40
BLOCK_SIZE = 16
PROMPT = [(13 * i) % 40_000 + 100 for i in range(40)]
FUZZ_S = 1.2
"""How long each kind of RPC gets mutated messages."""

StatusCode = grpc.StatusCode
BAD, FAILED, GONE = StatusCode.INVALID_ARGUMENT, StatusCode.FAILED_PRECONDITION, StatusCode.ABORTED
GARBAGE = b"\xff\xff\xff\xff junk"
HUGE = 2**32 - 1
SESSIONS = pytest.mark.parametrize("service", ["Prefill", "Decode"])
COMMANDS = pytest.mark.parametrize("command", ["prefill", "reserve", "generate"])


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
        """Send `messages` unchanged to a method that answers once. Raises `grpc.RpcError`."""
        service = method.partition("/")[0]
        channel = self.router if service == "Cluster" else self.channels[(worker or self.decode).worker_id]
        path, data = f"/tandem.v1.{method}", [as_bytes(message) for message in messages]
        if method == "KVTransfer/Push":
            return bytes(channel.stream_unary(path)(iter(data), timeout=TIMEOUT_S))
        return bytes(channel.unary_unary(path)(data[0], timeout=TIMEOUT_S))


class Session:
    """A raw Session stream that sends only what a test tells it to."""

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
        """Return the next event. Raises `grpc.RpcError` if the session ends with an error."""
        while not self._events:
            self._events += pb.WorkerEvents.FromString(next(self._call)).events
        return self._events.pop(0)

    def events_until(self, request_id: str) -> list[pb.WorkerEvent]:
        events = [self.event()]
        while events[-1].request_id != request_id:
            events.append(self.event())
        return events

    def error(self) -> tuple[StatusCode, str]:
        """Return the error that ends the session, whatever comes before."""
        return refusal(lambda: list(self._call))


def as_bytes(message: bytes | Message) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


def ask(client: Client) -> list[int]:
    answer = client.generate(PROMPT, max_tokens=4, temperature=0, ignore_eos=True, timeout_s=TIMEOUT_S)
    return list(answer.token_ids)


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
        changes["compat_digest"] = re.sub(rf"(?<=\b{different}=)[^;]*", "other", digest)
    layout = {
        "num_layers": 30,
        "num_blocks": NUM_BLOCKS,
        "block_size": BLOCK_SIZE,
        "num_kv_heads": 3,
        "head_dim": 64,
        "dtype": "bfloat16",
        "order": KV_ORDER,
        "digest": "xxh3_64",
        "num_parts": 2,
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


def hello_bytes(session: Session, router_id: str = "r") -> bytes:
    hello = pb.Hello(protocol_version=PROTOCOL_VERSION, incarnation=session.record.incarnation, router_id=router_id)
    return as_bytes(session.command_type(hello=hello))


def work(session: Session, **changes: Any) -> Message:
    if session.command_type is pb.PrefillCommand:
        return pb.PrefillCommand(prefill=pb.PrefillRequest(request=engine_request(**changes)))
    return pb.DecodeCommand(reserve=engine_request(**changes))


def say_work(session: Session, peers: Peers, command: str, request: pb.EngineRequest) -> None:
    if command != "prefill":
        session.say(**{command: request})
        return
    num_blocks = -(-(len(request.prompt_token_ids) + len(request.output_token_ids)) // BLOCK_SIZE)
    session.say(prefill=pb.PrefillRequest(request=request, grant=grant_of(peers, block_ids=range(num_blocks))))


# -- messages under a grant


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
    """Return a commit with the digests of blocks of zeros (see `push_zeros`)."""
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
