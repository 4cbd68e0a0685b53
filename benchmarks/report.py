"""Saves the results of a benchmark: as one JSON line on stdout, as a file, and as a picture if matplotlib is installed.

save(name, summary, draw) ──> benchmarks/results/<name>-<date>-<time>-<commit>.json and .png

A long benchmark saves intermediate results: `path_of` once, `keep` repeatedly, `plot` at the end.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")


def path_of(name: str, commit: object, folder: Path = RESULTS) -> Path:
    """The path of results at the current time."""
    return folder / f"{name}-{time.strftime('%Y-%m-%d-%H%M')}-{commit or 'local'}.json"


def keep(path: Path, summary: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(summary, indent=1) + "\n")


def save(name: str, summary: dict[str, Any], draw: Callable[[Any], None]) -> None:
    """`draw` is called with an empty figure of matplotlib."""
    path = path_of(name, summary.get("commit"))
    keep(path, summary)
    plot(path, name, summary, draw)
    print(f"kept in {path.parent.name}/{path.name}", file=sys.stderr)
    print(json.dumps(summary))


def plot(path: Path, name: str, summary: dict[str, Any], draw: Callable[[Any], None]) -> None:
    """Save a picture beside the results at `path`. Without matplotlib, print that there is none."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("no plot: pip install matplotlib draws one", file=sys.stderr)
        return
    figure = pyplot.figure(figsize=(10, 4), layout="constrained")
    draw(figure)
    device = summary.get("gpu") or summary.get("cpu", "")
    figure.supxlabel(f"{name}, {device}, commit {summary.get('commit')}", fontsize=8)
    figure.savefig(path.with_suffix(".png"), dpi=120)
