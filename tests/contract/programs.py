"""Our programs as click commands, to check the command lines and environments in manifests."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import click

import decode_service.__main__
import gateway.__main__
import prefill_service.__main__
import router.__main__
from decode_service import service as decode
from engine.engine_args import EngineArgs
from gateway.args import GatewayArgs
from prefill_service import service as prefill
from router.args import RouterArgs
from router.policy import PolicyConfig
from router.process import CLUSTER_SERVICE, INFERENCE_SERVICE
from rpc.entrypoint import build
from worker_service import process as worker
from worker_service.args import WorkerArgs

PROGRAMS: dict[str, tuple[click.Command, list[type[Any]]]] = {
    "router": (router.__main__.main, [RouterArgs, PolicyConfig]),
    "gateway": (gateway.__main__.main, [GatewayArgs]),
    "prefill_service": (prefill_service.__main__.main, [WorkerArgs, EngineArgs]),
    "decode_service": (decode_service.__main__.main, [WorkerArgs, EngineArgs]),
}
HEALTH_SERVICES = {
    "router": {"", INFERENCE_SERVICE, CLUSTER_SERVICE},
    "prefill_service": {"", worker.SERVICE_NAME, prefill.SERVICE_NAME},
    "decode_service": {"", worker.SERVICE_NAME, decode.SERVICE_NAME, decode.KV_SERVICE_NAME},
}
"""The services for which each program reports its health."""


def parsed(module: str, args: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
    """Return the flags of `python -m module ARGS` with only `env` in its environment, checked as the program does.

    Raises `click.UsageError` for an unknown flag or an invalid value, `AssertionError` for a variable that looks like
    one of our settings but is none.
    """
    command, arg_types = PROGRAMS[module]
    known = {parameter.envvar for parameter in command.params if isinstance(parameter, click.Option)}
    unknown = {name for name in env if re.match("TANDEM_|REDIS_URL$", name)} - known
    assert not unknown, f"{module} reads no {unknown}"
    with mock.patch.dict(os.environ, env, clear=True):
        context = command.make_context(module, list(args))
    for arg_type in arg_types:
        build(arg_type, context.params)
    return context.params
