"""Numbers given as flags: each process refuses, at its start, values that cannot be meant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import click
import pytest
from click.testing import CliRunner

from decode_service.__main__ import main as decode
from gateway.__main__ import main as gateway
from gateway.args import GatewayArgs
from router.__main__ import main as router
from router.args import RouterArgs
from rpc.flag_numbers import check_numbers, number
from worker_service.args import WorkerArgs

SERVICES = ((RouterArgs, router), (WorkerArgs, decode), (GatewayArgs, gateway))
MAY_BE_SHORT = {"drain_grace_s", "resume_s", "worker_wait_s"}
"""For these, a tiny value is as good as 0, which is no waiting at all."""


def wrong_numbers() -> Iterator[tuple[click.Command, str, str]]:
    for args, command in SERVICES:
        for entry in fields(args):
            flag = f"--{entry.name.replace('_', '-')}"
            if isinstance(entry.default, int) and not isinstance(entry.default, bool):
                yield command, flag, "-1"
            if isinstance(entry.default, float):
                small = () if entry.name in MAY_BE_SHORT else ("1e-9",)
                yield from ((command, flag, value) for value in ("-1", "nan", "inf", *small))


@pytest.mark.parametrize(("command", "flag", "value"), [*wrong_numbers()])
def test_a_number_that_nobody_means_is_refused(command: click.Command, flag: str, value: str) -> None:
    model = [] if command is gateway else ["--model", "m"]
    # An address at which it cannot listen: a value that is not refused does not start a server either.
    result = CliRunner().invoke(command, [*model, "--listen", "nowhere", flag, value])
    assert result.exit_code == 2, result.output
    assert f"Error: {flag} must be " in result.stderr
    assert f", is {float(value):g}" in result.stderr


def test_zero_turns_off_what_may_be_turned_off() -> None:
    GatewayArgs(sse_keep_alive_s=0.0, resume_s=0.0, drain_grace_s=0.0)
    WorkerArgs(engine_iteration_timeout_s=0.0, drain_grace_s=0.0)
    with pytest.raises(ValueError, match=r"^good_ttft_ms must be at least 0.1 and finite, is 0"):
        RouterArgs(model="m", good_ttft_ms=0.0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1e-9, "wait_s must be 0 (never), or at least 0.1 and finite, is 1e-09"),
        (-0.5, "wait_s must be 0 (never), or at least 0.1 and finite, is -0.5"),
    ],
)
def test_the_error_says_what_may_be(value: float, message: str) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Args:
        wait_s: float = number(1.0, "How long. 0: never.", least=0.1, zero="never")

        def __post_init__(self) -> None:
            check_numbers(self)

    with pytest.raises(ValueError) as error:
        Args(wait_s=value)
    assert str(error.value) == message
    assert Args(wait_s=0).wait_s == 0


def test_a_number_without_a_bound_is_noticed_at_once() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Args:
        wait_s: float = 1.0

    with pytest.raises(AssertionError, match="wait_s"):
        check_numbers(Args())
