"""Tests that need the optional nixl library."""

from __future__ import annotations

import importlib.util

import pytest

needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed")
NIXL = pytest.param("nixl", marks=needs_nixl)
"""The transport, as a parameter."""
