"""What a cluster must know about its model before it starts anything: where it is, and whether its layers keep a state.

Downloads, conversions, and a look at transformers' code run in processes of their own, so that signals end them and
this process needs no torch.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from engine.engine_args import EngineArgs
from engine.model_loader.language_part import read_config
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


async def has_states(args: EngineArgs, folder: Path) -> bool:
    """Whether layers of the model in `folder` keep a state in place of keys and values. False if it cannot be served:
    others say why. Takes some seconds if transformers' code computes the model."""
    try:
        if is_for_our_decoder(read_config(folder, args.load_format), args.model_impl):
            return False
    except ValueError:
        return False
    words = "engine.model_loader.has_states", str(folder), args.load_format, args.model_impl
    return await _output_of(*words, stderr=asyncio.subprocess.DEVNULL) not in (None, "0")


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
