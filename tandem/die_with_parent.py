"""Runs a command that ends when its parent ends, for whatever reason: no orphan survives a SIGKILL of the parent.

    python die_with_parent.py PARENT_PID COMMAND ARGUMENT...

A small program in front of the command, not a function between fork and exec: the parent has gRPC's threads, and no
code runs safely in a forked copy of such a process. Has an effect only on Linux; elsewhere, it just runs the command.
Imports only the standard library, since it is run by its path.
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
        if os.getppid() != parent_pid:  # the parent died before prctl was called
            sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
