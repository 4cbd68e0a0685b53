"""Reads a request's body, within its bound."""

from __future__ import annotations

from starlette.requests import Request

from gateway.errors import TOO_LARGE, UNSUPPORTED_BODY, Refusal


async def body_bytes(request: Request, max_bytes: int) -> bytes:
    """The body. Raises `Refusal`, before anything is read, if it is compressed or a page of any site may have sent it;
    and if it has more than `max_bytes`."""
    if (encoding := request.headers.get("content-encoding", "identity")).lower() != "identity":
        why = f"content-encoding: {encoding[:40]!r} is not supported; send the body uncompressed"
        raise Refusal(UNSUPPORTED_BODY, why)
    # Browsers let a page of any site send bodies of other types without asking this server (CORS), so such a page could
    # make it compute. Clients that are no browser need not name the type: `curl -d` does not.
    kind = request.headers.get("content-type", "")
    if "origin" in request.headers and kind.partition(";")[0].strip().lower() != "application/json":
        bound = f"must be application/json in a request from a web page, is {kind[:40]!r}"
        raise Refusal(UNSUPPORTED_BODY, f"content-type: {bound}")
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > max_bytes:
            bound = f"{max_bytes} bytes, the maximum (the gateway's --max-body-bytes)"
            raise Refusal(TOO_LARGE, f"the request body is larger than {bound}")
    return bytes(data)
