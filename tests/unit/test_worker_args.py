"""Where a worker says that others reach it."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker_service.args import WorkerArgs, check_lora_dir


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "[::]", "*", "[::0]", "[0:0::]", "[::ffff:0.0.0.0]", "0", "0.0", "000.0.0.0"]
)
def test_no_worker_tells_others_to_call_themselves(host: str) -> None:
    WorkerArgs(listen=f"{host}:50061", advertise="10.0.0.4:50061")
    for wrong in ({"listen": f"{host}:50061"}, {"listen": "10.0.0.4:50061", "advertise": f"{host}:50061"}):
        with pytest.raises(ValueError, match=r"advertise must be HOST:PORT at which routers and other workers reach"):
            WorkerArgs(**wrong)


@pytest.mark.parametrize("host", ["[::1]", "10.0.0.0", "1", "decode-0", "0.example", "[::ffff:10.0.0.4]"])
def test_another_host_may_be_advertised(host: str) -> None:
    assert WorkerArgs(listen="0.0.0.0:50061", advertise=f"{host}:50061").advertise == f"{host}:50061"


def test_others_are_told_of_a_port() -> None:
    WorkerArgs(listen="10.0.0.4:0")  # allowed: the worker tells others the port that it gets
    with pytest.raises(ValueError, match="advertise must name the port"):
        WorkerArgs(listen="0.0.0.0:0", advertise="10.0.0.4:0")
    with pytest.raises(ValueError, match="advertise: must be HOST:PORT"):
        WorkerArgs(advertise="10.0.0.4")


@pytest.mark.parametrize(
    ("folder", "max_loras", "says"),
    [
        ("", 0, "lora_dir needs room for adapters: also give max_loras"),
        ("nobody", 1, r"lora_dir: there is no folder .*/nobody"),
    ],
)
def test_a_folder_of_adapters_needs_room_and_must_be_there(
    tmp_path: Path, folder: str, max_loras: int, says: str
) -> None:
    check_lora_dir("", 0)
    check_lora_dir(str(tmp_path), 1)
    with pytest.raises(ValueError, match=f"^{says}"):
        check_lora_dir(str(tmp_path / folder), max_loras)


def test_room_for_adapters_that_come_from_nowhere_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^max_loras is room for adapters that are added from lora_dir.*, is 8"):
        check_lora_dir("", 8)
