"""Memory that other processes open: the same bytes, nothing else passes for it, and nothing is left of it."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kv_transfer import InvalidTransfer, PeerUnreachable, SharedMemory
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
print(described.pid, described.fd, flush=True)
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
    pid, fd = map(int, owner.stdout.readline().split())
    memory = open_peers_memory(pb.HostMemory(pid=pid, fd=fd), NUM_BYTES)
    assert memory[:5] == b"ready"
    memory[-4:] = b"seen"
    owner.stdin.write("x")
    owner.stdin.flush()
    assert owner.stdout.readline() == "seen\n"
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    memory[:4] = b"late"  # into pages that are nobody's but ours: no signal, no error
    assert memory[:5] == b"latey"
    with pytest.raises(PeerUnreachable, match=f"memory of process {pid}: No such file"):
        open_peers_memory(pb.HostMemory(pid=pid, fd=fd), NUM_BYTES)
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
    assert is_mapped()  # a view needs it still
    view.release()
    del view
    assert not is_mapped()


def described(fd: int) -> pb.HostMemory:
    return pb.HostMemory(pid=os.getpid(), fd=fd)


def test_what_is_no_such_memory_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(NUM_BYTES))
    reading, writing = os.pipe()
    with (tmp_path / "file").open("r+b") as file:
        for fd in (file.fileno(), reading, writing):
            with pytest.raises(InvalidTransfer, match="is no memory of Tandem's"):
                open_peers_memory(described(fd), NUM_BYTES)
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("difference", [-1, 1, 4096])
def test_its_size_is_what_the_layout_says(difference: int) -> None:
    memory = SharedMemory(NUM_BYTES)
    with pytest.raises(InvalidTransfer, match="is no sealed memory of"):
        open_peers_memory(memory.describe(), NUM_BYTES + difference)


def test_memory_that_may_shrink_under_a_write_is_refused() -> None:
    fd = os.memfd_create("tandem-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, NUM_BYTES)
    with pytest.raises(InvalidTransfer, match="is no sealed memory"):
        open_peers_memory(described(fd), NUM_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    assert len(open_peers_memory(described(fd), NUM_BYTES)) == NUM_BYTES
    os.close(fd)


def test_it_cannot_shrink() -> None:
    memory = SharedMemory(NUM_BYTES)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.describe().fd, 4096)
