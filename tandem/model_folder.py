"""What a cluster must know about its model before it starts anything: where it is, and what transformers' code tells of
it.

Downloads, conversions, and a look at transformers' code run in processes of their own, so that signals end them and
this process needs no torch.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from engine.engine_args import EngineArgs
from engine.model_loader.language_part import read_config
from engine.model_loader.settings import check_beside_states
from engine.models import is_for_our_decoder
from tandem.cluster_args import python_env
from tandem.process_run import dying_with_us
from tandem.supervision import ProcessEvent


async def resolve_model(model: str, on_event: Callable[[ProcessEvent], None]) -> Path:
    """The local folder of a model. Raises `ValueError` if it cannot be prepared; then stderr says why."""
    if folder := _ready_folder(model):
        return folder
    started_at_s = time.monotonic()
    output = await _output_of("tandem", "fetch", model)
    if output is None:
        raise ValueError(f"model {model!r} cannot be prepared: see the lines above")
    on_event(ProcessEvent(name="model", what=f"{model} is at {output} ({time.monotonic() - started_at_s:.1f} s)"))
    return Path(output)


class Observed(NamedTuple):
    """What transformers' code tells of a model that it computes (engine/model_loader/observed.py)."""

    num_recurrent_layers: int = 0
    why_not_split: str = ""


async def observe(args: EngineArgs, folder: Path) -> Observed:
    """Takes some seconds if transformers' code computes the model. If our own decoder does, or if the model cannot be
    served, there is nothing to tell: others say why."""
    try:
        if is_for_our_decoder(read_config(folder, args.load_format), args.model_impl):
            return Observed()
    except ValueError:
        return Observed()
    words = (str(folder), args.load_format, args.model_impl, str(args.tensor_parallel_size))
    output = await _output_of("engine.model_loader.observed", *words, stderr=asyncio.subprocess.DEVNULL)
    return Observed() if output is None else Observed(**json.loads(output))


async def has_states(args: EngineArgs, folder: Path) -> bool:
    """Whether layers of the model in `folder` keep a state in place of keys and values: see `observe`."""
    return (await observe(args, folder)).num_recurrent_layers > 0


async def check_observed(args: EngineArgs, folder: Path) -> None:
    """Raise `ValueError` if workers would refuse `args` because layers of the model in `folder` keep a state, or since
    ranks cannot share it."""
    beside_states = ""
    try:
        check_beside_states(args)
    except ValueError as error:
        beside_states = str(error)
    if not beside_states and args.tensor_parallel_size == 1:
        return
    seen = await observe(args, folder)
    if why_not := (beside_states if seen.num_recurrent_layers else "") or seen.why_not_split:
        raise ValueError(why_not)


def _ready_folder(model: str) -> Path | None:
    """The folder of a model that needs no preparation; None: `model` is no such folder."""
    path = Path(model).expanduser()
    return path.resolve() if (path / "config.json").is_file() else None


async def _output_of(module: str, *arguments: str, stderr: int | None = None) -> str | None:
    """What a program of ours prints to stdout. None: it failed."""
    process = await asyncio.create_subprocess_exec(
        *dying_with_us(sys.executable, "-P", "-m", module, *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
        env={**os.environ, **python_env()},
    )
    try:
        output, _ = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    return output.decode().strip() if process.returncode == 0 else None
