"""Memory of this process that other processes of the machine may open, without a name in any file system.

    SharedMemory(num_bytes) ──describe──> (pid, fd, name) ──a peer's message──> open_peers_memory ──> the same pages

This is Linux' `memfd`: the memory lives as long as some process has it mapped, and nothing of it is left behind,
whatever ends them. It is sealed, so a process that has opened it need not fear that it shrinks under a write. Opening
it takes the right to inspect the process: the same user, and the same PID namespace (containers of a pod share one with
`shareProcessNamespace`). In another namespace that pid is another process, perhaps this one itself: so every memory has
a name of its own, and memory with another name is not opened.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets

from kv_transfer.errors import InvalidTransfer, PeerUnreachable, TransportMissing
from protos import tandem_kv_transfer_pb2 as pb

_NAME = "tandem-kv-{}"
_NAME_PATTERN = re.compile(r"tandem-kv-[0-9a-f]{16}")
"""What tools show for it: /memfd:tandem-kv-0123456789abcdef."""
_HINT = (
    "the ipc transport needs both workers on one machine, run by one user, in one PID namespace (shareProcessNamespace "
    "in a pod)"
)


class SharedMemory:
    """`num_bytes` of zeros, taken from the machine as they are first touched. Freed when neither this object nor any
    view of `buffer` is left, in any process. Raises `TransportMissing` where the system gives none."""

    def __init__(self, num_bytes: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise TransportMissing("the ipc transport needs Linux' memfd_create")
        self._name = _NAME.format(secrets.token_hex(8))
        try:
            self._fd = os.memfd_create(self._name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self._fd, num_bytes)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self.buffer = mmap.mmap(self._fd, num_bytes)
        except OSError as error:
            raise TransportMissing(f"no shared memory of {num_bytes} bytes for the ipc transport: {error}") from error

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)

    @property
    def fd(self) -> int:
        return self._fd

    def describe(self) -> pb.HostMemory:
        return pb.HostMemory(pid=os.getpid(), fd=self._fd, name=self._name)


def open_peers_memory(described: pb.HostMemory, num_bytes: int) -> mmap.mmap:
    """The memory that a peer described, writable; unmapped with the last reference to it.

    Raises `InvalidTransfer` where that is no such memory of `num_bytes`, `PeerUnreachable` where it cannot be opened.
    """
    if not _NAME_PATTERN.fullmatch(described.name):
        raise InvalidTransfer(f"{described.name[:40]!r} is no name of shared memory")
    path = f"/proc/{described.pid}/fd/{described.fd}"
    try:
        # Looked at before it is opened: to open a pipe or a device may do something.
        is_it = os.readlink(path).startswith(f"/memfd:{described.name} ")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK) if is_it else -1
    except OSError as error:
        raise PeerUnreachable(
            f"cannot open the memory of process {described.pid}: {error.strerror}; {_HINT}"
        ) from error
    if not is_it:
        raise PeerUnreachable(f"process {described.pid} is not the peer as seen from here: {_HINT}")
    try:
        size = os.fstat(fd).st_size
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or size != num_bytes:
            raise InvalidTransfer(f"{path} is no sealed memory of {num_bytes} bytes")
        return mmap.mmap(fd, num_bytes)
    except OSError as error:
        raise PeerUnreachable(f"cannot map the memory of process {described.pid}: {error.strerror}") from error
    finally:
        os.close(fd)
