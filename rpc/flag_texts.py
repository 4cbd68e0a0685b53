"""Checks of the texts among a process' flags, in the same words for all of them. `flag_numbers` checks the numbers."""

from __future__ import annotations

from collections.abc import Iterable

from rpc.server import split_address


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise `ValueError` naming the flag if its value is none of `choices`."""
    if value not in (known := tuple(choices)):
        raise ValueError(f"{name} must be one of {', '.join(known)}, is {value!r}")


def check_address(name: str, address: str) -> tuple[str, int]:
    """`split_address`, whose `ValueError` names the flag."""
    try:
        return split_address(address)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
