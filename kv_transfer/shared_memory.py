"""Memory that other processes of the machine can open, without a name in any file system.

    SharedMemory(num_bytes) ──describe──> (pid, fd, name) ──a peer's message──> open_peers_memory ──> the same pages

It uses Linux' `memfd`: the memory lives as long as some process has it mapped, and is freed however the processes end.
It is sealed, so that it cannot shrink under another process' write. Opening it requires the right to inspect the
process: the same user, and the same PID namespace (containers of a pod share one with `shareProcessNamespace`). In
another namespace the pid is another process, perhaps this one itself. So every memory has a unique name, and memory
with another name is not opened.
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
"""Tools show it as /memfd:tandem-kv-0123456789abcdef."""
_HINT = (
    "the ipc transport needs both workers on one machine, run by one user, in one PID namespace (shareProcessNamespace "
    "in a pod)"
)


class SharedMemory:
    """`num_bytes` of zeros, allocated when first touched. Freed when neither this object nor any view of `buffer` is
    left in any process. Raises `TransportMissing` if the system provides none."""

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
    """Map the memory that a peer described, writable; unmapped with the last reference to it.

    Raises `InvalidTransfer` if it is no such memory of `num_bytes`, `PeerUnreachable` if it cannot be opened.
    """
    if not _NAME_PATTERN.fullmatch(described.name):
        raise InvalidTransfer(f"{described.name[:40]!r} is no name of shared memory")
    path = f"/proc/{described.pid}/fd/{described.fd}"
    try:
        # Check before opening, since opening a pipe or a device may have side effects.
        is_it = os.readlink(path).startswith(f"/memfd:{described.name} ")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK) if is_it else -1
    except OSError as error:
        raise PeerUnreachable(
            f"cannot open the memory of process {described.pid}: {error.strerror}; {_HINT}"
        ) from error
    if not is_it:
        raise PeerUnreachable(f"process {described.pid} is not the peer in this PID namespace: {_HINT}")
    try:
        size = os.fstat(fd).st_size
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or size != num_bytes:
            raise InvalidTransfer(f"{path} is no sealed memory of {num_bytes} bytes")
        return mmap.mmap(fd, num_bytes)
    except OSError as error:
        raise PeerUnreachable(f"cannot map the memory of process {described.pid}: {error.strerror}") from error
    finally:
        os.close(fd)
