"""Every error class has its status, and arrives at the client as the class that the server raised."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc.aio import AioRpcError, Metadata

from rpc import errors
from rpc.errors import (
    DETAILS_KEY,
    FOREIGN_CODES,
    STATUS_CODES,
    CorruptKV,
    Incompatible,
    InternalError,
    InvalidRequest,
    LeaseGone,
    RequestCancelled,
    TandemError,
    Unreachable,
)
from rpc.interceptors import abort


def subclasses(error_class: type[TandemError]) -> set[type[TandemError]]:
    direct = set(error_class.__subclasses__())
    return direct.union(*(subclasses(each) for each in direct))


def all_classes() -> list[type[TandemError]]:
    return sorted(subclasses(TandemError), key=lambda each: each.__name__)


def made(error_class: type[TandemError], retry_after_s: float | None) -> TandemError:
    if error_class is InvalidRequest:
        violations = [("sampling_params.top_p", "must be in (0, 1]"), ("prompt", "is empty")]
        return InvalidRequest(violations, retry_after_s=retry_after_s)
    return error_class(f"what {error_class.__name__} says", retry_after_s=retry_after_s)


def as_rpc_error(status: status_pb2.Status, details: bytes | None = None) -> AioRpcError:
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    data = status.SerializeToString() if details is None else details
    return AioRpcError(code, Metadata(), Metadata((DETAILS_KEY, data)), details=status.message)


def test_table_and_drawing_name_every_class() -> None:
    assert set(STATUS_CODES) == set(all_classes())
    drawing = {line.split()[1]: line.split()[2] for line in errors.__doc__.splitlines() if "──" in line}
    assert drawing == {each.__name__: code.name for each, code in STATUS_CODES.items()}


def test_codes_that_the_wire_promises() -> None:
    """docs and proto comments state these; a client in another language relies on them."""
    promised = {
        "InvalidRequest": "INVALID_ARGUMENT",
        "Overloaded": "RESOURCE_EXHAUSTED",
        "Draining": "UNAVAILABLE",
        "NoWorker": "UNAVAILABLE",
        "LeaseGone": "ABORTED",
        "CorruptKV": "DATA_LOSS",
        "Incompatible": "FAILED_PRECONDITION",
        "InternalError": "INTERNAL",
        "RequestExists": "ALREADY_EXISTS",
        "DeadlinePassed": "DEADLINE_EXCEEDED",
        "RequestCancelled": "CANCELLED",
        "NotFound": "NOT_FOUND",
    }
    assert {name: STATUS_CODES[getattr(errors, name)].name for name in promised} == promised


def test_every_code_that_grpc_can_make_has_a_class() -> None:
    assert set(FOREIGN_CODES) == set(grpc.StatusCode) - {grpc.StatusCode.OK}


@pytest.mark.parametrize("retry_after_s", [None, 0.0, 1.25])
@pytest.mark.parametrize("error_class", all_classes())
def test_round_trip_keeps_everything(error_class: type[TandemError], retry_after_s: float | None) -> None:
    error = made(error_class, retry_after_s)
    status = errors.to_status(error)
    assert status.code == STATUS_CODES[error_class].value[0]
    back = errors.from_rpc_error(as_rpc_error(status))
    assert type(back) is error_class
    assert (back.message, back.retry_after_s) == (error.message, retry_after_s)
    if isinstance(error, InvalidRequest):
        assert isinstance(back, InvalidRequest)
        assert back.violations == error.violations


def test_invalid_request_says_which_fields_in_its_message() -> None:
    assert str(InvalidRequest([("n", "must be 1"), ("prompt", "is empty")])) == "n: must be 1; prompt: is empty"


@pytest.mark.parametrize("text", ["x" * 100_000, "é" * 50_000, "\ud800" * 1000, "line\n" * 5000])
def test_status_of_any_text_fits_trailing_metadata(text: str) -> None:
    """gRPC drops trailing metadata beyond 8 KiB: message percent-encoded, details in base64."""
    error = InvalidRequest([(text[:2000], text)] * 100, text, retry_after_s=1)
    status = errors.to_status(error)
    message_bytes = 3 * len(status.message.encode())
    assert message_bytes + len(status.SerializeToString()) * 4 / 3 < 7_500
    back = errors.from_rpc_error(as_rpc_error(status))
    assert isinstance(back, InvalidRequest)
    assert back.violations


@pytest.mark.parametrize("size", [511, 512, 513])
def test_a_text_that_is_cut_keeps_within_its_bound(size: int) -> None:
    assert errors.clip("x" * size, 512) == ("x" * size if size <= 512 else "x" * 509 + "…")
    assert len(errors.clip("é" * size, 512).encode()) <= 512


def test_violations_that_are_left_out_keep_the_others_within_their_bound() -> None:
    error = InvalidRequest([(f"field_{i}", "x" * 400) for i in range(20)])
    [bad_request] = [
        unpacked
        for detail in errors.to_status(error).details
        if detail.Unpack(unpacked := error_details_pb2.BadRequest())
    ]
    assert 0 <= errors.MAX_VIOLATIONS_BYTES - bad_request.ByteSize() < 500


def test_a_peer_s_time_in_the_past_is_now() -> None:
    status = errors.to_status(made(LeaseGone, None))
    status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=Duration(seconds=-1)))
    assert errors.from_rpc_error(as_rpc_error(status)).retry_after_s == 0


async def test_who_is_cancelled_during_a_call_is_cancelled_and_has_not_lost_its_peer() -> None:
    began = asyncio.Event()

    async def calls() -> None:
        with errors.rpc_errors_as_tandem_errors():
            began.set()
            await asyncio.Event().wait()

    calling = asyncio.create_task(calls())
    await began.wait()
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling


async def test_a_call_on_a_closed_channel_has_no_peer() -> None:
    channel = grpc.aio.insecure_channel("127.0.0.1:1")
    await channel.close()
    with pytest.raises(Unreachable, match="its connection is closed"), errors.rpc_errors_as_tandem_errors():
        await channel.unary_unary("/tandem.v1.Inference/GetModelInfo")(b"")


async def test_a_status_that_comes_too_late_for_its_call_is_no_bug() -> None:
    """gRPC logs what a handler raises, except a cancellation."""

    class Ended:
        async def abort(self, *_: object) -> None:
            raise grpc.aio.InternalError("the call has ended")

    with pytest.raises(asyncio.CancelledError):
        await abort(Ended(), made(LeaseGone, None))


def test_status_that_is_not_ours_is_translated_by_its_code() -> None:
    foreign = status_pb2.Status(code=grpc.StatusCode.UNAVAILABLE.value[0], message="connection refused")
    for details in (b"", b"\xff\xff not a status", foreign.SerializeToString()):
        error = errors.from_rpc_error(as_rpc_error(foreign, details))
        assert type(error) is Unreachable
        assert error.message == "connection refused"
    without = AioRpcError(grpc.StatusCode.INVALID_ARGUMENT, None, None, details=None)
    assert type(errors.from_rpc_error(without)) is InvalidRequest


def test_a_method_that_the_peer_does_not_have_is_another_process_than_was_meant() -> None:
    foreign = status_pb2.Status(code=grpc.StatusCode.UNIMPLEMENTED.value[0], message="Method not found!")
    error = errors.from_rpc_error(as_rpc_error(foreign))
    assert (type(error), error.message) == (
        Incompatible,
        "Method not found! (the server there is not a router, but perhaps a worker, or has another version: check the "
        "address)",
    )


def test_cancellation_by_the_peer_is_a_lost_peer() -> None:
    """A server that stops ends its calls with CANCELLED; this must not look like the client's own cancellation."""
    assert type(errors.from_rpc_error(AioRpcError(grpc.StatusCode.CANCELLED, None, None))) is Unreachable


def test_code_in_a_message_is_translated_by_what_a_service_means() -> None:
    for error_class in (RequestCancelled, InvalidRequest, LeaseGone, CorruptKV):
        code = errors.code_of(made(error_class, None))
        back = errors.error_of_code(code, "why")
        assert (type(back), back.message) == (error_class, "why")
    assert type(errors.error_of_code(99, "why")) is InternalError


def test_reason_of_another_domain_is_not_ours() -> None:
    status = status_pb2.Status(code=grpc.StatusCode.UNAVAILABLE.value[0])
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="DRAINING", domain="example.org"))
    assert type(errors.from_rpc_error(as_rpc_error(status))) is Unreachable
