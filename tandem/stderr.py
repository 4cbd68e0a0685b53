"""Prints lines to stderr, and ignores errors of doing so.

Ctrl-C in `tandem up 2>&1 | tee log` ends tee as well, and a disk may be full. Writing to stderr then raises an error,
which would do harm: in a signal handler, it would keep the program from ending, and in the code that reads a service's
output, it would stop the reading, and then the service.
"""

from __future__ import annotations

import os
import sys


def tell(line: str) -> None:
    """Print `line`. If it cannot be written, only this line is lost."""
    if not sys.stderr:  # stderr was closed before the program began; print would use stdout instead
        return
    try:
        print(line, file=sys.stderr, flush=True)
    except BrokenPipeError:
        # The pipe stays broken, and Python would try to flush it at exit, and end with exit code 120.
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - open for as long as this process runs
    except OSError:  # a full disk may have room again
        pass
