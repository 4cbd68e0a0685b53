"""Refuses requests with fields that this router does not know, since its clients are newer.

Protobuf ignores such fields, so the router would answer another request than the client sent: without a bound on the
answer, or without a part of the prompt. The public messages are the client's own: that a worker knows what a router
sends to it is checked by the `takes_…` fields of its record.
"""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from rpc.errors import Outdated


def check_known_fields(request: Message) -> None:
    """Raises `Outdated` naming a field of `request`, or of a message in it, that this version does not have."""
    if unknown := _unknown_field(request, ""):
        raise Outdated(
            f"this router is older than its client, and does not know {unknown} of the request: upgrade routers before "
            "gateways and clients",
            retry_after_s=1.0,
        )


def _unknown_field(message: Message, path: str) -> str:
    """The first one, as "field 9 of chat.messages"; empty if there is none."""
    unknown_fields = UnknownFieldSet(message)
    if len(unknown_fields):
        return f"field {unknown_fields[0].field_number}" + (f" of {path}" if path else "")
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None or descriptor.message_type.GetOptions().map_entry:
            continue
        inner: Iterable[Message] = value if descriptor.is_repeated else (value,)
        for each in inner:
            if unknown := _unknown_field(each, f"{path}.{descriptor.name}" if path else descriptor.name):
                return unknown
    return ""
