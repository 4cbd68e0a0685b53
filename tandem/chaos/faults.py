"""Which fault hits whom, and when. Pure: a seed and the names of processes in, a plan out.

    plan_faults ──> [Fault, Fault, …] in the order of their time; `tandem.chaos.soak` makes them happen

Two things a plan leaves alone, for what the failure contract promises in full: of each role one worker is whole at any
moment, and so is one router and one gateway where there are several; a single one ends at intervals that a client can
live with. Everything else happens at any time, and together.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class FaultKind(Enum):
    """The value is how a report names it."""

    KILL = "killed"
    """SIGKILL; started again by its supervisor."""
    LEAVE = "told to leave"
    """SIGTERM: it takes nothing new, finishes what it has, or hands over what takes longer than its grace, and exits as
    it should; started again."""
    STOP = "stopped"
    """SIGSTOP for longer than a lease, then SIGCONT: what it says afterwards is stale."""
    PARTITION = "cut off"
    """Packets vanish for longer than a lease, and nobody is told."""
    MUTE = "muted"
    """As cut off, in one direction: it hears what it is told, and what it answers does not arrive."""
    DEAFEN = "deafened"
    """In the other one: nothing reaches it, and what it says arrives."""
    RESET = "connections reset"
    DAMAGE = "KV damaged"
    """One bit each of some pieces on their way."""
    SLOW = "slowed"
    """Every packet comes later."""
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
"""Of those that are told to leave, for what they have."""
RECOVERY_S = 12.0
"""Until a killed worker has certainly been started again, on a busy machine."""
EXCHANGE_S = 5.0
"""From one exchange to the next: workers have heard of the first, most of the time."""
MEAN_INTERVAL_S = 1.8
DOOR_INTERVAL_S = 15.0
DOORS = ("router", "gateway")
"""Roles of those that clients come to."""
_AROUND = (*DOORS, "redis", "clients")
"""Roles of what stands around workers."""
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
"""How long it keeps its target from being whole; of the others a multiple of the lease."""


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
    """Faults on `workers` ("prefill-1", "decode-2", …), `doors` ("router", or "router-1", "router-2", …, and gateways
    likewise), "redis", "clients" and "adapters" within `seconds`.

    The same arguments give the same plan. The first comes after a second. `can_damage`: KV travels where it can be
    reached. `can_exchange`: there are adapters for it.
    """
    dice = random.Random(seed)
    impaired_until_s = dict.fromkeys([*workers, "redis", "clients", *(["adapters"] if can_exchange else [])], 0.0)
    impaired_until_s |= dict.fromkeys(doors, 0.0)
    # One of which there is no other is left alone at first.
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
    # Workers, where the state is, and their adapters four times as often as what stands around them.
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
    """Whether its target is whole, and so is another one of its role for as long as this lasts."""
    if impaired_until_s[fault.target] > fault.at_s:
        return False
    others = [t for t in impaired_until_s if t != fault.target and role_of(t) == role_of(fault.target)]
    return not others or any(impaired_until_s[other] <= fault.at_s for other in others)


def role_of(name: str) -> str:
    """Of a process."""
    return name.split("-")[0]
