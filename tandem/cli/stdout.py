"""What is left of stdout once something could not be written to it."""

from __future__ import annotations

import os
import sys


def give_up_stdout() -> None:
    """Else Python would try once more at its end, say so, and make the exit code 120."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open for as long as this process runs
