"""Keeps what a benchmark found: one JSON line on stdout, the same in a file, and a picture if one can be drawn.

save(name, summary, draw) ──> benchmarks/results/<name>-<date>-<time>-<commit>.json and .png
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")


def save(name: str, summary: dict[str, Any], draw: Callable[[Any], None]) -> None:
    """`draw` gets matplotlib's empty figure. Without matplotlib there is no picture, which is said."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{time.strftime('%Y-%m-%d-%H%M')}-{summary.get('commit') or 'local'}.json"
    path.write_text(json.dumps(summary, indent=1) + "\n")
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("no plot: pip install matplotlib draws one", file=sys.stderr)
    else:
        figure = pyplot.figure(figsize=(10, 4), layout="constrained")
        draw(figure)
        figure.supxlabel(f"{name}, {summary.get('cpu', '')}, commit {summary.get('commit')}", fontsize=8)
        figure.savefig(path.with_suffix(".png"), dpi=120)
    print(f"kept in {path.parent.name}/{path.name}", file=sys.stderr)
    print(json.dumps(summary))
