"""A worker whose engine stands still within a step while a file exists: python hanging_worker.py FILE MODULE FLAGS…

The service is the real one. Only here can a step be made to hang: a test cannot stop one thread of a process.
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path
from typing import Any

from engine.llm_engine import LLMEngine


def main() -> None:
    hangs, module = Path(sys.argv[1]), sys.argv[2]
    sys.argv = [module, *sys.argv[3:]]
    step = LLMEngine.step

    def hanging_step(self: LLMEngine) -> Any:
        while hangs.exists():
            time.sleep(0.1)
        return step(self)

    LLMEngine.step = hanging_step  # type: ignore[method-assign]
    runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main()
