"""Writes the files of a report.

NAME.json           the flags, and one object for each rate
NAME.csv            the same numbers, one line for each rate
NAME-requests.csv   one line for each request
NAME-*.svg          plots, if matplotlib is installed
NAME.html           everything on one self-contained page
"""

from __future__ import annotations

import json
from pathlib import Path

from tandem.bench.page import page
from tandem.bench.plots import draw
from tandem.bench.report import Report, requests_csv, summary_csv, to_dict


def save(report: Report) -> list[Path]:
    """Write all files into --result-dir, and return them. If no plot is among them, matplotlib is not installed."""
    folder = Path(report.args.result_dir)
    folder.mkdir(parents=True, exist_ok=True)
    plots = draw(report)
    texts = {
        f"{report.name}.json": json.dumps(to_dict(report), indent=1) + "\n",
        f"{report.name}.csv": summary_csv(report),
        f"{report.name}-requests.csv": requests_csv(report),
        **{f"{report.name}-{plot.name}.svg": plot.svg for plot in plots},
        f"{report.name}.html": page(report, plots),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]
