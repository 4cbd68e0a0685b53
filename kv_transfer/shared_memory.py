"""Memory of this process that other processes of the machine may open, by no name in any file system.

    SharedMemory(num_bytes) ──describe──> (pid, fd) ──a peer's message──> open_peers_memory ──> the same pages, mapped

Linux' `memfd`: the memory lives as long as some process has it mapped, and nothing of it is left behind whatever ends
them. It is sealed, so that who has opened it need not fear that it shrinks under a write. Opening it takes the right to
look at the process (the same user, and one PID namespace: containers of one pod have one with `shareProcessNamespace`).
"""

from __future__ import annotations

import fcntl
import mmap
import os

from kv_transfer.errors import InvalidTransfer, PeerUnreachable, TransportMissing
from protos import tandem_kv_transfer_pb2 as pb

NAME = "tandem-kv"
"""What tools show for it: /memfd:tandem-kv."""


class SharedMemory:
    """`num_bytes` of zeros, taken from the machine as they are first touched. Freed when neither this object nor any
    view of `buffer` is left, in any process. Raises `TransportMissing` where the system has no such memory."""

    def __init__(self, num_bytes: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise TransportMissing("the ipc transport needs Linux' memfd_create")
        self._fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, num_bytes)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self.buffer = mmap.mmap(self._fd, num_bytes)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)

    def describe(self) -> pb.HostMemory:
        return pb.HostMemory(pid=os.getpid(), fd=self._fd)


def open_peers_memory(described: pb.HostMemory, num_bytes: int) -> mmap.mmap:
    """The memory that a peer described, writable; unmapped with the last reference to it.

    Raises `InvalidTransfer` where that is no such memory of `num_bytes`, `PeerUnreachable` where it cannot be opened.
    """
    path = f"/proc/{described.pid}/fd/{described.fd}"
    try:
        # Looked at before it is opened: to open a pipe or a device may do something.
        if not os.readlink(path).startswith(f"/memfd:{NAME}"):
            raise InvalidTransfer(f"{path} is no memory of Tandem's")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise PeerUnreachable(
            f"cannot open the memory of process {described.pid}: {error.strerror}. The ipc transport needs both "
            "workers on one machine, run by one user, in one PID namespace (shareProcessNamespace in a pod)"
        ) from error
    try:
        size = os.fstat(fd).st_size
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or size != num_bytes:
            raise InvalidTransfer(f"{path} is no sealed memory of {num_bytes} bytes")
        return mmap.mmap(fd, num_bytes)
    except OSError as error:
        raise PeerUnreachable(f"cannot map the memory of process {described.pid}: {error.strerror}") from error
    finally:
        os.close(fd)
