"""Plans which faults hit which processes, and when. Pure: a seed and the names of processes in, a plan out.

    plan_faults ──> [Fault, Fault, …] in the order of their time; `tandem.chaos.harm` makes them happen

A plan respects two conditions, under which the failure contract promises everything: at any moment, one worker of each
role has no fault, and so has one router and one gateway if there are several; and a single router or gateway ends only
at intervals that clients can cope with. All other faults happen at any time, and together.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class FaultKind(Enum):
    """A kind of fault. The values are the names in reports."""

    KILL = "killed"
    """SIGKILL; started again by its supervisor."""
    LEAVE = "told to leave"
    """SIGTERM: it takes nothing new, finishes its requests, hands over those that take longer than its grace period,
    and exits with 0; started again."""
    STOP = "stopped"
    """SIGSTOP for longer than a lease, then SIGCONT: what it sends afterwards is stale."""
    PARTITION = "cut off"
    """Packets vanish for longer than a lease, without any error."""
    MUTE = "muted"
    """Like PARTITION in one direction: the worker receives everything, but what it sends does not arrive."""
    DEAFEN = "deafened"
    """Like PARTITION in the other direction: nothing reaches the worker, but what it sends arrives."""
    RESET = "connections reset"
    DAMAGE = "KV damaged"
    """One bit is flipped in each of some pieces in transit."""
    SLOW = "slowed"
    """Every packet is delayed."""
    BURST = "bursts"
    """Many requests at once, more than the queue takes."""
    EXCHANGE = "adapters exchanged"
    """A name gets the files of another adapter."""


@dataclass(frozen=True, slots=True)
class Fault:
    at_s: float
    kind: FaultKind
    target: str
    """A process; "clients" for a burst, "adapters" for an exchange."""
    duration_s: float


GRACE_S = 5.0
"""Grace period for the requests of a process that is told to leave."""
RECOVERY_S = 12.0
"""Time within which a killed worker has certainly been started again, even on a busy machine."""
EXCHANGE_S = 5.0
"""Least time from one exchange to the next: mostly, workers have noticed the first one by then."""
MEAN_INTERVAL_S = 1.8
DOOR_INTERVAL_S = 15.0
DOORS = ("router", "gateway")
"""Roles of the processes to which clients connect."""
_AROUND = (*DOORS, "redis", "clients")
"""Roles of everything around the workers."""
_ON_WORKERS = (
    FaultKind.KILL, FaultKind.LEAVE, FaultKind.STOP, FaultKind.PARTITION, FaultKind.MUTE, FaultKind.DEAFEN,
    FaultKind.RESET, FaultKind.RESET, FaultKind.SLOW,
)  # fmt: skip
_ON_REDIS = (FaultKind.KILL, FaultKind.STOP)
_ON_DOORS = (FaultKind.KILL, FaultKind.LEAVE)
_LASTS_S = {
    FaultKind.KILL: RECOVERY_S, FaultKind.LEAVE: GRACE_S + RECOVERY_S, FaultKind.RESET: 0.0, FaultKind.DAMAGE: 0.5,
    FaultKind.BURST: 3.0, FaultKind.EXCHANGE: EXCHANGE_S,
}  # fmt: skip
"""How long the fault affects its target; other faults last a random multiple of the lease."""


def plan_faults(
    seed: int,
    seconds: float,
    workers: Sequence[str],
    lease_s: float,
    *,
    doors: Sequence[str] = DOORS,
    can_damage: bool = True,
    can_exchange: bool = False,
) -> list[Fault]:
    """Plan faults on `workers` ("prefill-1", "decode-2", …), `doors` ("router", or "router-1", "router-2", …, and
    gateways likewise), "redis", "clients" and "adapters" within `seconds`.

    The same arguments give the same plan. The first fault comes after a second. `can_damage`: KV travels through the
    proxies, so that it can be damaged. `can_exchange`: there are adapters to exchange.
    """
    dice = random.Random(seed)
    impaired_until_s = dict.fromkeys([*workers, "redis", "clients", *(["adapters"] if can_exchange else [])], 0.0)
    impaired_until_s |= dict.fromkeys(doors, 0.0)
    # A single router or gateway is left alone at first.
    impaired_until_s |= {
        door: DOOR_INTERVAL_S / rests for door, rests in zip(DOORS, (2, 4), strict=True) if door in doors
    }
    plan: list[Fault] = []
    at_s = 1.0
    while at_s < seconds:
        fault = _draw(dice, at_s, list(impaired_until_s), lease_s, can_damage=can_damage)
        if _is_allowed(fault, impaired_until_s):
            plan.append(fault)
            rests_s = DOOR_INTERVAL_S if fault.target in DOORS else 0.5  # a single one
            impaired_until_s[fault.target] = at_s + fault.duration_s + rests_s
            at_s += dice.expovariate(1 / MEAN_INTERVAL_S)
        else:
            at_s += 0.1
    return plan


def _draw(dice: random.Random, at_s: float, targets: Sequence[str], lease_s: float, *, can_damage: bool) -> Fault:
    # Workers, which hold the state, and their adapters are hit four times as often as what is around them.
    target = dice.choices(targets, [1 if role_of(t) in _AROUND else 4 for t in targets])[0]
    match role_of(target):
        case "router" | "gateway":
            kind = dice.choice(_ON_DOORS)
        case "redis":
            kind = dice.choice(_ON_REDIS)
        case "clients":
            kind = FaultKind.BURST
        case "adapters":
            kind = FaultKind.EXCHANGE
        case _:
            has_kv = can_damage and role_of(target) == "decode"
            kind = dice.choice(_ON_WORKERS + (FaultKind.DAMAGE,) * 2 * has_kv)
    lasts_s = _LASTS_S.get(kind)
    return Fault(at_s, kind, target, dice.uniform(0.5, 2.5) * lease_s if lasts_s is None else lasts_s)


def _is_allowed(fault: Fault, impaired_until_s: dict[str, float]) -> bool:
    """Whether the target has no fault now, and another process of its role, if there is one, has none either."""
    if impaired_until_s[fault.target] > fault.at_s:
        return False
    others = [t for t in impaired_until_s if t != fault.target and role_of(t) == role_of(fault.target)]
    return not others or any(impaired_until_s[other] <= fault.at_s for other in others)


def role_of(name: str) -> str:
    """The role of the process `name`."""
    return name.split("-")[0]
