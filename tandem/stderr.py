"""Lines on stderr for whoever watches, which nobody has to read.

Ctrl-C in `tandem up 2>&1 | tee log` ends tee as well, and a disk may be full. Whoever writes then gets an error where
it writes: in a signal's handler, which would have set what ends the program, or while it reads what a service says,
which stands still once nobody does.
"""

from __future__ import annotations

import os
import sys


def tell(line: str) -> None:
    """`line`, which is lost where it cannot be written; nothing else is."""
    if not sys.stderr:  # closed before the program began; print would take stdout instead
        return
    try:
        print(line, file=sys.stderr, flush=True)
    except BrokenPipeError:
        # For good. And Python would try once more at its end, and make the exit code 120.
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - open for as long as this process runs
    except OSError:  # a full disk may have room again
        pass
