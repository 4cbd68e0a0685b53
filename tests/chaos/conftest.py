"""The model that all chaos runs on: the real one."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.model_loader import resolve_model


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return resolve_model("smollm2-135m-instruct")
