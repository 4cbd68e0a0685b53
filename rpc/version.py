"""The version of Tandem in this process."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def tandem_version() -> str:
    try:
        return version("tandem-llm")
    except PackageNotFoundError:  # a checkout on the path that was never installed
        return "0.0.0+checkout"
