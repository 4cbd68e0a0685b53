"""The docstrings that say what each module of a package is for name all of its modules, and no others."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "package",
    [
        "engine",
        "engine/attention",
        "engine/kernels/gpu",
        "engine/model_loader",
        "engine/models",
        "engine/running",
        "engine/scheduling",
    ],
)
def test_a_map_has_all_modules(package: str) -> None:
    docstring = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text()))
    assert docstring is not None
    modules = {path.name for path in (ROOT / package).glob("*.py")} - {"__init__.py", "__main__.py"}
    assert set(re.findall(r"(?<![\w/])\w+\.py", docstring)) == modules
