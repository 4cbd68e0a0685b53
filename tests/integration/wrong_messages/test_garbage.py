"""Bytes that are no message, oversized messages, and correct messages with a few bits changed."""

from __future__ import annotations

import random
import time

import pytest
from google.protobuf.message import DecodeError, Message

from protos import tandem_kv_transfer_pb2 as kv_pb
from protos import tandem_worker_pb2 as pb
from rpc.channel import DEFAULT_MAX_MESSAGE_BYTES
from rpc.errors import InternalError, code_of
from wrong_messages.saying import (
    BAD,
    COMMANDS,
    FAILED,
    FUZZ_S,
    GARBAGE,
    GONE,
    HUGE,
    PROMPT,
    Peers,
    Session,
    StatusCode,
    as_bytes,
    chunk_of,
    commit_of,
    connect_request,
    engine_request,
    grant_of,
    hello_bytes,
    outcome,
    refusal,
    work,
)

ASKED_ONCE = [
    *(f"KVTransfer/{name}" for name in ("Connect", "Push", "Commit", "Abandon")),
    *(f"Worker/{name}" for name in ("GetStatus", "Drain", "Audit", "Profile")),
    *(f"Cluster/{name}" for name in ("GetStatus", "Audit", "Profile")),
]


@pytest.mark.one_in(2)
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
    """gRPC itself refuses them before anything reads them; its limit holds for all methods of a process."""
    size = (4 if method.startswith("Cluster") else 1) * DEFAULT_MAX_MESSAGE_BYTES + (1 << 20)
    code, details = refusal(lambda: peers.call(method, b"\xfa\x01" + varint(size) + bytes(size)))
    assert (code, "larger than max" in details) == (StatusCode.RESOURCE_EXHAUSTED, True), details


def varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def mutated(dice: random.Random, data: bytes) -> bytes:
    """Apply one to four random changes to `data`: flip a bit, or cut, repeat or replace a piece."""
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


@pytest.mark.one_in(2)
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
    head = min(len(seed), 100)  # the head holds the fields; most of a chunk is data
    may = {StatusCode.OK, BAD, FAILED, GONE, *([StatusCode.NOT_FOUND] if method == "Cluster/Profile" else [])}
    num_sent, until_s = 0, time.monotonic() + FUZZ_S / 2
    while time.monotonic() < until_s or num_sent < 20:
        data = mutated(dice, seed[:head]) + seed[head:]
        if method == "Worker/Drain" and parses(pb.DrainRequest(), data):
            continue  # a valid Drain would be obeyed
        num_sent += 1
        code, details = outcome(lambda data=data: peers.call(method, data))  # type: ignore[misc]
        assert code in may, (code, details, data)


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
