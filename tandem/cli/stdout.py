"""Handles a stdout to which writing has failed."""

from __future__ import annotations

import os
import sys


def give_up_stdout() -> None:
    """Replace stdout, since otherwise Python would try to flush it at exit, print an error, and exit with code 120."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open for as long as this process runs
