"""Named points at which a process fails on purpose, for tests. Nothing happens unless a point is armed.

    --failpoints "prefill.before_commit=exit" ──> arm ──> … await reach("prefill.before_commit") … exits there, once

A point is at a place where a failure leaves peers in a state that is hard to reach otherwise. Only entry points arm
points; reaching one that is not armed costs a dictionary lookup.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from dataclasses import dataclass

from rpc.errors import InternalError

_log = logging.getLogger(__name__)

POINTS = {
    "prefill.opened": "the decode worker's grant is open for writing; nothing is computed yet",
    "prefill.before_commit": "the first token is sent, the KV pushed; the decode worker does not know that it has all",
    "prefill.after_commit": "the decode worker has taken over; the router does not know yet",
    "decode.reserved": "blocks are reserved; the router does not know yet",
    "decode.before_commit": "the KV is verified; the engine does not have it yet",
    "decode.after_commit": "the engine has the KV; the prefill worker does not know yet",
    "decode.generate": "the prompt is about to be prefilled here",
}
EXIT_CODE = 87
"""Exit code of a process that a failpoint ended."""


@dataclass(slots=True)
class _Armed:
    action: str
    seconds: float
    num_left: int


_armed: dict[str, _Armed] = {}


def arm(spec: str) -> None:
    """Arm comma-separated "POINT=ACTION" pairs. An action is `exit` (at once, without clean-up), `fail` (raises an
    error) or `delay:SECONDS`; it happens once, or as often as `*TIMES` says. Raises `ValueError` naming what is
    wrong."""
    _armed.update(parse(spec))


def parse(spec: str) -> dict[str, _Armed]:
    """What `arm` would arm. Raises `ValueError`."""
    armed: dict[str, _Armed] = {}
    for pair in filter(None, (part.strip() for part in spec.split(","))):
        match = re.fullmatch(r"([\w.]+)=(exit|fail|delay:(\d+(?:\.\d+)?))(?:\*(\d+))?", pair)
        if match is None:
            raise ValueError(f"failpoints must be POINT=exit|fail|delay:SECONDS, optionally with *TIMES, is {pair!r}")
        point, action, seconds, times = match.groups()
        if point not in POINTS:
            raise ValueError(f"failpoints: unknown point {point!r}; known points: {', '.join(POINTS)}")
        armed[point] = _Armed(action.split(":")[0], float(seconds or 0), int(times or 1))
    return armed


async def reach(point: str) -> None:
    """Perform the action armed for `point`, one of `POINTS`, if any. Raises `InternalError` for `fail`."""
    armed = _armed.get(point)
    if armed is None or not armed.num_left:
        return
    armed.num_left -= 1
    _log.warning("failpoint", extra={"point": point, "action": armed.action})
    match armed.action:
        case "exit":
            os._exit(EXIT_CODE)
        case "fail":
            raise InternalError(f"failpoint {point}")
        case "delay":
            await asyncio.sleep(armed.seconds)
