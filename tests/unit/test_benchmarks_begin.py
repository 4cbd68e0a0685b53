"""Programs of benchmarks/ begin: what they import and read is there, and the servers that they are asked for."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import serve, speculation, transfer


def test_a_program_may_be_run_as_a_file() -> None:
    """Its folder, which has an engine.py, is then the first where modules are looked for."""
    done = subprocess.run([sys.executable, transfer.__file__, "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_to_be_written_again_is_there_to_be_read() -> None:
    def chat(chats: list[Any], *_: object, **__: object) -> list[Any]:
        return [SimpleNamespace(prompt_token_ids=chat[0]["content"]) for chat in chats]

    prompts = speculation.prompts(SimpleNamespace(chat=chat))  # type: ignore[arg-type]
    ((edited,), (summed_up,)) = prompts["code edited"], prompts["text summed up"]
    assert "class StepPace" in edited
    assert "Tandem" in summed_up


@pytest.mark.parametrize("name", ["1p1d", "1p1d-ipc", "2d", "vllm"])
def test_servers_have_names(name: str) -> None:
    assert callable(serve.target_of(name))
