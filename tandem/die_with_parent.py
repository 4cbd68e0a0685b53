"""Runs a command that ends when its parent ends, however that ended: no orphan survives a SIGKILL.

    python die_with_parent.py PARENT_PID COMMAND ARGUMENT...

A small program in front of the command rather than a function between fork and exec: the parent runs gRPC's threads,
and nothing may be run safely in a forked copy of those. On Linux only; elsewhere the command is run as it is. Imports
nothing but the standard library, since it is run by its path.
"""

from __future__ import annotations

import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent_pid, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
        if os.getppid() != parent_pid:  # it died before the line above
            sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
