"""Memory that other processes open: they see the same bytes, nothing else passes for it, and nothing of it is left
over."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kv_transfer import InvalidTransfer, PeerUnreachable, SharedMemory, TransportMissing
from kv_transfer.shared_memory import open_peers_memory
from protos import tandem_kv_transfer_pb2 as pb

NUM_BYTES = 3 * 4096
ROOT = Path(__file__).parents[2]
OWNER = f"""
import sys, time
from kv_transfer import SharedMemory
memory = SharedMemory({NUM_BYTES})
memory.buffer[:5] = b"ready"
described = memory.describe()
print(described.SerializeToString().hex(), flush=True)
sys.stdin.read(1)
print(bytes(memory.buffer[-4:]).decode(), flush=True)
sys.stdin.read(1)
"""


def test_another_process_memory_is_read_and_written_and_outlives_it() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True
    )
    assert owner.stdin is not None
    assert owner.stdout is not None
    described = pb.HostMemory.FromString(bytes.fromhex(owner.stdout.readline()))
    assert described.pid == owner.pid
    memory = open_peers_memory(described, NUM_BYTES)
    assert memory[:5] == b"ready"
    memory[-4:] = b"seen"
    owner.stdin.write("x")
    owner.stdin.flush()
    assert owner.stdout.readline() == "seen\n"
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    memory[:4] = b"late"  # into pages that only this process has: no signal, no error
    assert memory[:5] == b"latey"
    with pytest.raises(PeerUnreachable, match=f"memory of process {owner.pid}: No such file"):
        open_peers_memory(described, NUM_BYTES)
    owner.stdin.close()
    owner.stdout.close()


def test_it_is_gone_with_its_last_user() -> None:
    memory = SharedMemory(NUM_BYTES)
    view = memoryview(memory.buffer)
    path = f"/proc/self/fd/{memory.describe().fd}"
    assert os.readlink(path).startswith("/memfd:tandem-kv")
    inode = f" {os.stat(path).st_ino} "

    def is_mapped() -> bool:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return any(inode in line and "memfd:tandem-kv" in line for line in lines)

    assert is_mapped()
    del memory
    assert not os.path.exists(path)
    assert is_mapped()  # a view still needs it
    view.release()
    del view
    assert not is_mapped()


NAME = "tandem-kv-0123456789abcdef"


def described_as(fd: int, name: str = NAME) -> pb.HostMemory:
    return pb.HostMemory(pid=os.getpid(), fd=fd, name=name)


def test_what_is_no_such_memory_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(NUM_BYTES))
    reading, writing = os.pipe()
    with (tmp_path / "file").open("r+b") as file:
        for fd in (file.fileno(), reading, writing):
            with pytest.raises(PeerUnreachable, match="one PID namespace"):
                open_peers_memory(described_as(fd), NUM_BYTES)
    os.close(reading)
    os.close(writing)


def test_what_looks_the_same_and_is_not_the_peers_is_not_opened() -> None:
    """In two PID namespaces, two workers may have the same process id, and their memory the same descriptor. A worker
    that opens its peer's memory then finds its own."""
    own, peers = SharedMemory(NUM_BYTES), SharedMemory(NUM_BYTES)
    mistaken = peers.describe()
    mistaken.fd = own.describe().fd
    with pytest.raises(PeerUnreachable, match=r"is not the peer in this PID namespace.*one PID namespace"):
        open_peers_memory(mistaken, NUM_BYTES)


@pytest.mark.parametrize("name", ["", "tandem-kv", "tandem-kv-0123456789abcdeg", f"{NAME} ", "x" * 1000, "../" + NAME])
def test_names_are_checked(name: str) -> None:
    with pytest.raises(InvalidTransfer, match="is no name of shared memory"):
        open_peers_memory(described_as(0, name), NUM_BYTES)


@pytest.mark.parametrize("difference", [-1, 1, 4096])
def test_its_size_is_what_the_layout_says(difference: int) -> None:
    memory = SharedMemory(NUM_BYTES)
    with pytest.raises(InvalidTransfer, match="is no sealed memory of"):
        open_peers_memory(memory.describe(), NUM_BYTES + difference)


def test_memory_that_may_shrink_under_a_write_is_refused() -> None:
    fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, NUM_BYTES)
    with pytest.raises(InvalidTransfer, match="is no sealed memory"):
        open_peers_memory(described_as(fd), NUM_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    assert len(open_peers_memory(described_as(fd), NUM_BYTES)) == NUM_BYTES
    os.close(fd)


def test_a_system_that_gives_none_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TransportMissing, match=r"no shared memory of .* bytes"):
        SharedMemory(1 << 62)

    def refused(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "memfd_create", refused)
    with pytest.raises(TransportMissing, match="Permission denied"):
        SharedMemory(NUM_BYTES)


def test_it_cannot_shrink() -> None:
    memory = SharedMemory(NUM_BYTES)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.describe().fd, 4096)
