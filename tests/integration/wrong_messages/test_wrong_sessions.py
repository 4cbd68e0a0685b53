"""Wrong commands at the start of a session, and later."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from protos import tandem_worker_pb2 as pb
from rpc.errors import InvalidRequest, RequestExists, code_of
from rpc.session import PROTOCOL_VERSION
from wrong_messages.saying import (
    BAD,
    FAILED,
    GARBAGE,
    HUGE,
    SESSIONS,
    Peers,
    Session,
    StatusCode,
    as_bytes,
    engine_request,
    grant_of,
    hello_bytes,
    refusal,
    work,
)

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
    """The first command may have ended, because its grant is invalid, before the second arrives: then try again."""
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
    """Wait for the failures of the two commands: of both at a prefill worker, only of the second at a decode worker."""
    failures: list[pb.Failed] = []
    while len(failures) < (2 if service == "Prefill" else 1):
        event = session.event()
        failures += [event.failed] if event.HasField("failed") and event.attempt == attempt else []
    return failures
