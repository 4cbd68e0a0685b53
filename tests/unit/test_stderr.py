"""Lines for a person who watches, where no one can read them."""

from __future__ import annotations

import sys

import pytest

from tandem.stderr import tell


def test_what_cannot_be_told_on_stderr_is_not_told_on_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in `tandem bench --json 2>&-`, where Python's sys.stderr is None."""
    monkeypatch.setattr(sys, "stderr", None)
    tell("kept in a folder")
    assert capsys.readouterr().out == ""
