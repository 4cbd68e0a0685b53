"""What a worker says of folders that are no adapters. The folder is real; no engine is asked."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from worker_service.lora_folder import CONFIG_FILE, LOOKS_UNTIL_INCOMPLETE, WEIGHTS_FILE, LoRAFolder


@pytest.fixture
def folder(tmp_path: Path) -> LoRAFolder:
    engine: Any = None
    return LoRAFolder(tmp_path, engine, names_of_others=[], on_change=lambda: None)


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    records = [record for record in caplog.records if record.levelno >= logging.WARNING]
    return [(record.__dict__["lora_name"], record.__dict__["why"]) for record in records]


def test_a_folder_with_one_file_only_is_told_of_once(
    folder: LoRAFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, file in (("a", CONFIG_FILE), ("b", WEIGHTS_FILE), ("lost+found", ""), ("c", "adapter_model.bin")):
        (tmp_path / name).mkdir()
        if file:
            (tmp_path / name / file).touch()
    (tmp_path / "README").touch()
    for _ in range(LOOKS_UNTIL_INCOMPLETE - 1):
        assert folder._stamps() == {}
    assert told(caplog) == [], "it may be in the middle of being copied"
    for _ in range(3):
        folder._stamps()
    expected = [(name, f"the folder has no {file} yet") for name, file in (("a", WEIGHTS_FILE), ("b", CONFIG_FILE))]
    assert told(caplog) == expected
    (tmp_path / "a" / WEIGHTS_FILE).touch()
    assert folder._stamps().keys() == {"a"}
    (tmp_path / "a" / WEIGHTS_FILE).unlink()
    for _ in range(LOOKS_UNTIL_INCOMPLETE):
        folder._stamps()
    assert told(caplog) == [*expected, expected[0]], "it is news again"
