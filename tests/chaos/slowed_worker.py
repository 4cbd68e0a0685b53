"""A worker whose engine is slowed while a file exists: python slowed_worker.py FILE MODULE FLAGS…

The file holds the number of seconds to add to each step. While it is empty, the engine hangs within a step. The service
is the real one. The delay must be inside the process, because a test cannot stop a single thread of another process.
"""

from __future__ import annotations

import gc

gc.disable()  # until the service has imported the rest

import runpy
import sys
import time
from pathlib import Path
from typing import Any

from engine.llm_engine import LLMEngine

LOOKS_PER_S = 10


def main() -> None:
    file, module = Path(sys.argv[1]), sys.argv[2]
    sys.argv = [module, *sys.argv[3:]]
    step = LLMEngine.step

    def slowed_step(self: LLMEngine) -> Any:
        start_s = time.monotonic()
        while time.monotonic() - start_s < seconds_in(file):
            time.sleep(1 / LOOKS_PER_S)
        return step(self)

    LLMEngine.step = slowed_step  # type: ignore[method-assign]
    runpy.run_module(module, run_name="__main__")


def seconds_in(file: Path) -> float:
    """Return the delay of a step. 0 without the file, so that a hanging step goes on once the file is gone."""
    try:
        return float(file.read_text() or "inf")
    except FileNotFoundError:
        return 0


if __name__ == "__main__":
    main()
